"""CheckpointUploader: checkpoints and Hugging Face exports of a run into an object store, in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import remote
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.checkpoint.retention import retention_of
from megatron.checkpoint.uploading import HF, Uploads
from megatron.errors import DataError
from megatron.training.timeouts import SAVING
from megatron.training.trainer import Callback


class CheckpointUploader(Callback):
    """Uploads what has become durable in the run folder to ``target``; the end of the run waits for it.

    Each rank sends the files that it has written. What fails is logged and tried again; it never ends the run. In the
    store as many checkpoints stay as --keep-last and --keep-every say, counted by what is whole there.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._uploads: Uploads | None = None

    def on_train_start(self) -> None:
        world = self.trainer.world
        self._uploads = Uploads(self.trainer.folder, self.target, world.rank, world.grid.host.size, self._on_whole)

    def on_save_end(self, step: int, path: Path | None, values: dict[str, Any]) -> None:
        if path is not None and self._uploads is not None:
            self._uploads.add(CHECKPOINTS, path)

    def on_export_end(self, step: int, path: Path) -> None:
        if self._uploads is not None:
            self._uploads.add(HF, path)

    def on_train_end(self) -> None:
        """Wait for the uploads of all ranks; what the store does not take is logged. Collective."""
        uploads, phases, is_first = self._uploads, self.trainer.phases, self.trainer.world.rank == 0
        if uploads is None:
            return
        with phases.over(SAVING):
            if is_first:
                uploads.begin()
        with phases.over(SAVING):
            uploads.finish(log.info)
        with phases.over(SAVING):
            left = uploads.close()
        if left and is_first:
            log.error(
                f"{', '.join(left)} could not be uploaded to {self.target}, and wait in {self.trainer.folder}: a start "
                "with the same --save and --save-remote uploads them"
            )

    def _on_whole(self, kind: str, name: str) -> None:
        """In the thread of rank 0: something has become whole in the store."""
        log.info(f"uploaded {self.target}/{kind}/{name}")
        keep = retention_of(self.trainer.config.checkpoint)
        number = keep.automatic if keep.last is None else keep.last
        if kind != CHECKPOINTS or number is None:
            return
        try:
            gone = remote.remove_old(self.target, keep.counts, number, keep.every)
        except DataError as error:
            log.warning(f"old checkpoints in {self.target} could not be deleted ({error}); {name} is complete")
            return
        if gone:
            log.info(f"deleted from {self.target}: {', '.join(gone)}")
