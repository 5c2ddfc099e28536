"""State shared by successive starts of one launcher job."""

from __future__ import annotations

import os
from pathlib import Path

from megatron import files
from megatron.checkpoint.metadata import MANIFEST_NAME, manifest_from_bytes
from megatron.errors import CheckpointError
from megatron.training.checkpoint_source import (
    RUNS,
    saved_checkpoints,
)

_CHOICES_FOLDER = ".by-launch"  # runs/.by-launch/<job>: folder and source chosen by its first start


def job_id() -> str | None:
    """Return the launcher's job id, which is the same for restarts; None without our launcher."""
    return os.environ.get("MEGATRON_RUN_ID") or None


def has_checkpoint_of_job(folder: Path) -> bool:
    """Return True if this job has saved a checkpoint into ``folder``, which may contain earlier jobs' checkpoints."""
    return job_id() is not None and any(_job_id_of(path) == job_id() for path in saved_checkpoints(folder))


def _job_id_of(checkpoint: Path) -> str | None:
    """Return the id of the job that saved a checkpoint, or None."""
    path = checkpoint / MANIFEST_NAME
    try:
        return manifest_from_bytes(path.read_bytes(), path).metadata.get("job")
    except (OSError, CheckpointError):
        return None


def _choice_path() -> Path | None:
    """Return the file that stores the folder and source chosen by this job; None for a job without restarts.

    A restart reads the file instead of choosing again, because the newest run may have changed by then.
    """
    current_job_id = job_id()
    return (
        RUNS / _CHOICES_FOLDER / current_job_id
        if current_job_id and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        else None
    )


def read_choice() -> tuple[Path, Path | None] | None:
    """Return the folder and source chosen by an earlier start of this job, or None."""
    choice_path = _choice_path()
    if choice_path is None or not choice_path.exists():
        return None
    folder, *source = choice_path.read_text().splitlines()
    return Path(folder), Path(source[0]) if source else None


def write_choice(folder: Path, source: Path | None) -> None:
    """Store this start's choice for later starts of the job."""
    choice_path = _choice_path()
    if choice_path is not None:
        choice_path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_bytes(choice_path, "\n".join(str(path) for path in (folder, source) if path is not None).encode())
