"""Micro-batches for the first and the last stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tds.data_agreement import ENDED, NO_READER, READY, DataAgreement, DataEnded, checksum
from tds.deepspeed_api import RepeatingLoader
from tds.nesting import as_pair, refuse_input
from tds.structure import entered


class BatchSource:
    """Reads (inputs, labels) from an iterator through the user's batch function.

    A rank without an iterator still calls the function, with None, so that it can take part in a broadcast over the
    tensor group.

    Args:
        agreement: asks all ranks whether they have data; None where there is one rank, or no data end.

    Attributes:
        ended_at: the micro-batch that the iterator did not give; None while it gives all.
        checksums: of each micro-batch, where they are to be compared.
    """

    def __init__(
        self,
        iterator: Iterator[Any] | None,
        batch_fn: Callable[[Any], Any] | None,
        stage: int,
        agreement: DataAgreement | None = None,
    ) -> None:
        if iterator is not None and not hasattr(iterator, "__next__"):
            raise TypeError(
                f"train_batch and eval_batch take an iterator, got {type(iterator).__name__}. Make one by iter(...), "
                "once ahead of all steps"
            )
        self.iterator = iterator
        self.batch_fn = batch_fn
        self.stage = stage
        self.agreement = agreement
        self.ended_at: int | None = None
        self.checksums: list[int] = []
        self._number = 0
        self._fetched: list[Any] = []
        self._last: Any = None
        self._first: tuple[Any, Any] | None = None

    def begin(self, reads: bool) -> None:
        """Read the first micro-batch, so that an iterator at its end raises before anything is on its way. Collective.

        Args:
            reads: this rank reads in this call.

        Raises:
            StopIteration: the data have ended on all ranks.
            DataEnded: they have ended on some.
            RuntimeError: there is neither an iterator nor a batch function.
        """
        if reads and self.iterator is None and self.batch_fn is None:
            raise RuntimeError(
                f"stage {self.stage} needs data: pass an iterator to train_batch or eval_batch, or training_data to "
                "initialize; a rank that does not read needs a batch function (set_batch_fn)"
            )
        state = NO_READER
        if reads and self.iterator is not None:
            state = self._fetch(self.iterator)
        if self.agreement is not None:
            self.agreement.begin(state)
        elif state == ENDED:
            raise StopIteration
        if reads:
            self._first = self._read()

    def next(self) -> tuple[Any, Any]:
        """Return the next (inputs, labels).

        Raises:
            DataEnded: the iterator has ended, and no other rank waits for this one.
            TypeError: the batch is no pair.
        """
        first, self._first = self._first, None
        return self._read() if first is None else first

    def read_ahead(self) -> None:
        """Let the iterator read ahead, as ``read_ahead`` does."""
        read_ahead(self.iterator)

    def end(self, num_micro_batches: int) -> None:
        """See that no rank's data have ended within the call, and that they agree, where that was asked. Collective.

        Raises:
            DataEnded, DataDisagreement: on all ranks alike.
        """
        if self.agreement is not None:
            self.agreement.end(self.ended_at, self.checksums, num_micro_batches)

    def _fetch(self, iterator: Iterator[Any]) -> int:
        """Take what the iterator gives first, ahead of the batch function, in which others of a group may wait."""
        try:
            self._fetched = [next(iterator)]
        except StopIteration:
            return ENDED
        return READY

    def _read(self) -> tuple[Any, Any]:
        batch = None if self.iterator is None else self._given(self.iterator)
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        pair = as_pair(batch, f"{self._origin()} on stage {self.stage}")
        self._number += 1
        if self.agreement is not None and self.agreement.compares:
            self.checksums.append(checksum(pair))
        return pair

    def _given(self, iterator: Iterator[Any]) -> Any:
        """Return what the iterator gives; once it has ended what it gave last, which ``end`` will tell."""
        try:
            batch = self._fetched.pop() if self._fetched else next(iterator)
        except StopIteration:
            if self.agreement is None:
                raise DataEnded(f"the data ended behind {self._number} micro-batches of a global batch") from None
            self.ended_at = self._number if self.ended_at is None else self.ended_at
            return copy.copy(self._last)
        self._last = copy.copy(batch) if isinstance(batch, (dict, list)) else batch  # a batch function may empty it
        return batch

    def _origin(self) -> str:
        if self.batch_fn is None:
            return "the iterator"
        return f"the batch function {getattr(self.batch_fn, '__name__', type(self.batch_fn).__name__)}"


def read_ahead(iterator: Iterator[Any] | None) -> None:
    """Tell an iterator that can read ahead, by a method of that name, that the host has time: the device has work."""
    read = getattr(iterator, "read_ahead", None)
    if read is not None:
        read()


class TrainingLoader(RepeatingLoader):
    """DeepSpeed's ``RepeatingLoader``; its curriculum learning reaches the sampler and the post-processing
    of the loader within through it."""

    loader: Any

    @property
    def data_sampler(self) -> Any:
        """The sampler of the loader."""
        return self.loader.data_sampler

    @property
    def post_process_func(self) -> Callable[[Any, Any], Any] | None:
        """What the loader does to each micro-batch, given the state of the sampler."""
        return self.loader.post_process_func

    @post_process_func.setter
    def post_process_func(self, function: Callable[[Any, Any], Any] | None) -> None:
        self.loader.post_process_func = function


def training_loader(data: Any, grid: Any, make_loader: Callable[..., Any], *, has_curriculum: bool) -> TrainingLoader:
    """Return a loader over ``data`` that gives each replica its part and starts anew at the end.

    Args:
        make_loader: of DeepSpeed's engine, from data and a sampler.
        has_curriculum: the JSON asks for DeepSpeed's curriculum sampler.

    Raises:
        NotImplementedError: DeepSpeed's curriculum sampler on several stages.
    """
    if has_curriculum and grid.pipe_parallel_size > 1:
        raise NotImplementedError(
            "DeepSpeed's curriculum sampler draws on rank 0 for ranks of its own data-parallel group, so it cannot "
            f"feed the last of {grid.pipe_parallel_size} stages: "
            '"data_efficiency.data_sampling.curriculum_learning" needs '
            "one stage. Pass an iterator to train_batch, and cut sequences to the length of DeepSpeed's "
            "CurriculumScheduler in the batch function (set_batch_fn): shapes may change from call to call."
        )
    sampler: Any = torch.utils.data.distributed.DistributedSampler(
        data,
        num_replicas=grid.data_parallel_size,
        rank=grid.get_data_parallel_rank(),
        shuffle=False,
    )
    return TrainingLoader(make_loader(data, data_sampler=sampler))


def stage_inputs(inputs: Any, device: torch.device, *, needs_grad: bool) -> Any:
    """Return copies of a micro-batch's inputs on ``device``: layers may change them in place.

    A list becomes a tuple, a namedtuple stays one.

    Args:
        needs_grad: let floats require a gradient, without which reentrant recompute detaches the first layers.

    Raises:
        TypeError: something else than tensors, and tuples, lists and dicts of them.
    """

    def copied(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            copy = value.detach().to(device, copy=True)
            return entered([copy])[0][0] if needs_grad and copy.is_floating_point() else copy
        if isinstance(value, (tuple, list)):
            return _tuple_like(value, [copied(each, f"{path}[{place}]") for place, each in enumerate(value)])
        if isinstance(value, Mapping):
            return {key: copied(each, f"{path}[{key!r}]") for key, each in value.items()}
        raise refuse_input(value, path, inputs)

    return copied(inputs, "inputs")


def to_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it on ``device``; lists become tuples, as DeepSpeed gives them.

    A namedtuple stays one.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return _tuple_like(value, [to_device(each, device) for each in value])
    if isinstance(value, dict):
        return {key: to_device(each, device) for key, each in value.items()}
    return value


def _tuple_like(value: tuple[Any, ...] | list[Any], parts: list[Any]) -> tuple[Any, ...]:
    """Return ``parts`` in a tuple, or a namedtuple if ``value`` is one."""
    return type(value)(*parts) if isinstance(value, tuple) and hasattr(value, "_fields") else tuple(parts)
