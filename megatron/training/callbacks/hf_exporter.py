"""HuggingFaceExporter: converts new checkpoints to Hugging Face folders in the background."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from megatron import files, log
from megatron.checkpoint.huggingface.config import config_to_huggingface
from megatron.checkpoint.huggingface.convert import DTYPES, ExportResult, export
from megatron.checkpoint.one_process import open_unverified, read_weights
from megatron.errors import CheckpointError, ConfigError
from megatron.training.step_result import StepResult
from megatron.training.timeouts import SAVING
from megatron.training.trainer import Callback

HF = "hf"
"""Folder of the exports in a run folder, next to its checkpoints."""
TEMPORARY_PREFIX = ".tmp-"


@dataclass(frozen=True)
class _Outcome:
    """An export's result.

    Args:
        path: target folder.
        seconds: export duration.
        exported: the export, or None if it failed with ``error``.
    """

    step: int
    path: Path
    seconds: float
    exported: ExportResult | None = None
    error: str = ""


class HuggingFaceExporter(Callback):
    """Writes ``hf/step-00000020`` in the run folder every ``interval`` steps and at the last step.

    The exporter requests a checkpoint at such a step. Once it is committed, a thread on rank 0 reads the weights back
    and converts them while training continues; with ``--async-save``, the checkpoint itself is also written in the
    background. During an export, all weights are in the memory of rank 0's host. Only one export runs at a time. An
    error is logged and does not end the run.

    Args:
        interval: steps between exports.
        dtype: run precision. Weights from bf16 and fp16 runs are rounded to it; others stay as saved.
    """

    def __init__(self, interval: int, dtype: str | None) -> None:
        self.interval = interval
        self.dtype = dtype if dtype in ("bf16", "fp16") and dtype in DTYPES else None
        self._thread: Thread | None = None
        self._checkpoint_read = Event()
        self._outcome: _Outcome | None = None

    def on_train_start(self) -> None:
        """Check that the model has a Hugging Face format, and remove leftovers of killed exports.

        Raises:
            ConfigError: the model has no such format; raised on all ranks.
        """
        trainer = self.trainer
        try:
            config_to_huggingface(trainer.config, "")
        except (CheckpointError, ValueError) as error:
            raise ConfigError(f"--export-hf-interval: {error}. Leave the flag out") from error
        if trainer.world.rank == 0:
            for leftover in (trainer.folder / HF).glob(f"{TEMPORARY_PREFIX}*"):
                with suppress(OSError):
                    files.remove_tree(leftover)

    def on_step_end(self, result: StepResult) -> None:
        """Request a checkpoint if an export is due.

        Before a save, wait until the running export has read its checkpoint, because the save may delete it.
        """
        self._report()
        if self.trainer.progress.step % self.interval == 0:
            self.trainer.request_save()
        if self.trainer.is_save_requested and self._thread is not None:
            self._checkpoint_read.wait()

    def on_save_end(self, step: int, path: Path | None, values: dict[str, object]) -> None:
        """Start exporting the checkpoint ``path`` if an export is due at its step."""
        trainer = self.trainer
        is_due = step % self.interval == 0 or step == trainer.last_step
        if path is None or trainer.world.rank or not is_due:
            return
        self._finish()
        self._checkpoint_read.clear()
        target = trainer.folder / HF / f"step-{step:08d}"
        # A daemon thread, so that a failing job does not wait for the disk.
        self._thread = Thread(target=self._export, args=(step, path, target), name=f"export-{step}", daemon=True)
        self._thread.start()

    def on_train_end(self) -> None:
        """Wait for the running export. Collective."""
        with self.trainer.phases.during(SAVING):
            self._finish()

    def _finish(self) -> None:
        """Wait for the running export and report the result."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._report()

    def _export(self, step: int, source: Path, target: Path) -> None:
        """Export the checkpoint ``source`` to ``target``; runs in a thread."""
        began, exported, error = time.perf_counter(), None, ""
        try:
            checkpoint = open_unverified(source)
            weights = read_weights(checkpoint)
            self._checkpoint_read.set()
            files.make_folder(target.parent)
            if target.exists():  # from an earlier start, or from before a rollback
                files.remove_tree(target)
            exported = export(checkpoint, target, dtype=self.dtype, weights=weights)
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
        self._outcome = _Outcome(step, target, time.perf_counter() - began, exported, error)
        self._checkpoint_read.set()

    def _report(self) -> None:
        """Log a finished export's result, and call ``on_export_end`` if it succeeded."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        if outcome.exported is None:
            log.error(f"step {outcome.step}: NOT EXPORTED to {outcome.path}: {outcome.error}. The run continues")
            return
        size = f"{outcome.exported.num_bytes / 1e6:.1f} MB"
        self.trainer.print_line(f"step {outcome.step} | exported {outcome.path} in {outcome.seconds:.2f} s, {size}")
        for note in outcome.exported.notes:
            log.warn_once(f"{outcome.path.parent}: {note}")
        self.trainer.call("on_export_end", outcome.step, outcome.path)
