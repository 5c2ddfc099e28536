"""States of the callbacks in the metadata of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GUARD = "guard"
"""Key of the stability guard's state; the states of other callbacks are stored under ``callbacks``."""


def callback_metadata(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata entries for the states of the callbacks, given by name."""
    others = {name: state for name, state in states.items() if name != GUARD}
    return {
        **({GUARD: states[GUARD]} if GUARD in states else {}),
        **({"callbacks": others} if others else {}),
    }


def callback_states_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the callbacks in a checkpoint's metadata, by name."""
    states = dict(metadata.get("callbacks", {}))
    return states | {GUARD: metadata[GUARD]} if GUARD in metadata else states
