"""Number of predicted tokens of a step, for losses averaged over different numbers of tokens.

A data set whose samples say it by their number alone (``num_predicted``) gives each micro-batch "step_predictions",
int64[2]: the tokens to predict and the samples of the step that it is part of. It is the same in every layout, needs
no message between replicas, and is known before the first backward of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megatron.config.batch_rampup import BatchSizes
from megatron.data.sample_order import as_ordered

KEY = "step_predictions"


class StepPredictions:
    """From the number of a sample to the tokens to predict and the samples of its step.

    Args:
        num_predicted: of a sample, by its number.
        sizes: samples of a step by samples consumed.
        samples_consumed: before the first step that will be asked for.
    """

    def __init__(self, num_predicted: Callable[[int], int], sizes: BatchSizes, samples_consumed: int) -> None:
        self._num_predicted, self._sizes, self._consumed = num_predicted, sizes, samples_consumed
        self._start, self._stop = samples_consumed, samples_consumed
        self._known = np.zeros(2, np.int64)

    def of(self, index: int) -> np.ndarray:
        """Return int64[2]: the tokens to predict and the samples of the step that sample ``index`` is part of."""
        if not self._start <= index < self._stop:
            self._find(index)
        return self._known.copy()

    def _find(self, index: int) -> None:
        stop = self._stop if index >= self._stop else self._consumed
        while stop <= index:
            start, stop = stop, stop + self._sizes.at(stop)
        self._start, self._stop = start, stop
        self._known[:] = sum(map(self._num_predicted, range(start, stop))), stop - start


def predictions_of(dataset: Any) -> Callable[[int], int] | None:
    """Return what tells how many tokens of a sample are predicted; None for a data set that does not say it."""
    ordered = as_ordered(dataset)
    if ordered is None:
        own = getattr(dataset, "num_predicted", None)
        return own if callable(own) else None
    counts = [getattr(part, "num_predicted", None) for part in ordered.parts.values()]
    if not all(map(callable, counts)):
        return None

    def of_any(index: int) -> int:
        number, place = ordered.order.locate(index)
        return counts[number](place)  # type: ignore[misc]

    return of_any
