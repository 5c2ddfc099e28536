"""When to save, how saves end, going back to a checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import Checkpoint, Committed, Staged, open_checkpoint, open_latest
from megatron.checkpoint.folders import CHECKPOINTS, UNASKED, RetentionPolicy, last_sequence, list_checkpoints, step_of
from megatron.checkpoint.metadata import read_sequence
from megatron.errors import CheckpointError, marked
from megatron.training import deepspeed_checkpoint, failure
from megatron.training.data import to_save
from megatron.training.run import Run
from megatron.training.run_folder import job
from megatron.training.timeouts import LOADING, SAVING
from megatron.training.train_state import EVERYTHING, described, kept_by, restore, save_state

# How saves end, and who is told: the screen, the metrics, the log and the launcher.


def look(run: Run) -> None:
    """Take note of what has happened in the background; never waits. Not collective."""
    if run.saves.background is not None:
        _take(run, run.saves.background.poll)


def settle(run: Run) -> None:
    """Wait for the save in the background and take note of how it ended. Collective."""
    if run.saves.background is not None:
        _take(run, run.saves.background.finish)


def on_save_committed(run: Run, step: int, path: Path, text: str, values: Mapping[str, float]) -> None:
    """The checkpoint ``path`` of ``step`` is whole and committed."""
    run.saved = path
    log_save(run, step, text, values)
    if run.world.rank == 0:
        failure.note_committed_step(step)


def note_failure(run: Run, step: int, error: CheckpointError) -> None:
    """The save of ``step`` failed; the run may go on."""
    run.saves.note_failure(error, step)
    if run.world.rank == 0:
        kept = f"the last one is {run.saved}" if run.saved else "there is none yet"
        log.error(f"step {step}: NOT SAVED: {str(error).rstrip('.')}. Older checkpoints are untouched ({kept})")
    if run.metrics is not None:
        run.metrics.write("save", step, {"failed": 1})


def log_save(run: Run, step: int, text: str, values: Mapping[str, float]) -> None:
    """Show ``text`` and record ``values``, of the checkpoint of ``step``, on rank 0."""
    if run.screen is not None:
        run.screen.line(f"step {step} | {text}")
    if run.metrics is not None:
        run.metrics.write("save", step, dict(values))


def _take(run: Run, ask: Callable[[], Committed | None]) -> None:
    try:
        done = ask()
    except CheckpointError as error:
        step, run.saved_step = run.saved_step, -1
        note_failure(run, step, error)
        return
    if done is not None:
        text = f"durable {done.seconds:.2f} s after it was staged: saved {done.path}"
        on_save_committed(run, done.step, done.path, text, {"durable_s": done.seconds, "durable_bytes": done.num_bytes})


# When a run writes a checkpoint, what a save costs, and the way back to one.
#
# | a save | that fails in mid-run | at the end, or when the run is stopped |
# |---|---|---|
# | --on-save-error continue | is told; the run goes on, older checkpoints stay | CheckpointError (code 3) |
# | --on-save-error stop | CheckpointError (code 3) | CheckpointError (code 3) |
#
# "Staged" is a copy in memory, from which a thread writes while training goes on (--async-save); "durable" is a
# checkpoint that a kill cannot take away any more.


def wants_by_time(run: Run) -> bool:
    """Return whether this rank would save after this step, since --save-interval-minutes have passed. Not collective.

    Also where a save in the background has failed and --on-save-error is stop: then ``save_when_due`` ends the run.
    """
    look(run)
    flags = run.config.checkpoint
    if run.saves.failure is not None and flags.on_save_error == "stop":
        return True
    return flags.minutes > 0 and time.monotonic() - run.saves.last_at >= 60 * flags.minutes


def save_when_due(run: Run, by_time: bool = False) -> None:
    """Write a checkpoint if --save-interval says so after this step, or ``by_time``. Collective.

    Args:
        by_time: any rank's ``wants_by_time``; the same on all ranks.

    Raises:
        CheckpointError: a save failed, and --on-save-error is stop; on all ranks alike.
    """
    flags = run.config.checkpoint
    is_due = bool(flags.save_interval) and run.progress.step % flags.save_interval == 0
    if not is_due and not by_time:
        return
    try:
        _save(run, is_unasked=by_time and flags.is_default_interval, stops=flags.on_save_error == "stop")
    except CheckpointError as error:
        if flags.on_save_error == "stop":
            raise
        note_failure(run, run.progress.step, error)


def save(run: Run) -> None:
    """Write a checkpoint of now, unless this step has one. Collective.

    Raises:
        CheckpointError: it could not be written; with --async-save ``finish_saves`` raises it.
    """
    _save(run)


def finish_saves(run: Run) -> None:
    """Wait until the save in the background is durable. Collective.

    Raises:
        CheckpointError: the checkpoint of this step could not be written; on all ranks alike.
    """
    if run.saves.background is None:
        return
    await_saves(run)
    if run.saves.failure is not None and run.saves.failed_step == run.progress.step:
        raise run.saves.failure


def await_saves(run: Run) -> None:
    """Wait until the save in the background has ended; a failure is told only, since the run ends for another reason.

    Collective.
    """
    if run.saves.background is not None:
        with run.phases.over(SAVING):
            settle(run)


def roll_back(run: Run, up_to_step: int) -> Path:
    """Go back to this run's newest checkpoint of at most ``up_to_step`` that verifies; return its path. Collective.

    Weights, optimizer, loss scale, generators and counters are then those of that step, and the metrics end there.
    Where the data goes on is the caller's to say.

    Raises:
        CheckpointError: there is none; on all ranks alike.
    """
    with run.phases.over(LOADING):
        settle(run)
        checkpoint = _newest_of(run, up_to_step)
        run.progress = restore(
            checkpoint,
            config=run.config,
            module=run.engine.module,
            optimizer=run.engine.optimizer,
            world=run.world,
            fingerprint=None,
            taken=EVERYTHING,
        )
    run.guard.load(checkpoint.state.get("guard"))
    if run.world.rank == 0 and checkpoint.path.parent == run.folder / CHECKPOINTS:
        run.saves.branch.go_on_from(checkpoint.sequence, last_sequence(list_checkpoints(checkpoint.path.parent)))
    run.saved, run.saved_step = checkpoint.path, run.progress.step
    if run.metrics is not None:
        run.metrics.truncate_to_step(run.progress.step)
    if run.screen is not None:
        run.screen.line(f"step {run.progress.step} | went back to {checkpoint.path}")
    return checkpoint.path


@marked(is_of_this_rank=False)
def _newest_of(run: Run, up_to_step: int) -> Checkpoint:
    """Return the newest checkpoint of this run of at most ``up_to_step`` that verifies, else its origin. Collective."""
    root = run.folder / CHECKPOINTS

    def is_on_the_way(path: Path) -> bool:
        sequence = read_sequence(path)  # None: damaged, which is found and named
        return step_of(path) <= up_to_step and (sequence is None or run.saves.branch.has(sequence))

    try:
        return open_latest(root, run.world.grid.host, accept=is_on_the_way)
    except CheckpointError as error:
        if run.origin is not None and step_of(run.origin) <= up_to_step:
            return open_checkpoint(run.origin, run.world.grid.host)
        raise CheckpointError(
            f"no checkpoint of this run up to step {up_to_step} in {root} to go back to: {str(error).rstrip('.')}. "
            "--save-interval N or --save-interval-minutes M saves more often"
        ) from error


def _save(run: Run, *, is_unasked: bool = False, stops: bool = False) -> None:
    if run.saves.background is None and run.saved_step == run.progress.step:
        return
    began = time.perf_counter()
    with run.phases.over(SAVING):  # the wait for the save before, too
        settle(run)
        if stops and run.saves.failure is not None:
            raise run.saves.failure
        step = run.progress.step
        if run.saved_step == step:
            return
        run.saves.failure = None
        written = _write(run, is_unasked)
    run.saved_step, stall_s = step, time.perf_counter() - began
    stall = {"save_stall_s": stall_s, "save_stall_share": run.saves.share_since_last(stall_s)}
    if isinstance(written, Staged):
        told = {"staged_s": written.seconds, "staged_bytes": written.num_bytes}
        log_save(run, step, f"staged in {stall_s:.2f} s, being written", {**told, **stall})
    else:
        on_save_committed(run, step, written, f"saved {written}", {"durable_s": stall_s, **stall})


def _left_alone(run: Run) -> int:
    """Return up to which sequence number checkpoints stay: amidst bad steps all, since one of them is the way back."""
    return sys.maxsize if run.guard.may_go_back else run.saves.branch.earlier


def _write(run: Run, is_unasked: bool) -> Path | Staged:
    """Write the checkpoint of now, or stage it. Collective."""
    branch, unasked = run.saves.branch, {UNASKED: True} if is_unasked else {}
    told, background = to_save(run.data, run.progress.samples_consumed, run.data_loaded), run.saves.background
    said: dict[str, Any] = {
        "config": run.config,
        "optimizer": run.engine.optimizer,
        "world": run.world,
        "fingerprint": told.fingerprint,
        "order": told.order,
        "more": {"tokenizer": run.tokenizer, "job": job(), "guard": run.guard.state(), **branch.state(), **unasked},
    }
    if run.config.checkpoint.is_deepspeed:
        flags, state = run.config.checkpoint, described(run.progress, **said)
        keep = RetentionPolicy(flags.keep_last, None, run.loaded, kept_by(flags)["keep_unasked"], _left_alone(run))
        return deepspeed_checkpoint.save(run.folder, run.progress.step, state, run.engine.engine, run.world, keep=keep)
    given = {**said, "module": run.engine.module, "loaded": run.loaded, "earlier": _left_alone(run)}
    if background is None:
        return save_state(run.folder, run.progress, **given)

    def stage(root: Path, step: int, records: Any, state: Any, world: object, **kept: Any) -> Staged:
        return background.start(root, step, records, state, **kept)

    return save_state(run.folder, run.progress, write=stage, **given)
