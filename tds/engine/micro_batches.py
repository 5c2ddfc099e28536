"""Micro-batches of first and last stage: reading, form, to the device; all ranks have data, equally much, the same."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tds.deepspeed_api import RepeatingLoader
from tds.device import tuple_like, upload
from tds.p2p.boundary import entered
from tds.p2p.communicator import collective_scope

# Whether all ranks that read have data, equally much of it, and, on request, whether they see the same.
#
# Without it a rank whose loader ends first leaves, and the others wait for it. So each call begins with one small
# message of every rank to all others, and ends with another one:
#
# | when | what each rank says | if they differ |
# |---|---|---|
# | ahead of the first micro-batch | whether its iterator has one | all ended: StopIteration everywhere; some: DataEnded |  # noqa: E501
# | behind the last one, ahead of the update | at which its iterator ended; checksums | DataEnded; DataDisagreement |
#
# A rank whose iterator ends within a call goes on with its last micro-batch up to the end of the call, so that nobody
# waits for it; what was computed is thrown away.

NO_READER, ENDED, READY = 0, 1, 2
NOWHERE = -1


class DataEnded(RuntimeError):
    """The data of some ranks ended ahead of the others', or in the middle of a global batch."""


class DataDisagreement(ValueError):
    """Ranks of one replica have read different micro-batches."""


class DataConsistency:
    """Makes all ranks of an engine decide alike about their data.

    Args:
        group: all ranks of the engine.
        name_of: a rank in words, by its number in the group.
        compares: also compare checksums of what the ranks of a replica have read.
    """

    def __init__(
        self, group: Any, *, stage: int, replica: int, device: torch.device, name_of: Callable[[int], str],
        compares: bool,
    ) -> None:  # fmt: skip
        self.compares = compares
        self._group, self._stage, self._replica = group, stage, replica
        self._device, self._name_of = device, name_of

    def begin(self, state: int) -> None:
        """See that the iterators of all ranks have a first micro-batch. Collective.

        Args:
            state: of this rank: NO_READER, ENDED or READY.

        Raises:
            StopIteration: the data of all ranks that read have ended.
            DataEnded: those of some.
        """
        states = [row[0] for row in self._gather([state], "agreeing on whether there is data")]
        ended, ready = ([rank for rank, each in enumerate(states) if each == kind] for kind in (ENDED, READY))
        if ended and ready:
            raise DataEnded(
                "the data must last equally long on all ranks that read, got none for this call on "
                f"{self._format_ranks(ended)}, and more on {self._format_ranks(ready)}. {_ADVICE}"
            )
        if ended:
            raise StopIteration

    def end(self, ended_at: int | None, checksums: Sequence[int], num_micro_batches: int) -> None:
        """See that the data of no rank have ended within the call, and that replicas have read alike. Collective.

        Args:
            checksums: of this rank's micro-batches; none where it has read none.

        Raises:
            DataEnded: ``ended_at`` is a micro-batch on some rank.
            DataDisagreement: checksums of the ranks of one replica differ.
        """
        own = [NOWHERE if ended_at is None else ended_at, self._replica]
        if self.compares:
            own += list(checksums) or [NOWHERE] * num_micro_batches
        rows = self._gather(own, "agreeing on the data that were read")
        ended = {rank: row[0] for rank, row in enumerate(rows) if row[0] != NOWHERE}
        if ended:
            raise DataEnded(
                f"a global batch needs {num_micro_batches} micro-batches, got "
                f"{', '.join(f'{number} on {self._name_of(rank)}' for rank, number in ended.items())}, where the data "
                f"ended. {_ADVICE}"
            )
        if self.compares:
            self._compare([(row[1], row[2:]) for row in rows])

    def _compare(self, rows: Sequence[tuple[int, list[int]]]) -> None:
        first_of: dict[int, int] = {}
        for rank, (replica, checksums) in enumerate(rows):
            if NOWHERE in checksums:
                continue
            other = first_of.setdefault(replica, rank)
            for micro_batch, (one, two) in enumerate(zip(rows[other][1], checksums, strict=True)):
                if one != two:
                    raise DataDisagreement(
                        "all ranks of a replica that read must read the same micro-batches, got different ones of "
                        f"number {micro_batch}: checksum {one:08x} on {self._name_of(other)}, {two:08x} on "
                        f"{self._name_of(rank)}. Give the first and the last stage the same loader with the same "
                        "seed, and a sampler by replica (data-parallel rank), not by rank"
                    )

    def _gather(self, numbers: Sequence[int], doing: str) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        everyone = own.new_empty(dist.get_world_size(self._group) * len(own))
        with collective_scope(self._stage, doing):
            dist.all_gather_into_tensor(everyone, own, group=self._group)
        rows: list[list[int]] = everyone.view(-1, len(own)).tolist()
        return rows

    def _format_ranks(self, ranks: Sequence[int]) -> str:
        shown = [self._name_of(rank) for rank in ranks[:4]]
        return ", ".join(shown) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


