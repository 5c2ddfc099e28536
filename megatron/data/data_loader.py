"""Micro-batches of one replica: order, collate, worker processes, counts per step."""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from megatron.child_process import die_with_parent
from megatron.config.batch import BatchSizes, Share, share_of
from megatron.config.seq_length import SeqLengths
from megatron.data.blended_dataset import as_ordered
from megatron.errors import DataError, SampleError

# How many tokens a whole step predicts, for losses that are added up from means over different things.
#
# A data set whose samples say it by their number alone (``num_predicted``) gives each micro-batch "step_predictions",
# int64[2]: the tokens to predict and the samples of the step that it is part of. It is the same in every layout, needs
# no message between replicas, and is known before the first backward of the step.

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


# One micro-batch out of its samples, and what is said when that fails.


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


# Processes that read micro-batches ahead of the training.
#
# They are forked, so they import nothing and share what the data set holds with the process that trains. A signal for
# the whole job is for that process alone: it may save and go on reading meanwhile. They end with it, however it ends.

_DEATH_SEEN_AFTER_S = 2.0


class PrefetchWorkers:
    """Iterates over the micro-batches that are ``asked`` for, which ``num_workers`` processes read in their order.

    Args:
        prefetch_factor: micro-batches that each process reads ahead.
        pin_memory: give tensors in pinned memory, which a GPU copies from while it computes.
        predictions: as ``Collate``.

    Raises:
        DataError: the data set is empty.
        SampleError: as ``Collate``.
        RuntimeError: a reading process died.
    """

    def __init__(
        self,
        dataset: Samples,
        asked: Iterable[MicroBatch],
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool,
        predictions: StepPredictions | None = None,
    ) -> None:
        loader: Iterable[Any] = torch.utils.data.DataLoader(
            GuardedCollate(dataset, predictions),  # type: ignore[arg-type]
            sampler=asked,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            multiprocessing_context="fork",
            worker_init_fn=partial(_become_reader, os.getpid()),
            generator=torch.Generator(),  # else it draws a seed from the generator that users' dropout draws from
        )
        self._batches: Iterator[Any] | None = iter(loader)
        self._pids = [process.pid for process in getattr(self._batches, "_workers", ())]

    def __iter__(self) -> PrefetchWorkers:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._batches is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except RuntimeError as error:
            raise self.explained(error) from error
        except (EOFError, OSError) as error:  # the pipe to a reader broke before torch saw it dead
            raise self._broken(error) from error
        if isinstance(batch, str):
            raise SampleError(batch)
        return batch

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Return what to say of ``error`` if it tells of the death of a reading process, else ``error`` itself.

        Torch raises such an error by a signal, wherever this process happens to be.
        """
        first_line = str(error).splitlines()[0] if str(error) else ""
        match = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", first_line)
        if match is None:
            return error
        dead = [int(pid) for pid in match.group(1).split(",")]
        known = [f"reader {self._pids.index(pid)} (pid {pid})" for pid in dead if pid in self._pids]
        return _death(", ".join(known or [f"pid {pid}" for pid in dead]), match.group(2).rstrip(". "))

    def _broken(self, error: Exception) -> Exception:
        """Return what to say of a broken pipe: which reader has died, or ``error`` itself if all live."""
        workers = getattr(self._batches, "_workers", ())
        wait([worker.sentinel for worker in workers], timeout=_DEATH_SEEN_AFTER_S)
        dead = [f"reader {number} (pid {w.pid})" for number, w in enumerate(workers) if not w.is_alive()]
        codes = [str(worker.exitcode) for worker in workers if not worker.is_alive()]
        return _death(", ".join(dead), f"ended with exit code {', '.join(codes)}") if dead else error

    def close(self) -> None:
        """End the processes."""
        batches, self._batches = self._batches, None
        del batches  # ends them, and waits until they have


def _death(who: str, how: str) -> RuntimeError:
    return RuntimeError(
        f"a process that reads data died: {who} {how}. "
        "Free memory, or read in the training process with --num-workers 0."
    )


def _become_reader(parent: int, number: int) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


# The micro-batches of one data-parallel replica, in an order that does not depend on the layout.
#
# A step that begins after c samples takes the samples c ... c + B - 1, where B = b m d is a function of c alone,
# constant or growing (``megatron.config.batch``); replica r takes the contiguous part r m b ... (r + 1) m b - 1 of
# them, micro-batch after micro-batch; where B is no multiple of b d, the first replicas have one micro-batch more each.
# So "samples consumed" is all that there is to resume, with any b, m, d.
#
# A data set that has a length starts anew at its end: sample i of the run is its item i % len. One without a length, as
# ``GPTDataset``, has an item for any index.


class DataLoader:
    """Iterates over micro-batches of replica ``data_rank`` of ``data_size``.

    A micro-batch is ``{"text": int64 [b, L+1]}``; of a data set whose samples are dictionaries, the same keys with the
    arrays or tensors of b samples stacked, and "step_predictions" where the data set tells what it predicts. In a step
    of length l below L all but that are cut into pieces, [b L/l, l+1].

    Args:
        num_micro_batches: of every step; with ``sizes`` of a whole one.
        samples_consumed: samples of all replicas that earlier steps have read.
        sizes: samples of a step over all replicas, where they change or replicas take unequal parts of them.
        lengths: at which samples are read, by tokens consumed; None: they are left whole.
        num_workers: processes that read ahead; 0 reads in this process.
        prefetch_factor: micro-batches that each of them reads ahead.
        pin_memory: give tensors in pinned memory.

    Raises:
        DataError: the data set is empty.
        SampleError: a sample cannot be read, or those of a micro-batch cannot be stacked; with ``num_workers`` or not.
        RuntimeError: a reading process died.
        ValueError: a size of ``sizes`` cannot be shared among the replicas.
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
        sizes: BatchSizes | None = None,
        lengths: SeqLengths | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.num_workers = dataset, num_workers
        self.prefetch_factor, self.pin_memory = prefetch_factor, pin_memory
        self.micro_batch_size, self.data_rank, self.data_size = micro_batch_size, data_rank, data_size
        self.samples_consumed = samples_consumed
        self.sizes = sizes or BatchSizes(micro_batch_size * num_micro_batches * data_size)
        wrong = [n for n in self.sizes.all() if n % micro_batch_size or n < micro_batch_size * data_size]
        if wrong:
            raise ValueError(
                f"a step must be whole micro-batches of {micro_batch_size}, one or more on each of {data_size} "
                f"replicas, got {wrong[0]} samples"
            )
        self.lengths = lengths

    def share_at(self, samples_consumed: int) -> Share:
        """Return this replica's micro-batches of the step that begins after so many samples."""
        return share_of(self.sizes.at(samples_consumed) // self.micro_batch_size, self.data_size, self.data_rank)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the samples of each micro-batch of this replica and their length, without an end."""
        start = self.samples_consumed
        while True:
            share = self.share_at(start)
            length = self.length_at(start)
            own = start + share.first * self.micro_batch_size
            for micro_batch in range(share.number):
                first = own + micro_batch * self.micro_batch_size
                yield MicroBatch(list(range(first, first + self.micro_batch_size)), length)
            start += self.sizes.at(start)

    def length_at(self, samples_consumed: int) -> int | None:
        """Return the length of the pieces of the step that begins after so many samples; None: samples are whole."""
        if self.lengths is None:
            return None
        length = self.lengths.of_step(samples_consumed)
        return None if length == self.lengths.full else length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        num_predicted = predictions_of(self.dataset)
        predictions = num_predicted and StepPredictions(num_predicted, self.sizes, self.samples_consumed)
        asked, prefetch = self.micro_batches(), prefetch_of(self.dataset)
        if prefetch is not None:
            num_readers = max(self.num_workers, 1)
            depth = -(-READ_AHEAD_SAMPLES // self.micro_batch_size) * num_readers
            asked = looking_ahead(asked, depth, num_readers)
            if not self.num_workers:
                asked = prefetching(asked, prefetch)
        if self.num_workers:
            return PrefetchWorkers(
                self.dataset, asked, self.num_workers, self.prefetch_factor, self.pin_memory, predictions
            )
        batches = map(Collate(self.dataset, predictions), asked)
        return map(_pinned, batches) if self.pin_memory else batches


def _pinned(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.pin_memory() for key, tensor in batch.items()}
