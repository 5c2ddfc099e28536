"""The permutations of documents and samples that Megatron draws from one numpy generator per corpus and split.

numpy does not change the stream of ``RandomState`` (NEP 19), so the permutations are the same with every version.

``RandomState.shuffle`` has a special case for elements of 8 bytes, which is three times as fast as for 4 bytes. The
permutation does not depend on the type, so arrays are shuffled as int64 and stored in the smallest type.
"""

from __future__ import annotations

import numpy as np

from megatron.data.megatron_order.epochs import EpochPlan

_LARGEST_UINT32 = np.iinfo(np.uint32).max


def permuted_documents(first: int, stop: int, plan: EpochPlan, generator: np.random.RandomState) -> np.ndarray:
    """Return int32[num_epochs * documents], the documents ``first`` ... ``stop - 1`` of all epochs in their order.

    The documents of all epochs are permuted together, except that a separate last epoch follows the others.
    """
    num_together = plan.num_epochs - plan.has_separate_last
    order = np.empty(plan.num_epochs * (stop - first), np.int32)
    start = 0
    for num_epochs in [num_together, 1] if plan.has_separate_last else [num_together]:
        documents = np.tile(np.arange(first, stop, dtype=np.int64), num_epochs)
        generator.shuffle(documents)
        order[start : start + len(documents)] = documents
        start += len(documents)
    return order


def permuted_samples(plan: EpochPlan, generator: np.random.RandomState) -> np.ndarray:
    """Return uint32[num_samples], the position in the concatenated documents of each sample of the run, in samples.

    The array is int64 if there are too many samples for uint32.
    """
    dtype = np.uint32 if plan.num_samples < _LARGEST_UINT32 else np.int64
    order = np.empty(plan.num_samples, dtype)
    for start, stop in ((0, plan.num_samples_before_last), (plan.num_samples_before_last, plan.num_samples)):
        if start < stop or start == 0:
            positions = np.arange(start, stop, dtype=np.int64)
            generator.shuffle(positions)
            order[start:stop] = positions
    return order
