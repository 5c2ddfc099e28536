"""Which kernels a step launches: aligned products, attention without masks, few of them, and none of chance."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.cuda.cases import flags
from tests.cuda.worker import Case, Worker

FAMILIES = ["gpt2", "llama", "t5"]
MASKED = {"t5", "mpt", "bert"}
"""Families whose attention has a bias, or padding."""
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


def step_of(worker: Worker, family: str, extra: str, layers: int = 1, gas: int = 2) -> Any:
    """Return what the second step has seen, in one process."""
    case = Case(family, flags(family, f"{extra} --gas {gas}", layers), 1, (0,), gas=gas, is_whole=False)
    return worker.run(case)[0].phases["step 2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_aligned_and_attention_has_no_mask_it_does_not_need(worker: Worker, family: str) -> None:
    seen = step_of(worker, family, "--bf16 --vocab-size 256 --make-vocab-size-divisible-by 64")
    assert not seen.unaligned, "cuBLAS takes slow kernels for these"
    assert bool(seen.masks) == (family in MASKED), "with a mask attention is not the fast kernel"


def test_products_are_aligned_whatever_the_vocabulary(worker: Worker) -> None:
    assert not step_of(worker, "gpt2", "--bf16 --vocab-size 211").unaligned


@pytest.mark.parametrize("family", CEILING)
def test_a_layer_launches_few_kernels(worker: Worker, family: str) -> None:
    one, two = (sum(step_of(worker, family, "--bf16", layers, gas=1).launches.values()) for layers in (1, 2))
    assert 0 < two - one <= CEILING[family]


def test_a_deterministic_step_has_no_operator_of_chance(worker: Worker) -> None:
    found: Counter[str] = Counter()
    for family in ("gpt2", "t5"):
        found += step_of(worker, family, "--bf16 --deterministic").launches
    assert found["mm"] and not BY_CHANCE & found.keys()
