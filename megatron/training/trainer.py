"""Opening a run, the training loop, one step, what all ranks decide alike after it, the end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.arguments import resolve_dtype
from megatron.arguments.unused_flags import format_problems
from megatron.arguments.validate import raise_all
from megatron.checkpoint import AsyncSaver
from megatron.checkpoint.folders import last_sequence, newest_first
from megatron.config import Config
from megatron.config.parallel import TRACE_IN_RUN
from megatron.errors import NumericsError, StopRequest
from megatron.optim.lr_scheduler import set_learning_rate
from megatron.training import failure, global_vars, initialize, profiler, report, run_folder, run_lock
from megatron.training.checkpointing import await_saves, finish_saves, save, save_when_due, wants_by_time
from megatron.training.console import TrainingConsole
from megatron.training.data import DatasetsProvider, open_data, start_rows
from megatron.training.dry_run import bubble_of_run
from megatron.training.evaluate import evaluate as evaluate
from megatron.training.exit_signals import StopRequests, how_to_go_on
from megatron.training.failure import asked_through_launcher
from megatron.training.global_vars import with_tokenizer
from megatron.training.initialize import World, run_on_rank_0
from megatron.training.metrics import EVALUATIONS, METRICS, LayerNorms, MetricsWriter, WandbRun, open_wandb
from megatron.training.replica_check import ReplicaGroup, ReplicaMismatch, check_replicas, error_of, find_copies
from megatron.training.resume import is_same_run, load
from megatron.training.rollback import after_bad_step, explain_nonfinite
from megatron.training.run import Run
from megatron.training.run_folder import Place, saved_in
from megatron.training.setup import build_engine, make_learning_rate, make_streams
from megatron.training.stability_guard import EventLog
from megatron.training.timeouts import LOADING, OPENING_DATA, STEP, Sections
from megatron.training.train_state import CheckpointLineage
from megatron.training.train_step import ForwardStep, StepResult, StepSamples
from megatron.training.training_log import end_rows, most_of_each_stage, training_log

# What all ranks must decide alike after a step: to stop, to save, to end for drifted weights. One small sum a step.

ANOTHER = "another rank was asked to stop"


class StepDecision(NamedTuple):
    """What the ranks have agreed on; ``reason`` to stop is this rank's own words where it has some."""

    reason: str | None
    by_time: bool
    has_drift: bool


def vote(run: Run, has_drift: bool = False) -> StepDecision:
    """Return what the run does after this step: what any rank wants. Collective."""
    reason = run.stop.reason(run.progress.step)
    stops, by_time, drifted = run.world.any([reason is not None, wants_by_time(run), has_drift])
    asked = asked_through_launcher() if stops and reason is None else None  # its signal is on the way here, too
    return StepDecision((reason or (f"received {asked}" if asked else ANOTHER)) if stops else None, by_time, drifted)


# The loop: step, report, judge, evaluate, agree, save, stop.


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
        raise explain_nonfinite(error, run.engine, run.world.grid, span) from error
    _advance(run, result, samples)
    if run.is_log_step(span.step):
        training_log(run, result, lr, span)
    return result.is_bad and after_bad_step(run, result, span)


def _prepare(run: Run) -> list[ReplicaGroup]:
    """Let the guard watch the engine; return what is compared for drift."""
    grid, stability = run.world.grid, run.config.stability
    run.guard.watch(run.engine, *run.world.decision_group, run.progress.step)
    if stability.is_guarded and run.world.rank == 0:
        run.journal = EventLog(run.folder, run.guard.history.events)
    kept = run.engine.optimizer.kept
    return find_copies(run.engine.module, grid, kept) if stability.drift_interval else []


def _run_through(run: Run, copies: Sequence[ReplicaGroup]) -> bool:
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


def _between_steps(run: Run, copies: Sequence[ReplicaGroup]) -> StepDecision:
    """Evaluate, compare copies, agree and save, each if it is due; return what was agreed on. Collective.

    Raises:
        NumericsError: copies differ; nothing is saved of them.
    """
    batch, step, interval = run.config.batch, run.progress.step, run.config.stability.drift_interval
    drift: list[ReplicaMismatch] = []
    with _Pause(run):
        if batch.eval_interval and batch.eval_iters and step % batch.eval_interval == 0:
            evaluate(run, "valid")
        if interval and step % interval == 0:
            drift = check_replicas(run.engine.module, copies, run.engine.optimizer.kept)
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


