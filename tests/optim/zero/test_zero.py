"""ZeRO 1 against ZeRO 0: bitwise equal, with sharded states (row E07)."""

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
from tests.helpers.zero_weights import Weights, copy_weights, make_optimizer, take_step

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, clipped": {"clip_grad": 0.5},
    "fp64, clipped": {"dtype": torch.float64, "clip_grad": 0.5},
    "bf16, clipped": {"dtype": torch.bfloat16, "clip_grad": 0.5},
    "fp16": {"dtype": torch.float16},
    "sgd, clipped": {"name": "sgd", "clip_grad": 0.5},
    "sgd with momentum": {"name": "sgd", "momentum": 0.9},
}


def settings_of(case: str) -> dict[str, Any]:
    """Return the settings of a case with a new loss scaler; the scale of fp16 overflows in the first steps."""
    scaler = GradScaler(scale=2.0**18, is_dynamic=True, hysteresis=1, window=5) if case == "fp16" else None
    return CASES[case] | {"scaler": scaler}


def compare_stages(rank: int, tensor: int, size: int, steps: int) -> dict[str, Any]:
    """Train with ZeRO 0 and 1; return by case the differences, and the skipped and rejected steps."""
    grid = build_grid(Topology.from_world_size(size, tensor=tensor, pipe=1), rank)
    results = {}
    for case in CASES:
        plain, sharded = Weights(grid), Weights(grid)
        runs = [(plain, make_optimizer(plain, grid, 0, **settings_of(case)))]
        runs.append((sharded, make_optimizer(sharded, grid, 1, **settings_of(case))))
        differences, num_skipped, num_rejected = set(), 0, 0
        for step in range(steps):
            for module, optimizer in runs:
                optimizer.policy.accepts_step = (lambda norm: False) if step == 7 else None
                take_step(module, optimizer, grid, step)
            plain_optimizer, sharded_optimizer = runs[0][1], runs[1][1]
            if plain_optimizer._global_grad_norm.hex() != sharded_optimizer._global_grad_norm.hex():
                differences.add("norm")
            differences |= {
                name
                for name, value in copy_weights(plain).items()
                if not torch.equal(value, copy_weights(sharded)[name])
            }
            if (plain_optimizer.overflow, plain_optimizer.was_rejected, plain_optimizer.loss_scale) != (
                sharded_optimizer.overflow,
                sharded_optimizer.was_rejected,
                sharded_optimizer.loss_scale,
            ):
                differences.add("skipped")
            num_skipped, num_rejected = (
                num_skipped + sharded_optimizer.overflow,
                num_rejected + sharded_optimizer.was_rejected,
            )
        has_moved = not torch.equal(plain.pair, Weights(grid).pair.to(plain.pair.dtype))
        results[case] = (differences, has_moved, num_skipped > 0, num_rejected)
    return results


