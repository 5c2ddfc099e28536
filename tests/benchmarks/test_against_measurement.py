"""The planner's bytes are those of trainings: tensors counted at the peak of a step, on every rank."""

from __future__ import annotations

import pytest

from benchmarks.plan import (
    CASES,
    EXPERT_CASES,
    MEMORY_BAR,
    RECOMPUTE,
    TENSOR,
    Case,
    Measured,
    estimate_of,
    train,
)
from tests.helpers.harness import run_ranks

QUICK = [Case("gpt2", 2, "--pipe-parallel-size 2")]


def measured(rank: int, case: Case) -> Measured:
    return train(case, is_smoke=True, steps=0)


def check(case: Case) -> None:
    """Fail unless what each rank of ``case`` held is within the bar of its stage's estimate."""
    estimate = estimate_of(case, is_smoke=True)
    for rank, found in enumerate(run_ranks(case.ranks, measured, case)):
        ratio = estimate.memory[found.stage].total / found.peak_bytes
        print(f"{case.name}, rank {rank}: {estimate.memory[found.stage]} against {found}: {ratio:.3f}")
        assert abs(ratio - 1) <= MEMORY_BAR, f"{case.name}, rank {rank}: estimate / measured = {ratio:.3f}"


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_memory_is_within_the_bar_of_what_a_step_holds(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in (*CASES, *EXPERT_CASES) if case not in QUICK], ids=lambda case: case.name
)
def test_memory_is_within_the_bar_in_every_layout_of_the_benchmark(case: Case) -> None:
    check(case)


def test_memory_falls_by_what_is_cut_and_recomputed() -> None:
    """Were estimates all alike, the bar above could still be met by luck."""
    whole, cut, short = (
        estimate_of(case, is_smoke=True).memory[0].total
        for case in (Case("gpt2"), Case("gpt2", 2, TENSOR), Case("gpt2", 1, RECOMPUTE))
    )
    assert cut < 0.75 * whole and short < 0.75 * whole
