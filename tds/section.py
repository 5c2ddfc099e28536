"""The "pipeline" section of DeepSpeed's JSON: its keys, and the schedule that it asks for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from tds.schedule import schedule_named
from tds.schedule.orders import Order

KEYS = (
    "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned",
    "use_reentrant", "schedule", "chunks",
)  # fmt: skip
"""DeepSpeed 0.19's, and ours: schedule, chunks."""


def check_keys(section: Mapping[str, Any]) -> None:
    """Raise ValueError for keys that nobody reads."""
    unknown = [key for key in section if key not in KEYS]
    if not unknown:
        return
    told = []
    for key in unknown:
        close = difflib.get_close_matches(str(key), KEYS, n=1)
        told.append(f'"{key}"' + (f' (did you mean "{close[0]}"?)' if close else ""))
    raise ValueError(f'"pipeline" in the JSON has no {", ".join(told)}; its keys are {", ".join(KEYS)}')


def chosen_order(section: Mapping[str, Any]) -> Order:
    """Return the schedule that the section asks for; 1F1B by default."""
    chunks = section.get("chunks", 1)
    if chunks != 1:
        raise ValueError(f'"pipeline": {{"chunks": ...}} must be 1 with these schedules, got {chunks!r}')
    return schedule_named(section.get("schedule", "1f1b"))
