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
from tests.helpers.zero_parts import HIDDEN_SIZE, Model, compute_loss, make_model_and_optimizer, make_tokens, take_step

STEPS = 4
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"gas": 1},
    "three micro-batches in bf16, recomputed": {"gas": 3, "dtype": torch.bfloat16, "recompute": True},
    "fp16, which overflows at first": {"gas": 2, "dtype": torch.float16},
    "ZeRO 1": {"gas": 2, "stage": 1, "clip_grad": 0.5},
    "fp64": {"gas": 2, "dtype": torch.float64},
}
BUCKET_BYTES = 3000
"""Of a bucket: the model has several, and one weight that is larger."""


def make_pair(grid: Grid, stage: int = 0, gas: int = 1, **settings: Any) -> list[tuple[Model, MixedPrecisionOptimizer]]:
    """Return the same model twice, with sums after and within the backward."""
    pairs = []
    for overlap in (False, True):
        scaler = None
        if settings.get("dtype") is torch.float16:
            scaler = GradScaler(scale=2.0**13, is_dynamic=True, hysteresis=1, window=50)
        pairs.append(make_model_and_optimizer(grid, stage, overlap_grad_reduce=overlap, scaler=scaler, **settings))
    return pairs


def compare_overlap(rank: int, size: int, cases: list[str]) -> dict[str, Any]:
    """Train both ways; return by kind what differs, and whether anything moved."""
    grid = build_grid(Topology.from_world_size(size, tensor=1, pipe=1), rank)
    gradients.BUCKET_BYTES = BUCKET_BYTES
    results = {}
    for case in cases:
        (plain, plain_optimizer), (module, overlapped_optimizer) = make_pair(grid, **CASES[case])
        assert overlapped_optimizer.reducer.reduces_in_backward and not plain_optimizer.reducer.reduces_in_backward
        differences: set[Any] = set()
        for step in range(STEPS):
            for trained_module, optimizer in ((plain, plain_optimizer), (module, overlapped_optimizer)):
                optimizer.policy.accepts_step = (lambda norm: False) if step == 2 else None
                take_step(trained_module, optimizer, grid, step, CASES[case]["gas"])
            norms = [
                (repr(optimizer.grad_norm), optimizer.overflow) for optimizer in (plain_optimizer, overlapped_optimizer)
            ]
            if norms[0] != norms[1]:
                differences.add(("norm", *norms))
            for (name, expected), value in zip(plain.named_parameters(), module.parameters(), strict=True):
                if not torch.equal(value, expected):
                    differences.add(name)
        words = module.words.weight
        results[case] = differences, not torch.equal(words, Model().words.weight.to(words.dtype))
    return results


def test_overlapped_all_reduce_is_bitwise_equal() -> None:
    for result in run_ranks(2, compare_overlap, 2, list(CASES)):
        assert result == {case: (set(), True) for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_overlapped_all_reduce_is_bitwise_equal_on_more_replicas(size: int) -> None:
    for result in run_ranks(size, compare_overlap, size, list(CASES)):
        assert result == {case: (set(), True) for case in CASES}


class Recorder:
    """Writes down in one list which gradients come, which buckets start and where a backward ends."""

    def __init__(self, module: nn.Module) -> None:
        self.events: list[str] = []
        self.names = {p: name for name, p in module.named_parameters()}
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self.events.append(f"came {self.names[p]}"))
        self.start = gradients.GradientBucket.start_all_reduce
        gradients.GradientBucket.start_all_reduce = self.record_start  # type: ignore[method-assign]

    def record_start(self, bucket: list[torch.Tensor], *args: Any) -> Any:
        self.events.append(f"sum {len(bucket)} {sum(g.numel() for g in bucket)}")
        return self.start(bucket, *args)


