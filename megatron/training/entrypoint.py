"""``pretrain``: the function that scripts call; command line, dry run, exit guard.

This module imports neither torch nor DeepSpeed, so that --help and --dry-run answer at once; ``training.start``
brings them in when the run begins.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron import training
from megatron.arguments import parse
from megatron.arguments.scan import Scan
from megatron.arguments.validate import find_problems
from megatron.config import Config, elastic
from megatron.errors import ConfigError, JobError, raise_all
from megatron.runtime import rank_status
from megatron.runtime.exit_guard import guard, trace_crashes
from megatron.runtime.exit_signals import StopRequests
from megatron.runtime.rank_env import has_world, name_of, raise_own, set_rank_environment


def refit(config: Config, span: elastic.Span, num_ranks: int) -> tuple[Config, int]:
    """Return ``config`` for ``num_ranks`` of an elastic job, and how many of them have work; the same on each.

    Raises:
        ConfigError: there is no layout for them.
    """
    elastic.check_fewest(config, span)
    problems: list[str] = []
    for count in elastic.replica_counts(config, span, num_ranks):
        fitted, used = elastic.with_replicas(config, span, count), count * config.parallel.replica_size
        found = find_problems(fitted, used)
        if not found:
            note = elastic.describe(fitted, span, num_ranks, count)
            return replace(fitted, notes=(*fitted.notes, note)), used
        problems = problems or found
    raise_all([f"with {num_ranks} of {span.most} ranks: {problem}" for problem in problems])
    raise ConfigError(
        f"no number of replicas on {num_ranks} of {span.most} ranks shares out the global batch by micro-batches of "
        f"{config.batch.batch_size}. Lower --batch-size, or choose a global batch with more divisors"
    )


def _checkpoint_args(found: Scan, defaults: Mapping[str, Any], run_name: Callable[[str], str]) -> dict[str, Any]:
    """Return sizes and data settings that come from the run or folder of --load or --resume.

    Args:
        run_name: the name of a run, given the family of its model.
    """
    from megatron.checkpoint import checkpoint_args, run_data  # 10 ms, which --help does not wait

    name = run_name(found.family)
    return {**checkpoint_args.bring(found, defaults, name), **run_data.bring_data(found, defaults, name)}


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
    """Train, from the command line to the test loss. Collective; a failure ends the process with the job's exit code.

    Args:
        train_valid_test_datasets_provider: given the samples that the three splits will be asked for, returns three
            data sets (or None); a data set has an item for every index. Called only on ranks that read data.
        model_provider: returns the model: a module, or with 2 and more stages a PipelineModule.
        forward_step: given (data iterator or None, model), returns (loss, named losses). Not used with a pipeline.
        extra_args_provider: adds flags of the script's own to an argparse parser.
        args_defaults: flag names with values that hold where the user gives none.
        name: of the run folder, ``runs/<name>-<time>``; None: the script's, without ``pretrain_``. With ``--model`` of
            another family, the name of that family.
        family: "gpt2", "t5", "llama", "mpt" or "bert": which flags there are; a model of your own takes those of the
            one it resembles.
        accepts_model: ``--model`` may name another decoder than ``family``: for providers that build any of them.
        callbacks: of the script's own: ``megatron.training.Callback``, made alike on every rank.
    """
    unsettled = set_rank_environment(os.environ)  # ahead of all that asks for RANK
    started = float(os.environ.get("MEGATRON_STARTED") or time.monotonic())  # of the job's first start on this machine
    names = {"who": name_of(os.environ)}

    def run_name(trained: str) -> str:
        if trained != family:
            return trained
        return name or Path(sys.argv[0]).stem.removeprefix("pretrain_")

    stop = StopRequests()

    def main() -> None:
        if not has_world(os.environ):
            raise_own(unsettled)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        span = elastic.span_of(os.environ)
        defaults = dict(args_defaults or {})
        try:
            config = parse(
                sys.argv[1:],
                world_size=span.most if span else world_size,
                extra_args_provider=extra_args_provider,
                defaults=defaults,
                family=family,
                accepts_model=accepts_model,
                checkpoint_args=partial(_checkpoint_args, run_name=run_name),
            )
        except JobError:
            if "--dry-run" not in sys.argv:  # which starts no ranks
                raise_own(unsettled)
            raise
        if config.run.dry_run:
            from megatron.training.dry_run import dry_run  # numpy and rich, which --help does not need

            dry_run(config, world_size, Path(sys.argv[0]).name, run_name(config.family))
            return
        raise_own(unsettled)
        if span is not None:
            config, world_size = refit(config, span, world_size)
            if int(os.environ["RANK"]) >= world_size:
                rank_status.note_state(rank_status.IDLE)
                return
            os.environ["WORLD_SIZE"] = str(world_size)
        providers = (train_valid_test_datasets_provider, model_provider, forward_step)
        rank_status.note_state(rank_status.RUNNING)
        training.configure_device(config)  # before DeepSpeed is imported
        training.start(config, names, *providers, run_name(config.family), started, stop, callbacks)
        rank_status.note_state("")

    stop.listen()
    trace_crashes()
    rank_status.open_page()
    guard(main, lambda: names["who"])
