"""Sums over replicas that start within the last backward of a step: the bits of those that are made after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.mpu.groups import Grid, build_grid
from megatron.mpu.topology import Topology
from megatron.optim import GradScaler, MixedPrecisionOptimizer, build_optimizer
from tds import gradients
from tests.helpers.harness import RankFailure, run_ranks
from tests.helpers.zero_parts import H, Model, loss_of, make, take_step, tokens_of

STEPS = 4
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"gas": 1},
    "three micro-batches in bf16, recomputed": {"gas": 3, "dtype": torch.bfloat16, "recomputes": True},
    "fp16, which overflows at first": {"gas": 2, "dtype": torch.float16},
    "ZeRO 1": {"gas": 2, "stage": 1, "clip_grad": 0.5},
    "fp64": {"gas": 2, "dtype": torch.float64},
}
BYTES = 3000
"""Of a bucket: the model has several, and one weight that is larger."""


def pair(grid: Grid, stage: int = 0, gas: int = 1, **settings: Any) -> list[tuple[Model, MixedPrecisionOptimizer]]:
    """Return the same model twice, with sums after and within the backward."""
    made = []
    for overlaps in (False, True):
        scaler = None
        if settings.get("dtype") is torch.float16:
            scaler = GradScaler(scale=2.0**13, is_dynamic=True, hysteresis=1, window=50)
        made.append(make(grid, stage, overlap_grad_reduce=overlaps, scaler=scaler, **settings))
    return made


def compare(rank: int, size: int, kinds: list[str]) -> dict[str, Any]:
    """Train both ways; return by kind what differs, and whether anything moved."""
    grid = build_grid(Topology.of_world(size, tensor=1, pipe=1), rank)
    gradients.BUCKET_BYTES = BYTES
    found = {}
    for kind in kinds:
        (plain, after), (module, within) = pair(grid, **KINDS[kind])
        assert within.reducer.reduces_in_backward and not after.reducer.reduces_in_backward
        different: set[Any] = set()
        for step in range(STEPS):
            for each, optimizer in ((plain, after), (module, within)):
                optimizer.policy.accepts_step = (lambda norm: False) if step == 2 else None
                take_step(each, optimizer, grid, step, KINDS[kind]["gas"])
            norms = [(repr(optimizer.grad_norm), optimizer.overflow) for optimizer in (after, within)]
            if norms[0] != norms[1]:
                different.add(("norm", *norms))
            for (name, wanted), value in zip(plain.named_parameters(), module.parameters(), strict=True):
                if not torch.equal(value, wanted):
                    different.add(name)
        words = module.words.weight
        found[kind] = different, not torch.equal(words, Model().words.weight.to(words.dtype))
    return found


def test_numbers_are_those_of_sums_after_the_backward_to_the_bit() -> None:
    for found in run_ranks(2, compare, 2, list(KINDS)):
        assert found == {kind: (set(), True) for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_replicas_have_the_same_bits_in_the_same_buckets(size: int) -> None:
    for found in run_ranks(size, compare, size, list(KINDS)):
        assert found == {kind: (set(), True) for kind in KINDS}


class Recorder:
    """Writes down in one list which gradients come, which buckets start and where a backward ends."""

    def __init__(self, module: nn.Module) -> None:
        self.events: list[str] = []
        self.names = {p: name for name, p in module.named_parameters()}
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self.events.append(f"came {self.names[p]}"))
        self.start = gradients.GradientBucket.start_all_reduce
        gradients.GradientBucket.start_all_reduce = self.starting  # type: ignore[method-assign]

    def starting(self, bucket: list[torch.Tensor], *where: Any) -> Any:
        self.events.append(f"sum {len(bucket)} {sum(g.numel() for g in bucket)}")
        return self.start(bucket, *where)


def record(rank: int, gas: int) -> list[list[str]]:
    """Return the events of each backward of two steps."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    gradients.BUCKET_BYTES = BYTES
    module, optimizer = make(grid, 0, overlap_grad_reduce=True)
    recorder = Recorder(module)
    found = []
    for step in range(2):
        for micro_batch in range(gas):
            recorder.events = []
            if micro_batch == gas - 1:
                optimizer.begin_last_backward()
            loss_of(module, tokens_of(rank, step, micro_batch)).backward()
            recorder.events.append("over")
            optimizer.end_micro_batch()
            found.append(recorder.events)
        optimizer.finish_gradient_sums(0.5)
        optimizer.step()
    return found


