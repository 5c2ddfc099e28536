"""Heartbeat: reports a run's state to the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.runtime import exit_guard, progress_file, rank_status
from megatron.training.callbacks.console import Console
from megatron.training.trainer import Callback


class Heartbeat(Callback):
    """Records the engine's current operation, the newest durable checkpoint, and the error that ends this rank."""

    def on_train_start(self) -> None:
        self.trainer.engine.on_activity = rank_status.write_operation

    def on_save_end(self, step: int, path: Path | None, values: dict[str, Any]) -> None:
        if path is not None and self.trainer.world.rank == 0:
            progress_file.report_committed_step(step)

    def on_exception(self, error: BaseException) -> None:
        if console := self.trainer.find(Console):
            console.close()  # the error must be printed below the progress bar
        exit_guard.report_failure(error, self.trainer.world.name)
