"""SwanLab: sends a run's metrics to SwanLab (--swanlab-project)."""

from __future__ import annotations

import os
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
        run = swanlab.init(
            project=logging_config.swanlab_project,
            experiment_name=folder.name,
            mode=logging_config.swanlab_mode,
            logdir=os.environ.get("SWANLAB_LOG_DIR") or str(folder / "swanlog"),
            config=config.to_dict(),
            id=run_id,
            resume="allow",
        )
        return str(run.public.run_id)

    def send(self, record_type: str, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def finish(self, *, has_failed: bool) -> None:
        state = "crashed" if has_failed else "success"
        self._module.finish(state, **({"error": "the run ended with an error"} if has_failed else {}))

    @property
    def pending_advice(self) -> str:
        return "The other records are in the run's swanlog folder; swanlab sync uploads them"
