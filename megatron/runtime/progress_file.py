"""The step of the last committed checkpoint, reported to the launcher in a file.

It decides by this whether another start makes sense: a start that ends before a new checkpoint is durable has lost
all of its work, and the next one does the same.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PROGRESS_FILE_VARIABLE = "MEGATRON_PROGRESS_FILE"


def note_committed_step(step: int) -> None:
    """Say that the checkpoint of this step is durable. Rank 0 calls it; without our launcher it does nothing."""
    place = os.environ.get(PROGRESS_FILE_VARIABLE)
    if place:
        write_committed_step(Path(place), step)


def write_committed_step(place: Path, step: int) -> None:
    """Put ``step`` into the progress file ``place``, in one step."""
    temporary = Path(f"{place}.{os.getpid()}")
    with suppress(OSError):  # a full disk here must not end a run whose checkpoint is safe
        temporary.write_text(f"{step}\n")
        temporary.replace(place)


def committed_step(place: Path) -> int | None:
    """Return the step that was told last, or None if none was."""
    try:
        return int(place.read_text())
    except (OSError, ValueError):
        return None
