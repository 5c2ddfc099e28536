"""How far the corpora of a run have been read, in words, and how a run goes on in the order of its checkpoint.

Data sets say so by an ``order`` (``megatron.data.SampleOrder``); those of a user's own need not have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron import log
from megatron.training.data import RunData


def numbers_text(numbers: Mapping[str, float], form: str) -> str:
    """Return "a 0.12, b 0.30", or the number alone where there is one corpus."""
    if len(numbers) == 1:
        return format(next(iter(numbers.values())), form)
    return ", ".join(f"{name} {number:{form}}" for name, number in numbers.items())


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


def start_rows(data: RunData, num_samples: int) -> Iterator[tuple[str, str]]:
    """Yield rows of the start table: samples of an epoch, and how often a run of ``num_samples`` will read them."""
    train = data.datasets.get("train")
    parts = getattr(train, "parts", None) or {"": train}
    sizes = {name: getattr(part, "samples_per_epoch", None) for name, part in parts.items()}
    known = {name: size for name, size in sizes.items() if size}
    if known and len(known) == len(sizes):
        yield "samples", f"{numbers_text(known, ',')} an epoch"
    if data.order is not None:
        epochs = numbers_text(data.order.epochs(num_samples), ".3g")
        yield "epochs", f"{epochs} when the {num_samples:,} samples of the run are read"


def resumed(data: RunData, state: Mapping[str, Any], *, allow_change: bool) -> Any:
    """Return the order in which the training goes on after the ``state`` of a checkpoint; None where there is none.

    Raises:
        CheckpointError: the data are not those of the checkpoint; the same on every rank.
    """
    saved = state.get("data_order") or state.get("data_fingerprint")
    if data.order is None or not saved:
        return data.order
    consumed = state["progress"]["samples_consumed"]
    order, lines = data.order.resumed(saved, consumed, allow_change=allow_change)
    for line in lines:
        log.info(line)
    return order
