"""Datasets of a run and their iterators; ranks that read agree; order across a resume; time waited for data."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from fractions import Fraction
from types import TracebackType
from typing import Any, NamedTuple

import torch

from megatron import device, log
from megatron.checkpoint import former
from megatron.config import Config
from megatron.config.batch import BatchSizes
from megatron.config.seq_length import SeqLengths
from megatron.data import BlendSchedule, DataLoader, resumed_order
from megatron.data.blended_dataset import SAME_LENGTH, as_ordered
from megatron.data.data_loader import Samples
from megatron.errors import CheckpointError, DataError, SampleError, marked
from megatron.mpu.data import Upload
from megatron.training import failure
from megatron.training.compatibility import data_settings_changed
from megatron.training.initialize import World

# Iterators over micro-batches: one that knows how long the training has waited, and one that copies them ahead.


class TimedBatches:
    """Gives what ``source`` gives; as a context it ends the processes that read ahead when the training has ended.

    When the training dies they end with this process instead: nothing must keep it from leaving.

    Raises:
        DataError: as ``source``; it is of this rank, since other replicas read other samples.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source
        self._waited_s = 0.0
        with marked(is_of_this_rank=True):
            self._batches = iter(source)

    def __iter__(self) -> TimedBatches:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            with marked(is_of_this_rank=True):
                return next(self._batches)
        finally:
            self._waited_s += time.perf_counter() - start

    def drain_waited_s(self) -> float:
        """Return the seconds spent waiting since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def __enter__(self) -> TimedBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and hasattr(self._batches, "close"):
            self._batches.close()
            return
        raised = error.__cause__ if isinstance(error, SampleError) else error  # torch tells of a death wherever we are
        if isinstance(raised, RuntimeError) and hasattr(self._batches, "explained"):
            explained = self._batches.explained(raised)
            if explained is not raised:
                raise explained from error


class UploadedBatches(TimedBatches):
    """Also has what ``source`` gives copied to ``place``, and reads one micro-batch ahead where it is told to.

    What was read ahead and is never asked for is as if it had not been read: the samples that a run has consumed are
    counted by steps. So is an error of it.
    """

    def __init__(self, source: Iterable[Mapping[str, torch.Tensor]], place: torch.device) -> None:
        super().__init__(source)
        self._place = place
        self._ahead: Upload | None = None
        self._error: Exception | None = None

    def __next__(self) -> Upload:
        error, self._error = self._error, None
        if error is not None:
            raise error
        ahead, self._ahead = self._ahead, None
        return self._upload() if ahead is None else ahead

    def read_ahead(self) -> None:
        """Read the next micro-batch and start its copies, for a moment in which the device has work.

        Nothing has waited for it where the device still has work when that is done. What goes wrong is raised when the
        micro-batch is asked for.
        """
        if self._ahead is not None or self._error is not None:
            return
        waited_s, at = self._waited_s, failure.heartbeat_now() or ""
        failure.heartbeat_note(f"{at}, reading ahead" if at else "reading ahead")
        try:
            self._ahead = self._upload()
        except Exception as error:
            self._error = error
        failure.heartbeat_note(at)
        if device.is_busy(self._place):
            self._waited_s = waited_s

    def _upload(self) -> Upload:
        return Upload(super().__next__(), self._place)


# What a rank that reads data tells the others of it, and whether all of them read the same.

KINDS = ("train", "valid", "test")


@dataclass(frozen=True)
class RankData:
    """What a rank tells the others of its data; ``prints`` has one text for each kind of data set that it has."""

    problem: str | None
    reads: bool
    fingerprint: str | None = None
    order: BlendSchedule | None = None
    corpora: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    prints: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, datasets: Mapping[str, Samples], reads: bool, failure: Exception | None) -> RankData:
        if failure or not reads:
            return cls(str(failure) if failure else None, False)
        ordered = as_ordered(datasets.get("train"))
        return cls(
            problem=None,
            reads=True,
            fingerprint=_fingerprint(datasets.get("train")),
            order=None if ordered is None else ordered.order,
            corpora={kind: weights for kind, dataset in datasets.items() if len(weights := _weights(dataset)) > 1},
            prints={kind: _print(dataset) for kind, dataset in datasets.items()},
        )


def _fingerprint(dataset: object) -> str | None:
    found = getattr(dataset, "fingerprint", None)
    return found if isinstance(found, str) else None


def _weights(dataset: object) -> dict[str, float]:
    """Return the weight of each corpus by name; of none where nothing is known of corpora."""
    ordered = as_ordered(dataset)
    return {} if ordered is None else ordered.order.weights(0)


def _print(dataset: object) -> str:
    """Return a text that is the same on all ranks whose data set gives the same samples in the same order."""
    ordered = as_ordered(dataset)
    text = f"fingerprint {_fingerprint(dataset)}"
    if ordered is None:
        return f"{len(dataset)} samples and {text}" if isinstance(dataset, Sized) else text
    order = repr((ordered.order.corpora, ordered.order.schedule)).encode()
    return f"{text} and order {hashlib.sha256(order).hexdigest()[:8]}"


def disagreement(ranks_data: Sequence[RankData]) -> str | None:
    """Say which ranks have opened other data than the first one that reads."""
    for kind in KINDS:
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(ranks_data):
            if one.reads:
                ranks.setdefault(one.prints.get(kind, "none"), []).append(rank)
        if len(ranks) > 1:
            each = "; ".join(f"{text} on rank{'s' * (len(on) > 1)} {_ranges(on)}" for text, on in ranks.items())
            return (
                f"all ranks must read the same data, got of the {kind} data {each}. Give every node the same files "
                "under the same paths."
            )
    return None


def _ranges(numbers: Sequence[int]) -> str:
    """Return "0-3, 6" for the rising numbers 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


