"""Permutations of documents and samples that Megatron draws from one numpy generator per corpus and split.

numpy does not change the stream of ``RandomState`` (NEP 19), so the permutations are the same with every version.
"""

from __future__ import annotations

import numpy as np

from megatron.data.megatron_order.epochs import EpochPlan

_LARGEST_UINT32 = np.iinfo(np.uint32).max


def permuted_documents(first: int, stop: int, plan: EpochPlan, generator: np.random.RandomState) -> np.ndarray:
    """Permute the documents ``first`` ... ``stop - 1`` of all epochs: int32[num_epochs * documents].

    All epochs' documents are permuted together, except that a separate last epoch follows the others.
    """
    order = np.tile(np.arange(first, stop, dtype=np.int32), plan.num_epochs)
    num_together = (plan.num_epochs - plan.has_separate_last) * (stop - first)
    generator.shuffle(order[:num_together])
    if plan.has_separate_last:
        generator.shuffle(order[num_together:])
    return order


def permuted_samples(plan: EpochPlan, generator: np.random.RandomState) -> np.ndarray:
    """Permute the sample indices 0 ... num_samples - 1: uint32[num_samples].

    Sample index i refers to the i-th window in the concatenated documents. The array is int64 if there are too many
    samples for uint32.
    """
    order = np.arange(plan.num_samples, dtype=np.uint32 if plan.num_samples < _LARGEST_UINT32 else np.int64)
    generator.shuffle(order[: plan.num_samples_before_last])
    if plan.has_separate_last:
        generator.shuffle(order[plan.num_samples_before_last :])
    return order
