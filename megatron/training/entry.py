"""``pretrain``: what a script calls with its data sets, its model and its forward step.

This module imports neither torch nor DeepSpeed, so that --help and --dry-run answer at once; ``training.start`` brings
them in when the run begins.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron import training
from megatron.arguments import parse
from megatron.errors import JobError
from megatron.training import position
from megatron.training.failure import guard, trace_crashes
from megatron.training.plan import dry_run
from megatron.training.started_by import adopt, has_world, name_of, raise_own
from megatron.training.stop import StopRequests


def pretrain(
    train_valid_test_datasets_provider: Callable[[list[int]], tuple[Any, Any, Any]],
    model_provider: Callable[[], Any],
    forward_step: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
    *,
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    name: str | None = None,
    family: str = "gpt2",
) -> None:
    """Train, from the command line to the test loss. Collective; a failure ends the process with the job's exit code.

    Args:
        train_valid_test_datasets_provider: given the samples that the three splits will be asked for, returns three
            data sets (or None); a data set has an item for every index. Called only on ranks that read data.
        model_provider: returns the model: a module, or with 2 and more stages a PipelineModule.
        forward_step: given (data iterator or None, model), returns (loss, named losses). Not used with a pipeline.
        extra_args_provider: adds flags of the script's own to an argparse parser.
        args_defaults: flag names with values that hold where the user gives none.
        name: of the run folder, ``runs/<name>-<time>``; None: the script's, without ``pretrain_``.
        family: "gpt2", "t5", "llama", "mpt" or "bert": which flags there are; a model of your own takes those of the
            one it resembles.
    """
    unsettled = adopt(os.environ)  # ahead of all that asks for RANK
    started = float(os.environ.get("MEGATRON_STARTED") or time.monotonic())  # of the job's first start on this machine
    names = {"who": name_of(os.environ)}

    run_name = name or Path(sys.argv[0]).stem.removeprefix("pretrain_")
    stop = StopRequests()

    def main() -> None:
        if not has_world(os.environ):
            raise_own(unsettled)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        defaults = dict(args_defaults or {})
        try:
            config = parse(
                sys.argv[1:],
                world_size=world_size,
                extra_args_provider=extra_args_provider,
                defaults=defaults,
                family=family,
            )
        except JobError:
            raise_own(unsettled)
            raise
        if config.run.dry_run:
            dry_run(config, world_size)
            return
        raise_own(unsettled)
        providers = (train_valid_test_datasets_provider, model_provider, forward_step)
        position.note_state(position.RUNNING)
        training.configure_device(config)  # before DeepSpeed is imported
        training.start(config, names, *providers, run_name, started, stop)
        position.note_state("")

    stop.listen()
    trace_crashes()
    position.open_page()
    guard(main, lambda: names["who"])
