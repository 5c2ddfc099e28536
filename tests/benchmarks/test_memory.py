"""Bytes that a step holds in tensors are counted, not guessed."""

from __future__ import annotations

import torch

from benchmarks.step_profile import live_bytes, measure_memory, peak_bytes
from tests.helpers.harness import run_ranks

NUMEL = 1 << 20


def measure_in_rank(rank: int) -> tuple[int, tuple[int, int]]:
    """Return (bytes of what is made here, what ``measure_memory`` found), apart from what this process held before."""
    before = live_bytes()
    param = torch.zeros(NUMEL, requires_grad=True)
    param.grad = torch.zeros(NUMEL)
    views = [param.detach()[:5], param.detach().view(2, -1)]
    allocated_bytes = live_bytes() - before

    def step() -> None:
        temporary = torch.empty(NUMEL)
        del temporary
        pair = [torch.empty(NUMEL), torch.empty(NUMEL)]
        pair.clear()
        torch.empty(NUMEL)

    measured = measure_memory(step)
    assert len(views) == 2
    return allocated_bytes, (measured[0] - before, measured[1])


def test_measure_counts_views_once_and_peak_of_live_tensors() -> None:
    allocated_bytes, (before, added) = run_ranks(1, measure_in_rank, init=False)[0]
    assert 8 * NUMEL <= before <= allocated_bytes + 4096
    assert 8 * NUMEL <= allocated_bytes < 12 * NUMEL
    assert 8 * NUMEL <= added < 8.1 * NUMEL


def test_unreleased_blocks_count_only_if_still_allocated() -> None:
    events = [(1, 10), (2, 20), (1, -10), (3, 40), (3, 40), (3, -40), (4, 5)]
    assert peak_bytes(events, remaining={2, 4}) == 60  # the first block at 3 was gone when the second came
    assert peak_bytes(events, remaining={4}) == 40
    assert peak_bytes([], remaining=()) == 0
