"""A batch that grows gives the same losses, gradients and weights in every layout."""

from __future__ import annotations

import pytest

from tests.helpers.layouts import batches, check_fp64, difference, serial, traces

GAS, STEPS = 4, {"steps": 5, "eval_every": 2}
RAMP = "--fp64 --rampup-batch-size 8 4 28"  # steps of 8, 8, 12, 16 and 16 samples


@pytest.mark.parametrize("pipe, data", [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
def test_steps_of_growing_size_equal_those_of_one_process(pipe: int, data: int) -> None:
    check_fp64(difference(1, pipe, data, GAS, RAMP, **STEPS))
    alone, there = (
        serial(*batches(1, GAS), RAMP, **STEPS),
        traces(1, pipe, data, *batches(data, GAS), f"{RAMP} ", **STEPS),
    )
    for trace in there:
        assert trace.eval_losses == pytest.approx(alone.eval_losses, abs=1e-12, rel=0), "over whole batches"


def test_the_first_step_of_a_ramp_has_its_own_samples_alone() -> None:
    """It is that of a run whose whole batch is the first size; the later ones differ."""
    ramp = serial(*batches(1, GAS), RAMP, **STEPS)
    small = serial(4, 2, "--fp64", **STEPS)
    assert ramp.losses[:2] == small.losses[:2] and ramp.grad_norms[:2] == small.grad_norms[:2]
    assert ramp.losses[2] != small.losses[2]
