"""Callback states in checkpoint metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GUARD_KEY = "guard"
"""Key of the stability guard's state; the states of other callbacks are stored under ``callbacks``."""


def callback_metadata(states: Mapping[str, Any]) -> dict[str, Any]:
    """Convert callback states (by name) to checkpoint metadata entries."""
    others = {name: state for name, state in states.items() if name != GUARD_KEY}
    return {
        **({GUARD_KEY: states[GUARD_KEY]} if GUARD_KEY in states else {}),
        **({"callbacks": others} if others else {}),
    }


def callback_states_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Extract callback states by name from checkpoint metadata."""
    states = dict(metadata.get("callbacks", {}))
    return states | {GUARD_KEY: metadata[GUARD_KEY]} if GUARD_KEY in metadata else states
