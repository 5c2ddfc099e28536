"""Samples to a micro-batch, and the errors of unusable samples."""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from megatron.data.sample_order import as_ordered
from megatron.data.step_predictions import KEY, StepPredictions
from megatron.errors import DataError, SampleError


class Samples(Protocol):
    """A sample for any index >= 0, or below its length where it has one: an array, or a dictionary of them."""

    def __getitem__(self, index: int) -> Any: ...


class MicroBatch(NamedTuple):
    """What is read for one micro-batch: samples ``indices``, cut into pieces of ``length`` tokens; None: left whole.

    ``coming`` are samples that will be read later, whose tokens are to be fetched from an object store meanwhile.
    """

    indices: list[int]
    length: int | None = None
    coming: Sequence[int] = ()


READ_AHEAD_SAMPLES = 64
"""How far each process that reads from an object store looks ahead."""


def prefetch_of(dataset: Any) -> Callable[[int], None] | None:
    """Return what has a sample of ``dataset`` fetched ahead, by its number; None where no store has any of it."""
    ordered = as_ordered(dataset)
    parts = [dataset] if ordered is None else list(ordered.parts.values())
    if not any(getattr(getattr(part, "token_file", None), "is_remote", False) for part in parts):
        return None
    if ordered is None:
        return lambda index: dataset.prefetch(index % len(dataset) if isinstance(dataset, Sized) else index)

    def of_any(index: int) -> None:
        number, place = ordered.order.locate(index)
        if hasattr(part := parts[number], "prefetch"):
            part.prefetch(place)

    return of_any


def looking_ahead(asked: Iterable[MicroBatch], depth: int, num_readers: int) -> Iterator[MicroBatch]:
    """Yield each micro-batch with the samples of the one that comes ``depth`` later; the first ones: of all up to it.

    Args:
        depth: a multiple of ``num_readers``, so that who hears of samples is the one that reads them.
        num_readers: processes that take the micro-batches in turn.
    """
    waiting = deque[MicroBatch]()
    for number, last in enumerate(asked):
        waiting.append(last)
        if len(waiting) > depth:
            is_first = number - depth < num_readers
            later = [waiting[at] for at in (range(num_readers, depth + 1, num_readers) if is_first else (depth,))]
            yield waiting.popleft()._replace(coming=[index for one in later for index in one.indices])


def prefetching(asked: Iterable[MicroBatch], prefetch: Callable[[int], None]) -> Iterator[MicroBatch]:
    """Yield each micro-batch, its ``coming`` samples being fetched."""
    for one in asked:
        for index in one.coming:
            prefetch(index)
        yield one


def cut(key: str, values: torch.Tensor, length: int) -> torch.Tensor:
    """Return windows of L + 1 tokens cut into pieces of ``length`` + 1, neighbours with one token in common.

    Shapes:
        values [b, L+1], output [b L/length, length+1]: the pieces of the first window, then those of the next

    Raises:
        SampleError: they have another shape.
    """
    if values.dim() != 2 or (values.shape[1] - 1) % length or values.shape[1] == 1:
        raise SampleError(
            f"with --seq-length-schedule all that samples hold must be --seq-length + 1 numbers, to be cut into pieces "
            f"of {length} + 1, got {key!r} of shape {tuple(values.shape)} in a micro-batch. Change the data set, or "
            "leave the flag out"
        )
    return values.unfold(1, length + 1, length).reshape(-1, length + 1)


class Collate:
    """Reads the samples of one micro-batch into one tensor for each key, and cuts them.

    ``predictions`` says what each micro-batch of a step is told of all of it.

    A data set that has a length starts anew at its end: sample i of the run is its item i % len.

    Raises:
        DataError: the data set is empty.
        SampleError: a sample cannot be read, whatever the data set raised, or the samples cannot be stacked or cut.
    """

    def __init__(self, dataset: Samples, predictions: StepPredictions | None = None) -> None:
        self.dataset, self.predictions = dataset, predictions
        self.length = len(dataset) if isinstance(dataset, Sized) else None
        if self.length == 0:
            raise DataError(f"a data set must hold at least one sample, {type(dataset).__name__} has none")

    def __call__(self, asked: MicroBatch) -> dict[str, torch.Tensor]:
        indices, length = asked[:2]
        samples = [self._read(index) for index in indices]
        has_names = all(isinstance(sample, Mapping) for sample in samples)
        if has_names:
            batch = {key: _joined(key, [s.get(key) for s in samples], indices, _of_any) for key in samples[0]}
        else:
            batch = {"text": _joined("text", samples, indices, _of_arrays)}
        if length is not None:
            batch = {key: cut(key, values, length) for key, values in batch.items()}
        if has_names and self.predictions is not None:
            batch[KEY] = torch.from_numpy(self.predictions.of(indices[0]))
        return batch

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

    def __getitem__(self, asked: MicroBatch) -> dict[str, torch.Tensor] | str:
        prefetch = prefetch_of(self.dataset) if asked.coming else None
        for index in asked.coming if prefetch is not None else ():
            prefetch(index)  # type: ignore[misc]
        try:
            return self(asked)
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