# One run of training on this rank, from the opened world to the test loss.


def start(
    config: Config,
    names: dict[str, str],
    datasets_provider: DatasetsProvider,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
    name: str,
    started: float,
    stop: StopRequests,
) -> None:
    """Form the world, train, and leave the world. Collective.

    Args:
        names: gets this rank's name under "who", for error messages.
        started: ``time.monotonic()`` at the start of the process.
        stop: listens to signals already.
    """
    here = initialize.start(config, lambda: stop.signal_name)
    names["who"] = here.name
    failure.name_rank(here.name)
    log.configure(here.rank)
    stop.limit(config.run.exit_interval, config.run.exit_duration_in_mins, started)
    config = resolve_dtype(config, device.default_precision(here.kind))
    run(config, here, datasets_provider, model_provider, forward_step, name, stop)
    initialize.stop()


def run(
    config: Config,
    here: World,
    datasets_provider: DatasetsProvider,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
    name: str,
    stop: StopRequests,
) -> None:
    """Train with a configuration and a world that exist already. Collective."""
    with closing(Sections(here, config)) as phases:
        tokenizer, config = with_tokenizer(config)
        streams = make_streams(config, here)
        global_vars.set_current(config, tokenizer, streams)
        with phases.over(OPENING_DATA):
            data = open_data(datasets_provider, config, here)
        traced = run_folder.choose(config, name, here) if config.parallel.pipeline_trace == TRACE_IN_RUN else None
        if traced is not None:  # the engine is made with the folder of its trace
            config = with_trace(config, traced)
        before = device.peak_memory_bytes(here.kind)
        engine = build_engine(config, here, streams, model_provider, forward_step)
        phases.follow(engine)
        seed_replicas(config.run.seed, here)
        place = traced or run_folder.choose(config, name, here)  # after what can fail, which leaves no empty folder
        config = with_format(config, place)
        rate, identity = make_learning_rate(config), getattr(tokenizer, "identity", None)
        this = Run(config, here, engine, data, rate, place.folder, stop, before, tokenizer=identity, phases=phases)
        with run_lock.held(place.folder, here):
            _go_on(this, place)


def with_trace(config: Config, place: Place) -> Config:
    """Return ``config`` with the trace of its pipeline in the run folder."""
    return replace(config, parallel=replace(config.parallel, pipeline_trace=str(place.folder / "trace")))


def with_format(config: Config, place: Place) -> Config:
    """Return ``config`` with the format of the checkpoints that are saved there.

    Raises:
        ConfigError: flags do not go with it; the same on every rank.
    """
    config = replace(config, checkpoint=replace(config.checkpoint, checkpoint_format=place.checkpoint_format))
    raise_all(list(format_problems(config)))
    return config


def _go_on(this: Run, place: Place) -> None:
    """Load, train and evaluate in the folder that is this job's own. Collective."""
    if place.source is not None:
        with this.phases.over(LOADING):
            load(this, place)
    _open_saves(this, place)
    _open_reports(this, place)
    finish_profile = _open_profile(this)
    try:
        _work(this, time.monotonic())
    except StopRequest:
        finish_profile()
        _draw_pipeline(this)
        _close_reports_together(this)
        raise
    except BaseException as error:
        _close_screen(this)
        failure.report_failure(error, this.world.name)
        _close_reports(this, draws=False)
        raise
    _close_reports_together(this)


def _close_screen(this: Run) -> None:
    if this.screen is not None:
        with suppress(Exception):  # an error on its way out counts more, and a run that is done is done
            this.screen.close()


def _close_reports(this: Run, *, draws: bool = True) -> None:
    _close_screen(this)
    if this.metrics is not None:
        this.metrics.close(draws=draws)


def _close_reports_together(this: Run) -> None:
    """Close them where no error ends the run: no rank leaves while rank 0 still sends and draws. Collective."""
    _close_reports(this)
    if this.world.grid.host.size > 1:
        dist.barrier(group=this.world.grid.host.handle)


def _work(this: Run, start: float) -> None:
    if not this.config.checkpoint.eval_only:
        train(this)
    if this.saves.background is not None:
        this.saves.background.close()
    if this.config.batch.eval_iters:
        evaluate(this, "test")
    told = _draw_pipeline(this)
    if this.screen is not None:
        seconds = time.monotonic() - start
        this.screen.close()
        rows = end_rows(this, seconds)
        this.screen.table("Done", rows if told is None else [*rows, ("pipeline", told)])


