"""A run of training on this rank, from the command line's configuration to the last barrier: what is made, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.arguments import resolve_dtype
from megatron.arguments.unused_flags import format_problems
from megatron.config import Config
from megatron.config.parallel import TRACE_IN_RUN
from megatron.errors import raise_all
from megatron.mpu.mappings import all_reduce
from megatron.runtime import rank_status
from megatron.runtime.exit_signals import StopRequests
from megatron.training import auto_placement, global_vars, initialize, run_folder, run_lock, start_table
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.data import DatasetsProvider, open_data
from megatron.training.run_callbacks import (
    debugging_callbacks,
    make_callbacks,
    reporting_callbacks,
    step_callbacks,
)
from megatron.training.run_folder import Place
from megatron.training.setup import build_engine, make_streams
from megatron.training.step_engine import ForwardStep
from megatron.training.timeouts import OPENING_DATA, Sections
from megatron.training.trainer import Callback, Trainer
from megatron.training.vocabulary import with_tokenizer
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
    callbacks: Sequence[Callback] = (),
) -> None:
    """Form the world, train, and leave the world. Collective.

    Args:
        names: gets this rank's name under "who", for error messages.
        started: ``time.monotonic()`` at the start of the process.
        stop: listens to signals already.
        callbacks: of the script's own.
    """
    here = initialize.start(config, lambda: stop.signal_name)
    names["who"] = here.name
    rank_status.name_rank(here.name)
    log.configure(here.rank)
    run_settings = config.run
    stop.limit(run_settings.exit_interval, run_settings.exit_duration_in_mins, started, run_settings.kill_switch_path)
    config = resolve_dtype(config, device.default_precision(here.kind))
    run(config, here, datasets_provider, model_provider, forward_step, name, stop, callbacks)
    initialize.stop()


def run(
    config: Config,
    here: World,
    datasets_provider: DatasetsProvider,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
    name: str,
    stop: StopRequests,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train with a configuration and a world that exist already. Collective."""
    with closing(Sections(here, config)) as phases:
        tokenizer, config = with_tokenizer(config)
        config = placed(config, here)
        streams = make_streams(config, here)
        global_vars.set_current(config, tokenizer, streams)
        with phases.over(OPENING_DATA):
            data = open_data(datasets_provider, config, here)
        traced = run_folder.choose(config, name, here) if config.parallel.pipeline_trace == TRACE_IN_RUN else None
        if traced is not None:  # the engine is made with the folder of its trace
            config = with_trace(config, traced)
        before = device.peak_memory_bytes(here.kind)
        engine = build_engine(config, here, streams, model_provider, forward_step)
        debuggers = make_callbacks(debugging_callbacks(config, here, engine, streams))
        phases.follow(engine)
        seed_replicas(config.run.seed, here)
        place = traced or run_folder.choose(config, name, here)  # after what can fail, which leaves no empty folder
        config = with_format(config, place)
        if config.checkpoint.is_deepspeed:
            engine.use_deepspeed()
        with run_lock.held(place.folder, here):
            checkpointer = Checkpointer(place, getattr(tokenizer, "identity", None))
            counted = start_table.count_parameters(engine.module, here)
            every = [checkpointer, *debuggers, *make_callbacks(step_callbacks(config, counted, before))]
            every += [*callbacks, *make_callbacks(reporting_callbacks(config, counted))]
            Trainer(config, here, engine, data, place.folder, every, stop=stop, phases=phases).fit()


def placed(config: Config, here: World) -> Config:
    """Return ``config`` with what ``--pipeline-schedule auto`` makes of the placement of chunks. Collective."""
    if not auto_placement.is_free(config):
        return config
    own = auto_placement.usable_bytes(here.kind, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    limit = all_reduce(torch.tensor([own], dtype=torch.float64, device=here.device), here.grid.world, dist.ReduceOp.MIN)
    return auto_placement.with_placement(config, here.grid.topology, config.precision.dtype or "", int(limit.item()))


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


def seed_replicas(seed: int, here: World) -> None:
    """Seed torch's default generator anew: a user's own dropout must differ between replicas and between stages.

    Until here it was the same on all ranks, as weights that a model draws itself need it.
    """
    place = here.grid.topology.coordinate(here.rank)
    device.seed(hash((seed, place.data, place.pipe)) % 2**63)
