"""Every family in every layout on the device without CUDA: two steps, an evaluation, both ways to save."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda.cases import all_pairs, case_of, every_layout, every_row, named, pairs_of, short_run, values_of
from tests.cuda.worker import Case, Worker

FIRST = {
    "tolist in tds/loss_reduction.py:read": 1,  # losses and gradient norm at once: the one read of every step
    "tolist in tds/bucket_reducer.py:_agree": 2,  # the order of the buckets, once in a run
}
STEADY = {"tolist in tds/loss_reduction.py:read": 1}
MASKED = {"t5", "mpt", "bert"}
"""Families whose attention has a bias, or padding."""
BUDGET = {"step 1": FIRST, "step 2": STEADY, "evaluation": STEADY}
"""Phase -> what makes the host wait for the device, and how often at most. A new line needs a reason."""


def check(case: Case, outcomes: list[Any]) -> None:
    """Check what every run must hold to."""
    for rank, seen in zip(case.ranks, outcomes, strict=True):
        assert not seen.wrong, "a backend cannot send this"
        assert not seen.faults, "the order of two streams is left to chance"
        for phase, budget in BUDGET.items():
            over = {what: n for what, n in seen.phases[phase].reads.items() if n > budget.get(what, 0)}
            assert not over, f"the host waits for the device in {phase}, on rank {rank}"
        for phase in ("step 2", "evaluation"):
            assert not seen.phases[phase].blocking, f"a copy holds the host in {phase}, on rank {rank}"
        mixed = {phase: dict(of.mixed) for phase, of in seen.phases.items() if of.mixed}
        assert not mixed, "an operator of the device is given a tensor of the host"
        step = seen.phases["step 2"]
        assert step.reads["tolist in tds/loss_reduction.py:read"] == 1, "the watch sees nothing"
        assert not step.unaligned, "cuBLAS takes slow kernels for these"
        assert bool(step.masks) == (case.family in MASKED), "with a mask attention is not the fast kernel"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if tuple(name.split("-")) in short_run() else pytest.mark.slow)
        for name, case in named(all_pairs())
    ],
)
def test_all_pairs_run_as_a_gpu_needs_it(worker: Worker, case: Case) -> None:
    check(case, worker.run(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in named(every_layout())])
def test_every_layout_runs_as_a_gpu_needs_it(worker: Worker, case: Case) -> None:
    check(case, worker.run(case))


def test_all_pairs_are_there() -> None:
    wanted = {pair for row in every_row() for pair in pairs_of(row)}
    assert {pair for row in all_pairs() for pair in pairs_of(row)} == wanted
    assert {value for row in short_run() for value in values_of(row)} == {
        value for row in every_row() for value in values_of(row)
    }
    assert {row[:-1] for row in every_layout()} == {row[:-1] for row in every_row()}
    assert {rank % 2 for n, row in enumerate(all_pairs()) for rank in case_of(row, n).ranks} == {0, 1}
