"""ZeRO 2 and 3 against ZeRO 0: the same gradients to the bit, parts of the memory (row E07)."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron import log
from megatron.mpu.groups import build_grid, single_grid
from megatron.mpu.topology import Topology
from megatron.optim import GradScaler, OffloadConfig, build_optimizer
from megatron.optim.gradients import reduction
from megatron.optim.zero.layers import layers_of
from megatron.optim.zero.partition import partition_of
from megatron.training import optimizer_setup
from tds import bucket_reducer, gradients
from tests.helpers.harness import RankFailure, run_ranks
from tests.helpers.zero_parts import Model, alone, loss_of, make, take_step, tokens_of, whole_weights

STEPS = 6
EVERYWHERE = OffloadConfig(optimizer=True, parameters=True)
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, recomputed": {"dtype": torch.bfloat16, "recomputes": True},
    "fp16": {"dtype": torch.float16},
    "sgd": {"name": "sgd", "momentum": 0.9},
    "fp64, clipped": {"dtype": torch.float64, "clip_grad": 0.5},
}
SIDES: tuple[dict[str, Any], ...] = (
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "offload": EVERYWHERE},
    {"stage": 1, "offload": OffloadConfig(optimizer=True)},
)
ROUNDING = 1e-12
"""Of a clipped step in fp64, whose norm is a sum in another order; all others must have equal bits."""


def settings_of(kind: str) -> dict[str, Any]:
    """Return settings with a loss scale of their own; that of fp16 overflows at first."""
    scaler = GradScaler(scale=2.0**14, is_dynamic=True, hysteresis=1, window=50) if kind == "fp16" else None
    return KINDS[kind] | {"scaler": scaler}


def compare_stages(rank: int, size: int, gas: int, kinds: list[str]) -> dict[str, Any]:
    """Train all stages side by side; return by kind what differs from ZeRO 0, and the steps that were skipped."""
    grid = build_grid(Topology.of_world(size, tensor=1, pipe=1), rank)
    found = {}
    for kind in kinds:
        limit = ROUNDING if "fp64" in kind else 0.0
        plain = make(grid, 0, **settings_of(kind))
        others = [make(grid, **side, **settings_of(kind)) for side in SIDES]
        different, skipped, refused = set(), 0, 0
        for step in range(STEPS):
            for module, optimizer in (plain, *others):
                optimizer.policy.accepts_step = (lambda norm: False) if step == 4 else None
                optimizer.seen_loss = take_step(module, optimizer, grid, step, gas)
            _, reference = plain
            wanted = whole_weights(*plain, grid)
            for number, (module, optimizer) in enumerate(others):
                if abs(optimizer.grad_norm - reference.grad_norm) > 1e-7 * reference.grad_norm:
                    different.add((number, "norm"))
                if abs(optimizer.seen_loss - reference.seen_loss) > limit * abs(reference.seen_loss):
                    different.add((number, "loss"))
                for name, value in whole_weights(module, optimizer, grid).items():
                    if not (value - wanted[name]).abs().max() <= limit:
                        different.add((number, name))
                if (optimizer.overflow, optimizer.was_refused) != (reference.overflow, reference.was_refused):
                    different.add((number, "skipped"))
            skipped, refused = skipped + reference.overflow, refused + reference.was_refused
        words = wanted["words.weight"]
        moved = not torch.equal(words, Model().words.weight.to(words.dtype))
        found[kind] = (different, moved, skipped > 0, refused)
    return found


def test_steps_of_one_micro_batch_leave_the_bits_of_stage_0_in_every_precision(pytestconfig: pytest.Config) -> None:
    """SGD and clipping, which are those of ZeRO 1 as well, with --all."""
    kinds = list(KINDS) if pytestconfig.getoption("--all") else list(KINDS)[:3]
    gradients.BUCKET_BYTES, kept = 3000, gradients.BUCKET_BYTES
    try:
        for found in run_ranks(2, compare_stages, 2, 1, kinds):
            assert found == {kind: (set(), True, kind == "fp16", 1) for kind in kinds}
    finally:
        gradients.BUCKET_BYTES = kept


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_replicas_leave_the_bits_of_stage_0_in_the_same_buckets(size: int) -> None:
    for found in run_ranks(size, compare_stages, size, 1, list(KINDS)):
        assert found == {kind: (set(), True, kind == "fp16", 1) for kind in KINDS}


def several_micro_batches(rank: int) -> float:
    """Train stages 0 and 3 on steps of three micro-batches in fp64; return the largest difference."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    plain, cut = (make(grid, stage, dtype=torch.float64, name="sgd", clip_grad=0.5) for stage in (0, 3))
    for step in range(STEPS):
        for module, optimizer in (plain, cut):
            take_step(module, optimizer, grid, step, gas=3)
    wanted = whole_weights(*plain, grid)
    return max((value - wanted[name]).abs().max().item() for name, value in whole_weights(*cut, grid).items())


