"""StepPolicy: which steps are skipped, rejected or clipped; no gradients are needed."""

from __future__ import annotations

import math

import pytest

from megatron.errors import NumericsError
from megatron.mpu.groups import Group
from megatron.optim import GradScaler
from megatron.optim.gradients.all_reduce import AllReduceGradReducer
from megatron.optim.gradients.local import LocalGradReducer
from megatron.optim.gradients.make_reducer import make_reducer
from megatron.optim.gradients.overlapped import OverlappedGradReducer
from megatron.optim.gradients.reduce_scatter import ReduceScatterGradReducer
from megatron.optim.param_store import ParamStore
from megatron.optim.step_policy import StepPolicy


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_norm_is_overflow_only_if_scale_can_decrease(norm: float) -> None:
    for scaler, is_overflow in (
        (GradScaler(2.0, is_dynamic=True), True),
        (GradScaler(1.0, is_dynamic=True), False),
        (GradScaler(2.0), False),
        (GradScaler(), False),
    ):
        policy = StepPolicy(scaler)
        assert policy.has_overflowed(norm) == is_overflow
        assert not policy.has_overflowed(1e30)
        with pytest.raises(NumericsError, match="The step did not change the weights"):
            policy.rejects(norm)
        assert not policy.rejects(1e30)


def test_veto_replaces_error_and_receives_norm() -> None:
    policy, norms = StepPolicy(GradScaler()), []
    policy.accepts_step = lambda norm: bool(norms.append(norm)) or norm < 2.0
    assert [policy.rejects(norm) for norm in (1.0, 3.0, math.inf)] == [False, True, True]
    assert norms == [1.0, 3.0, math.inf]


def test_gradients_are_clipped_only_above_limit() -> None:
    assert StepPolicy(GradScaler()).clip_factor(100.0) == 1.0
    policy = StepPolicy(GradScaler(), clip_grad=0.5)
    assert policy.clip_factor(0.5) == 1.0 and policy.clip_factor(5.0) == pytest.approx(0.1)


def test_reducer_follows_replicas_zero_stage_and_overlap() -> None:
    group = Group((0, 1), 0)
    for stage, overlap, has_pipeline, expected in (
        (0, False, False, AllReduceGradReducer),
        (0, True, False, OverlappedGradReducer),
        (1, True, True, AllReduceGradReducer),
        (2, True, False, ReduceScatterGradReducer),
        (3, False, False, ReduceScatterGradReducer),
    ):
        options = {"overlap_grad_reduce": overlap, "has_pipeline": has_pipeline}
        assert type(make_reducer(ParamStore(group, zero_stage=stage), **options)) is expected
        assert type(make_reducer(ParamStore(zero_stage=stage), **options)) is LocalGradReducer
