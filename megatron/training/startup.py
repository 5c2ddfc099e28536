"""Start-up of a run in order: command line, ranks, process groups, data, model and engine, trainer.

Scripts call ``pretrain``. It imports torch and DeepSpeed only after the configuration is known, so that --help and
--dry-run respond immediately. ``run`` is the second half, for process groups that already exist.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron import log
from megatron.arguments import parse, resolve_dtype, resolve_fusion
from megatron.arguments.elastic_fit import fit_to_ranks
from megatron.arguments.scan import Scan
from megatron.config import Config, elastic
from megatron.errors import JobError
from megatron.runtime import rank_status
from megatron.runtime.exit_guard import enable_crash_traces, guard
from megatron.runtime.exit_signals import StopRequests
from megatron.runtime.rank_env import has_valid_world_size, process_name, raise_on_this_rank, set_rank_environment

if TYPE_CHECKING:
    import torch

    from megatron.training.callbacks.layout_check import LayoutCheck
    from megatron.training.data import DatasetsProvider
    from megatron.training.step_engine import ForwardStep
    from megatron.training.trainer import Callback
    from megatron.training.world import World


def pretrain(
    train_valid_test_datasets_provider: Callable[[list[int]], tuple[Any, Any, Any]],
    model_provider: Callable[[], Any],
    forward_step: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
    *,
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    name: str | None = None,
    family: str = "gpt2",
    accepts_model: bool = False,
    callbacks: Sequence[Any] = (),
) -> None:
    """Run a complete training job: parse the command line, train, and evaluate the test split. Collective.

    A failure exits the process with the job's exit code.

    Args:
        train_valid_test_datasets_provider: takes the sample counts of the three splits and returns three data sets, or
            None for a split without data. A data set with a length is repeated; one without must return a sample for
            any index >= 0. Called only on ranks that read data.
        model_provider: returns the model: a module or, with 2 or more stages, a PipelineModule.
        forward_step: takes (data iterator or None, model) and returns (loss, named losses). Not used with a pipeline.
        extra_args_provider: adds the script's flags to an argparse parser.
        args_defaults: the script's defaults by flag name; flags on the command line override them.
        name: name in the run folder ``runs/<name>-<time>``; None: the script's name without ``pretrain_``. If
            ``--model`` selects another family, that family's name is used.
        family: "gpt2", "t5", "llama", "mpt" or "bert"; decides which flags exist. For your own model, choose the
            family it resembles.
        accepts_model: ``--model`` may select a decoder of another family; for providers that can build all of them.
        callbacks: the script's ``megatron.training.Callback`` objects, constructed identically on every rank. Those of
            ``--callback`` are called after them.
    """
    rank_problems = set_rank_environment(os.environ)  # must precede every read of RANK
    start_time = float(os.environ.get("MEGATRON_STARTED") or time.monotonic())  # first start of the job on this host
    rank_name = process_name(os.environ)
    stop = StopRequests()

    def run_name(trained_family: str) -> str:
        if trained_family != family:
            return trained_family
        return name or Path(sys.argv[0]).stem.removeprefix("pretrain_")

    def main() -> None:
        nonlocal rank_name

        # Command line: merge all sources of flags into one configuration. --dry-run ends here.
        if not has_valid_world_size(os.environ):
            raise_on_this_rank(rank_problems)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        span = elastic.parse_rank_range(os.environ)
        try:
            config = parse(
                sys.argv[1:],
                world_size=span.max_ranks if span else world_size,
                extra_args_provider=extra_args_provider,
                defaults=dict(args_defaults or {}),
                family=family,
                accepts_model=accepts_model,
                checkpoint_args=partial(_checkpoint_args, run_name=run_name),
            )
        except JobError:
            if "--dry-run" not in sys.argv:  # a dry run starts no ranks
                raise_on_this_rank(rank_problems)
            raise
        if config.run.dry_run:
            from megatron.training.dry_run import dry_run  # imports numpy and rich, which --help does not need

            dry_run(config, world_size, Path(sys.argv[0]).name, run_name(config.family))
            return
        providers = (train_valid_test_datasets_provider, model_provider, forward_step)
        if config.run.prove_only:
            if os.environ.get("RANK", "0") != "0":
                return  # rank 0 starts all processes of the check
            from megatron.training.proof.prove_only import prove_only  # imports torch, which --help does not need

            sys.exit(prove_only(config, span.max_ranks if span else world_size, *providers))
        raise_on_this_rank(rank_problems)

        # Ranks: an elastic job may have fewer ranks than the configuration was validated for.
        if span is not None:
            config, world_size = fit_to_ranks(config, span, world_size)
            if int(os.environ["RANK"]) >= world_size:
                rank_status.write_state(rank_status.IDLE)
                return
            os.environ["WORLD_SIZE"] = str(world_size)
        rank_status.write_state(rank_status.RUNNING)

        # Device and process groups.
        from megatron.training.device_setup import configure_device

        device_type = configure_device(config)  # before DeepSpeed is imported
        import megatron.training.setup  # noqa: F401 - import DeepSpeed before ranks wait for each other
        from megatron import device
        from megatron.training import initialize
        from megatron.training.callback_loading import load_callbacks
        from megatron.training.proof.start import start_layout_check

        all_callbacks = [*callbacks, *load_callbacks(config.run.callback)]
        layout_check = start_layout_check(config, world_size, device_type, *providers)
        world = initialize.start(config, lambda: stop.signal_name)
        rank_name = world.name
        rank_status.write_coordinates(rank_name)
        log.configure(world.rank)
        limits = config.run
        stop.set_limits(limits.exit_interval, limits.exit_duration_in_mins, start_time, limits.kill_switch_path)
        config = resolve_dtype(config, device.default_precision(world.device_type))

        # Data, model, engine, trainer.
        run(config, world, *providers, run_name(config.family), stop, all_callbacks, layout_check)
        initialize.stop()
        rank_status.write_state("")

    stop.install_handlers()
    enable_crash_traces()
    rank_status.open_status_file()
    guard(main, lambda: rank_name)


def run(
    config: Config,
    world: World,
    datasets_provider: DatasetsProvider,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
    name: str,
    stop: StopRequests,
    callbacks: Sequence[Callback] = (),
    layout_check: LayoutCheck | None = None,
) -> None:
    """Train with an existing configuration and world. Collective.

    Args:
        name: name for a new run folder, ``runs/<name>-<time>``.
        stop: requests to stop early, from signals or limits.
        callbacks: the callbacks of the script and of ``--callback``.
        layout_check: layout check that was started before the process groups; None: no check.
    """
    # Imported here so that --help and --dry-run need neither torch nor DeepSpeed.
    from megatron import device
    from megatron.config.parallel import TRACE_IN_RUN
    from megatron.training import auto_placement, global_vars, run_callbacks, run_folder, run_lock, start_table
    from megatron.training.callbacks.checkpointer import Checkpointer
    from megatron.training.data import open_data
    from megatron.training.setup import build_engine, make_streams
    from megatron.training.timeouts import OPENING_DATA, RunPhases
    from megatron.training.trainer import Trainer
    from megatron.training.vocabulary import with_tokenizer

    config = resolve_fusion(config, world.device_type)
    with closing(RunPhases(world, config)) as phases:
        # Tokenizer, layout of the chunks, dropout streams: scripts read them through get_args and similar functions.
        tokenizer, config = with_tokenizer(config, world.grid.host)
        if auto_placement.should_choose_placement(config):
            limit, dtype = auto_placement.min_usable_bytes(world), config.precision.dtype or ""
            config = auto_placement.with_placement(config, world.grid.topology, dtype, limit)
        streams = make_streams(config, world)
        global_vars.set_current(config, tokenizer, streams)

        # Data.
        with phases.during(OPENING_DATA):
            data = open_data(datasets_provider, config, world)

        # Model and engine.
        paths = None
        if config.parallel.pipeline_trace == TRACE_IN_RUN:  # the engine needs the folder of its trace
            paths = run_folder.choose(config, name, world)
            config = replace(config, parallel=replace(config.parallel, pipeline_trace=str(paths.folder / "trace")))
        bytes_before_model = device.peak_memory_bytes(world.device_type)
        engine = build_engine(config, world, streams, model_provider, forward_step)
        debuggers = run_callbacks.make_callbacks(run_callbacks.debugging_callbacks(config, world, engine, streams))
        phases.attach_engine(engine)
        # So far, the random generators had the same state on all ranks, because a model may initialise weights with
        # them. From now on they differ between replicas and stages, because a user's model may use them for dropout.
        rank = world.grid.topology.coordinate(world.rank)
        device.seed(hash((config.run.seed, rank.data, rank.pipe)) % 2**63)

        # Run folder. It is chosen after every step that may fail, because a failure would leave an empty folder.
        paths = paths or run_folder.choose(config, name, world)
        config = run_folder.with_checkpoint_format(config, paths)
        if config.checkpoint.is_deepspeed:
            engine.use_deepspeed()

        # Trainer. The checkpointer resumes in on_train_start (training/resume.py).
        with run_lock.hold_run_lock(paths.folder, world):
            num_parameters = start_table.count_parameters(engine.module, world)
            step_callbacks = run_callbacks.step_callbacks(config, num_parameters, bytes_before_model)
            reporting_callbacks = run_callbacks.reporting_callbacks(config, num_parameters)
            all_callbacks = [
                *([layout_check] if layout_check is not None else []),
                *run_callbacks.make_callbacks(run_callbacks.callbacks_before_save(config)),
                Checkpointer(paths, getattr(tokenizer, "identity", None), getattr(tokenizer, "probe", None)),
                *debuggers,
                *run_callbacks.make_callbacks(step_callbacks),
                *callbacks,
                *run_callbacks.make_callbacks(reporting_callbacks),
            ]
            Trainer(config, world, engine, data, paths.folder, all_callbacks, stop=stop, phases=phases).fit()


def _checkpoint_args(scan: Scan, defaults: Mapping[str, Any], run_name: Callable[[str], str]) -> dict[str, Any]:
    """Read the model and data settings from the --load or --resume run or checkpoint.

    Args:
        run_name: maps a model family to the name of its run.
    """
    from megatron.checkpoint import checkpoint_args, run_data  # takes 10 ms, which --help does not wait for

    name = run_name(scan.family)
    return {
        **checkpoint_args.load_checkpoint_args(scan, defaults, name),
        **run_data.load_data_args(scan, defaults, name),
    }
