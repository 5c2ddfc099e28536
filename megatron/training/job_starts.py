"""State shared by successive starts of one job of the launcher."""

from __future__ import annotations

import os
from pathlib import Path

from megatron import files
from megatron.checkpoint.metadata import MANIFEST_NAME, manifest_from_bytes
from megatron.errors import CheckpointError
from megatron.training.checkpoint_source import (
    RUNS,
    saved_in,
)

_BY_LAUNCH = ".by-launch"  # runs/.by-launch/<job>: folder and source chosen by its first start


def job() -> str | None:
    """Return the launcher's id of this job, which is the same for its restarts; None without our launcher."""
    return os.environ.get("MEGATRON_RUN_ID") or None


def has_saved(folder: Path) -> bool:
    """Return True if this job has saved a checkpoint into ``folder``, which may contain checkpoints of earlier jobs."""
    return job() is not None and any(_job_of(path) == job() for path in saved_in(folder))


def _job_of(checkpoint: Path) -> str | None:
    """Return the id of the job that saved a checkpoint, or None."""
    path = checkpoint / MANIFEST_NAME
    try:
        return manifest_from_bytes(path.read_bytes(), path).metadata.get("job")
    except (OSError, CheckpointError):
        return None


def _note_file() -> Path | None:
    """Return the file in which a job with restarts stores its choice; None without restarts.

    A restart must not choose again, because the newest run may be another one by then.
    """
    launch = job()
    return RUNS / _BY_LAUNCH / launch if launch and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" else None


def noted_choice() -> tuple[Path, Path | None] | None:
    """Return the folder and the source chosen by an earlier start of this job, or None."""
    note = _note_file()
    if note is None or not note.exists():
        return None
    folder, *source = note.read_text().splitlines()
    return Path(folder), Path(source[0]) if source else None


def note_choice(folder: Path, source: Path | None) -> None:
    """Store the choice of this start for later starts of the job."""
    note = _note_file()
    if note is not None:
        note.parent.mkdir(parents=True, exist_ok=True)
        files.replace_bytes(note, "\n".join(str(path) for path in (folder, source) if path is not None).encode())
