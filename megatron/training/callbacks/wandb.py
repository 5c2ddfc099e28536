"""Wandb: sends a run's metrics to Weights & Biases (--wandb-project)."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron import files, log
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.training.callbacks.metrics_writer import flatten_metrics
from megatron.training.rank_0 import run_on_rank_0
from megatron.training.trainer import Callback

# Rank 0 sends the records. The id of the run at Weights & Biases is stored in ``wandb.json`` in the run folder, so that
# a resumed run continues the same curves. Steps that are repeated after a restart or rollback are sent again: curves
# are plotted over the training step, not over the order of the records. Errors after the start are logged once and do
# not end the run.

ID_FILE_NAME = "wandb.json"
RECORD_TYPES = ("train", "valid", "test", "tasks", "save")
CLOSE_TIMEOUT_S = 20.0
"""Seconds to wait for pending uploads at the end; must be less than --exit-grace, after which ranks are killed."""


class Wandb(Callback):
    """Sends every record in a run to Weights & Biases."""

    def __init__(self) -> None:
        self._run: WandbRun | None = None

    def on_train_start(self) -> None:
        """Open the run at Weights & Biases. Collective.

        Raises:
            ConfigError: wandb cannot be imported or started; the same on every rank.
        """
        config, folder = self.trainer.config, self.trainer.folder
        run_on_rank_0(self.trainer.world, lambda: self._open(config, folder))

    def on_log(self, metrics: dict[str, Any]) -> None:
        self._write("train", self.trainer.progress.step, metrics)

    def on_evaluate_end(self, split: str, values: dict[str, Any]) -> None:
        self._write(split, self.trainer.progress.step, values)

    def on_save_staged(self, step: int, values: dict[str, Any]) -> None:
        self._write("save", step, values)

    def on_save_end(self, step: int, path: Path | None, values: dict[str, Any]) -> None:
        self._write("save", step, values)

    def on_train_end(self) -> None:
        if self._run is not None:
            self._run.close()

    def on_exception(self, error: BaseException) -> None:
        if self._run is not None:
            self._run.close(has_failed=True)

    def _open(self, config: Config, folder: Path) -> None:
        """Open the run. Called on rank 0."""
        self._run = open_wandb(config, folder)

    def _write(self, record_type: str, step: int, values: dict[str, Any]) -> None:
        """Send a record's values, if the run is open."""
        if self._run is not None:
            self._run.write(record_type, step, dict(flatten_metrics(record_type, values)))


class WandbRun:
    """A run at Weights & Biases that records are sent to; created by ``open_wandb``."""

    def __init__(self, run: Any) -> None:
        self._run: Any = run

    def write(self, record_type: str, step: int, metrics: Mapping[str, float]) -> None:
        """Send one record's values, named "record_type/name"."""
        self._try(lambda: self._run.log({**metrics, f"{record_type}/step": step}))

    def close(self, *, has_failed: bool = False) -> None:
        """Finish the run as succeeded or failed, and wait up to ``CLOSE_TIMEOUT_S`` for pending uploads."""
        finish = functools.partial(self._try, lambda: self._run.finish(exit_code=int(has_failed)))
        thread = threading.Thread(target=finish, name="wandb-finish", daemon=True)
        thread.start()
        thread.join(CLOSE_TIMEOUT_S)
        if thread.is_alive():
            log.warning(
                f"Weights & Biases did not receive all records within {CLOSE_TIMEOUT_S:g} s. The other records are in "
                "the run's wandb folder; wandb sync uploads them"
            )

    def _try(self, function: Any) -> None:
        """Call ``function``; after an error, log it and send nothing more."""
        if self._run is None:
            return
        try:
            function()
        except Exception as error:
            self._run = None
            log.warning(f"no further records are sent to Weights & Biases ({type(error).__name__}: {error})")


def open_wandb(config: Config, folder: Path) -> WandbRun | None:
    """Open the run at Weights & Biases, continuing this folder's run if there is one; None without the flag.

    An evaluation becomes a separate run and does not modify the folder's run.

    Raises:
        ConfigError: wandb cannot be imported or started.
    """
    logging_config, is_evaluation = config.logging, config.checkpoint.eval_only
    if not logging_config.wandb_project:
        return None
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{0.75 * CLOSE_TIMEOUT_S:g}")  # also limits wandb's exit handler
    try:
        import wandb

        run = wandb.init(
            project=logging_config.wandb_project,
            entity=logging_config.wandb_entity,
            name=logging_config.wandb_exp_name or folder.name,
            dir=_create_folder(Path(logging_config.wandb_save_dir) if logging_config.wandb_save_dir else folder),
            id=None if is_evaluation else _read_id(folder),
            resume="allow",
            config=config.to_dict(),
        )
        for record_type in RECORD_TYPES:
            run.define_metric(f"{record_type}/step")
            run.define_metric(f"{record_type}/*", step_metric=f"{record_type}/step")
    except Exception as error:
        raise ConfigError(
            f"wandb cannot write to --wandb-project {logging_config.wandb_project}: {type(error).__name__}: "
            f"{error}. Run wandb login, set WANDB_MODE=offline to write to a folder, or leave the flag out"
        ) from error
    if not is_evaluation:
        _store_id(folder, run.id)
    return WandbRun(run)


def _create_folder(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)  # wandb silently uses another folder if this one is missing
    return str(folder)


def _store_id(folder: Path, run_id: str) -> None:
    """Store the Weights & Biases run id in the run folder."""
    try:
        files.replace_bytes(folder / ID_FILE_NAME, json.dumps({"id": run_id}).encode() + b"\n")
    except OSError as error:
        log.warning(
            f"{folder / ID_FILE_NAME} could not be written ({error}): a resumed run will be a new run at Weights & "
            "Biases"
        )


def _read_id(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / ID_FILE_NAME).read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