def test_micro_batches_add_up_to_rounding() -> None:
    for found in run_ranks(2, several_micro_batches):
        assert found <= 1e-13


def sum_both_ways(rank: int) -> float:
    """Sum gradients by an all-reduce and by a reduce-scatter; return the largest difference of a part."""
    grid = build_grid(Topology.of_world(3, tensor=1, pipe=1), rank)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((37, 16), (), (10, 5), (16,), (3, 2))]
    shares = []
    for number, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(10 * number + rank)
        gradient = None if number == rank else torch.randn(parameter.shape, generator=generator)
        shares.append(reduction.LocalGrad(gradient, parameter, partition_of(parameter, 3)))
    one, other = (dict(reduction.Reduction(shares, grid.data, is_scattered=way).shards()) for way in (False, True))
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in (*one.values(), *other.values()))
    whole = {p: torch.zeros_like(p).detach() for p in parameters}
    for share in shares:
        whole[share.parameter] += 0 if share.gradient is None else share.gradient
        dist.all_reduce(whole[share.parameter])
    for share in shares:
        assert torch.allclose(one[share.parameter], share.shard(whole[share.parameter], rank), atol=1e-6)
    return max(((one[p] - other[p]).abs().max().item() for p in parameters if one[p].numel()), default=1.0)


def test_a_reduce_scatter_leaves_the_parts_of_the_all_reduce() -> None:
    assert max(run_ranks(3, sum_both_ways)) <= 1e-6


def in_a_ring(rank: int) -> list[bool]:
    """Sum by a reduce-scatter that adds up in another order for each replica; return whether all have what is whole."""
    grid = build_grid(Topology.of_world(4, tensor=1, pipe=1), rank)

    def scatter(mine: torch.Tensor, every: torch.Tensor, **how: Any) -> Any:
        sent = [torch.empty_like(every) for _ in range(4)]
        dist.all_gather(sent, every)
        mine.copy_(sum(sent[(rank + 1 + step) % 4].view(4, -1)[rank] for step in range(4)))
        return Done()

    dist.reduce_scatter_single = scatter
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((64, 4), *[()] * 64)]
    generator = torch.Generator().manual_seed(rank)
    shares = [reduction.LocalGrad(torch.randn(p.shape, generator=generator), p, partition_of(p, 4)) for p in parameters]
    parts = dict(reduction.Reduction(shares, grid.data, is_scattered=True).shards())
    numbers = torch.stack([parts[p] for p in parameters[1:]])
    every = [torch.empty_like(numbers) for _ in range(4)]
    dist.all_gather(every, numbers)
    return [torch.equal(other, numbers) for other in every]


class Done:
    """A sum that is here."""

    def wait(self) -> None: ...


def test_single_numbers_do_not_drift_apart_where_a_reduce_scatter_adds_in_orders_of_its_own() -> None:
    assert run_ranks(4, in_a_ring) == [[True] * 4] * 4


def test_buckets_are_those_in_which_stage_0_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((40, 3), (7,), (0, 4), (100,), (2, 2), (), (30, 9))]
    for limit in (1, 500, 900, 2**20):
        monkeypatch.setattr(gradients, "BUCKET_BYTES", limit)
        theirs = [[id(p) for p in bucket] for bucket in gradients.buckets(parameters)]
        order = bucket_reducer.AgreedOrder(None)
        for parameter in parameters:
            order.register(parameter)
        assert sorted([id(p) for p in bucket] for bucket in order._guessed()) == sorted(theirs)


