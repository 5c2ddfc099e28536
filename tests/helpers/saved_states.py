"""Save and load the state of a model and optimizer as a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.checkpoint import SyncSaver
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.checkpoint.retention import retention_of
from megatron.training.capture import capture
from megatron.training.checkpoint_checks import check_fits
from megatron.training.restore_options import RestoreOptions
from megatron.training.resume import open_source, restore
from megatron.training.train_progress import TrainProgress


def save_state(folder: Path, progress: TrainProgress, **parts: Any) -> Path:
    """Capture ``parts`` (see ``capture``), write them to ``folder / "checkpoints"`` and return the path. Collective."""
    captured = capture(progress, **parts)
    return SyncSaver(parts["world"].grid.host).save(
        folder / CHECKPOINTS, captured, retention_of(parts["config"].checkpoint)
    )


def load_state(folder: Path, *, fingerprint: str | None = None, **parts: Any) -> TrainProgress:
    """Restore ``parts`` (see ``restore``) from the newest checkpoint in ``folder`` if it fits. Collective."""
    checkpoint, config = open_source(folder, parts["world"]), parts["config"]
    options = RestoreOptions.of(config.checkpoint)
    check_fits(checkpoint, config, fingerprint, options)
    return restore(checkpoint, options=options, **parts)
