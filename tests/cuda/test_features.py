"""Experts, context parallelism, Muon, gradient accumulation fusion, recompute and offload on the simulated device."""

from __future__ import annotations

import pytest

from tests.cuda.cases import FEATURES, make_feature_case
from tests.cuda.test_matrix import check_outcomes
from tests.cuda.worker import Worker


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if feature.is_short else pytest.mark.slow) for name, feature in FEATURES.items()],
)
def test_features_meet_gpu_requirements(worker: Worker, name: str) -> None:
    case = make_feature_case(FEATURES[name])
    check_outcomes(case, worker.run(case), has_mask=FEATURES[name].has_mask)
