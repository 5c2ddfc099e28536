"""Every family in every layout on the simulated device: two steps, an evaluation and a save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.cuda.cases import all_layouts, all_pairs, all_rows, make_case, named_cases, pairs_of, short_rows, values_of
from tests.cuda.worker import Case, Worker

STEADY_READS = {
    "tolist in tds/loss_reduction.py:read": 1,  # losses and gradient norm in one copy, once per step
    # the sizes of messages: once per layer and micro-batch of 2 each, and again for recomputation
    "tolist in megatron/mpu/expert_parallel.py:from_counts": 8,
    # without a grouped product, the number of rows of each expert, once per layer and micro-batch
    "tolist in megatron/models/common/experts.py:forward": 4,
    "copy in megatron/models/common/router.py:end_step": 1,  # expert load and auxiliary losses, once per step
}
FIRST_STEP_READS = STEADY_READS | {
    "tolist in tds/bucket_reducer.py:_agree": 2,  # the order of the buckets, once per run
}
BLOCKING_BUDGET = {"to the host in megatron/models/common/router.py:end_step": 1}
"""Copies that block the host -> maximum number in a step or an evaluation."""
MASKED_FAMILIES = {"t5", "mpt", "bert"}
"""Families whose attention has a bias or padding."""
READ_BUDGET = {"step 1": FIRST_STEP_READS, "step 2": STEADY_READS, "evaluation": STEADY_READS}
"""Phase -> operations for which the host waits for the device -> maximum number. A new line needs a reason."""


def excess(counts: Mapping[str, int], budget: Mapping[str, int]) -> dict[str, int]:
    """Return the entries of ``counts`` that exceed ``budget``."""
    return {name: n for name, n in counts.items() if n > budget.get(name, 0)}


def check_outcomes(case: Case, outcomes: list[Any], *, has_mask: bool) -> None:
    """Check the requirements for all runs: host reads, copies, order of streams, alignment and masks.

    Args:
        has_mask: attention has a mask.
    """
    for rank, outcome in zip(case.ranks, outcomes, strict=True):
        assert not outcome.wrong, "a backend cannot send these tensors"
        assert not outcome.faults, "the order of two streams is undefined"
        for phase, budget in READ_BUDGET.items():
            assert not excess(outcome.phases[phase].reads, budget), (
                f"the host waits for the device in {phase}, on rank {rank}"
            )
        for phase in ("step 2", "evaluation"):
            assert not excess(outcome.phases[phase].blocking, BLOCKING_BUDGET), (
                f"a copy blocks the host in {phase}, on rank {rank}"
            )
        mixed = {phase: dict(stats.mixed) for phase, stats in outcome.phases.items() if stats.mixed}
        assert not mixed, "an operator on the device has an input on the host"
        step = outcome.phases["step 2"]
        assert step.reads["tolist in tds/loss_reduction.py:read"] == 1, "the read of the losses was not recorded"
        assert not step.unaligned, "cuBLAS uses slow kernels for these products"
        assert bool(step.masks) == has_mask, "attention with a mask does not use the fast kernel"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if tuple(name.split("-")) in short_rows() else pytest.mark.slow)
        for name, case in named_cases(all_pairs())
    ],
)
def test_all_pairs_meet_gpu_requirements(worker: Worker, case: Case) -> None:
    check_outcomes(case, worker.run(case), has_mask=case.family in MASKED_FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in named_cases(all_layouts())])
def test_all_layouts_meet_gpu_requirements(worker: Worker, case: Case) -> None:
    check_outcomes(case, worker.run(case), has_mask=case.family in MASKED_FAMILIES)


def test_case_selections_cover_all_pairs_and_values() -> None:
    expected = {pair for row in all_rows() for pair in pairs_of(row)}
    assert {pair for row in all_pairs() for pair in pairs_of(row)} == expected
    assert {value for row in short_rows() for value in values_of(row)} == {
        value for row in all_rows() for value in values_of(row)
    }
    assert {row[:-1] for row in all_layouts()} == {row[:-1] for row in all_rows()}
    assert {rank % 2 for n, row in enumerate(all_pairs()) for rank in make_case(row, n).ranks} == {0, 1}
