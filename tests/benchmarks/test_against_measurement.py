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
    RankMeasurement,
    make_estimate,
    train,
)
from tests.helpers.harness import run_ranks

QUICK = [Case("gpt2", 2, "--pipe-parallel-size 2")]


def measure_rank(rank: int, case: Case) -> RankMeasurement:
    return train(case, is_smoke=True, steps=0)


def check_memory(case: Case) -> None:
    """Fail unless what each rank of ``case`` held is within the bar of its stage's estimate."""
    estimate = make_estimate(case, is_smoke=True)
    for rank, rank_result in enumerate(run_ranks(case.num_ranks, measure_rank, case)):
        ratio = estimate.memory[rank_result.stage].total / rank_result.peak_bytes
        print(f"{case.name}, rank {rank}: {estimate.memory[rank_result.stage]} against {rank_result}: {ratio:.3f}")
        assert abs(ratio - 1) <= MEMORY_BAR, f"{case.name}, rank {rank}: estimate / measured = {ratio:.3f}"


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_estimated_memory_matches_measurement(case: Case) -> None:
    check_memory(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in (*CASES, *EXPERT_CASES) if case not in QUICK], ids=lambda case: case.name
)
def test_estimated_memory_matches_measurement_in_every_layout(case: Case) -> None:
    check_memory(case)


def test_estimated_memory_shrinks_with_sharding_and_recompute() -> None:
    """Were estimates all alike, the bar above could still be met by luck."""
    unsharded, sharded, recomputed = (
        make_estimate(case, is_smoke=True).memory[0].total
        for case in (Case("gpt2"), Case("gpt2", 2, TENSOR), Case("gpt2", 1, RECOMPUTE))
    )
    assert sharded < 0.75 * unsharded and recomputed < 0.75 * unsharded
