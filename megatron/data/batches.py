"""The micro-batches of one data-parallel replica, in an order that does not depend on the layout.

Global batch k after ``samples_consumed`` = c is the samples c + k B ... c + (k + 1) B - 1 with B = b m d; replica r
takes the contiguous part r m b ... (r + 1) m b - 1 of it, micro-batch after micro-batch. So "samples consumed" is
all that there is to resume, with any b, m, d.

A data set that has a length starts anew at its end: sample i of the run is its item i % len. One without a length, as
``GPT2Samples``, has an item for any index.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol

import numpy as np
import torch

from megatron.errors import DataError


class Samples(Protocol):
    """A sample for any index >= 0, or below its length where it has one: an array, or a dictionary of them."""

    def __getitem__(self, index: int) -> Any: ...


class ReplicaBatches:
    """Iterates over micro-batches of replica ``data_rank`` of ``data_size``.

    A micro-batch is ``{"text": int64 [b, L+1]}``; of a data set whose samples are dictionaries, the same keys with the
    arrays or tensors of b samples stacked.

    Args:
        samples_consumed: samples of all replicas that earlier steps have read.
        limit: samples, counted from the very first one; only global batches wholly before it are given. None: for ever.
        num_workers: processes that read ahead; 0 reads in this process.

    Raises:
        DataError: a sample cannot be read (names sample, document and place in the file), the data set is empty, or
            the samples of a micro-batch cannot be stacked.
        RuntimeError: a reading process died.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        micro_batch_size: int,
        num_micro_batches: int,
        data_rank: int,
        data_size: int,
        samples_consumed: int = 0,
        limit: int | None = None,
        num_workers: int = 0,
    ) -> None:
        self.dataset, self.num_workers, self.limit = dataset, num_workers, limit
        self.micro_batch_size, self.num_micro_batches = micro_batch_size, num_micro_batches
        self.data_rank, self.samples_consumed = data_rank, samples_consumed
        self.global_batch_size = micro_batch_size * num_micro_batches * data_size

    def indices(self) -> Iterator[list[int]]:
        """Yield the sample indices of each micro-batch of this replica."""
        own = self.data_rank * self.micro_batch_size * self.num_micro_batches
        for batch in itertools.count():
            start = self.samples_consumed + batch * self.global_batch_size
            if self.limit is not None and start + self.global_batch_size > self.limit:
                return
            for micro_batch in range(self.num_micro_batches):
                first = start + own + micro_batch * self.micro_batch_size
                yield list(range(first, first + self.micro_batch_size))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if self.num_workers:
            return self._read_ahead()
        return map(_Collate(self.dataset), self.indices())

    def _read_ahead(self) -> Iterator[dict[str, torch.Tensor]]:
        loader: Iterable[dict[str, torch.Tensor] | str] = torch.utils.data.DataLoader(
            _Guarded(self.dataset),  # type: ignore[arg-type]
            sampler=self.indices(),  # type: ignore[arg-type]
            batch_size=None,
            num_workers=self.num_workers,
            generator=torch.Generator(),  # else it draws a seed from the generator that users' dropout draws from
        )
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise RuntimeError(
                    f"a process that reads data died: {reason} "
                    "Free memory, or read in the training process with --num-workers 0."
                ) from error
            if isinstance(batch, str):
                raise DataError(batch)
            yield batch


class _Collate:
    """Reads the samples of one micro-batch into one tensor for each key."""

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


class _Guarded(_Collate):
    """As ``_Collate``, in a reading process: an error comes back as its text, without torch's traceback around it."""

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor] | str:
        try:
            return self(indices)
        except Exception as error:
            text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            return text if "sample" in text else f"samples {indices} cannot be read: {text}"
