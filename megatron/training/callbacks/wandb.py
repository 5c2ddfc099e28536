"""Wandb: sends the metrics of a run to Weights & Biases (--wandb-project)."""

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
from megatron.training.callbacks.metrics_writer import flat
from megatron.training.rank_0 import run_on_rank_0
from megatron.training.trainer import Callback

# Rank 0 sends the records. The id of the run at Weights & Biases is stored in ``wandb.json`` in the run folder, so that
# a resumed run continues the same curves. Steps that are repeated after a restart or rollback are sent again: curves
# are plotted over the training step, not over the order of the records. Errors after the start are logged once and do
# not end the run.

NAME = "wandb.json"
KINDS = ("train", "valid", "test", "tasks", "save")
PATIENCE_S = 20.0
"""Seconds to wait for pending uploads at the end; must be less than --exit-grace, after which ranks are killed."""


class Wandb(Callback):
    """Sends every record of a run to Weights & Biases."""

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
        """Open the run at Weights & Biases; called on rank 0."""
        self._run = open_wandb(config, folder)

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Send the values of a record, if the run is open."""
        if self._run is not None:
            self._run.write(kind, step, dict(flat(kind, values)))


class WandbRun:
    """A run at Weights & Biases that records are sent to; created by ``open_wandb``."""

    def __init__(self, run: Any) -> None:
        self._run: Any = run

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Send the values of one record, named "kind/name"."""
        self._try(lambda: self._run.log({**numbers, f"{kind}/step": step}))

    def close(self, *, has_failed: bool = False) -> None:
        """Finish the run as succeeded or failed, and wait up to ``PATIENCE_S`` for pending uploads."""
        finish = functools.partial(self._try, lambda: self._run.finish(exit_code=int(has_failed)))
        ending = threading.Thread(target=finish, name="wandb-finish", daemon=True)
        ending.start()
        ending.join(PATIENCE_S)
        if ending.is_alive():
            log.warning(
                f"Weights & Biases did not receive all records within {PATIENCE_S:g} s. The other records are in the "
                "run's wandb folder; wandb sync uploads them"
            )

    def _try(self, do: Any) -> None:
        """Call ``do``; after an error, log it and send nothing more."""
        if self._run is None:
            return
        try:
            do()
        except Exception as error:
            self._run = None
            log.warning(f"no further records are sent to Weights & Biases ({type(error).__name__}: {error})")


def open_wandb(config: Config, folder: Path) -> WandbRun | None:
    """Open the run at Weights & Biases, continuing the one of this folder if there is one; None without the flag.

    An evaluation becomes a separate run and does not modify the folder's run.

    Raises:
        ConfigError: wandb cannot be imported or started.
    """
    seeing, is_evaluation = config.seeing, config.checkpoint.eval_only
    if not seeing.wandb_project:
        return None
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{0.75 * PATIENCE_S:g}")  # also limits wandb's exit handler
    try:
        import wandb

        run = wandb.init(
            project=seeing.wandb_project,
            entity=seeing.wandb_entity,
            name=seeing.wandb_exp_name or folder.name,
            dir=_made(Path(seeing.wandb_save_dir) if seeing.wandb_save_dir else folder),
            id=None if is_evaluation else _id_in(folder),
            resume="allow",
            config=config.to_dict(),
        )
        for record_kind in KINDS:
            run.define_metric(f"{record_kind}/step")
            run.define_metric(f"{record_kind}/*", step_metric=f"{record_kind}/step")
    except Exception as error:
        raise ConfigError(
            f"wandb cannot write to --wandb-project {seeing.wandb_project}: {type(error).__name__}: "
            f"{error}. Run wandb login, set WANDB_MODE=offline to write to a folder, or leave the flag out"
        ) from error
    if not is_evaluation:
        _note_id(folder, run.id)
    return WandbRun(run)


def _made(folder: Path) -> str:
    """Create ``folder`` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)  # wandb silently uses another folder if this one is missing
    return str(folder)


def _note_id(folder: Path, name: str) -> None:
    """Store the id ``name`` of the run at Weights & Biases in the run folder."""
    try:
        files.replace_bytes(folder / NAME, json.dumps({"id": name}).encode() + b"\n")
    except OSError as error:
        log.warning(
            f"{folder / NAME} could not be written ({error}): a resumed run will be a new run at Weights & Biases"
        )


def _id_in(folder: Path) -> str | None:
    """Return the id stored in the run folder, or None."""
    try:
        return str(json.loads((folder / NAME).read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
