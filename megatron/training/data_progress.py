"""Progress through each corpus: log line, metrics and start-table rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.data.sample_order import as_ordered
from megatron.training.data import RunData

_MAX_LISTED, _NUM_LISTED_OF_MORE = 6, 4


def format_by_corpus(values_by_corpus: Mapping[str, float], format_spec: str) -> str:
    """Format as "a 0.12, b 0.30", or only the number for a single corpus.

    If there are too many corpora for a line, only the largest numbers are listed, followed by "and 9 more".
    """
    if len(values_by_corpus) == 1:
        return format(next(iter(values_by_corpus.values())), format_spec)
    items = list(values_by_corpus.items())
    if len(items) > _MAX_LISTED:
        items = sorted(items, key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])[:_NUM_LISTED_OF_MORE]
    text = ", ".join(f"{name} {value:{format_spec}}" for name, value in items)
    return text if len(items) == len(values_by_corpus) else f"{text} and {len(values_by_corpus) - len(items)} more"


def epochs_text(data: RunData, samples_consumed: int) -> str:
    """Format the epochs by corpus for the log line; "" if unknown."""
    if data.order is None:
        return ""
    epochs = data.order.epochs(samples_consumed)
    if not epochs:
        return ""
    return f"epoch{'s' if len(epochs) > 1 else ''} {format_by_corpus(epochs, '.3g')}"


def epoch_metrics(data: RunData, samples_consumed: int) -> dict[str, Any]:
    """Return the epochs as a metric: ``epoch`` for a single corpus, or ``epochs`` by corpus name."""
    if data.order is None:
        return {}
    epochs = data.order.epochs(samples_consumed)
    if not epochs:
        return {}
    return {"epochs": epochs} if len(epochs) > 1 else {"epoch": next(iter(epochs.values()))}


def token_metrics(data: RunData, samples_consumed: int, tokens_per_sample: int) -> dict[str, Any]:
    """Return the token count by corpus as a metric."""
    if data.order is None:
        return {}
    cursors = data.order.cursors(samples_consumed)
    return {"corpus_tokens": {name: tokens_per_sample * samples for name, samples in cursors.items()}}


def corpus_rows(data: RunData, num_samples: int) -> Iterator[tuple[str, str]]:
    """Yield start-table rows: samples per epoch, and epochs in ``num_samples`` samples."""
    train = data.datasets.get("train")
    ordered = as_ordered(train)
    corpora: Mapping[str, object] = {"": train} if ordered is None else ordered.parts
    samples_per_epoch = {name: getattr(corpus, "samples_per_epoch", None) for name, corpus in corpora.items()}
    known = {name: samples for name, samples in samples_per_epoch.items() if isinstance(samples, int) and samples}
    if known and len(known) == len(samples_per_epoch):
        yield "samples", f"{format_by_corpus(known, ',')} per epoch"
    if data.order is not None:
        epochs = format_by_corpus(data.order.epochs(num_samples), ".3g")
        if not epochs:
            return
        yield "epochs", f"{epochs} in the {num_samples:,} samples of the run"