def held_in_backward(rank: int) -> tuple[list[int], list[int], int]:
    """Return the bytes of gradients after a backward by stage, and of weights in a pass of ZeRO 3."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    gradients, weights = [], []
    for stage in (1, 2, 3):
        module, optimizer = make(grid, stage, dtype=torch.bfloat16)
        loss_of(module, tokens_of(rank, 0, 0)).backward()
        optimizer.end_micro_batch()
        held = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for _, g in optimizer.gradients()}
        gradients.append(sum(held.values()))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    weights = [units_here(optimizer)]
    module.layers[0].down.register_forward_hook(lambda *_: weights.append(units_here(optimizer)))
    loss = loss_of(module, tokens_of(rank, 0, 0))
    weights.append(units_here(optimizer))
    loss.backward()
    weights.append(units_here(optimizer))
    with torch.no_grad():
        module(tokens_of(rank, 0, 0))
    return gradients, [*weights, units_here(optimizer)], sum(storages.values())


def units_here(optimizer: Any) -> int:
    """Return the bytes of whole weights that ZeRO 3 has gathered."""
    return sum(
        whole.untyped_storage().nbytes() for unit in optimizer.store.units.units for whole in unit._full.values()
    )


def test_gradients_and_weights_are_held_in_parts_and_gathered_by_the_layer() -> None:
    numbers = sum(p.numel() for p in Model().parameters() if p.requires_grad and p.dim())
    layer = sum(p.numel() for name, p in Model().layers[0].named_parameters() if p.dim() and "shared" not in name)
    rest = numbers - 2 * layer
    for held, weights, between in run_ranks(2, held_in_backward):
        whole, *parts = held
        assert whole == 4 * (numbers + 2), "with two single numbers"
        assert all(abs(part - 2 * numbers) <= 4 * 16 * 4 for part in parts), "vectors of 16 that do not halve"
        passes = [2 * (rest + layer), 2 * rest, 0]  # in the layer, after forward, after backward
        assert weights == [0, *passes, 2 * (rest + layer), 0]
        assert between < 200, "one number for each weight, the frozen one and the scalars"


def test_layers_are_the_elements_of_lists_and_what_they_share_is_the_rest() -> None:
    module = Model()
    found = layers_of(module, [p for p in module.parameters() if p.requires_grad])
    assert list(found) == list(module.layers)
    own = {id(p) for name, p in module.layers[0].named_parameters() if not name.startswith("shared")}
    assert {id(p) for p in found[module.layers[0]]} == own
    inner = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]))
    inner[1][0].weight = inner[0].weight
    assert {id(p) for weights in layers_of(inner, inner.parameters()).values() for p in weights} == {
        id(inner[0].bias),
        id(inner[1][0].bias),
    }


def test_what_reads_a_weight_outside_of_any_call_gets_no_number() -> None:
    module, optimizer = alone()
    before = Model()
    assert all(p.isnan().all() and p.shape == q.shape for p, q in zip(
        module.layers[0].up.parameters(), before.layers[0].up.parameters(), strict=True))  # fmt: skip
    tokens = tokens_of(0, 0, 0)
    with torch.no_grad():
        assert torch.equal(module(tokens), before(tokens))
        assert torch.equal(module.layers[1].up(torch.ones(16)), before.layers[1].up(torch.ones(16))), "a part alone"
    with pytest.raises(IndexError):
        module(torch.tensor([99]))
    assert optimizer.store.units._depth == 0 and optimizer.store.units._watch is None
    optimizer.end_micro_batch()
    assert units_here(optimizer) == 0
    loss = loss_of(module, tokens)
    optimizer.end_micro_batch()
    loss.backward()  # what backward asks for is gathered again
    loss_of(before, tokens).backward()
    assert torch.equal(optimizer.gradient_of(module.words.weight), before.words.weight.grad)
    assert units_here(optimizer) <= sum(p.nbytes for p in before.parameters())
    optimizer.zero_grad()
    take_step(module, optimizer, single_grid(), 0)
    with torch.no_grad():
        assert not torch.equal(module(tokens), before(tokens))
    module(tokens)  # no backward follows: the rest stays gathered
    with torch.no_grad():
        assert units_here(optimizer) > 0
        optimizer.main_param_of(module.words.weight).zero_()
        optimizer.copy_main_params_to_parameters()
        assert units_here(optimizer) == 0 and module(tokens).unique().numel() == 1, "no word is likelier"


def test_layers_whose_weights_are_read_past_them_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.layers[0](x), self.layers[2].weight)

    messages: list[str] = []
    monkeypatch.setattr(log, "warning", messages.append)
    module = Odd()
    optimizer = build_optimizer(module.parameters(), zero_stage=3, offload=EVERYWHERE)
    optimizer.store.shard_weights(module)
    assert all(module(torch.ones(2, 16)).isnan().all() for _ in range(2))
    assert len(messages) == 1 and "layers.1, layers.2 was not called" in messages[0]


def twice(rank: int) -> None:
    """Leave the gradient of a weight twice in one backward."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    module, _ = make(grid, 2)
    shared, x = module.layers[0].shared, torch.ones(2, 16, requires_grad=True)
    once = checkpoint(shared, x, use_reentrant=True)
    checkpoint(shared, once, use_reentrant=True).sum().backward()


