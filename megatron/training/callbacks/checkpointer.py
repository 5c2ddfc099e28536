"""Checkpointer: resumes at the start, saves checkpoints when due, and rolls back to an earlier checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import AsyncSaver, Checkpoint, Committed, Staged, SyncSaver, open_checkpoint, open_latest
from megatron.checkpoint.folders import last_sequence, list_checkpoints, newest_first, step_of
from megatron.checkpoint.huggingface.convert import CHAT_TEMPLATE
from megatron.checkpoint.manifest import CHECKPOINTS, read_sequence
from megatron.checkpoint.retention import AUTOMATIC, make_retention_policy
from megatron.errors import CheckpointError, NumericsError, marked
from megatron.runtime import rank_status
from megatron.runtime.exit_signals import REGROUP_REASON, resume_advice
from megatron.training import deepspeed_checkpoint
from megatron.training.callback_states import callback_metadata
from megatron.training.capture import capture, capture_metadata
from megatron.training.checkpoint_lineage import CheckpointLineage
from megatron.training.checkpoint_source import checkpoint_folder, saved_checkpoints
from megatron.training.data_resume import EXCLUSION, SavedData, data_to_save
from megatron.training.job_starts import job_id
from megatron.training.resume import ResumedCheckpoint, resume, roll_back_to
from megatron.training.run_folder import RunPaths
from megatron.training.save_status import SaveStatus
from megatron.training.step_result import StepResult
from megatron.training.timeouts import LOADING, SAVING
from megatron.training.trainer import Callback


class Checkpointer(Callback):
    """Loads at the start; saves when a checkpoint is due or requested, at the end, and when the run is stopped.

    | flag | failed save during the run | failed save at the end or at a stop |
    |---|---|---|
    | --on-save-error continue | logged; the run continues, older checkpoints stay | CheckpointError (code 3) |
    | --on-save-error stop | CheckpointError (code 3) | CheckpointError (code 3) |

    With --async-save, a save is first staged (copied to host memory) and then written by a thread while training
    continues. It is committed once all files are durable, so that a kill no longer loses it.

    Args:
        paths: run folder and source that the run resumes from.
        tokenizer: the run's tokenizer identity, if known.
        tokenizer_probe: the tokenizer's ids of the probe texts, if known.

    Attributes:
        loaded: the checkpoint that the run started from.
        origin: the same checkpoint if everything was restored from it, otherwise None.
        committed: the run's newest committed checkpoint.
        newest_step: step of the newest save, possibly still being written; -1 if there is none or it failed.
        is_held: True while anomalous steps may lead to a rollback; no checkpoint is saved or deleted meanwhile.
        lineage: checkpoints in the folder that belong to this history of the run; known on rank 0.
    """

    def __init__(
        self, paths: RunPaths, tokenizer: str | None = None, tokenizer_probe: Mapping[str, Any] | None = None
    ) -> None:
        self.paths, self.tokenizer, self.tokenizer_probe = paths, tokenizer, tokenizer_probe
        self.loaded: Path | None = None
        self.origin: Path | None = None
        self.committed: Path | None = None
        self.newest_step = -1
        self.is_held = False
        self.lineage = CheckpointLineage()
        self.status = SaveStatus()
        self.async_saver: AsyncSaver | None = None
        self._loaded_data = SavedData()
        self._export_metadata: dict[str, Any] = {}

    # Start.

    def on_train_start(self) -> None:
        """Resume from the checkpoint that the flags name, if any. Collective."""
        trainer, flags, data = self.trainer, self.trainer.config.checkpoint, self.trainer.config.data
        if data.sft is not None and data.chat_template is not None and trainer.world.rank == 0:
            # Store the text, because the file may be deleted or changed before the run is exported.
            self._export_metadata[CHAT_TEMPLATE] = Path(data.chat_template).read_text(encoding="utf-8")
        resumed = resume(trainer, self.paths, self.tokenizer, self.tokenizer_probe)
        if resumed is not None:
            self._continue_from(resumed)
        self.status.last_time = time.monotonic()
        self.async_saver = AsyncSaver(trainer.world.grid.host) if flags.async_save else None
        if not flags.eval_only and (self.paths.may_start_from_scratch or self.is_same_run):
            trainer.resumed_step = trainer.progress.step  # metrics of later steps are recorded again
        if trainer.world.rank == 0 and not flags.eval_only and not self.is_same_run:
            self._exclude_earlier_run()

    def _continue_from(self, resumed: ResumedCheckpoint) -> None:
        """Set the attributes of the checkpointer after the run has resumed from a checkpoint."""
        trainer = self.trainer
        self.loaded = resumed.path
        self.origin = resumed.path if resumed.is_complete else None
        self._loaded_data = resumed.data
        self._export_metadata |= resumed.export_metadata
        if self.is_same_run:
            self.committed, self.newest_step = resumed.path, trainer.progress.step
            self.lineage = resumed.lineage
            if trainer.world.rank == 0:
                self.lineage.continue_from(resumed.sequence, last_sequence(saved_checkpoints(trainer.folder)))

    @property
    def is_same_run(self) -> bool:
        """True if the run continues in the loaded checkpoint's folder, after the checkpoint's step."""
        flags = self.trainer.config.checkpoint
        is_in_this_folder = self.loaded is not None and self.loaded.parent == checkpoint_folder(
            self.trainer.folder, flags
        )
        return is_in_this_folder and (self.paths.is_restart or not (flags.finetune or flags.eval_only))

    def _exclude_earlier_run(self) -> None:
        """Exclude an earlier run's checkpoints in the folder from rollbacks and deletion."""
        folder = self.trainer.folder
        earlier = newest_first(saved_checkpoints(folder))
        self.lineage = CheckpointLineage(last_sequence(earlier))
        if earlier:
            log.warning(
                f"{folder} contains {len(earlier)} checkpoints of an earlier run. They are retained; --resume "
                "continues from them"
            )

    # During the run.

    def on_step_end(self, result: StepResult) -> None:
        """Request a save if one is due by steps or time, or if a failed save must end the run."""
        flags, status = self.trainer.config.checkpoint, self.status
        if self.async_saver is not None:
            self._report_outcome(self.async_saver.poll)  # does not wait
        is_due_by_steps = bool(flags.save_interval) and self.trainer.progress.step % flags.save_interval == 0
        is_due_by_time = flags.minutes > 0 and time.monotonic() - status.last_time >= 60 * flags.minutes
        has_failed = status.failure is not None and flags.on_save_error == "stop"
        if is_due_by_steps or is_due_by_time or has_failed:
            self.trainer.request_save()

    def on_save(self) -> None:
        """Save a checkpoint, unless anomalous steps may lead to a rollback. Collective.

        A node that waits to join a job joins after a save. If no checkpoint is saved, the node waits for the next one.

        Raises:
            CheckpointError: a save failed and --on-save-error is stop; raised on all ranks.
        """
        flags = self.trainer.config.checkpoint
        if self.is_held:
            self._cancel_regroup()
            return
        try:
            self.save_step(is_automatic=flags.is_default_interval, raise_failure=flags.on_save_error == "stop")
        except CheckpointError as error:
            if flags.on_save_error == "stop":
                raise
            self._report_failure(self.trainer.progress.step, error)
            self._cancel_regroup()

    def _cancel_regroup(self) -> None:
        """Continue training if the run was about to stop only so that a node can join."""
        if self.trainer.stop_text == REGROUP_REASON:
            self.trainer.stop_text = ""

    def on_log(self, metrics: dict[str, Any]) -> None:
        metrics["checkpoint_stall_s"] = self.status.drain_stalled_s()

    # End.

    def on_train_end(self) -> None:
        """Save the last step, and wait until it is committed. Collective.

        Raises:
            CheckpointError: the checkpoint could not be written; raised on all ranks.
        """
        trainer = self.trainer
        if not trainer.config.checkpoint.eval_only:
            self.save_step()
            self.wait_for_save(raise_failure=True)
        if self.async_saver is not None:
            self.async_saver.close()
        if trainer.stop_text:
            resume_hint = "" if trainer.stop_text == REGROUP_REASON else f" {resume_advice(trainer.folder)}"
            if trainer.stop_text == REGROUP_REASON:
                rank_status.write_state(rank_status.REGROUP)
            trainer.stop_text = (
                f"stopped after step {trainer.progress.step} of {trainer.last_step}: "
                f"{trainer.stop_text}. Everything is saved in {self.committed}.{resume_hint}"
            )

    def on_exception(self, error: BaseException) -> None:
        if isinstance(error, NumericsError):  # raised on all ranks, so a staged save can still be committed
            self.wait_for_save()

    # One save.

    def save_step(self, *, is_automatic: bool = False, raise_failure: bool = False) -> None:
        """Save a checkpoint for the current step, unless there is one. Collective.

        Args:
            is_automatic: the save interval is the default, not set by a flag; only the last few of these checkpoints
                are retained.
            raise_failure: also raise an earlier background save's error.

        Raises:
            CheckpointError: the save failed; raised on all ranks. With --async-save, ``wait_for_save`` raises it.
        """
        trainer, status = self.trainer, self.status
        if self.async_saver is None and self.newest_step == trainer.progress.step:
            return
        began = time.perf_counter()
        with trainer.phases.during(SAVING):
            self._finish_save()  # only one save runs at a time
            if raise_failure and status.failure is not None:
                raise status.failure
            step = trainer.progress.step
            if self.newest_step == step:
                return
            status.failure = None
            written = self._write(is_automatic)
        self.newest_step, stall_s = step, time.perf_counter() - began
        stall = {"save_stall_s": stall_s, "save_stall_share": status.record_stall(stall_s)}
        if isinstance(written, Staged):
            trainer.print_line(f"step {step} | staged in {stall_s:.2f} s, being written")
            staged = {"staged_s": written.seconds, "staged_bytes": written.num_bytes}
            trainer.call("on_save_staged", step, {**staged, **stall})
        else:
            self._report_commit(step, written, f"saved {written}", {"durable_s": stall_s, **stall})

    def _write(self, is_automatic: bool) -> Path | Staged:
        """Capture the state of this step and write it, or stage it with --async-save. Collective."""
        trainer, engine, config = self.trainer, self.trainer.engine, self.trainer.config
        # While ``is_held``, all checkpoints are retained, because a rollback may need any of them.
        earlier = sys.maxsize if self.is_held else self.lineage.earlier
        retention = make_retention_policy(config.checkpoint, loaded=self.loaded, earlier_sequence=earlier)
        data = data_to_save(trainer.data, trainer.progress.samples_consumed, self._loaded_data)
        extra = {
            "tokenizer": self.tokenizer,
            "tokenizer_probe": self.tokenizer_probe,
            "job": job_id(),
            **self._export_metadata,
            **({EXCLUSION: trainer.data.exclusion} if trainer.data.exclusion else {}),
            **callback_metadata(trainer.state_dict()),
            **self.lineage.to_metadata(),
            **({AUTOMATIC: True} if is_automatic else {}),
        }
        if config.checkpoint.is_deepspeed:
            metadata = capture_metadata(
                trainer.progress,
                config=config,
                optimizer=engine.optimizer,
                world=trainer.world,
                fingerprint=data.fingerprint,
                order=data.order,
                extra=extra,
            )
            retention = replace(retention, every=None)
            step, world = trainer.progress.step, trainer.world
            return deepspeed_checkpoint.save(trainer.folder, step, metadata, engine.engine, world, retention=retention)
        captured = capture(
            trainer.progress,
            config=config,
            module=engine.module,
            optimizer=engine.optimizer,
            world=trainer.world,
            fingerprint=data.fingerprint,
            order=data.order,
            extra=extra,
        )
        saver = self.async_saver or SyncSaver(trainer.world.grid.host)
        return saver.save(trainer.folder / CHECKPOINTS, captured, retention)

    def wait_for_save(self, *, raise_failure: bool = False) -> None:
        """Wait until the background save has ended, and log a failure. Collective.

        Args:
            raise_failure: raise the error if the current step could not be saved.

        Raises:
            CheckpointError: the current step could not be saved and ``raise_failure`` is set; raised on all ranks.
        """
        if self.async_saver is None:
            return
        with self.trainer.phases.during(SAVING):
            self._finish_save()
        if raise_failure and self.status.failure is not None and self.status.failed_step == self.trainer.progress.step:
            raise self.status.failure

    def _finish_save(self) -> None:
        """Wait for the background save; the caller has entered a phase. Collective."""
        if self.async_saver is not None:
            self._report_outcome(self.async_saver.finish)

    def _report_outcome(self, get_outcome: Callable[[], Committed | None]) -> None:
        """Report a finished background save: ``get_outcome`` returns it (None: not finished) or raises its error."""
        try:
            committed = get_outcome()
        except CheckpointError as error:
            step, self.newest_step = self.newest_step, -1
            self._report_failure(step, error)
            return
        if committed is not None:
            text = f"durable {committed.seconds:.2f} s after it was staged: saved {committed.path}"
            values = {"durable_s": committed.seconds, "durable_bytes": committed.num_bytes}
            self._report_commit(committed.step, committed.path, text, values)

    def _report_commit(self, step: int, path: Path, text: str, values: dict[str, Any]) -> None:
        self.committed = path
        self.trainer.print_line(f"step {step} | {text}")
        self.trainer.call("on_save_end", step, path, values)

    def _report_failure(self, step: int, error: CheckpointError) -> None:
        self.status.record_failure(error, step)
        if self.trainer.world.rank == 0:
            last_text = f"the last one is {self.committed}" if self.committed else "there is none yet"
            log.error(
                f"step {step}: NOT SAVED: {str(error).rstrip('.')}. Older checkpoints are untouched ({last_text})"
            )
        self.trainer.call("on_save_end", step, None, {"failed": 1})

    # Rollback.

    def roll_back(self, up_to_step: int) -> Path:
        """Roll back to this run's newest verified checkpoint at or before ``up_to_step``. Collective.

        Weights, optimizer, loss scale, random states, counters and callbacks are restored, and the metrics of later
        steps are dropped. The caller decides where the data continues.

        Returns:
            The checkpoint path.

        Raises:
            CheckpointError: there is no such checkpoint; raised on all ranks.
        """
        trainer = self.trainer
        with trainer.phases.during(LOADING):
            self._finish_save()
            checkpoint = self._open_newest(up_to_step)
            roll_back_to(trainer, checkpoint)
        if trainer.world.rank == 0 and checkpoint.path.parent == trainer.folder / CHECKPOINTS:
            self.lineage.continue_from(checkpoint.sequence, last_sequence(list_checkpoints(checkpoint.path.parent)))
        self.committed, self.newest_step = checkpoint.path, trainer.progress.step
        trainer.call("on_load_end", trainer.progress.step)
        trainer.print_line(f"step {trainer.progress.step} | rolled back to {checkpoint.path}")
        return checkpoint.path

    @marked(is_of_this_rank=False)
    def _open_newest(self, up_to_step: int) -> Checkpoint:
        """Open this run's newest verified checkpoint at or before ``up_to_step``; if there is none, ``origin``."""
        root, host = self.trainer.folder / CHECKPOINTS, self.trainer.world.grid.host

        def is_candidate(path: Path) -> bool:
            sequence = read_sequence(path)  # None if damaged; opening it reports the damage
            return step_of(path) <= up_to_step and (sequence is None or self.lineage.contains(sequence))

        try:
            return open_latest(root, host, accept=is_candidate)
        except CheckpointError as error:
            if self.origin is not None and step_of(self.origin) <= up_to_step:
                return open_checkpoint(self.origin, host)
            raise CheckpointError(
                f"{root} has no checkpoint of this run up to step {up_to_step} to roll back to: "
                f"{str(error).rstrip('.')}. Save more often with --save-interval N or --save-interval-minutes M"
            ) from error
