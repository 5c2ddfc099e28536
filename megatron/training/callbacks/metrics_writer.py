"""Metrics: writes metrics.jsonl, TensorBoard events and loss.png to the run folder."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from megatron import files, log
from megatron.errors import ConfigError, marked
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.trainer import Callback

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
"""File of --eval-only, which does not modify the records of the run that it evaluates."""


class Metrics(Callback):
    """Writes every record in a run, with the values that earlier callbacks have added."""

    on_all_ranks = False

    def __init__(self) -> None:
        self.writer: MetricsWriter | None = None

    def on_train_start(self) -> None:
        trainer, is_evaluation = self.trainer, self.trainer.config.checkpoint.eval_only
        tensorboard_dir = trainer.config.run.tensorboard_dir
        # An evaluation must not modify the run's records.
        default_folder = None if is_evaluation else trainer.folder / "tensorboard"
        name = EVALUATIONS if is_evaluation else METRICS
        self.writer = MetricsWriter(
            trainer.folder, Path(tensorboard_dir) if tensorboard_dir else default_folder, trainer.resumed_step, name
        )

    def on_load_end(self, step: int) -> None:
        self._open_writer.truncate_to_step(step)

    def on_log(self, metrics: dict[str, Any]) -> None:
        self._open_writer.write("train", self.trainer.progress.step, metrics)

    def on_evaluate_end(self, split: str, values: dict[str, Any]) -> None:
        notes = self._evaluation_notes() if self.trainer.config.checkpoint.eval_only else None
        self._open_writer.write(split, self.trainer.progress.step, values, notes)

    def on_save_staged(self, step: int, values: dict[str, Any]) -> None:
        self._open_writer.write("save", step, values)

    def on_save_end(self, step: int, path: Path | None, values: dict[str, Any]) -> None:
        self._open_writer.write("save", step, values)

    def on_train_end(self) -> None:
        self._open_writer.close()

    def on_exception(self, error: BaseException) -> None:
        if self.writer is not None:
            self.writer.close(should_plot=False)

    @property
    def _open_writer(self) -> MetricsWriter:
        """Return the writer; raise RuntimeError before ``on_train_start``."""
        if self.writer is None:
            raise RuntimeError("metrics cannot be written before on_train_start")
        return self.writer

    def _evaluation_notes(self) -> dict[str, Any]:
        """Return checkpoint and settings for an evaluation, which writes no config.json."""
        checkpointer = self.trainer.find(Checkpointer)
        loaded = None if checkpointer is None else checkpointer.loaded
        return {"time": time.time(), "checkpoint": str(loaded), "config": self.trainer.config.to_dict()}


class MetricsWriter:
    """Appends records to ``folder/metrics.jsonl`` and TensorBoard; plots the loss curve at the end.

    Args:
        tensorboard: folder for event files; None: no events are written.
        resumed_step: step that the run resumes after. Later records are dropped, because their steps are repeated.
            None keeps all records. A line truncated by a kill is dropped in both cases.
        name: file name, METRICS or EVALUATIONS.

    Attributes:
        recorded_steps: last step of each record type in the file before this start.
    """

    def __init__(
        self,
        folder: Path,
        tensorboard: Path | None,
        resumed_step: int | None = None,
        name: str = METRICS,
    ) -> None:
        self.path = folder / name
        self.picture = folder / "loss.png"
        self._tensorboard_folder = tensorboard
        self._events: Any = None
        self._purge_step: int | None = None
        self.recorded_steps: dict[str, int] = {}
        for record in read_metrics(self.path):
            self.recorded_steps[record["kind"]] = max(record["step"], self.recorded_steps.get(record["kind"], 0))
        self._open(resumed_step)

    def truncate_to_step(self, step: int) -> None:
        """Drop the records after ``step``, because those steps are repeated."""
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None
        self._open(step)

    def _open(self, last_step: int | None) -> None:
        """Drop truncated records and those after ``last_step`` (None: keep all), and open the file."""
        _truncate_records(self.path, last_step)
        self._file = open(self.path, "ab")  # noqa: SIM115 - kept open for the run, closed in close()
        self._purge_step = None if last_step is None else last_step + 1

    def write(
        self, record_type: str, step: int, values: dict[str, Any], notes: Mapping[str, Any] | None = None
    ) -> None:
        """Record ``values`` for ``step``.

        Args:
            record_type: train, valid, test, tasks or save.
            values: values by name; a value may be a dictionary of numbers.
            notes: entries that are written to the file, but not to TensorBoard.

        Raises:
            ConfigError: the run folder or the TensorBoard folder was deleted or moved; raised on this rank only.
        """
        scalars = dict(flatten_metrics(record_type, values))
        with marked(is_of_this_rank=True):
            self._require_folder()
            record = {"kind": record_type, "step": step, **values, **(notes or {})}
            self._file.write(orjson.dumps(record, default=str) + b"\n")
            self._file.flush()
            if self._tensorboard_folder is not None:
                self._add_events(self._tensorboard_folder, step, scalars)

    def _require_folder(self) -> None:
        """Raise a ConfigError if the open file is no longer at its path."""
        try:
            is_in_place = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            is_in_place = False
        if not is_in_place:
            raise ConfigError(
                f"the run folder {self.path.parent} or its {self.path.name} was deleted or moved during the run. "
                "Restore it and resume with --load, or start again"
            )

    def _add_events(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        """Write numbers to TensorBoard."""
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder), purge_step=self._purge_step)
        try:
            for name, scalar in scalars.items():
                self._events.add_scalar(name, scalar, step)
        except FileNotFoundError as error:
            raise ConfigError(
                f"TensorBoard's folder {folder} was deleted or moved during the run ({error}). Restore it and resume "
                "with --load, or start again"
            ) from error

    def close(self, *, should_plot: bool = True) -> None:
        """Close the files and plot the losses. Errors are only logged, because all records have been written already.

        Args:
            should_plot: False if an error ends the run: plotting takes seconds, and the launcher does not wait.
        """
        events = [self._events.close] if self._events is not None else []
        picture = [lambda: plot_losses(self.path, self.picture)] if should_plot else []
        for action in (self._file.close, *events, *picture):
            try:
                action()
            except Exception as error:
                log.warning(f"closing or plotting the metrics failed ({type(error).__name__}: {error})")


def flatten_metrics(record_type: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield ("record_type/name", number), or ("record_type/name/key", number) in dictionaries, for all numbers."""
    for name, value in values.items():
        for inner, scalar in value.items() if isinstance(value, dict) else (("", value),):
            if isinstance(scalar, int | float):
                yield f"{record_type}/{name}" + (f"/{inner}" if inner else ""), scalar


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file, without a last line truncated by a kill."""
    records = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            with suppress(orjson.JSONDecodeError):
                records.append(orjson.loads(line))
    return records


def plot_losses(metrics: Path, picture: Path) -> None:
    """Plot training and validation loss over steps, and the loss of a uniform prediction, ln(vocabulary size).

    Does nothing without records. The vocabulary size is read from config.json next to the metrics, if it exists.
    """
    records = read_metrics(metrics)
    curves = {split: [(r["step"], r["loss"]) for r in records if r["kind"] == split] for split in ("train", "valid")}
    if not any(curves.values()):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for split, marker in (("train", None), ("valid", "o")):
        points = [(step, loss) for step, loss in curves[split] if loss is not None and math.isfinite(loss)]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=split)
    if vocab_size := _vocab_size(metrics.parent):
        uniform_loss = math.log(vocab_size)
        axes.axhline(
            uniform_loss,
            color="grey",
            linestyle="--",
            label=f"ln({vocab_size:,}) = {uniform_loss:.2f}: uniform prediction",
        )
    axes.set_xlim(left=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def _vocab_size(folder: Path) -> int | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(orjson.loads((folder / "config.json").read_bytes())["model"]["vocab_size"])
    return None


def _truncate_records(path: Path, last_step: int | None) -> None:
    """Keep the complete records up to ``last_step`` (None: all), so that new lines can be appended."""
    if not path.exists():
        return
    records = [record for record in read_metrics(path) if last_step is None or record["step"] <= last_step]
    content = b"".join(orjson.dumps(record) + b"\n" for record in records)
    if content != path.read_bytes():
        files.replace_bytes(path, content)