# The data sets of a run and the iterators of this rank over them.

DatasetsProvider = Callable[[list[int]], tuple[Any, Any, Any]]


@dataclass
class RunData:
    """The three data sets on a rank that reads, none elsewhere; the rest is known on all ranks.

    Args:
        order: which corpus each sample of the training comes from, where the data set says so.
        corpora: kind -> name and weight of each corpus, where there are several.
        has_training: whether the run has training data; one that takes no step needs none.
    """

    datasets: dict[str, Samples]
    fingerprint: str | None
    order: BlendSchedule | None = None
    corpora: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    has_training: bool = True

    def batches(
        self, kind: str, config: Config, world: World, samples_consumed: int = 0, corpus: str | None = None,
        length: int | None = None,
    ) -> TimedBatches | None:  # fmt: skip
        """Return this replica's micro-batches from ``samples_consumed`` on, or None on a rank that does not read.

        They are on their way to the device already, where there is one beside the CPU.

        Args:
            corpus: read this one's own samples alone.
            length: read samples in pieces of so many tokens; None: those of the training by --seq-length-schedule,
                others whole.
        """
        dataset = self.datasets.get(kind)
        if dataset is None:
            return None
        is_training = kind == "train"
        ordered, replicas = as_ordered(dataset), world.grid.data.size
        lengths = config.batch.lengths if is_training else SeqLengths(config.batch.seq_length)
        if length is not None:
            lengths = SeqLengths(lengths.full, ((0, length),))
        batches = DataLoader(
            dataset if corpus is None or ordered is None else ordered.parts[corpus],
            micro_batch_size=config.batch.batch_size,
            num_micro_batches=config.batch.gas,
            data_rank=world.grid.data.rank,
            data_size=replicas,
            samples_consumed=samples_consumed,
            sizes=config.batch.sizes(replicas) if is_training else BatchSizes(config.batch.global_batch_size(replicas)),
            lengths=lengths,
            num_workers=config.data.reading_processes if is_training else 0,
            prefetch_factor=config.data.prefetch_factor,
            pin_memory=device.can_pin(world.kind),
        )
        return TimedBatches(batches) if world.kind == "cpu" else UploadedBatches(batches, world.device)

    def use_order(self, order: BlendSchedule) -> None:
        """Let the training go on in ``order``."""
        self.order = order
        ordered = as_ordered(self.datasets.get("train"))
        if ordered is not None:
            ordered.use_order(order)


