"""Checks of a model that reads one sequence, and needs none of its own."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.config import Config


def problems(config: Config) -> Iterator[str]:
    """Yield what cannot be: a sequence that is longer than the model's positions."""
    length, positions = config.batch.seq_length, config.model.max_position_embeddings
    if length > positions:
        yield (
            f"--seq-length must not exceed --max-position-embeddings, got {length} and {positions}. "
            "Raise --max-position-embeddings, or shorten the sequence"
        )


def notes(config: Config) -> Iterator[str]:
    """Yield what comes from defaults, cannot act, and does no harm: nothing."""
    yield from ()
