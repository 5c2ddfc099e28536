"""A batch that grows gives the same losses, gradients and weights in every layout."""

from __future__ import annotations

import pytest

from tests.helpers.layouts import check_fp64, compare_layout, split_global_batch, trace_layout, trace_one_process

GAS, STEPS = 4, {"steps": 5, "eval_every": 2}
RAMP = "--fp64 --rampup-batch-size 8 4 28"  # steps of 8, 8, 12, 16 and 16 samples


@pytest.mark.slow
@pytest.mark.parametrize("pipe, data", [(1, 2), (2, 1)])
def test_scheduled_batch_equals_single_process(pipe: int, data: int) -> None:
    check_fp64(compare_layout(1, pipe, data, GAS, "--fp64 --step-batch-size-schedule 0:8,128:12,224:16", **STEPS))


@pytest.mark.parametrize("pipe, data", [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
def test_growing_batch_equals_single_process(pipe: int, data: int) -> None:
    check_fp64(compare_layout(1, pipe, data, GAS, RAMP, **STEPS))
    reference, ranks = (
        trace_one_process(*split_global_batch(1, GAS), RAMP, **STEPS),
        trace_layout(1, pipe, data, *split_global_batch(data, GAS), f"{RAMP} ", **STEPS),
    )
    for trace in ranks:
        assert trace.eval_losses == pytest.approx(reference.eval_losses, abs=1e-12, rel=0), "over whole batches"


def test_first_ramp_steps_use_only_their_samples() -> None:
    """It is that of a run whose whole batch is the first size; the later ones differ."""
    ramp_trace = trace_one_process(*split_global_batch(1, GAS), RAMP, **STEPS)
    small_trace = trace_one_process(4, 2, "--fp64", **STEPS)
    assert ramp_trace.losses[:2] == small_trace.losses[:2] and ramp_trace.grad_norms[:2] == small_trace.grad_norms[:2]
    assert ramp_trace.losses[2] != small_trace.losses[2]
