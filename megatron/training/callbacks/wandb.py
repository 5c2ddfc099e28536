"""Wandb: sends a run's metrics to Weights & Biases (--wandb-project)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.training.callbacks.tracker import CLOSE_TIMEOUT_S, RECORD_TYPES, Tracker


class Wandb(Tracker):
    """Sends every record in a run to Weights & Biases. Curves are plotted over the training step."""

    service = "Weights & Biases"
    file_name = "wandb.json"
    flag = "--wandb-project"
    advice = "Run wandb login, set WANDB_MODE=offline to write to a folder, or leave the flag out"

    def open_run(self, config: Config, folder: Path, run_id: str | None) -> str | None:
        # Also limits wandb's exit handler.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{0.75 * CLOSE_TIMEOUT_S:g}")
        import wandb

        logging_config = config.logging
        save_dir = Path(logging_config.wandb_save_dir) if logging_config.wandb_save_dir else folder
        save_dir.mkdir(parents=True, exist_ok=True)  # wandb silently uses another folder if this one is missing
        self._run: Any = wandb.init(
            project=logging_config.wandb_project,
            entity=logging_config.wandb_entity,
            name=logging_config.wandb_exp_name or folder.name,
            dir=str(save_dir),
            id=run_id,
            resume="allow",
            config=config.to_dict(),
        )
        for record_type in RECORD_TYPES:
            self._run.define_metric(f"{record_type}/step")
            self._run.define_metric(f"{record_type}/*", step_metric=f"{record_type}/step")
        return str(self._run.id)

    def send(self, record_type: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, f"{record_type}/step": step})

    def finish(self, *, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))

    @property
    def pending_advice(self) -> str:
        return "The other records are in the run's wandb folder; wandb sync uploads them"
