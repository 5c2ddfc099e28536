"""The loop: step, report, judge, evaluate, agree, save, stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

from megatron.errors import NumericsError, StopRequest
from megatron.training.bad_steps import after_bad_step
from megatron.training.culprit import explained
from megatron.training.drift import Copies, Drift, error_of, find_copies, find_drift
from megatron.training.evaluation import evaluate as evaluate
from megatron.training.journal import Journal
from megatron.training.parts import Run
from megatron.training.phases import OPENING_DATA, STEP
from megatron.training.report import set_learning_rate
from megatron.training.samples import StepSamples
from megatron.training.saver import await_saves, finish_saves, save, save_when_due
from megatron.training.step_result import StepResult
from megatron.training.stop import how_to_go_on
from megatron.training.telling import tell_step
from megatron.training.vote import Vote, vote


def train(run: Run) -> None:
    """Step until --train-iters. Collective.

    Raises:
        StopRequest: a signal or limit ended the run early; it is saved and can go on.
        NumericsError: a loss or gradient is not finite, too many steps were bad, or copies of a weight have drifted.
    """
    copies = _prepare(run)
    with run.phases.over(STEP):
        while not _run_through(run, copies):
            pass  # gone back to a checkpoint: the data are opened anew, behind what is left out
    save(run)
    finish_saves(run)


def train_step(run: Run) -> bool:
    """Take one step and report it; return whether the run has gone back to a checkpoint after it. Collective."""
    batch, replicas = run.config.batch, run.world.grid.data.size
    samples = batch.sizes(replicas).at(run.progress.samples_consumed)
    lr = run.learning_rate.at(run.progress.updates)
    set_learning_rate(run.engine.optimizer, lr)
    span = StepSamples(run.progress.step + 1, run.progress.samples_consumed, samples, batch.batch_size, replicas)
    if run.layer_norms is not None:
        run.layer_norms.is_wanted = run.is_log_step(span.step)
    try:
        own = run.engine.train_step(run.batches, run.progress.step, span.num_micro_batches)
        result = run.guard.note(own, span.step)
    except NumericsError as error:
        await_saves(run)  # a failure of it must not hide this one
        raise explained(error, run.engine, run.world.grid, span) from error
    _advance(run, result, samples)
    if run.is_log_step(span.step):
        tell_step(run, result, lr, span)
    return result.is_bad and after_bad_step(run, result, span)


def _prepare(run: Run) -> list[Copies]:
    """Let the guard watch the engine; return what is compared for drift."""
    grid, stability = run.world.grid, run.config.stability
    run.guard.watch(run.engine, *run.world.council, run.progress.step)
    if stability.is_guarded and run.world.rank == 0:
        run.journal = Journal(run.folder, run.guard.history.events)
    kept = run.engine.optimizer.kept
    return find_copies(run.engine.module, grid, kept) if stability.drift_interval else []


def _run_through(run: Run, copies: Sequence[Copies]) -> bool:
    """Step to the end, from where the data are now; return False once the run has gone back to a checkpoint."""
    config, total = run.config, run.config.batch.train_iters
    with run.phases.over(OPENING_DATA):
        run.batches = run.data.batches("train", config, run.world, run.progress.samples_consumed)
    with run.batches or nullcontext():
        while run.progress.step < total:
            if train_step(run):
                return False
            decided = _between_steps(run, copies)
            if decided.reason is not None and run.progress.step < total:
                _stop(run, decided.reason)
    return True


def _between_steps(run: Run, copies: Sequence[Copies]) -> Vote:
    """Evaluate, compare copies, agree and save, each if it is due; return what was agreed on. Collective.

    Raises:
        NumericsError: copies differ; nothing is saved of them.
    """
    batch, step, interval = run.config.batch, run.progress.step, run.config.stability.drift_interval
    drift: list[Drift] = []
    with _Pause(run):
        if batch.eval_interval and batch.eval_iters and step % batch.eval_interval == 0:
            evaluate(run, "valid")
        if interval and step % interval == 0:
            drift = find_drift(run.engine.module, copies, run.engine.optimizer.kept)
    decided = vote(run, bool(drift))
    run.phases.step_done()
    if decided.has_drift:
        await_saves(run)
        raise error_of(drift, step, max(step - interval, 0))
    if not (run.guard.settings.goes_back and run.guard.history.streak):  # the way back is not pushed out by bad ones
        with _Pause(run):
            save_when_due(run, by_time=decided.by_time)
    return decided


def _stop(run: Run, reason: str) -> None:
    """Save and end. Collective."""
    save(run)
    finish_saves(run)
    raise StopRequest(
        f"stopped after step {run.progress.step} of {run.config.batch.train_iters}: {reason}. "
        f"Everything is saved in {run.saved}. {how_to_go_on(run.folder)}"
    )


def _advance(run: Run, result: StepResult, samples: int) -> None:
    progress = run.progress
    progress.step += 1
    progress.updates += 0 if result.is_skipped else 1
    progress.samples_consumed += samples
    run.last_loss = result.loss
    if run.screen is not None and run.rates is not None:
        run.rates.count_step(samples)
        run.screen.advance(progress.step, result.loss)


class _Pause:
    """Time that is not training, left out of tokens/s."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.run.pause_s += time.perf_counter() - self.start