def evaluated_splits(config: Config) -> dict[str, bool]:
    """Return True for "valid" and "test" if the run evaluates them.

    As in Megatron, a split without files or documents is not evaluated. ``--eval-only`` needs the test split in any
    case.
    """
    batch, paths, is_eval_only = config.batch, config.data.corpora, config.checkpoint.eval_only
    _, valid, test = config.data.split_shares
    has_eval = batch.eval_iters > 0
    has_test_files = paths["data_path"] is not None or paths["valid_data_path"] is None or bool(paths["test_data_path"])
    return {
        "valid": has_eval and batch.eval_interval > 0 and not is_eval_only and valid > 0,
        "test": has_eval and has_test_files and (test > 0 or is_eval_only),
    }


def samples_wanted(config: Config, world: World) -> list[int]:
    """Return how many samples training, all validations and the test will read.

    For the training it is --train-samples, as in Megatron, so that it does not change when a run is resumed with
    another batch size; otherwise the samples of a new run.
    """
    batch, replicas = config.batch, world.grid.data.size
    training = batch.sizes(replicas).consumed_after(batch.train_iters)
    if batch.train_samples is not None and batch.train_tokens is None and batch.train_iters:
        training = batch.train_samples
    per_step = batch.global_batch_size(replicas)
    evaluated = evaluated_splits(config)
    return [
        0 if config.checkpoint.eval_only else training,
        batch.eval_iters * per_step if evaluated["valid"] else 0,
        batch.eval_iters * per_step if evaluated["test"] else 0,
    ]


def open_data(provider: DatasetsProvider, config: Config, world: World) -> RunData:
    """Open the data sets on the ranks that read them. Collective.

    Raises:
        DataError: on all ranks, when any rank could not open its data, or ranks have opened different ones.
    """
    datasets: dict[str, Samples] = {}
    failure: Exception | None = None
    if world.reads_data:
        try:
            wanted = samples_wanted(config, world)
            made = _mock_data(config, wanted) if config.data.is_mock else provider(wanted)
            opened = dict(zip(KINDS, made, strict=True))
            datasets = {kind: dataset for kind, dataset in opened.items() if dataset is not None}
        except DataError as error:
            failure = error
    ranks = world.grid.host.gather_objects(RankData.of(datasets, world.reads_data, failure))
    problem = next((one.problem for one in ranks if one.problem), None) or disagreement(ranks)
    if problem:
        raise DataError(problem)
    known = next((one for one in ranks if one.reads), ranks[0])
    return RunData(datasets, known.fingerprint, known.order, known.corpora, "train" in known.prints)


def _mock_data(config: Config, wanted: Sequence[int]) -> tuple[Any, ...]:
    """Return the random samples of --data-path mock, others for each split; none of a split that nobody reads."""
    from megatron.training.global_vars import get_tokenizer
    from megatron.training.parity import random_data

    seed, tokenizer = config.run.seed, get_tokenizer()
    return tuple(random_data(config, seed + at, tokenizer) if count else None for at, count in enumerate(wanted))


# How far the corpora of a run have been read, in words, and how a run goes on in the order of its checkpoint.
#
# Data sets say so by an ``order`` (``megatron.data.BlendSchedule``); those of a user's own need not have one.

_NAMED_AT_MOST, _NAMED_OF_MORE = 6, 4


class Saved(NamedTuple):
    """What a checkpoint says of the data: a fingerprint, and how far each corpus has been read."""

    fingerprint: str | None = None
    order: Mapping[str, Any] | None = None


def numbers_text(numbers: Mapping[str, float], form: str) -> str:
    """Return "a 0.12, b 0.30", or the number alone where there is one corpus.

    Of more corpora than a line can hold the largest numbers come first and alone, and then "and 9 more".
    """
    if len(numbers) == 1:
        return format(next(iter(numbers.values())), form)
    named = list(numbers.items())
    if len(named) > _NAMED_AT_MOST:
        named = sorted(named, key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])[:_NAMED_OF_MORE]
    text = ", ".join(f"{name} {number:{form}}" for name, number in named)
    return text if len(named) == len(numbers) else f"{text} and {len(numbers) - len(named)} more"


def epochs_text(data: RunData, samples_consumed: int) -> str:
    """Return how often each corpus has been read, for the log line; "" where nobody knows."""
    if data.order is None:
        return ""
    epochs = data.order.epochs(samples_consumed)
    return f"epoch{'s' if len(epochs) > 1 else ''} {numbers_text(epochs, '.3g')}"


