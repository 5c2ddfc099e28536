"""Collate samples into micro-batches and report unusable samples."""

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
    """A dataset whose items are arrays or dictionaries of arrays.

    Every index >= 0 is valid; if the dataset has a length, only indices below it are.
    """

    def __getitem__(self, index: int) -> Any: ...


class MicroBatch(NamedTuple):
    """Samples to read for one micro-batch.

    Args:
        indices: sample indices.
        length: tokens per chunk that the samples are split into or truncated to; None: full samples.
        prefetch_indices: samples in later micro-batches whose tokens should be prefetched from an object store.
        is_truncated: the tokens after ``length`` are dropped.
    """

    indices: list[int]
    length: int | None = None
    prefetch_indices: Sequence[int] = ()
    is_truncated: bool = False


READ_AHEAD_SAMPLES = 64
"""Samples that each process prefetches from an object store."""


def make_prefetch(dataset: Any) -> Callable[[int], None] | None:
    """Build a function that prefetches the sample with a given index; None if no corpus is in an object store."""
    ordered = as_ordered(dataset)
    corpus_datasets = [dataset] if ordered is None else list(ordered.parts.values())
    if not any(
        getattr(getattr(corpus_dataset, "token_file", None), "is_remote", False) for corpus_dataset in corpus_datasets
    ):
        return None
    if ordered is None:
        return lambda index: dataset.prefetch(index % len(dataset) if isinstance(dataset, Sized) else index)

    def prefetch_from_corpus(index: int) -> None:
        try:
            corpus_idx, sample_idx = ordered.order.locate(index)
        except SampleError:  # past the end of Megatron's order, which the run does not reach
            return
        if hasattr(corpus_dataset := corpus_datasets[corpus_idx], "prefetch"):
            corpus_dataset.prefetch(sample_idx)

    return prefetch_from_corpus


def add_prefetch_indices(micro_batches: Iterable[MicroBatch], depth: int, num_readers: int) -> Iterator[MicroBatch]:
    """Set each micro-batch's ``prefetch_indices`` to the samples in the micro-batch ``depth`` positions later.

    The first micro-batch of each reader receives the samples in all later micro-batches of this reader up to that one.

    Args:
        depth: a multiple of ``num_readers``, so that the process that prefetches samples also reads them.
        num_readers: processes that read the micro-batches in turn.
    """
    queue = deque[MicroBatch]()
    for idx, newest in enumerate(micro_batches):
        queue.append(newest)
        if len(queue) > depth:
            is_first = idx - depth < num_readers
            later_micro_batches = [
                queue[offset] for offset in (range(num_readers, depth + 1, num_readers) if is_first else (depth,))
            ]
            yield queue.popleft()._replace(
                prefetch_indices=[index for micro_batch in later_micro_batches for index in micro_batch.indices]
            )


def prefetch_ahead(micro_batches: Iterable[MicroBatch], prefetch: Callable[[int], None]) -> Iterator[MicroBatch]:
    """Yield each micro-batch after starting to prefetch the samples in its ``prefetch_indices``."""
    for micro_batch in micro_batches:
        for index in micro_batch.prefetch_indices:
            prefetch(index)
        yield micro_batch


def split_windows(key: str, values: torch.Tensor, length: int) -> torch.Tensor:
    """Split windows with L + 1 tokens into chunks with ``length`` + 1 tokens; neighbouring chunks share one token.

    Shapes:
        values [b, L+1], output [b L/length, length+1]: the first window's chunks, then the second's, ...

    Raises:
        SampleError: ``values`` has another shape.
    """
    if values.dim() != 2 or (values.shape[1] - 1) % length or values.shape[1] == 1:
        raise SampleError(
            "--seq-length-schedule needs samples with --seq-length + 1 tokens in each field, which are split into "
            f"chunks of {length} + 1, got {key!r} of shape {tuple(values.shape)} in a micro-batch. Change the dataset, "
            "or remove the flag"
        )
    return values.unfold(1, length + 1, length).reshape(-1, length + 1)