def _draw_pipeline(this: Run) -> str | None:
    """Draw the trace of the steps that this run took; return what to say of it. Collective."""
    parallel, grid = this.config.parallel, this.world.grid
    if not parallel.pipeline_trace or not parallel.has_pipeline or this.last_loss is None:
        return None
    told = None
    if this.screen is not None:
        told = profiler.draw(parallel.pipeline_trace, this.folder, 0.5 * parallel.phase_timeout_s)
    dist.barrier(group=grid.host.handle)  # a rank that ended earlier would end this one
    return told


def seed_replicas(seed: int, here: World) -> None:
    """Seed torch's default generator anew: a user's own dropout must differ between replicas and between stages.

    Until here it was the same on all ranks, as weights that a model draws itself need it.
    """
    place = here.grid.topology.coordinate(here.rank)
    device.seed(hash((seed, place.data, place.pipe)) % 2**63)


def _open_saves(this: Run, place: Place) -> None:
    """Begin to count the time between saves; make ready to save in the background. Collective."""
    flags, saves = this.config.checkpoint, this.saves
    saves.last_at = time.monotonic()
    saves.background = AsyncSaver(this.world.grid.host) if flags.async_save else None
    if this.world.rank != 0 or flags.eval_only or is_same_run(this, place):
        return
    found = newest_first(saved_in(this.folder))
    saves.branch = CheckpointLineage(last_sequence(found))
    if found:
        log.warning(
            f"{this.folder} holds {len(found)} checkpoints of an earlier run, which stay as they are; --resume goes on "
            "with them"
        )


def _open_reports(this: Run, place: Place) -> None:
    config, here = this.config, this.world
    peak = report.peak_of_all_ranks(here)
    counted, bounds = report.count_parameters(this.engine.module, here), report.bounds_of(config, this.engine.module)
    before = most_of_each_stage(this.bytes_before, here)
    if config.seeing.log_layer_norms:
        this.layer_norms = LayerNorms(this.engine.module, this.engine.optimizer, here)
    wandb = _open_wandb(this)
    if here.rank != 0:
        return
    is_own = not config.checkpoint.eval_only  # an evaluation leaves what its folder says of a run as it is
    if is_own:
        run_folder.describe(this.folder, config, here, this.progress.step)
        facts = report.stage_facts(config, here.grid.topology, bounds, counted, before)
        report.write(this.folder, facts)
    for note in config.notes:
        log.info(note)
    this.screen = TrainingConsole(config.run.progress, config.batch.train_iters)
    own_events = this.folder / "tensorboard" if is_own else None
    tensorboard = Path(config.run.tensorboard_dir) if config.run.tensorboard_dir else own_events
    goes_on = is_own and (place.begins_again or is_same_run(this, place))
    resumed_step = this.progress.step if goes_on else None  # steps after it have been recorded, and come again
    name = METRICS if is_own else EVALUATIONS
    this.metrics = MetricsWriter(this.folder, tensorboard, resumed_step, wandb, name)
    this.rates = report.Rates(config, peak, counted)
    this.predicted_bubble = bubble_of_run(config, bounds, counted)
    sizes, left = config.batch.sizes(here.grid.data.size), config.batch.train_iters - this.progress.step
    read = start_rows(this.data, sizes.consumed_after(max(left, 0), this.progress.samples_consumed))
    rows = report.start_rows(config, here, this.engine.module, counted, this.folder, read, peak)
    this.screen.table(f"{this.folder.name}", rows)


def _open_profile(this: Run) -> Callable[[], None]:
    """Let the steps of --profile be profiled; return what ends the profile of a run that is stopped amidst them."""
    if this.config.seeing.profile is None:
        return lambda: None
    from megatron.training.profiler import Profiler  # imported where it is asked for alone

    return Profiler(this).finish


def _open_wandb(this: Run) -> WandbRun | None:
    """Return the run at Weights & Biases, on rank 0 and where it is asked for. Collective: all ranks fail with it."""
    if not this.config.seeing.wandb_project:
        return None
    opened: list[WandbRun | None] = []
    run_on_rank_0(this.world, lambda: opened.append(open_wandb(this.config, this.folder)))
    return opened[0] if opened else None
