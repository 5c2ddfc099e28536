"""Predicted token counts in each step, for losses averaged over a varying number of tokens.

If a dataset can compute a sample's predicted token count from its index (``num_predicted``), each micro-batch
contains "step_predictions", int64[2]: the predicted tokens and samples in its step. The values are the same
in every layout, need no communication between replicas, and are known before the step's first backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megatron.config.batch_rampup import BatchSizes
from megatron.data.sample_order import as_ordered

KEY = "step_predictions"


class StepPredictions:
    """Counts predicted tokens and samples in the step that contains a given sample.

    Args:
        num_predicted: predicted tokens in a sample, by sample index.
        batch_sizes: samples per step, by samples consumed.
        samples_consumed: samples consumed before the first step.
    """

    def __init__(self, num_predicted: Callable[[int], int], batch_sizes: BatchSizes, samples_consumed: int) -> None:
        self._num_predicted, self._batch_sizes, self._consumed = num_predicted, batch_sizes, samples_consumed
        self._start, self._stop = samples_consumed, samples_consumed
        self._step_counts = np.zeros(2, np.int64)

    def counts_of_step(self, index: int) -> np.ndarray:
        """Count predicted tokens and samples in the step that contains ``index``: int64[2]."""
        if not self._start <= index < self._stop:
            self._find_step(index)
        return self._step_counts.copy()

    def _find_step(self, index: int) -> None:
        """Compute the sample range and the counts for the step that contains ``index``."""
        stop = self._stop if index >= self._stop else self._consumed
        while stop <= index:
            start, stop = stop, stop + self._batch_sizes.at(stop)
        self._start, self._stop = start, stop
        self._step_counts[:] = sum(map(self._num_predicted, range(start, stop))), stop - start


def make_num_predicted(dataset: Any) -> Callable[[int], int] | None:
    """Build a function sample index -> predicted token count; None if the dataset does not provide it."""
    ordered = as_ordered(dataset)
    if ordered is None:
        num_predicted = getattr(dataset, "num_predicted", None)
        return num_predicted if callable(num_predicted) else None
    counters = [getattr(corpus_dataset, "num_predicted", None) for corpus_dataset in ordered.parts.values()]
    if not all(map(callable, counters)):
        return None

    def num_predicted_in_corpus(index: int) -> int:
        corpus_idx, sample_idx = ordered.order.locate(index)
        return counters[corpus_idx](sample_idx)  # type: ignore[misc]

    return num_predicted_in_corpus