def test_sums_start_within_the_last_backward_alone_and_in_one_order_everywhere() -> None:
    one, other = run_ranks(2, record, 2)
    waits = []
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        sums = [event for event in mine if event.startswith("sum")]
        assert sums == [event for event in theirs if event.startswith("sum")]
        if number % 2 == 0:
            assert not sums, "not the last one of its step"
            continue
        assert len(sums) == 6, "five buckets of matrices, with the unused weight in one of them, and one of vectors"
        within = mine.index("over")
        late = [event for event in mine[within:] if event.startswith("sum")]
        assert len(late) == 1, "the bucket of the unused weight holds nothing up, from the first step on"
        to_come = [event for event in mine[mine.index(sums[0]) : within] if event.startswith("came")]
        assert len(to_come) >= 8, "the last layer's weights are on their way while the first one's are made"
        waits.append([sum(e.startswith("came") for e in mine[:i]) for i, each in enumerate(mine) if each[:3] == "sum"])
    assert all(then <= first for first, then in zip(*waits, strict=True)) and waits[1] != waits[0], waits


def at_the_end(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the sums of a weight that only an early micro-batch reaches, one that none does, and a tied one."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    module = Model()
    optimizer = build_optimizer(module.parameters(), data=grid.data, overlap_grad_reduce=True, dtype=torch.bfloat16)
    own = {name: torch.zeros(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    for micro_batch in range(2):
        if micro_batch:
            optimizer.begin_last_backward()
        loss = loss_of(module, tokens_of(rank, 0, micro_batch))
        if micro_batch == 0 and rank == 1:
            loss = loss + module.unused.double().sum()
        wanted = torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad],
                                     retain_graph=True, allow_unused=True)  # fmt: skip
        for name, gradient in zip(own, wanted, strict=True):
            own[name] += 0 if gradient is None else gradient.float()
        loss.backward()
        optimizer.end_micro_batch()
    optimizer.finish_gradient_sums()
    named = dict(module.named_parameters())
    return {name: (own[name], optimizer.gradient_of(named[name]).clone()) for name in own}


def test_what_the_last_micro_batch_does_not_reach_is_summed_too_and_what_is_tied_once() -> None:
    one, other = run_ranks(2, at_the_end)
    for name in one:
        assert torch.equal(one[name][1], one[name][0] + other[name][0]), name
        assert torch.equal(one[name][1], other[name][1]), name
    assert one["unused"][1].eq(1).all(), "of the first micro-batch of the second replica alone"


def broken_off(rank: int) -> bool:
    """Break a last backward off with sums on their way; return whether the next step is as if nothing had been."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    gradients.BUCKET_BYTES = BYTES
    (plain, after), (module, within) = pair(grid)
    optimizers = after, within
    within.begin_last_backward()
    handle = module.words.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(module, tokens_of(rank, 0, 0)).backward()
    assert within.reducer._reducer._started
    handle.remove()
    within.zero_grad()
    assert not within.reducer._reducer._started
    for each, optimizer in zip((plain, module), optimizers, strict=True):
        take_step(each, optimizer, grid, 1)
    return all(torch.equal(p, q) for p, q in zip(plain.parameters(), module.parameters(), strict=True))


def test_a_backward_that_breaks_off_leaves_nothing_behind() -> None:
    assert run_ranks(2, broken_off) == [True, True]


def twice(rank: int) -> None:
    """Leave the gradient of a weight twice in the last backward, its sum between the two."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    module = nn.Linear(H, H, bias=False)
    optimizer = build_optimizer(module.parameters(), data=grid.data, overlap_grad_reduce=True)
    for is_last in (False, True):
        x = torch.ones(2, H, requires_grad=True)
        if is_last:
            optimizer.begin_last_backward()
        for _ in range(2):
            x = checkpoint(module, x, use_reentrant=True)
        x.sum().backward()
        optimizer.end_micro_batch()


def test_a_gradient_that_comes_after_its_sum_has_started_is_refused_with_the_way_out() -> None:
    with pytest.raises(RankFailure, match="was accumulated twice in one backward.*--no-overlap-grad-reduce"):
        run_ranks(2, twice)
