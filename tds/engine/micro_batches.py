"""Micro-batch sources on the first and the last stage."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tds.device import tuple_like, upload
from tds.engine.batch_structure import input_error, structure_error
from tds.engine.data_consistency import ENDED, NO_READER, READY, DataConsistency, DataEnded, checksum
from tds.p2p.input_leaves import with_leaves
from tds.user_functions import BatchFn


@dataclass
class BatchSource:
    """Reads (inputs, labels) from an iterator through the user's batch function.

    A rank without an iterator calls the function with None, so that it can take part in a broadcast over the tensor
    group.

    Args:
        agreement: checks whether all ranks have data; None with a single rank, or if the loaders never end.

    Attributes:
        ended_at: index of the first micro-batch that the iterator could not yield; None if it has not ended.
        checksums: checksum of each micro-batch, if ``agreement`` compares them.
    """

    iterator: Iterator[Any] | None
    batch_fn: BatchFn | None
    stage: int
    agreement: DataConsistency | None = None
    ended_at: int | None = field(default=None, init=False)
    checksums: list[int] = field(default_factory=list, init=False)
    _num_read: int = field(default=0, init=False)
    _fetched: list[Any] = field(default_factory=list, init=False)
    _last_item: Any = field(default=None, init=False)
    _first_batch: tuple[Any, Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.iterator is not None and not hasattr(self.iterator, "__next__"):
            raise TypeError(
                f"train_batch and eval_batch need an iterator, got {type(self.iterator).__name__}. Create one with "
                "iter(...), once before the first step"
            )

    def begin(self, reads_data: bool) -> None:
        """Read the first micro-batch, so that an exhausted iterator raises before any message is sent. Collective.

        Args:
            reads_data: this rank reads data in this call.

        Raises:
            StopIteration: the data have ended on all ranks that read.
            DataEnded: the data have ended on some of them.
            RuntimeError: there is neither an iterator nor a batch function.
        """
        if reads_data and self.iterator is None and self.batch_fn is None:
            raise RuntimeError(
                f"stage {self.stage} needs data: pass an iterator to train_batch or eval_batch, or training_data to "
                "initialize. A rank that does not read data needs a batch function (set_batch_fn)"
            )
        state = NO_READER
        if reads_data and self.iterator is not None:
            state = self._fetch(self.iterator)
        if self.agreement is not None:
            self.agreement.begin(state)
        elif state == ENDED:
            raise StopIteration
        if reads_data:
            self._first_batch = self._read()

    def next(self, micro_batch: int = 0) -> tuple[Any, Any]:
        """Return (inputs, labels) of the next micro-batch.

        Args:
            micro_batch: index of that micro-batch.

        Raises:
            DataEnded: the iterator has ended, and ``agreement`` is None.
            TypeError: the batch is not a pair.
        """
        first_batch, self._first_batch = self._first_batch, None
        return self._read() if first_batch is None else first_batch

    def read_ahead(self) -> None:
        read_ahead(self.iterator)

    def end(self, num_micro_batches: int) -> None:
        """Check that no rank's data ended during the call and, if requested, that all ranks read the same. Collective.

        Raises:
            DataEnded, DataDisagreement: on all ranks.
        """
        if self.agreement is not None:
            self.agreement.end(self.ended_at, self.checksums, num_micro_batches)

    def _fetch(self, iterator: Iterator[Any]) -> int:
        """Fetch the first item from ``iterator``; return READY, or ENDED if there is none.

        This happens before the batch function runs, because other ranks of the tensor group may wait inside theirs.
        """
        try:
            self._fetched = [next(iterator)]
        except StopIteration:
            return ENDED
        return READY

    def _read(self) -> tuple[Any, Any]:
        batch = None if self.iterator is None else self._next_item(self.iterator)
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise structure_error(batch, f"{self._origin()} on stage {self.stage}")
        self._num_read += 1
        if self.agreement is not None and self.agreement.should_compare:
            self.checksums.append(checksum(batch))
        return batch[0], batch[1]

    def _next_item(self, iterator: Iterator[Any]) -> Any:
        """After the iterator's end, repeat the last item until ``end`` raises the error."""
        try:
            item = self._fetched.pop() if self._fetched else next(iterator)
        except StopIteration:
            if self.agreement is None:
                raise DataEnded(f"the data ended after {self._num_read} micro-batches of a global batch") from None
            self.ended_at = self._num_read if self.ended_at is None else self.ended_at
            return copy.copy(self._last_item)
        # Copied because a batch function may empty the item.
        self._last_item = copy.copy(item) if isinstance(item, (dict, list)) else item
        return item

    def _origin(self) -> str:
        if self.batch_fn is None:
            return "the iterator"
        return f"the batch function {getattr(self.batch_fn, '__name__', type(self.batch_fn).__name__)}"


@dataclass
class BothEndsSource(BatchSource):
    """Source for a stage that has the first and the last virtual stage; stores labels until the last one needs them."""

    _labels: dict[int, Any] = field(default_factory=dict, init=False)

    def next(self, micro_batch: int = 0) -> tuple[Any, Any]:
        """Return (inputs, labels) of ``micro_batch`` on the first call for it, and (None, labels) on the second."""
        if micro_batch in self._labels:
            return None, self._labels.pop(micro_batch)
        inputs, labels = super().next(micro_batch)
        self._labels[micro_batch] = labels
        return inputs, labels


def read_ahead(iterator: Iterator[Any] | None) -> None:
    """Call the iterator's method ``read_ahead``, if it has one, to prefetch data while the device is busy."""
    read = getattr(iterator, "read_ahead", None)
    if read is not None:
        read()


def stage_inputs(inputs: Any, device: torch.device, *, needs_grad: bool) -> Any:
    """Copy a micro-batch's inputs to ``device``, so that layers may change them in place.

    A list becomes a tuple; a namedtuple stays a namedtuple.

    Args:
        needs_grad: make float tensors require gradients. Reentrant recompute needs this, because it detaches the output
            if no input requires a gradient.

    Raises:
        TypeError: an input is not a tensor, or a tuple, list or dict of tensors.
    """

    def copy_to_device(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            device_copy = upload(value.detach(), device)
            return with_leaves([device_copy])[0][0] if needs_grad and device_copy.is_floating_point() else device_copy
        if isinstance(value, (tuple, list)):
            return tuple_like(value, [copy_to_device(element, f"{path}[{idx}]") for idx, element in enumerate(value)])
        if isinstance(value, Mapping):
            return {key: copy_to_device(element, f"{path}[{key!r}]") for key, element in value.items()}
        raise input_error(value, path, inputs)

    return copy_to_device(inputs, "inputs")
