"""ZeRO 1 against ZeRO 0: the same bits, a share of the memory (row E07)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.mpu.groups import SINGLE, Group, build_grid
from megatron.mpu.shard import shard_of
from megatron.mpu.topology import Topology
from megatron.optim import GradScaler, build_optimizer
from megatron.torch_compat import name_of
from megatron.training.state_records import make_moments
from tds import gradients
from tests.helpers.harness import run_ranks
from tests.helpers.zero_weights import Weights, bits, optimizer_of, take_step

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, clipped": {"clip_grad": 0.5},
    "fp64, clipped": {"dtype": torch.float64, "clip_grad": 0.5},
    "bf16, clipped": {"dtype": torch.bfloat16, "clip_grad": 0.5},
    "fp16": {"dtype": torch.float16},
    "sgd, clipped": {"name": "sgd", "clip_grad": 0.5},
    "sgd with momentum": {"name": "sgd", "momentum": 0.9},
}


def settings_of(kind: str) -> dict[str, Any]:
    """Return settings with a loss scale of their own; that of fp16 overflows at first."""
    scaler = GradScaler(scale=2.0**18, is_dynamic=True, hysteresis=1, window=5) if kind == "fp16" else None
    return KINDS[kind] | {"scaler": scaler}


def both_stages(rank: int, tensor: int, size: int, steps: int) -> dict[str, Any]:
    """Train with ZeRO 0 and 1 side by side; return by kind what differs, and how many steps were skipped."""
    grid = build_grid(Topology.of_world(size, tensor=tensor, pipe=1), rank)
    found = {}
    for kind in KINDS:
        plain, cut = Weights(grid), Weights(grid)
        sides = [(plain, optimizer_of(plain, grid, 0, **settings_of(kind)))]
        sides.append((cut, optimizer_of(cut, grid, 1, **settings_of(kind))))
        different, skipped, refused = set(), 0, 0
        for step in range(steps):
            for module, optimizer in sides:
                optimizer.policy.accepts_step = (lambda norm: False) if step == 7 else None
                take_step(module, optimizer, grid, step)
            a, b = sides[0][1], sides[1][1]
            if a._global_grad_norm.hex() != b._global_grad_norm.hex():
                different.add("norm")
            different |= {name for name, value in bits(plain).items() if not torch.equal(value, bits(cut)[name])}
            if (a.overflow, a.was_refused, a.loss_scale) != (b.overflow, b.was_refused, b.loss_scale):
                different.add("skipped")
            skipped, refused = skipped + b.overflow, refused + b.was_refused
        moved = not torch.equal(plain.pair, Weights(grid).pair.to(plain.pair.dtype))
        found[kind] = (different, moved, skipped > 0, refused)
    return found


@pytest.mark.parametrize(("tensor", "size"), [(1, 3), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_many_steps_leave_the_bits_of_stage_0_in_every_precision(
    tensor: int, size: int, pytestconfig: pytest.Config
) -> None:
    """Twenty of them with --all; the eighth is refused."""
    steps = 20 if pytestconfig.getoption("--all") else 9
    for found in run_ranks(size, both_stages, tensor, size, steps):
        assert found == {kind: (set(), True, kind == "fp16", 1) for kind in KINDS}


def with_small_buckets(rank: int, size: int) -> tuple[list[int], bool]:
    """Count the all-gathers of a step with each limit; return them, and whether the weights came out the same."""
    grid = build_grid(Topology.of_world(size, tensor=1, pipe=1), rank)
    name = name_of("all_gather_single")
    calls, original = [0], getattr(dist, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[-1] += 1
        return original(*args, **kwargs)

    setattr(dist, name, counting)
    results = []
    for limit in (2**25, 2000, 1):
        gradients.BUCKET_BYTES = limit
        module = Weights(grid)
        take_step(module, optimizer_of(module, grid, 1), grid, 0)
        results.append(bits(module))
        calls.append(0)
    same = all(torch.equal(value, other[name]) for other in results for name, value in results[0].items())
    return calls[:-1], same


def test_one_all_gather_brings_the_parts_of_many_weights() -> None:
    for calls, same in run_ranks(2, with_small_buckets, 2):
        assert same
        assert calls == [1, 4, 7], "all; as many as fit into 2,000 bytes; each by itself"


def replica(number: int, of: int) -> Group:
    """Return a group without a process group: building an optimizer and its states needs none."""
    return Group(tuple(range(of)), number)


def state_bytes(parameters: list[torch.nn.Parameter], optimizer: Any) -> tuple[int, int]:
    """Return the bytes of masters that are not views of their parameters, and of moments."""
    seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    masters = {m.untyped_storage() for m in map(optimizer.main_param_of, parameters)}
    own = sum(storage.nbytes() for storage in masters if storage.data_ptr() not in seen)
    states = [v for state in optimizer.inner.state.values() for key, v in state.items() if key != "step"]
    return own, sum(value.untyped_storage().nbytes() for value in states)


@pytest.mark.parametrize(("dtype", "masters", "moments"), [(torch.float32, 0, 8), (torch.bfloat16, 4, 8)])
def test_a_replica_holds_its_share_of_the_bytes(dtype: torch.dtype, masters: int, moments: int) -> None:
    shapes = [(64, 32), (128, 32), (192,), (32, 64)]
    number = sum(torch.Size(shape).numel() for shape in shapes)
    for data in (SINGLE, *(replica(rank, 4) for rank in range(4))):
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = build_optimizer(parameters, dtype=dtype, data=data, zero_stage=1)
        make_moments(optimizer)
        assert state_bytes(parameters, optimizer) == (masters * number // data.size, moments * number // data.size)
        assert sum(p.untyped_storage().nbytes() for p in parameters) == number * dtype.itemsize
        assert all(master.grad is None for master in map(optimizer.main_param_of, parameters))


def test_making_states_moves_no_weight_and_every_part_lies_in_its_parameter() -> None:
    grid = build_grid(Topology(1, 1, 1), 0)
    for number in range(3):
        module = Weights(grid)
        optimizer = build_optimizer(
            module.parameters(),
            lr=1.0,
            weight_decay=1.0,
            data=replica(number, 3),
            tensor=Group((0, 1), 0),
            zero_stage=1,
        )
        make_moments(optimizer)
        for name, value in bits(Weights(grid)).items():
            assert torch.equal(getattr(module, name), value)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                master = optimizer.main_param_of(parameter)
                shard = shard_of(master)
                assert torch.equal(shard.unpadded(master), shard.cut(shard_of(parameter).unpadded(parameter))), name


def test_replicas_own_their_parts_and_the_first_what_is_not_cut() -> None:
    owned = []
    for number in range(2):
        module = Weights(build_grid(Topology(1, 1, 1), 0))
        module.columns.ds_pipe_replicated = True  # a tied copy: another stage writes it
        optimizer = build_optimizer(module.parameters(), data=replica(number, 2), zero_stage=1)
        owned.append({name for name, parameter in module.named_parameters() if optimizer.owns(parameter)})
    assert owned[0] - owned[1] == {"scalar", "frozen"} and owned[1] < owned[0] and "columns" not in owned[0]


def test_adafactor_is_refused_with_stage_1() -> None:
    with pytest.raises(ConfigError, match=r"--optimizer adafactor requires --zero-stage 0, got 1.*Use --zero-stage 0"):
        build_optimizer([torch.nn.Parameter(torch.ones(2, 2))], name="adafactor", zero_stage=1)
