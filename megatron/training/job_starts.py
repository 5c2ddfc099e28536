"""State shared by the successive starts of one job of the launcher."""

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

_BY_LAUNCH = ".by-launch"  # runs/.by-launch/<job>: the folder and the source that its first start chose


def job() -> str | None:
    """Return the launcher's name for this job, which its restarts share; None without our launcher."""
    return os.environ.get("MEGATRON_RUN_ID") or None


def has_saved(folder: Path) -> bool:
    """Return whether this job has saved into ``folder``, in which an earlier one may have, too."""
    return job() is not None and any(_job_of(path) == job() for path in saved_in(folder))


def _job_of(checkpoint: Path) -> str | None:
    path = checkpoint / MANIFEST_NAME
    try:
        return manifest_from_bytes(path.read_bytes(), path).metadata.get("job")
    except (OSError, CheckpointError):
        return None


def _note_file() -> Path | None:
    """Return where a launch that may start the job again notes what was chosen: another run may be the newest then."""
    launch = job()
    return RUNS / _BY_LAUNCH / launch if launch and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" else None


def noted_choice() -> tuple[Path, Path | None] | None:
    """Return the folder and the source that an earlier start of this launch chose."""
    note = _note_file()
    if note is None or not note.exists():
        return None
    folder, *source = note.read_text().splitlines()
    return Path(folder), Path(source[0]) if source else None


def note_choice(folder: Path, source: Path | None) -> None:
    """Write down what this start has chosen, for those that may follow."""
    note = _note_file()
    if note is not None:
        note.parent.mkdir(parents=True, exist_ok=True)
        files.replace_bytes(note, "\n".join(str(path) for path in (folder, source) if path is not None).encode())