def test_a_gradient_that_comes_twice_is_refused() -> None:
    with pytest.raises(RankFailure, match="once for each micro-batch, got one of shape .* twice.*use_reentrant=False"):
        run_ranks(2, twice)


def bytes_on_the_cpu(side: dict[str, Any], dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of masters and of parts of weights in memory of their own."""
    module, optimizer = make(single_grid(), **side, dtype=dtype)
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    masters = {m.untyped_storage() for m in map(optimizer.main_param_of, optimizer.store.main_params)}
    homes = {home.untyped_storage() for home in optimizer.store.weight_shards.values()}
    places = {storage.data_ptr() for storage in masters}
    own = sum(storage.nbytes() for storage in masters if storage.data_ptr() not in weights)
    return own, sum(storage.nbytes() for storage in homes if storage.data_ptr() not in places)


@pytest.mark.parametrize(
    ("side", "dtype", "masters", "homes"),
    [
        ({"stage": 0}, torch.float32, 0, 0),
        ({"stage": 0, "offload": OffloadConfig(optimizer=True)}, torch.float32, 4, 0),
        ({"stage": 3, "offload": EVERYWHERE}, torch.float32, 4, 0),
        ({"stage": 3, "offload": OffloadConfig(parameters=True)}, torch.float32, 4, 4),
        ({"stage": 3, "offload": EVERYWHERE}, torch.bfloat16, 4, 2),
        ({"stage": 1, "offload": OffloadConfig(optimizer=True)}, torch.bfloat16, 4, 0),
    ],
    ids=str,
)
def test_what_is_offloaded_has_copies_of_its_own(
    side: dict[str, Any], dtype: torch.dtype, masters: int, homes: int
) -> None:
    numbers = sum(p.numel() for p in Model().parameters() if p.requires_grad)
    found = bytes_on_the_cpu(side, dtype)
    assert found[0] in (masters * numbers, masters * (numbers - 2)), "two single numbers are never cut"
    assert found[1] == homes * (numbers - 2)


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_the_adam_of_deepspeed_trains_to_the_numbers_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Path.home() / ".cache" / "megatron-tds" / f"extensions-{torch.__version__}-{version('deepspeed')}"
    for lock in builds.glob("*/lock"):
        if time.time() - lock.stat().st_mtime > 900:  # left by a build that was killed: torch would wait for it
            lock.unlink()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(builds))
    grid, away = single_grid(), OffloadConfig(optimizer=True)
    try:
        theirs = make(grid, 0, offload=away, adam=optimizer_setup.deepspeed_adam)
    except ValueError as error:
        pytest.skip(f"DeepSpeedCPUAdam cannot be compiled here: {error}")
    ours = make(grid, 0, offload=away)
    assert type(theirs[1].inner).__name__ == "DeepSpeedCPUAdam"
    for step in range(STEPS):
        for module, optimizer in (theirs, ours):
            take_step(module, optimizer, grid, step)
    wanted = whole_weights(*ours, grid)
    for name, value in whole_weights(*theirs, grid).items():
        assert torch.allclose(value, wanted[name], rtol=0, atol=2e-6), name
