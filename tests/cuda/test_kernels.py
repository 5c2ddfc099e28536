"""Kernels of a training step: their number, and determinism."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda.cases import flags
from tests.cuda.worker import Case, Worker

MAX_LAUNCHES = {"gpt2": 60, "llama": 145}
"""Maximum launches per layer in a step of one micro-batch, including the gradient norm and the optimizer."""
NONDETERMINISTIC = {
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward",
    "avg_pool3d_backward",
    "max_pool3d_with_indices_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "max_unpool2d", "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward", "upsample_trilinear3d_backward", "reflection_pad1d_backward",
    "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward", "nll_loss2d_forward", "nll_loss2d_backward",
    "_ctc_loss_backward", "_embedding_bag_dense_backward", "put_", "histc", "bincount", "kthvalue", "median",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward", "cumsum", "scatter_reduce", "resize_",
}  # fmt: skip
"""Operators that ``torch.use_deterministic_algorithms`` rejects on CUDA, ``median`` and ``cumsum`` only in part."""


def run_second_step(worker: Worker, family: str, layers: int) -> Any:
    """Return the events of the second step with one micro-batch, one rank and ``--deterministic``."""
    case = Case(family, flags(family, "--bf16 --deterministic --gas 1", layers), 1, (0,), gas=1, runs_all_phases=False)
    return worker.run(case)[0].phases["step 2"]


@pytest.mark.parametrize("family", MAX_LAUNCHES)
def test_layer_launches_few_deterministic_kernels(worker: Worker, family: str) -> None:
    one_layer, two_layers = (run_second_step(worker, family, layers).launches for layers in (1, 2))
    assert 0 < two_layers.total() - one_layer.total() <= MAX_LAUNCHES[family]
    assert two_layers["mm"] and not NONDETERMINISTIC & two_layers.keys()


def test_t5_deterministic_step_has_no_nondeterministic_kernels(worker: Worker) -> None:
    launches = run_second_step(worker, "t5", layers=1).launches
    assert launches["mm"] and not NONDETERMINISTIC & launches.keys()
