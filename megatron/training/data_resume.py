"""Progress through each corpus, and resuming the data order of a checkpoint.

Data sets say so by an ``order`` (``megatron.data.BlendSchedule``); those of a user's own need not have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from megatron import log
from megatron.checkpoint import former
from megatron.config import Config
from megatron.data import BlendSchedule, resumed_order
from megatron.data.blend_resume import SAME_LENGTH
from megatron.data.sample_order import as_ordered
from megatron.errors import CheckpointError
from megatron.training.compatibility import data_settings_changed
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
