"""One micro-batch out of its samples, and what is said when a sample cannot be read."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sized
from typing import Any, Protocol

import numpy as np
import torch

from megatron.errors import DataError


class Samples(Protocol):
    """A sample for any index >= 0, or below its length where it has one: an array, or a dictionary of them."""

    def __getitem__(self, index: int) -> Any: ...


class Collate:
    """Reads the samples of one micro-batch into one tensor for each key.

    A data set that has a length starts anew at its end: sample i of the run is its item i % len.

    Raises:
        DataError: the data set is empty, or the samples cannot be stacked.
    """

    def __init__(self, dataset: Samples) -> None:
        self.dataset = dataset
        self.length = len(dataset) if isinstance(dataset, Sized) else None
        if self.length == 0:
            raise DataError(f"a data set must hold at least one sample, {type(dataset).__name__} has none")

    def __call__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        samples = [self.dataset[index if self.length is None else index % self.length] for index in indices]
        if not isinstance(samples[0], Mapping):
            return {"text": torch.from_numpy(np.stack(samples))}
        return {key: _stack(key, [sample.get(key) for sample in samples], indices) for key in samples[0]}


class GuardedCollate(Collate):
    """As ``Collate``, in a reading process: an error comes back as its text, without torch's traceback around it."""

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor] | str:
        try:
            return self(indices)
        except DataError as error:
            text = str(error)
        except Exception as error:
            text = f"{type(error).__name__}: {error}{_place_in_code(error)}"
        return text if "sample" in text else f"samples {indices}{self._origin(indices)} cannot be read: {text}"

    def _origin(self, indices: list[int]) -> str:
        """Say which samples of which corpora these are, where the data set is a mixture."""
        order, parts = getattr(self.dataset, "order", None), list(getattr(self.dataset, "parts", ()))
        if order is None or not parts:
            return ""
        located = [order.locate(index) for index in indices]
        return " (" + ", ".join(f"sample {own} of {parts[corpus]}" for corpus, own in located) + ")"


def _place_in_code(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" (in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""


def _stack(key: str, values: list[Any], indices: list[int]) -> torch.Tensor:
    """Return one tensor [b, ...] of what the samples hold under ``key``."""
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (RuntimeError, TypeError, ValueError) as error:
        held = [tuple(value.shape) if hasattr(value, "shape") else type(value).__name__ for value in values]
        raise DataError(
            f"{key!r} must be an array of one shape in all samples of a micro-batch, got {held} in samples {indices}. "
            "Pad them in the data set."
        ) from error
