"""Checks of BERT that need more than its own section."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config import decoder_checks
from megatron.config.config import Config

_FRAME = {True: 3, False: 2}
_SHORTEST_TEXT = 2


def problems(config: Config) -> Iterator[str]:
    """Yield what cannot be."""
    yield from decoder_checks.problems(config)
    shortest = _SHORTEST_TEXT + _FRAME[config.bert.binary_head]
    if config.batch.seq_length < shortest:
        yield (
            f"--seq-length must be at least {shortest}, a text of {_SHORTEST_TEXT} tokens and what frames it, got "
            f"{config.batch.seq_length}. Raise it"
        )


def notes(config: Config) -> Iterator[str]:
    """Yield what comes from defaults, cannot act, and does no harm: nothing."""
    yield from ()
