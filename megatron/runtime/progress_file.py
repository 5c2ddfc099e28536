"""Progress file: reports the step of the newest durable checkpoint to the launcher.

The launcher uses it to decide on restarts: a start that ends before a new checkpoint is durable has lost all of its
work, and the next one would fail in the same way.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PROGRESS_FILE_VARIABLE = "MEGATRON_PROGRESS_FILE"


def report_committed_step(step: int) -> None:
    """Report that the checkpoint of ``step`` is durable. Called on rank 0; no-op without our launcher."""
    progress_file = os.environ.get(PROGRESS_FILE_VARIABLE)
    if progress_file:
        write_committed_step(Path(progress_file), step)


def write_committed_step(path: Path, step: int) -> None:
    """Write ``step`` to the progress file ``path`` atomically."""
    temporary_path = Path(f"{path}.{os.getpid()}")
    with suppress(OSError):  # a full disk here must not end a run whose checkpoint is safe
        temporary_path.write_text(f"{step}\n")
        temporary_path.replace(path)


def read_committed_step(path: Path) -> int | None:
    """Return the last reported step, or None."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
