"""HuggingFaceExporter: Hugging Face folders of checkpoints that were just written, in the background."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from megatron import files, log
from megatron.checkpoint.huggingface.config import config_to_huggingface
from megatron.checkpoint.huggingface.convert import DTYPES, Exported, export
from megatron.checkpoint.one_process import open_written, read_weights
from megatron.errors import CheckpointError, ConfigError
from megatron.training.step_result import StepResult
from megatron.training.timeouts import SAVING
from megatron.training.trainer import Callback

HF = "hf"
"""Folder of the exports in a run folder, beside its checkpoints."""
STALE = ".tmp-"


@dataclass(frozen=True)
class _Outcome:
    """How an export ended: what was written where, or why nothing was; ``seconds`` after it began."""

    step: int
    path: Path
    seconds: float
    done: Exported | None = None
    error: str = ""


class HuggingFaceExporter(Callback):
    """Writes ``hf/step-00000020`` in the run folder at every so many-th step, and at the last one.

    At such a step it asks for a checkpoint. When that is durable, a thread of rank 0 reads the weights back from it and
    converts them, while training goes on; with ``--async-save`` the checkpoint itself is written in the background,
    too. All weights are in the memory of that host meanwhile. One export is under way at a time. An error does not end
    the run; it is logged.

    Args:
        interval: steps.
        dtype: the number format of the run; weights of bf16 and fp16 runs are rounded to it, others stay as saved.
    """

    def __init__(self, interval: int, dtype: str | None) -> None:
        self.interval = interval
        self.dtype = dtype if dtype in ("bf16", "fp16") and dtype in DTYPES else None
        self._thread: Thread | None = None
        self._is_read = Event()
        self._outcome: _Outcome | None = None

    def on_train_start(self) -> None:
        """Check that the model has a Hugging Face form, and remove what killed exports left.

        Raises:
            ConfigError: it has none; on all ranks alike.
        """
        trainer = self.trainer
        try:
            config_to_huggingface(trainer.config, "")
        except (CheckpointError, ValueError) as error:
            raise ConfigError(f"--export-hf-interval: {error}. Leave the flag out") from error
        if trainer.world.rank == 0:
            for left in (trainer.folder / HF).glob(f"{STALE}*"):
                with suppress(OSError):
                    files.remove_tree(left)

    def on_step_end(self, result: StepResult) -> None:
        """Ask for a checkpoint where an export is due.

        Ahead of a save, wait until the export under way has read its checkpoint, which the save may delete.
        """
        self._report()
        if self.trainer.progress.step % self.interval == 0:
            self.trainer.request_save()
        if self.trainer.is_save_wanted and self._thread is not None:
            self._is_read.wait()

    def on_save_end(self, step: int, path: Path | None, values: dict[str, object]) -> None:
        """Begin to export the checkpoint ``path`` where its step is due."""
        trainer = self.trainer
        is_due = step % self.interval == 0 or step == trainer.last_step
        if path is None or trainer.world.rank or not is_due:
            return
        self._finish()
        self._is_read.clear()
        target = trainer.folder / HF / f"step-{step:08d}"
        # a daemon: a job that fails does not wait for a disk
        self._thread = Thread(target=self._export, args=(step, path, target), name=f"export-{step}", daemon=True)
        self._thread.start()

    def on_train_end(self) -> None:
        """Wait for the export under way: that of the last step, or one that a stop has overtaken. Collective."""
        with self.trainer.phases.over(SAVING):
            self._finish()

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._report()

    def _export(self, step: int, source: Path, target: Path) -> None:
        began, done, error = time.perf_counter(), None, ""
        try:
            checkpoint = open_written(source)
            weights = read_weights(checkpoint)
            self._is_read.set()
            files.make_folder(target.parent)
            if target.exists():  # of an earlier start, or of steps that were taken back
                files.remove_tree(target)
            done = export(checkpoint, target, dtype=self.dtype, weights=weights)
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
        self._outcome = _Outcome(step, target, time.perf_counter() - began, done, error)
        self._is_read.set()

    def _report(self) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        if outcome.done is None:
            log.error(f"step {outcome.step}: NOT EXPORTED to {outcome.path}: {outcome.error}. The run goes on")
            return
        size = f"{outcome.done.num_bytes / 1e6:.1f} MB"
        self.trainer.print_line(f"step {outcome.step} | exported {outcome.path} in {outcome.seconds:.2f} s, {size}")
        for note in outcome.done.notes:
            log.warn_once(f"{outcome.path.parent}: {note}")
        self.trainer.call("on_export_end", outcome.step, outcome.path)