def record_events(rank: int, gas: int) -> list[list[str]]:
    """Return the events of each backward of two steps."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    gradients.BUCKET_BYTES = BUCKET_BYTES
    module, optimizer = make_model_and_optimizer(grid, 0, overlap_grad_reduce=True)
    recorder = Recorder(module)
    events = []
    for step in range(2):
        for micro_batch in range(gas):
            recorder.events = []
            if micro_batch == gas - 1:
                optimizer.begin_last_backward()
            compute_loss(module, make_tokens(rank, step, micro_batch)).backward()
            recorder.events.append("over")
            optimizer.end_micro_batch()
            events.append(recorder.events)
        optimizer.finish_gradient_sums(0.5)
        optimizer.step()
    return events


def test_all_reduces_start_only_in_last_backward_in_one_order() -> None:
    first_rank, second_rank = run_ranks(2, record_events, 2)
    num_waiting = []
    for backward_idx, (events, other_events) in enumerate(zip(first_rank, second_rank, strict=True)):
        reductions = [event for event in events if event.startswith("sum")]
        assert reductions == [event for event in other_events if event.startswith("sum")]
        if backward_idx % 2 == 0:
            assert not reductions, "not the last one of its step"
            continue
        assert len(reductions) == 6, (
            "five buckets of matrices, with the unused weight in one of them, and one of vectors"
        )
        backward_end = events.index("over")
        late_reductions = [event for event in events[backward_end:] if event.startswith("sum")]
        assert len(late_reductions) == 1, "the bucket of the unused weight holds nothing up, from the first step on"
        remaining = [event for event in events[events.index(reductions[0]) : backward_end] if event.startswith("came")]
        assert len(remaining) >= 8, "the last layer's weights are on their way while the first one's are made"
        num_waiting.append(
            [sum(e.startswith("came") for e in events[:i]) for i, started in enumerate(events) if started[:3] == "sum"]
        )
    assert (
        all(second <= first for first, second in zip(*num_waiting, strict=True)) and num_waiting[1] != num_waiting[0]
    ), num_waiting


def sum_unreached_weights(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the sums of a weight that only an early micro-batch reaches, one that none does, and a tied one."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    module = Model()
    optimizer = build_optimizer(module.parameters(), data=grid.data, overlap_grad_reduce=True, dtype=torch.bfloat16)
    local_sums = {name: torch.zeros(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    for micro_batch in range(2):
        if micro_batch:
            optimizer.begin_last_backward()
        loss = compute_loss(module, make_tokens(rank, 0, micro_batch))
        if micro_batch == 0 and rank == 1:
            loss = loss + module.unused.double().sum()
        expected = torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad],
                                     retain_graph=True, allow_unused=True)  # fmt: skip
        for name, gradient in zip(local_sums, expected, strict=True):
            local_sums[name] += 0 if gradient is None else gradient.float()
        loss.backward()
        optimizer.end_micro_batch()
    optimizer.finish_gradient_sums()
    parameters = dict(module.named_parameters())
    return {name: (local_sums[name], optimizer.gradient_of(parameters[name]).clone()) for name in local_sums}


def test_unreached_and_tied_weights_are_reduced_once() -> None:
    first_rank, second_rank = run_ranks(2, sum_unreached_weights)
    for name in first_rank:
        assert torch.equal(first_rank[name][1], first_rank[name][0] + second_rank[name][0]), name
        assert torch.equal(first_rank[name][1], second_rank[name][1]), name
    assert first_rank["unused"][1].eq(1).all(), "of the first micro-batch of the second replica alone"


def interrupt_backward(rank: int) -> bool:
    """Break a last backward off with sums on their way; return whether the next step is as if nothing had been."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    gradients.BUCKET_BYTES = BUCKET_BYTES
    (plain, plain_optimizer), (module, overlapped_optimizer) = make_pair(grid)
    optimizers = plain_optimizer, overlapped_optimizer
    overlapped_optimizer.begin_last_backward()
    handle = module.words.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compute_loss(module, make_tokens(rank, 0, 0)).backward()
    assert overlapped_optimizer.reducer._reducer._pending
    handle.remove()
    overlapped_optimizer.zero_grad()
    assert not overlapped_optimizer.reducer._reducer._pending
    for trained_module, optimizer in zip((plain, module), optimizers, strict=True):
        take_step(trained_module, optimizer, grid, 1)
    return all(torch.equal(p, q) for p, q in zip(plain.parameters(), module.parameters(), strict=True))


def test_interrupted_backward_leaves_no_state() -> None:
    assert run_ranks(2, interrupt_backward) == [True, True]


def accumulate_twice(rank: int) -> None:
    """Leave the gradient of a weight twice in the last backward, its sum between the two."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    module = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False)
    optimizer = build_optimizer(module.parameters(), data=grid.data, overlap_grad_reduce=True)
    for is_last in (False, True):
        x = torch.ones(2, HIDDEN_SIZE, requires_grad=True)
        if is_last:
            optimizer.begin_last_backward()
        for _ in range(2):
            x = checkpoint(module, x, use_reentrant=True)
        x.sum().backward()
        optimizer.end_micro_batch()


def test_gradient_after_all_reduce_start_is_rejected() -> None:
    with pytest.raises(RankFailure, match="was accumulated twice in one backward.*--no-overlap-grad-reduce"):
        run_ranks(2, accumulate_twice)
