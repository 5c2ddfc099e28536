"""Checkpointer: what a run starts from, when it saves, how its saves end, the way back to a checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import AsyncSaver, Checkpoint, Committed, Staged, open_checkpoint, open_latest
from megatron.checkpoint.downloading import fetch_newest
from megatron.checkpoint.folders import CHECKPOINTS, last_sequence, list_checkpoints, newest_first, step_of
from megatron.checkpoint.huggingface.convert import CHAT_TEMPLATE
from megatron.checkpoint.huggingface.origin import CARRIED, STATE
from megatron.checkpoint.huggingface.tokenizer import origin_in
from megatron.checkpoint.metadata import read_sequence
from megatron.checkpoint.retention import AUTOMATIC, RetentionPolicy
from megatron.errors import CheckpointError, NumericsError, marked
from megatron.runtime import rank_status
from megatron.runtime.exit_signals import REGROUP, how_to_go_on
from megatron.training import deepspeed_checkpoint
from megatron.training.checkpoint_lineage import CheckpointLineage
from megatron.training.checkpoint_source import saved_in, saves_in
from megatron.training.compatibility import check_tokenizer, layout_text, warn_of_changes, warn_of_weights
from megatron.training.data_resume import Saved, resumed, to_save
from megatron.training.job_starts import job
from megatron.training.resume import is_pretrained, open_source, restore_from, start_from
from megatron.training.run_folder import Place
from megatron.training.save_history import Saves
from megatron.training.step_result import StepResult
from megatron.training.timeouts import LOADING, SAVING
from megatron.training.train_state import EVERYTHING, RestoreOptions, described, kept_by, restore, save_state
from megatron.training.trainer import Callback, Trainer

GUARD = "guard"
"""The one state of a callback that lies beside the others in a checkpoint, as it has from the first."""


class Checkpointer(Callback):
    """Loads at the start, and saves when a checkpoint is due, when any callback asks, at the end and at a stop.

    | a save | that fails in mid-run | at the end, or when the run is stopped |
    |---|---|---|
    | --on-save-error continue | is told; the run goes on, older checkpoints stay | CheckpointError (code 3) |
    | --on-save-error stop | CheckpointError (code 3) | CheckpointError (code 3) |

    "Staged" is a copy in memory, from which a thread writes while training goes on (--async-save); "durable" is a
    checkpoint that a kill cannot take away any more.

    Args:
        place: the run folder, and what the run starts from.
        tokenizer: the identity of the run's, where it names one.

    Attributes:
        loaded: the checkpoint that the run started from; ``origin``: the same, where everything was taken from it.
        saved, saved_step: the newest durable one, and the step of the newest one, which may still be on its way.
        is_held: amidst bad steps that may lead back to a checkpoint: none is written, and none is deleted.
    """

    def __init__(self, place: Place, tokenizer: str | None = None) -> None:
        self.place, self.tokenizer = place, tokenizer
        self.loaded: Path | None = None
        self.origin: Path | None = None
        self.saved: Path | None = None
        self.saved_step = -1
        self.saves = Saves()
        self.is_held = False
        self._data_loaded = Saved()
        self._for_export: dict[str, Any] = {}

    # The start.

    def on_train_start(self) -> None:
        trainer, flags, data = self.trainer, self.trainer.config.checkpoint, self.trainer.config.data
        if data.sft is not None and data.chat_template is not None and trainer.world.rank == 0:
            # its text, since the file may be gone or changed when the run is exported
            self._for_export[CHAT_TEMPLATE] = Path(data.chat_template).read_text(encoding="utf-8")
        if self.place.remote is not None and self.place.downloads is not None:
            with trainer.phases.over(LOADING):
                self.place = replace(self.place, source=self._downloaded(self.place.remote, self.place.downloads))
        if self.place.source is not None:
            with trainer.phases.over(LOADING):
                self.load()
        self.saves.last_at = time.monotonic()
        self.saves.background = AsyncSaver(trainer.world.grid.host) if flags.async_save else None
        if not flags.eval_only and (self.place.begins_again or self.is_same_run):
            trainer.resumed_step = trainer.progress.step  # steps behind it have been recorded, and come again
        if trainer.world.rank == 0 and not flags.eval_only and not self.is_same_run:
            self._leave_earlier_alone()

    def _downloaded(self, source: str, root: Path) -> Path:
        """Return the newest checkpoint of a store, downloaded into ``root`` by all ranks together. Collective."""
        strict = self.trainer.config.checkpoint.strict_load
        with marked(is_of_this_rank=False):
            return fetch_newest(source, root, self.trainer.world.grid.host, strict=strict)

    def load(self) -> None:
        """Take up what the checkpoint holds, as far as the flags say; a restart takes all. Collective."""
        trainer, place, config = self.trainer, self.place, self.trainer.config
        if place.source is not None and is_pretrained(place.source):
            start_from(trainer, place.source)
            if trainer.world.rank == 0:
                self._for_export[STATE] = origin_in(place.source).state()
            self.loaded = place.source
            return
        flags, world = config.checkpoint, trainer.world
        checkpoint = open_source(trainer, place.source or place.folder)
        state = checkpoint.state
        self._for_export |= {name: state[name] for name in CARRIED if name in state}
        taken = EVERYTHING if place.is_restart else RestoreOptions.of(flags)
        order = None
        with marked(is_of_this_rank=False):
            check_tokenizer(state, self.tokenizer, allow_change=flags.allow_vocab_change, config=config)
            if taken.data:
                self._data_loaded = Saved(state.get("data_fingerprint"), state.get("data_order"))
                allow_change = flags.allow_data_change
                order = resumed(trainer.data, state, config.tokens_per_sample, allow_change=allow_change, config=config)
        trainer.progress = restore_from(trainer, checkpoint, taken)
        if order is not None:
            trainer.data.use_order(order)
        if taken.optimizer:
            trainer.load_state_dict(callback_states(state))
        self.loaded = checkpoint.path
        self.origin = checkpoint.path if taken == EVERYTHING else None
        if self.is_same_run:
            self.saved, self.saved_step = checkpoint.path, trainer.progress.step
            self.saves.lineage = CheckpointLineage.of(state)
            if world.rank == 0:
                self.saves.lineage.go_on_from(checkpoint.sequence, last_sequence(saved_in(trainer.folder)))
        log.info(f"loaded {checkpoint.path}: going on after step {trainer.progress.step}")
        if moved := layout_text(state["layout"], world.grid.topology):
            anew = "; torch's generators start from --seed" if taken.generators else ""
            log.info(f"{moved}: each rank reads the slices that it needs{anew}")
        if world.rank == 0:
            if taken.data:
                warn_of_changes(state, config, world.kind)
            else:
                warn_of_weights(state.get("config", {}), config, checkpoint.path)
        if not trainer.steps_left and not flags.eval_only:
            log.info(finished_text(trainer))

    @property
    def is_same_run(self) -> bool:
        """Whether the run goes on in the folder and at the step of what it has loaded."""
        flags = self.trainer.config.checkpoint
        is_here = self.loaded is not None and self.loaded.parent == saves_in(self.trainer.folder, flags)
        return is_here and (self.place.is_restart or not (flags.finetune or flags.eval_only))

    def _leave_earlier_alone(self) -> None:
        folder = self.trainer.folder
        found = newest_first(saved_in(folder))
        self.saves.lineage = CheckpointLineage(last_sequence(found))
        if found:
            log.warning(
                f"{folder} holds {len(found)} checkpoints of an earlier run, which stay as they are; --resume goes on "
                "with them"
            )

    # In mid-run.

    def on_step_end(self, result: StepResult) -> None:
        """Ask for a checkpoint if one is due by steps or by time, or a save has failed that is to end the run."""
        flags, saves = self.trainer.config.checkpoint, self.saves
        if saves.background is not None:
            self._take(saves.background.poll)  # never waits
        is_due = bool(flags.save_interval) and self.trainer.progress.step % flags.save_interval == 0
        is_late = flags.minutes > 0 and time.monotonic() - saves.last_at >= 60 * flags.minutes
        has_failed = saves.failure is not None and flags.on_save_error == "stop"
        if is_due or is_late or has_failed:
            self.trainer.request_save()

    def on_save(self) -> None:
        """Write a checkpoint, unless bad steps may lead back to one. Collective.

        Where none is written, a node that waits is taken in with a later one.

        Raises:
            CheckpointError: a save failed, and --on-save-error is stop; on all ranks alike.
        """
        flags = self.trainer.config.checkpoint
        if self.is_held:
            self._stay()
            return
        try:
            self._save(is_automatic=flags.is_default_interval, stops=flags.on_save_error == "stop")
        except CheckpointError as error:
            if flags.on_save_error == "stop":
                raise
            self._note_failure(self.trainer.progress.step, error)
            self._stay()

    def _stay(self) -> None:
        if self.trainer.stop_text == REGROUP:
            self.trainer.stop_text = ""

    def on_log(self, metrics: dict[str, Any]) -> None:
        metrics["checkpoint_stall_s"] = self.saves.drain_stalled_s()

    # The end.

    def on_train_end(self) -> None:
        """Save the last step, and wait until it is durable. Collective.

        Raises:
            CheckpointError: it could not be written; on all ranks alike.
        """
        trainer = self.trainer
        if not trainer.config.checkpoint.eval_only:
            self.save()
            self.finish()
        if self.saves.background is not None:
            self.saves.background.close()
        if trainer.stop_text:
            further = "" if trainer.stop_text == REGROUP else f" {how_to_go_on(trainer.folder)}"
            if trainer.stop_text == REGROUP:
                rank_status.note_state(rank_status.REGROUP)
            trainer.stop_text = (
                f"stopped after step {trainer.progress.step} of {trainer.last_step}: "
                f"{trainer.stop_text}. Everything is saved in {self.saved}.{further}"
            )

    def on_exception(self, error: BaseException) -> None:
        if isinstance(error, NumericsError):  # of all ranks: what they have staged is still to become durable
            self.wait()

    def save(self) -> None:
        """Write a checkpoint of now, unless this step has one. Collective.

        Raises:
            CheckpointError: it could not be written; with --async-save ``finish`` raises it.
        """
        self._save()

    def finish(self) -> None:
        """Wait until the save in the background is durable. Collective.

        Raises:
            CheckpointError: the checkpoint of this step could not be written; on all ranks alike.
        """
        if self.saves.background is None:
            return
        self.wait()
        if self.saves.failure is not None and self.saves.failed_step == self.trainer.progress.step:
            raise self.saves.failure

    def wait(self) -> None:
        """Wait until the save in the background has ended; a failure is told only. Collective."""
        if self.saves.background is not None:
            with self.trainer.phases.over(SAVING):
                self._take(self.saves.background.finish)

    # The way back.

    def roll_back(self, up_to_step: int) -> Path:
        """Go back to this run's newest checkpoint of at most ``up_to_step`` that verifies; return it. Collective.

        Weights, optimizer, loss scale, generators, counters and callbacks are then those of that step, and the metrics
        end there. Where the data goes on is the caller's to say.

        Raises:
            CheckpointError: there is none; on all ranks alike.
        """
        trainer = self.trainer
        with trainer.phases.over(LOADING):
            self.wait_here()
            checkpoint = self._newest(up_to_step)
            trainer.progress = restore(
                checkpoint,
                config=trainer.config,
                module=trainer.engine.module,
                optimizer=trainer.engine.optimizer,
                world=trainer.world,
                fingerprint=None,
                taken=EVERYTHING,
            )
        trainer.load_state_dict(callback_states(checkpoint.state))
        if trainer.world.rank == 0 and checkpoint.path.parent == trainer.folder / CHECKPOINTS:
            self.saves.lineage.go_on_from(checkpoint.sequence, last_sequence(list_checkpoints(checkpoint.path.parent)))
        self.saved, self.saved_step = checkpoint.path, trainer.progress.step
        trainer.call("on_load_end", trainer.progress.step)
        trainer.print_line(f"step {trainer.progress.step} | went back to {checkpoint.path}")
        return checkpoint.path

    @marked(is_of_this_rank=False)
    def _newest(self, up_to_step: int) -> Checkpoint:
        """Return the newest checkpoint of this run of at most ``up_to_step`` that verifies, else its origin."""
        root, host = self.trainer.folder / CHECKPOINTS, self.trainer.world.grid.host

        def is_on_the_way(path: Path) -> bool:
            sequence = read_sequence(path)  # None: damaged, which is found and named
            return step_of(path) <= up_to_step and (sequence is None or self.saves.lineage.has(sequence))

        try:
            return open_latest(root, host, accept=is_on_the_way)
        except CheckpointError as error:
            if self.origin is not None and step_of(self.origin) <= up_to_step:
                return open_checkpoint(self.origin, host)
            raise CheckpointError(
                f"no checkpoint of this run up to step {up_to_step} in {root} to go back to: {str(error).rstrip('.')}. "
                "--save-interval N or --save-interval-minutes M saves more often"
            ) from error

    # One save.

    def _save(self, *, is_automatic: bool = False, stops: bool = False) -> None:
        trainer, saves = self.trainer, self.saves
        if saves.background is None and self.saved_step == trainer.progress.step:
            return
        began = time.perf_counter()
        with trainer.phases.over(SAVING):  # the wait for the save before, too
            self.wait_here()
            if stops and saves.failure is not None:
                raise saves.failure
            step = trainer.progress.step
            if self.saved_step == step:
                return
            saves.failure = None
            written = self._write(is_automatic)
        self.saved_step, stall_s = step, time.perf_counter() - began
        stall = {"save_stall_s": stall_s, "save_stall_share": saves.share_since_last(stall_s)}
        if isinstance(written, Staged):
            trainer.print_line(f"step {step} | staged in {stall_s:.2f} s, being written")
            staged = {"staged_s": written.seconds, "staged_bytes": written.num_bytes}
            trainer.call("on_save_end", step, None, {**staged, **stall})
        else:
            self._note_saved(step, written, f"saved {written}", {"durable_s": stall_s, **stall})

    def wait_here(self) -> None:
        """As ``wait``, within a phase already."""
        if self.saves.background is not None:
            self._take(self.saves.background.finish)

    def _take(self, ask: Callable[[], Committed | None]) -> None:
        """Take note of how the save in the background has ended, if ``ask`` says so."""
        try:
            done = ask()
        except CheckpointError as error:
            step, self.saved_step = self.saved_step, -1
            self._note_failure(step, error)
            return
        if done is not None:
            text = f"durable {done.seconds:.2f} s after it was staged: saved {done.path}"
            values = {"durable_s": done.seconds, "durable_bytes": done.num_bytes}
            self._note_saved(done.step, done.path, text, values)

    def _note_saved(self, step: int, path: Path, text: str, values: dict[str, Any]) -> None:
        """The checkpoint ``path`` of ``step`` is whole and committed."""
        self.saved = path
        self.trainer.print_line(f"step {step} | {text}")
        self.trainer.call("on_save_end", step, path, values)

    def _note_failure(self, step: int, error: CheckpointError) -> None:
        """The save of ``step`` failed; the run may go on."""
        self.saves.note_failure(error, step)
        if self.trainer.world.rank == 0:
            kept = f"the last one is {self.saved}" if self.saved else "there is none yet"
            log.error(f"step {step}: NOT SAVED: {str(error).rstrip('.')}. Older checkpoints are untouched ({kept})")
        self.trainer.call("on_save_end", step, None, {"failed": 1})

    def _write(self, is_automatic: bool) -> Path | Staged:
        """Write the checkpoint of now, or stage it. Collective."""
        trainer, lineage, background = self.trainer, self.saves.lineage, self.saves.background
        left_alone = sys.maxsize if self.is_held else lineage.earlier  # of a run amidst bad steps one is the way back
        known = to_save(trainer.data, trainer.progress.samples_consumed, self._data_loaded)
        states = trainer.state_dict()
        beside = {GUARD: states.pop(GUARD)} if GUARD in states else {}
        more = {
            "tokenizer": self.tokenizer,
            "job": job(),
            **self._for_export,
            **beside,
            **({"callbacks": states} if states else {}),
            **lineage.state(),
            **({AUTOMATIC: True} if is_automatic else {}),
        }
        said: dict[str, Any] = {
            "config": trainer.config,
            "optimizer": trainer.engine.optimizer,
            "world": trainer.world,
            "fingerprint": known.fingerprint,
            "order": known.order,
            "more": more,
        }
        flags, step = trainer.config.checkpoint, trainer.progress.step
        if flags.is_deepspeed:
            state = described(trainer.progress, **said)
            keep = RetentionPolicy(flags.keep_last, None, self.loaded, kept_by(flags)["keep_automatic"], left_alone)
            engine = trainer.engine.engine
            return deepspeed_checkpoint.save(trainer.folder, step, state, engine, trainer.world, keep=keep)
        given = {**said, "module": trainer.engine.module, "loaded": self.loaded, "earlier": left_alone}
        if background is None:
            return save_state(trainer.folder, trainer.progress, **given)

        def stage(root: Path, step: int, records: Any, state: Any, world: object, **kept: Any) -> Staged:
            return background.start(root, step, records, state, **kept)

        return save_state(trainer.folder, trainer.progress, write=stage, **given)


def finished_text(trainer: Trainer) -> str:
    """Return the line for a run that has reached one of its limits already."""
    batch, progress = trainer.config.batch, trainer.progress
    if batch.train_samples is not None:
        left = batch.train_samples - progress.samples_consumed
        if not trainer.sizes.steps_within(batch.train_samples, progress.samples_consumed):
            size = trainer.sizes.at(progress.samples_consumed)
            rest = f"; the {left} that remain are less than a step of {size}" if left > 0 else ""
            return (
                f"{progress.samples_consumed} of --train-samples {batch.train_samples} are consumed already, after "
                f"step {progress.step}{rest}. Raise --train-samples to continue"
            )
    steps = trainer.length.steps
    if batch.train_tokens is not None and (steps is None or progress.step < steps):
        return (
            f"the tokens of --train-tokens {batch.train_tokens} are consumed already, after step {progress.step}. "
            "Raise --train-tokens to continue"
        )
    return f"all {steps} steps are done already; raise --train-iters to continue"


def callback_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of callbacks that a checkpoint has, by name."""
    found = dict(state.get("callbacks", {}))
    return found | {GUARD: state[GUARD]} if GUARD in state else found
