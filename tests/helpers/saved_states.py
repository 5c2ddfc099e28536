"""Save the captured state of a model and optimizer, as a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.checkpoint import SyncSaver
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.training.train_state import TrainState, capture, retention_of


def save_state(folder: Path, progress: TrainState, **parts: Any) -> Path:
    """Capture ``parts`` (see ``capture``), write them to ``folder / "checkpoints"`` and return the path. Collective."""
    captured = capture(progress, **parts)
    return SyncSaver(parts["world"].grid.host).save(
        folder / CHECKPOINTS, captured, retention_of(parts["config"].checkpoint)
    )
