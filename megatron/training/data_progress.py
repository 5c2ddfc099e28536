"""Progress through each corpus: log line, metrics and rows of the start table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.data.sample_order import as_ordered
from megatron.training.data import RunData

_NAMED_AT_MOST, _NAMED_OF_MORE = 6, 4


def numbers_text(numbers: Mapping[str, float], form: str) -> str:
    """Return "a 0.12, b 0.30", or only the number for a single corpus.

    If there are too many corpora for a line, only the largest numbers are listed, followed by "and 9 more".
    """
    if len(numbers) == 1:
        return format(next(iter(numbers.values())), form)
    items = list(numbers.items())
    if len(items) > _NAMED_AT_MOST:
        items = sorted(items, key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])[:_NAMED_OF_MORE]
    text = ", ".join(f"{name} {value:{form}}" for name, value in items)
    return text if len(items) == len(numbers) else f"{text} and {len(numbers) - len(items)} more"


def epochs_text(data: RunData, samples_consumed: int) -> str:
    """Return the number of epochs of each corpus for the log line; "" if unknown."""
    if data.order is None:
        return ""
    epochs = data.order.epochs(samples_consumed)
    return f"epoch{'s' if len(epochs) > 1 else ''} {numbers_text(epochs, '.3g')}"


def epochs_values(data: RunData, samples_consumed: int) -> dict[str, Any]:
    """Return the number of epochs as a metric: ``epoch`` for a single corpus, or ``epochs`` by corpus name."""
    if data.order is None:
        return {}
    epochs = data.order.epochs(samples_consumed)
    return {"epochs": epochs} if len(epochs) > 1 else {"epoch": next(iter(epochs.values()))}


def tokens_values(data: RunData, samples_consumed: int, tokens_per_sample: int) -> dict[str, Any]:
    """Return the number of tokens read from each corpus as a metric."""
    if data.order is None:
        return {}
    cursors = data.order.cursors(samples_consumed)
    return {"corpus_tokens": {name: tokens_per_sample * samples for name, samples in cursors.items()}}


def start_rows(data: RunData, num_samples: int) -> Iterator[tuple[str, str]]:
    """Yield rows of the start table: samples per epoch, and epochs in ``num_samples`` samples."""
    train = data.datasets.get("train")
    ordered = as_ordered(train)
    parts: Mapping[str, object] = {"": train} if ordered is None else ordered.parts
    sizes = {name: getattr(part, "samples_per_epoch", None) for name, part in parts.items()}
    known = {name: size for name, size in sizes.items() if isinstance(size, int) and size}
    if known and len(known) == len(sizes):
        yield "samples", f"{numbers_text(known, ',')} per epoch"
    if data.order is not None:
        epochs = numbers_text(data.order.epochs(num_samples), ".3g")
        yield "epochs", f"{epochs} in the {num_samples:,} samples of the run"
