"""Checks of MPT that need more than its own section. A sequence may be of any length: there are no positions."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.config import Config


def problems(config: Config) -> Iterator[str]:
    """Yield what cannot be."""
    if config.model.hidden_bias:
        yield "--hidden-bias must be left out in MPT, whose layers and norms have no biases, got it. Leave it out"


def notes(config: Config) -> Iterator[str]:
    """Yield what comes from defaults, cannot act, and does no harm: nothing."""
    yield from ()
