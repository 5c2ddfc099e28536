"""How far the corpora of a run have been read, in words, and how a run goes on in the order of its checkpoint.

Data sets say so by an ``order`` (``megatron.data.SampleOrder``); those of a user's own need not have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron import log
from megatron.data import SampleOrder, resumed_order
from megatron.data.ordered import as_ordered
from megatron.errors import CheckpointError
from megatron.training.data import RunData

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


def resumed(data: RunData, state: Mapping[str, Any], *, allow_change: bool) -> SampleOrder | None:
    """Return the order in which the training goes on after the ``state`` of a checkpoint; None where there is none.

    Raises:
        CheckpointError: the data are not those of the checkpoint, or it does not say which it has read; the same on
            every rank.
    """
    if data.order is None:
        return None
    saved = state.get("data_order") or state.get("data_fingerprint")
    consumed = state["progress"]["samples_consumed"]
    if not saved:
        if consumed:
            _take_unknown(consumed, allow_change)
        return data.order
    order, lines = resumed_order(data.order, saved, consumed, allow_change=allow_change)
    for line in lines:
        log.info(line)
    return order


def _take_unknown(consumed: int, allow_change: bool) -> None:
    """Refuse a checkpoint that says nothing of what it has read, or say what is taken to be so."""
    told = f"the checkpoint does not say of which data the {consumed} samples were that it has read"
    if not allow_change:
        raise CheckpointError(
            f"a checkpoint must say which data it has read, but {told}: some may come again. Give the data set of your "
            "own that it was trained on, --allow-data-change to go on as if they had been the first of the data given "
            "now, or --finetune to start anew from the weights."
        )
    log.info(f"data: {told}; going on as if they had been the first of the data given now")


def to_save(data: RunData, samples_consumed: int, loaded: Saved) -> Saved:
    """Return what a checkpoint of now must say of the data.

    Args:
        loaded: what the one says that the run goes on from; it stays true of a run without training data.
    """
    if not data.has_training:
        return loaded
    return Saved(data.fingerprint, None if data.order is None else data.order.state(samples_consumed))