_ADVICE = (
    "Give every rank that reads the same number of micro-batches, a multiple of gradient_accumulation_steps "
    "(drop_last=True), or let the loader begin anew (deepspeed.utils.RepeatingLoader)"
)


def checksum(value: Any, before: int = 0) -> int:
    """Return a checksum over all tensors of ``value``, their types and shapes, and how they are nested."""
    if isinstance(value, torch.Tensor):
        header_crc = zlib.crc32(f"{value.dtype}{list(value.shape)}".encode(), before)
        flat = value.detach().cpu().contiguous().reshape(-1)
        return zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), header_crc)
    if isinstance(value, Mapping):
        value = [part for key in value for part in (str(key), value[key])]
    if isinstance(value, (tuple, list)):
        before = zlib.crc32(f"{len(value)}(".encode(), before)
        for each in value:
            before = checksum(each, before)
        return before
    return zlib.crc32(repr(value).encode(), before)


# What a micro-batch must be, ``((inputs...), labels)``, and the words for what came instead.

BATCH_STRUCTURE = (
    "((inputs...), labels): what the first layer takes, and what the loss function takes beside the output"
)
_MOST_SHOWN = 6
_DEEPEST = 6
_LABELS = ("labels", "label", "targets", "target", "y")


def describe_structure(value: Any, depth: int = 0) -> str:
    """Return how ``value`` is nested, as text: "(tensor [4, 128], {'mask': tensor [4]})"."""
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)}"
    if isinstance(value, (Mapping, tuple, list)) and depth == _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        named = list(value.items())
        inner = [f"{key!r}: {describe_structure(each, depth + 1)}" for key, each in named[:_MOST_SHOWN]]
        return "{" + ", ".join([*inner, *_rest(len(named))]) + "}"
    if isinstance(value, (tuple, list)):
        inner = [*(describe_structure(each, depth + 1) for each in value[:_MOST_SHOWN]), *_rest(len(value))]
        if isinstance(value, list):
            return f"[{', '.join(inner)}]"
        return f"({', '.join(inner)}{',' if len(value) == 1 else ''})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__module__.partition('.')[0]} array {list(value.shape)}"
    return "None" if value is None else type(value).__name__


def no_pair(batch: Any, origin: str) -> TypeError:
    """Return the error for a micro-batch that is not (inputs, labels), and came from ``origin``."""
    return TypeError(
        f"a micro-batch must be {BATCH_STRUCTURE}, got {describe_structure(batch)} from {origin}. {_advice(batch)}"
    )


def refuse_input(value: Any, path: str, inputs: Any) -> TypeError:
    """Return the error for a part of the first layer's inputs that is no tensor.

    Args:
        path: where it is, such as "inputs[1]".
        inputs: all of them.
    """
    hint = "Leave it out"
    if hasattr(value, "__array__") or isinstance(value, (int, float)):
        hint = "Make a tensor of it (torch.as_tensor), or leave it to torch's default collate function"
    elif isinstance(value, (str, bytes)):
        hint = "Leave it out, or make numbers of the text first"
    return TypeError(
        "the first stage's inputs must be tensors, or tuples, lists or dicts of them, got "
        f"{type(value).__name__} at {path} of the inputs {describe_structure(inputs)}. {hint}"
    )


