"""One micro-batch out of its samples, and what is said when that fails."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Protocol

import numpy as np
import torch

from megatron.data import step_predictions
from megatron.data.ordered import as_ordered
from megatron.data.step_predictions import StepPredictions
from megatron.errors import DataError, SampleError


class Samples(Protocol):
    """A sample for any index >= 0, or below its length where it has one: an array, or a dictionary of them."""

    def __getitem__(self, index: int) -> Any: ...


class Collate:
    """Reads the samples of one micro-batch into one tensor for each key.

    ``predictions`` says what each micro-batch of a step is told of all of it.

    A data set that has a length starts anew at its end: sample i of the run is its item i % len.

    Raises:
        DataError: the data set is empty.
        SampleError: a sample cannot be read, whatever the data set raised, or the samples cannot be stacked.
    """

    def __init__(self, dataset: Samples, predictions: StepPredictions | None = None) -> None:
        self.dataset, self.predictions = dataset, predictions
        self.length = len(dataset) if isinstance(dataset, Sized) else None
        if self.length == 0:
            raise DataError(f"a data set must hold at least one sample, {type(dataset).__name__} has none")

    def __call__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        samples = [self._read(index) for index in indices]
        if all(isinstance(sample, Mapping) for sample in samples):
            batch = {key: _joined(key, [s.get(key) for s in samples], indices, _of_any) for key in samples[0]}
            if self.predictions is not None:
                batch[step_predictions.KEY] = torch.from_numpy(self.predictions.of(indices[0]))
            return batch
        return {"text": _joined("text", samples, indices, _of_arrays)}

    def _read(self, index: int) -> Any:
        item = index if self.length is None else index % self.length
        try:
            return self.dataset[item]
        except SampleError:
            raise
        except Exception as error:
            known = isinstance(error, DataError)  # written for a person: neither its class nor a line of code helps
            text = str(error) if known else f"{type(error).__name__}: {error}{_place_in_code(error)}"
            raise SampleError(f"sample {index}{self._origin(index, item)} cannot be read: {text}") from error

    def _origin(self, index: int, item: int) -> str:
        """Say which sample of which corpus this is where the data set knows, or which item of one that starts anew."""
        ordered = as_ordered(self.dataset)
        if ordered is not None:
            corpus, own = ordered.order.locate(item)
            return f" (sample {own} of corpus {list(ordered.parts)[corpus]})"
        return "" if item == index else f" (item {item} of {type(self.dataset).__name__})"


class GuardedCollate(Collate):
    """As ``Collate``, in a reading process: an error comes back as its text, without torch's traceback around it."""

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor] | str:
        try:
            return self(indices)
        except SampleError as error:
            return str(error)


def _place_in_code(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" (in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""


def _of_arrays(values: Sequence[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(values))


def _of_any(values: Sequence[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(value) for value in values])


def _joined(
    key: str, values: Sequence[Any], indices: list[int], join: Callable[[Sequence[Any]], torch.Tensor]
) -> torch.Tensor:
    """Return one tensor [b, ...] of what the samples hold under ``key``."""
    try:
        return join(values)
    except (RuntimeError, TypeError, ValueError) as error:
        held = [tuple(value.shape) if hasattr(value, "shape") else type(value).__name__ for value in values]
        raise SampleError(
            f"{key!r} must be an array of one shape in all samples of a micro-batch, got {held} in samples {indices}. "
            "Pad them in the data set."
        ) from error
