"""SwanLab: sends a run's metrics to SwanLab (--swanlab-project)."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.training.callbacks.tracker import Tracker


class SwanLab(Tracker):
    """Sends every record in a run to SwanLab's cloud, or writes it to ``swanlog`` in the run folder."""

    service = "SwanLab"
    file_name = "swanlab.json"
    flag = "--swanlab-project"
    advice = "Run swanlab login, set --swanlab-mode local or offline to write to a folder, or leave the flag out"

    def open_run(self, config: Config, folder: Path, run_id: str | None) -> str | None:
        import swanlab

        logging_config = config.logging
        self._module: Any = swanlab
        interrupt_handler = signal.getsignal(signal.SIGINT)
        run = swanlab.init(
            project=logging_config.swanlab_project,
            name=folder.name,
            mode="online" if logging_config.swanlab_mode == "cloud" else logging_config.swanlab_mode,
            log_dir=os.environ.get("SWANLAB_LOG_DIR") or str(folder / "swanlog"),
            config=config.to_dict(),
            id=run_id,
            resume="allow",
        )
        signal.signal(signal.SIGINT, interrupt_handler)  # swanlab's handler would not save a checkpoint
        return str(run.id)

    def send(self, record_type: str, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def finish(self, *, has_failed: bool) -> None:
        """Leave the run open for ``close``: swanlab sets signal handlers, which only the main thread can do."""

    def close(self, *, has_failed: bool = False) -> None:
        """Send the pending records and finish the run, in the main thread."""
        thread = self._thread
        super().close(has_failed=has_failed)
        if thread is None or thread.is_alive():  # a call of swanlab that does not return would also block here
            return
        state = "crashed" if has_failed else "success"
        try:
            self._module.finish(state, **({"error": "the run ended with an error"} if has_failed else {}))
        except Exception as error:
            self._report_failure(f"{type(error).__name__}: {error}")

    @property
    def pending_advice(self) -> str:
        return "The other records are in the run's swanlog folder; swanlab sync uploads them"
