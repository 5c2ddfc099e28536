"""States of the callbacks in the metadata of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GUARD_KEY = "guard"
"""Key of the stability guard's state; the states of other callbacks are stored under ``callbacks``."""


def callback_metadata(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata entries for the states of the callbacks, given by name."""
    others = {name: state for name, state in states.items() if name != GUARD_KEY}
    return {
        **({GUARD_KEY: states[GUARD_KEY]} if GUARD_KEY in states else {}),
        **({"callbacks": others} if others else {}),
    }


def callback_states_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the callbacks in a checkpoint's metadata, by name."""
    states = dict(metadata.get("callbacks", {}))
    return states | {GUARD_KEY: metadata[GUARD_KEY]} if GUARD_KEY in metadata else states