def epochs_values(data: RunData, samples_consumed: int) -> dict[str, Any]:
    """Return the same as metrics: one number under ``epoch``, or ``epochs`` by name."""
    if data.order is None:
        return {}
    epochs = data.order.epochs(samples_consumed)
    return {"epochs": epochs} if len(epochs) > 1 else {"epoch": next(iter(epochs.values()))}


def tokens_values(data: RunData, samples_consumed: int, tokens_per_sample: int) -> dict[str, Any]:
    """Return how many tokens of each corpus have been read, as a metric."""
    if data.order is None:
        return {}
    cursors = data.order.cursors(samples_consumed)
    return {"corpus_tokens": {name: tokens_per_sample * samples for name, samples in cursors.items()}}


def start_rows(data: RunData, num_samples: int) -> Iterator[tuple[str, str]]:
    """Yield rows of the start table: samples of an epoch, and how often a run of ``num_samples`` will read them."""
    train = data.datasets.get("train")
    ordered = as_ordered(train)
    parts: Mapping[str, object] = {"": train} if ordered is None else ordered.parts
    sizes = {name: getattr(part, "samples_per_epoch", None) for name, part in parts.items()}
    known = {name: size for name, size in sizes.items() if isinstance(size, int) and size}
    if known and len(known) == len(sizes):
        yield "samples", f"{numbers_text(known, ',')} an epoch"
    if data.order is not None:
        epochs = numbers_text(data.order.epochs(num_samples), ".3g")
        yield "epochs", f"{epochs} when the {num_samples:,} samples of the run are read"


def resumed(
    data: RunData, state: Mapping[str, Any], tokens_per_sample: int | None = None, *, allow_change: bool,
    config: Config | None = None,
) -> BlendSchedule | None:  # fmt: skip
    """Return the order in which the training goes on after the ``state`` of a checkpoint; None where there is none.

    Args:
        tokens_per_sample: of now; None: as in the checkpoint.
        config: of the run, to name the settings that differ from the checkpoint's.

    Raises:
        CheckpointError: the data are not those of the checkpoint, or it does not say which it has read; the same on
            every rank.
    """
    ratio = _length_ratio(state, tokens_per_sample)
    if data.order is None:
        return None
    saved, consumed = state.get("data_order") or state.get("data_fingerprint"), state["progress"]["samples_consumed"]
    if not saved:
        if consumed:
            _take_unknown(consumed, allow_change)
        return data.order
    settings = {} if config is None else data_settings_changed(state.get("config", {}), config)
    order, lines = resumed_order(data.order, saved, consumed, allow_change=allow_change, ratio=ratio, settings=settings)
    for line in lines:
        log.info(line)
    return order


def _length_ratio(state: Mapping[str, Any], tokens_per_sample: int | None) -> Fraction:
    """Return the tokens of a sample of the checkpoint to those of one now, and say where another length goes on."""
    progress = former.progress(state) if state["progress"] else {}
    samples, tokens = progress.get("samples_consumed", 0), progress.get("tokens_consumed")
    if not samples or tokens is None or tokens_per_sample is None or tokens == samples * tokens_per_sample:
        return SAME_LENGTH
    log.info(
        f"data: samples of {tokens_per_sample} tokens, of {tokens // samples} in the checkpoint: going on at sample "
        f"{-(-tokens // tokens_per_sample)}, the first that begins at or after the {tokens} tokens consumed"
    )
    return Fraction(tokens, samples * tokens_per_sample)


def _take_unknown(consumed: int, allow_change: bool) -> None:
    """Refuse a checkpoint that says nothing of what it has read, or say what is taken to be so."""
    problem = f"the checkpoint does not say of which data the {consumed} samples were that it has read"
    if not allow_change:
        raise CheckpointError(
            f"a checkpoint must say which data it has read, but {problem}: some may come again. Give the data set of "
            "your own that it was trained on, --allow-data-change to go on as if they had been the first of the data "
            "given now, or --finetune to start anew from the weights."
        )
    log.info(f"data: {problem}; going on as if they had been the first of the data given now")


def to_save(data: RunData, samples_consumed: int, loaded: Saved) -> Saved:
    """Return what a checkpoint of now must say of the data.

    Args:
        loaded: what the one says that the run goes on from; it stays true of a run without training data.
    """
    if not data.has_training:
        return loaded
    return Saved(data.fingerprint, None if data.order is None else data.order.state(samples_consumed))
