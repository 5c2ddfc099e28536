"""Bytes that a step holds in tensors are counted, not guessed."""

from __future__ import annotations

import torch

from benchmarks.step_profile import bytes_alive, measure, most_at_once
from tests.helpers.harness import run_ranks

NUMEL = 1 << 20


def counted(rank: int) -> tuple[int, tuple[int, int]]:
    """Return (bytes of what is made here, what ``measure`` found), apart from what this process held before."""
    before = bytes_alive()
    kept = torch.zeros(NUMEL, requires_grad=True)
    kept.grad = torch.zeros(NUMEL)
    views = [kept.detach()[:5], kept.detach().view(2, -1)]
    alive = bytes_alive() - before

    def step() -> None:
        first = torch.empty(NUMEL)
        del first
        both = [torch.empty(NUMEL), torch.empty(NUMEL)]
        both.clear()
        torch.empty(NUMEL)

    found = measure(step)
    assert len(views) == 2
    return alive, (found[0] - before, found[1])


def test_views_count_once_gradients_count_and_the_peak_is_what_lay_there_at_once() -> None:
    alive, (before, added) = run_ranks(1, counted, init=False)[0]
    assert 8 * NUMEL <= before <= alive + 4096
    assert 8 * NUMEL <= alive < 12 * NUMEL
    assert 8 * NUMEL <= added < 8.1 * NUMEL


def test_a_block_whose_release_nobody_saw_counts_only_if_it_is_still_there() -> None:
    events = [(1, 10), (2, 20), (1, -10), (3, 40), (3, 40), (3, -40), (4, 5)]
    assert most_at_once(events, left={2, 4}) == 60  # the first block at 3 was gone when the second came
    assert most_at_once(events, left={4}) == 40
    assert most_at_once([], left=()) == 0