def truncate_windows(key: str, values: torch.Tensor, length: int) -> torch.Tensor:
    """Keep the first ``length`` inputs of windows with L + 1 tokens, and the label of the last of them.

    Shapes:
        values [b, L+1], output [b, length+1]

    Raises:
        SampleError: ``values`` has another shape.
    """
    if values.dim() != 2 or values.shape[1] <= length:
        raise SampleError(
            "--seq-length-curriculum needs samples with --seq-length + 1 tokens in each field, which are truncated to "
            f"{length} + 1, got {key!r} of shape {tuple(values.shape)} in a micro-batch. Change the dataset, or remove "
            "the flag"
        )
    return values[:, : length + 1].contiguous()


class Collate:
    """Reads a micro-batch's samples into one tensor per key; splits or truncates them if the micro-batch has a length.

    A dataset with a length restarts at its end: the run's sample i is its item i % len.

    Args:
        predictions: computes "step_predictions" for each micro-batch.

    Raises:
        DataError: the dataset is empty.
        SampleError: the dataset raised an exception, or the samples cannot be stacked, split or truncated.
    """

    def __init__(self, dataset: Samples, predictions: StepPredictions | None = None) -> None:
        self.dataset, self.predictions = dataset, predictions
        self.length = len(dataset) if isinstance(dataset, Sized) else None
        if self.length == 0:
            raise DataError(f"a dataset must have at least one sample, {type(dataset).__name__} has none")

    def __call__(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        indices, length = micro_batch[:2]
        samples = [self._read_sample(index) for index in indices]
        is_mapping = all(isinstance(sample, Mapping) for sample in samples)
        if is_mapping:
            batch = {
                key: _stack_or_raise(key, [s.get(key) for s in samples], indices, _stack_values) for key in samples[0]
            }
        else:
            batch = {"text": _stack_or_raise("text", samples, indices, _stack_arrays)}
        if length is not None:
            cut_windows = truncate_windows if micro_batch.is_truncated else split_windows
            batch = {key: cut_windows(key, values, length) for key, values in batch.items()}
        if is_mapping and self.predictions is not None:
            batch[KEY] = torch.from_numpy(self.predictions.counts_of_step(indices[0]))
        return batch

    def _read_sample(self, index: int) -> Any:
        item_idx = index if self.length is None else index % self.length
        try:
            return self.dataset[item_idx]
        except SampleError:
            raise
        except Exception as error:
            # The message of a DataError is complete; other errors need their class and line of code.
            is_data_error = isinstance(error, DataError)
            text = str(error) if is_data_error else f"{type(error).__name__}: {error}{_describe_code_position(error)}"
            raise SampleError(
                f"sample {index}{self._describe_origin(index, item_idx)} cannot be read: {text}"
            ) from error

    def _describe_origin(self, index: int, item_idx: int) -> str:
        """Describe the sample's position in its corpus, or in a dataset that has restarted, for an error message."""
        ordered = as_ordered(self.dataset)
        if ordered is not None:
            corpus_idx, sample_idx = ordered.order.locate(item_idx)
            return f" (sample {sample_idx} of corpus {list(ordered.parts)[corpus_idx]})"
        return "" if item_idx == index else f" (item {item_idx} of {type(self.dataset).__name__})"


class GuardedCollate(Collate):
    """``Collate`` for worker processes: returns a SampleError as text, so that torch does not wrap the error."""

    def __getitem__(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor] | str:
        prefetch = make_prefetch(self.dataset) if micro_batch.prefetch_indices else None
        for index in micro_batch.prefetch_indices if prefetch is not None else ():
            prefetch(index)  # type: ignore[misc]
        try:
            return self(micro_batch)
        except SampleError as error:
            return str(error)


def _describe_code_position(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" (in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""


def _stack_arrays(values: Sequence[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(values))


def _stack_values(values: Sequence[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(value) for value in values])


def _stack_or_raise(
    key: str, values: Sequence[Any], indices: list[int], stack: Callable[[Sequence[Any]], torch.Tensor]
) -> torch.Tensor:
    """Stack the samples' values for ``key`` into one tensor [b, ...]."""
    try:
        return stack(values)
    except (RuntimeError, TypeError, ValueError) as error:
        shapes = [tuple(value.shape) if hasattr(value, "shape") else type(value).__name__ for value in values]
        raise SampleError(
            f"{key!r} must be an array of one shape in all samples of a micro-batch, got {shapes} in samples "
            f"{indices}. Pad them in the dataset."
        ) from error
