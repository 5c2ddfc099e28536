"""Save and load the state of a model and optimizer as a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.checkpoint import SyncSaver
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.checkpoint.retention import make_retention_policy
from megatron.training.capture import capture
from megatron.training.checkpoint_checks import check_fits
from megatron.training.restore_options import RestoreOptions
from megatron.training.resume import open_source, restore
from megatron.training.train_progress import TrainProgress


def save_state(folder: Path, progress: TrainProgress, **components: Any) -> Path:
    """Capture ``components`` (see ``capture``) and write them to ``folder / "checkpoints"``. Collective.

    Returns:
        the path of the checkpoint
    """
    captured = capture(progress, **components)
    return SyncSaver(components["world"].grid.host).save(
        folder / CHECKPOINTS, captured, make_retention_policy(components["config"].checkpoint)
    )


def load_state(folder: Path, *, fingerprint: str | None = None, **components: Any) -> TrainProgress:
    """Restore ``components`` (see ``restore``) from the newest checkpoint in ``folder`` if it fits. Collective."""
    checkpoint, config = open_source(folder, components["world"]), components["config"]
    options = RestoreOptions.from_flags(config.checkpoint)
    check_fits(checkpoint, config, fingerprint, options)
    return restore(checkpoint, options=options, **components)