def _rest(number: int) -> list[str]:
    return [f"{number - _MOST_SHOWN} more"] if number > _MOST_SHOWN else []


def _advice(batch: Any) -> str:
    if batch is None:
        return "Return the pair from the batch function (one without a return gives None), or let the loader give it"
    if isinstance(batch, torch.Tensor):
        return "Give (it, labels); where there are no labels, or they travel with the inputs, give (it, None)"
    if isinstance(batch, Mapping):
        return _advice_on_names([key for key in batch if isinstance(key, str)])
    if isinstance(batch, (tuple, list)):
        return _advice_on_parts(tuple(batch))
    return "Give tensors: a pair from the loader's collate_fn, or from a batch function (engine.set_batch_fn)"


def _advice_on_names(names: list[str]) -> str:
    labels = next((name for name in _LABELS if name in names), names[-1] if len(names) > 1 else "labels")
    inputs = "".join(f'batch["{name}"], ' for name in names if name != labels)[:-1] or 'batch["inputs"],'
    inputs = inputs if inputs.count(",") == 1 else inputs.rstrip(",")
    return (
        "Say which is which: from collate_fn, or by "
        f'engine.set_batch_fn(lambda batch: (({inputs}), batch["{labels}"])) where a rank without data gets none'
    )


def _advice_on_parts(parts: tuple[Any, ...]) -> str:
    if not parts:
        return "It is empty; let the loader give (inputs, labels)"
    if len(parts) == 1:
        inner = parts[0]
        if isinstance(inner, (tuple, list)) and len(inner) == 2:
            return f"It is nested one level too deep: give {describe_structure(inner)}"
        given = f"({describe_structure(inner)}, labels)"
        return f"The labels are missing: give {given}; where there are none, None in their place"
    nested = parts[:-1], parts[-1]
    shown = describe_structure(nested)
    return f"Put what the first layer takes into a tuple of its own: {shown}, if the last are the labels"


# Micro-batches for the first and the last stage.


@dataclass
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

    iterator: Iterator[Any] | None
    batch_fn: Callable[[Any], Any] | None
    stage: int
    agreement: DataConsistency | None = None
    ended_at: int | None = field(default=None, init=False)
    checksums: list[int] = field(default_factory=list, init=False)
    _number: int = field(default=0, init=False)
    _fetched: list[Any] = field(default_factory=list, init=False)
    _last: Any = field(default=None, init=False)
    _first: tuple[Any, Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.iterator is not None and not hasattr(self.iterator, "__next__"):
            raise TypeError(
                f"train_batch and eval_batch take an iterator, got {type(self.iterator).__name__}. Make one by "
                "iter(...), once ahead of all steps"
            )

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

    def next(self, micro_batch: int = 0) -> tuple[Any, Any]:
        """Return the next (inputs, labels), those of ``micro_batch``.

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
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise no_pair(batch, f"{self._origin()} on stage {self.stage}")
        self._number += 1
        if self.agreement is not None and self.agreement.compares:
            self.checksums.append(checksum(batch))
        return batch[0], batch[1]

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


@dataclass
class BothEndsSource(BatchSource):
    """Of a stage with the first piece and, in another chunk, the last: labels wait until they are asked for."""

    _labels: dict[int, Any] = field(default_factory=dict, init=False)

    def next(self, micro_batch: int = 0) -> tuple[Any, Any]:
        """Return the next (inputs, labels), those of ``micro_batch``; where it was read already (None, its labels)."""
        if micro_batch in self._labels:
            return None, self._labels.pop(micro_batch)
        inputs, labels = super().next(micro_batch)
        self._labels[micro_batch] = labels
        return inputs, labels


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
            copy = upload(value.detach(), device)
            return entered([copy])[0][0] if needs_grad and copy.is_floating_point() else copy
        if isinstance(value, (tuple, list)):
            return tuple_like(value, [copied(each, f"{path}[{place}]") for place, each in enumerate(value)])
        if isinstance(value, Mapping):
            return {key: copied(each, f"{path}[{key!r}]") for key, each in value.items()}
        raise refuse_input(value, path, inputs)

    return copied(inputs, "inputs")
