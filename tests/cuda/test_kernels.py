"""Which kernels a step launches: few of them, and none of chance."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda.cases import flags
from tests.cuda.worker import Case, Worker

CEILING = {"gpt2": 60, "llama": 145}
"""Launches of one more layer in a step of one micro-batch, those of its norm and update included; RMSNorm and the
gradient of SiLU, each a kernel on a GPU, are some thirty here, for fake tensors take them apart."""
BY_CHANCE = {
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
"""Operators that ``torch.use_deterministic_algorithms`` refuses on CUDA, of which ``median`` and ``cumsum`` in part."""


def step_of(worker: Worker, family: str, layers: int) -> Any:
    """Return what the second step has seen, of one micro-batch in one process, under ``--deterministic``."""
    case = Case(family, flags(family, "--bf16 --deterministic --gas 1", layers), 1, (0,), gas=1, is_whole=False)
    return worker.run(case)[0].phases["step 2"]


@pytest.mark.parametrize("family", CEILING)
def test_a_layer_launches_few_kernels_and_none_of_chance(worker: Worker, family: str) -> None:
    one, two = (step_of(worker, family, layers).launches for layers in (1, 2))
    assert 0 < two.total() - one.total() <= CEILING[family]
    assert two["mm"] and not BY_CHANCE & two.keys()


def test_a_deterministic_step_of_t5_has_no_operator_of_chance(worker: Worker) -> None:
    found = step_of(worker, "t5", layers=1).launches
    assert found["mm"] and not BY_CHANCE & found.keys()
