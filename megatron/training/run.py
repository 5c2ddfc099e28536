"""One run of training on this rank, from the opened world to the test loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.arguments import resolve_dtype
from megatron.checkpoint import BackgroundSaver
from megatron.checkpoint.folders import last_sequence, newest_first
from megatron.config import Config
from megatron.config.effects import format_problems
from megatron.config.parallel import TRACE_IN_RUN
from megatron.config.validate import raise_all
from megatron.errors import StopRequest
from megatron.training import (
    arguments,
    data_order,
    failure,
    position,
    report,
    run_folder,
    run_lock,
    stage_table,
    timeline,
    world,
)
from megatron.training.assembly import build_engine, make_learning_rate, make_streams
from megatron.training.branch import Branch
from megatron.training.data import DatasetsProvider, open_data
from megatron.training.engines import ForwardStep
from megatron.training.forecast import bubble_of_run
from megatron.training.layer_norms import LayerNorms
from megatron.training.loop import evaluate, train
from megatron.training.metrics import EVALUATIONS, METRICS, MetricsWriter
from megatron.training.of_ranks import most_of_each_stage
from megatron.training.parts import Run
from megatron.training.phases import LOADING, OPENING_DATA, Phases
from megatron.training.rank_zero import by_rank_0
from megatron.training.resume import is_same_run, load
from megatron.training.run_folder import Place
from megatron.training.run_source import saved_in
from megatron.training.screen import Screen
from megatron.training.stop import StopRequests
from megatron.training.telling import end_rows
from megatron.training.vocabulary import with_tokenizer
from megatron.training.wandb_run import WandbRun, open_wandb
from megatron.training.world import World


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
    here = world.start(config, lambda: stop.signal_name)
    names["who"] = here.name
    position.name_rank(here.name)
    log.configure(here.rank)
    stop.limit(config.run.exit_interval, config.run.exit_duration_in_mins, started)
    config = resolve_dtype(config, device.default_precision(here.kind))
    run(config, here, datasets_provider, model_provider, forward_step, name, stop)
    world.stop()


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
    with closing(Phases(here, config)) as phases:
        tokenizer, config = with_tokenizer(config)
        streams = make_streams(config, here)
        arguments.set_current(config, tokenizer, streams)
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
        failure.tell(error, this.world.name)
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
        told = timeline.draw(parallel.pipeline_trace, this.folder, 0.5 * parallel.phase_timeout_s)
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
    saves.background = BackgroundSaver(this.world.grid.host) if flags.async_save else None
    if this.world.rank != 0 or flags.eval_only or is_same_run(this, place):
        return
    found = newest_first(saved_in(this.folder))
    saves.branch = Branch(last_sequence(found))
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
        facts = stage_table.stage_facts(config, here.grid.topology, bounds, counted, before)
        stage_table.write(this.folder, facts)
    for note in config.notes:
        log.info(note)
    this.screen = Screen(config.run.progress, config.batch.train_iters)
    own_events = this.folder / "tensorboard" if is_own else None
    tensorboard = Path(config.run.tensorboard_dir) if config.run.tensorboard_dir else own_events
    goes_on = is_own and (place.begins_again or is_same_run(this, place))
    resumed_step = this.progress.step if goes_on else None  # steps after it have been recorded, and come again
    name = METRICS if is_own else EVALUATIONS
    this.metrics = MetricsWriter(this.folder, tensorboard, resumed_step, wandb, name)
    this.rates = report.Rates(config, peak, counted)
    this.predicted_bubble = bubble_of_run(config, bounds, counted)
    sizes, left = config.batch.sizes(here.grid.data.size), config.batch.train_iters - this.progress.step
    read = data_order.start_rows(this.data, sizes.consumed_after(max(left, 0), this.progress.samples_consumed))
    rows = report.start_rows(config, here, this.engine.module, counted, this.folder, read, peak)
    this.screen.table(f"{this.folder.name}", rows)


def _open_profile(this: Run) -> Callable[[], None]:
    """Let the steps of --profile be profiled; return what ends the profile of a run that is stopped amidst them."""
    if this.config.seeing.profile is None:
        return lambda: None
    from megatron.training.profiling import Profiler  # imported where it is asked for alone

    return Profiler(this).finish


def _open_wandb(this: Run) -> WandbRun | None:
    """Return the run at Weights & Biases, on rank 0 and where it is asked for. Collective: all ranks fail with it."""
    if not this.config.seeing.wandb_project:
        return None
    opened: list[WandbRun | None] = []
    by_rank_0(this.world, lambda: opened.append(open_wandb(this.config, this.folder)))
    return opened[0] if opened else None