@pytest.mark.parametrize(("tensor", "size"), [(1, 3), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_zero_1_is_bitwise_zero_0_in_every_precision(tensor: int, size: int, pytestconfig: pytest.Config) -> None:
    """Nine steps, or twenty with --all. The stability guard rejects the eighth."""
    steps = 20 if pytestconfig.getoption("--all") else 9
    for result in run_ranks(size, compare_stages, tensor, size, steps):
        assert result == {case: (set(), True, case == "fp16", 1) for case in CASES}


def count_all_gathers(rank: int, size: int) -> tuple[list[int], bool]:
    """Return the number of all-gathers of a step for each bucket limit, and True if the weights are equal."""
    grid = build_grid(Topology.from_world_size(size, tensor=1, pipe=1), rank)
    name = name_of("all_gather_single")
    calls, original = [0], getattr(dist, name)

    def count_call(*args: Any, **kwargs: Any) -> Any:
        calls[-1] += 1
        return original(*args, **kwargs)

    setattr(dist, name, count_call)
    results = []
    for limit in (2**25, 2000, 1):
        gradients.BUCKET_BYTES = limit
        module = Weights(grid)
        take_step(module, make_optimizer(module, grid, 1), grid, 0)
        results.append(copy_weights(module))
        calls.append(0)
    is_same = all(torch.equal(value, other[name]) for other in results for name, value in results[0].items())
    return calls[:-1], is_same


def test_one_all_gather_covers_many_weights() -> None:
    for calls, is_same in run_ranks(2, count_all_gathers, 2):
        assert is_same
        assert calls == [1, 4, 7], "one bucket; buckets of up to 2,000 bytes; one bucket per weight"


def make_group(rank: int, size: int) -> Group:
    """Return a group without a process group: building an optimizer and its states needs none."""
    return Group(tuple(range(size)), rank)


def state_bytes(parameters: list[torch.nn.Parameter], optimizer: Any) -> tuple[int, int]:
    """Return the bytes of main params that are not views of their parameters, and of moments."""
    parameter_addresses = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    main_storages = {main_param.untyped_storage() for main_param in map(optimizer.main_param_of, parameters)}
    main_param_bytes = sum(
        storage.nbytes() for storage in main_storages if storage.data_ptr() not in parameter_addresses
    )
    states = [v for state in optimizer.inner.state.values() for key, v in state.items() if key != "step"]
    return main_param_bytes, sum(value.untyped_storage().nbytes() for value in states)


@pytest.mark.parametrize(("dtype", "main_param_bytes", "moment_bytes"), [(torch.float32, 0, 8), (torch.bfloat16, 4, 8)])
def test_replica_holds_its_share_of_state_bytes(dtype: torch.dtype, main_param_bytes: int, moment_bytes: int) -> None:
    shapes = [(64, 32), (128, 32), (192,), (32, 64)]
    num_params = sum(torch.Size(shape).numel() for shape in shapes)
    for data in (SINGLE, *(make_group(rank, 4) for rank in range(4))):
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = build_optimizer(parameters, dtype=dtype, data=data, zero_stage=1)
        make_moments(optimizer)
        assert state_bytes(parameters, optimizer) == (
            main_param_bytes * num_params // data.size,
            moment_bytes * num_params // data.size,
        )
        assert sum(p.untyped_storage().nbytes() for p in parameters) == num_params * dtype.itemsize
        assert all(main_param.grad is None for main_param in map(optimizer.main_param_of, parameters))


def test_making_state_moves_no_weight_and_shards_alias_parameters() -> None:
    grid = build_grid(Topology(1, 1, 1), 0)
    for rank in range(3):
        module = Weights(grid)
        optimizer = build_optimizer(
            module.parameters(),
            lr=1.0,
            weight_decay=1.0,
            data=make_group(rank, 3),
            tensor=Group((0, 1), 0),
            zero_stage=1,
        )
        make_moments(optimizer)
        for name, value in copy_weights(Weights(grid)).items():
            assert torch.equal(getattr(module, name), value)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                main_param = optimizer.main_param_of(parameter)
                shard = shard_of(main_param)
                assert torch.equal(shard.unpadded(main_param), shard.narrow(shard_of(parameter).unpadded(parameter))), (
                    name
                )


def test_replica_0_owns_unpartitioned_weights() -> None:
    owned = []
    for rank in range(2):
        module = Weights(build_grid(Topology(1, 1, 1), 0))
        module.columns.ds_pipe_replicated = True  # a tied copy, which another stage saves
        optimizer = build_optimizer(module.parameters(), data=make_group(rank, 2), zero_stage=1)
        owned.append({name for name, parameter in module.named_parameters() if optimizer.owns(parameter)})
    assert owned[0] - owned[1] == {"scalar", "frozen"} and owned[1] < owned[0] and "columns" not in owned[0]


def test_zero_1_rejects_adafactor() -> None:
    with pytest.raises(ConfigError, match=r"--optimizer adafactor requires --zero-stage 0, got 1.*Use --zero-stage 0"):
        build_optimizer([torch.nn.Parameter(torch.ones(2, 2))], name="adafactor", zero_stage=1)
