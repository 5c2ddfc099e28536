"""CheckpointUploader: uploads a run's checkpoints and Hugging Face exports to an object store in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import remote
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.checkpoint.retention import make_retention_policy
from megatron.checkpoint.uploading import HF, Uploads
from megatron.errors import DataError
from megatron.training.timeouts import SAVING
from megatron.training.trainer import Callback


class CheckpointUploader(Callback):
    """Uploads committed checkpoints and exports from the run folder to ``target``; the end of the run waits for them.

    Each rank uploads the files that it has written. Failed uploads are logged and retried; they never end the run.
    --keep-last and --keep-every limit the checkpoints in the store; only complete ones are counted.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._uploads: Uploads | None = None

    def on_train_start(self) -> None:
        world = self.trainer.world
        self._uploads = Uploads(self.trainer.folder, self.target, world.rank, world.grid.host.size, self._on_uploaded)

    def on_save_end(self, step: int, path: Path | None, values: dict[str, Any]) -> None:
        if path is not None and self._uploads is not None:
            self._uploads.add(CHECKPOINTS, path)

    def on_export_end(self, step: int, path: Path) -> None:
        if self._uploads is not None:
            self._uploads.add(HF, path)

    def on_train_end(self) -> None:
        """Wait for all ranks' uploads, and log failed ones. Collective."""
        uploads, phases, is_first = self._uploads, self.trainer.phases, self.trainer.world.rank == 0
        if uploads is None:
            return
        with phases.during(SAVING):
            if is_first:
                uploads.publish()
        with phases.during(SAVING):
            uploads.finish(log.info)
        with phases.during(SAVING):
            failed_uploads = uploads.close()
        if failed_uploads and is_first:
            log.error(
                f"{', '.join(failed_uploads)} could not be uploaded to {self.target} and remain in "
                f"{self.trainer.folder}. Start again with the same --save and --save-remote to upload them"
            )

    def _on_uploaded(self, upload_type: str, name: str) -> None:
        """Log a completed upload and delete old checkpoints from the store; called in a thread on rank 0."""
        log.info(f"uploaded {self.target}/{upload_type}/{name}")
        retention = make_retention_policy(self.trainer.config.checkpoint)
        num_kept = retention.automatic if retention.last is None else retention.last
        if upload_type != CHECKPOINTS or num_kept is None:
            return
        try:
            deleted = remote.remove_old(self.target, retention.counts, num_kept, retention.every)
        except DataError as error:
            log.warning(f"old checkpoints in {self.target} could not be deleted ({error}); {name} is complete")
            return
        if deleted:
            log.info(f"deleted from {self.target}: {', '.join(deleted)}")
