"""What ``same_program.py`` times in each of two checkouts: a step of training at each line of standard input.

    cd CHECKOUT && PYTHONPATH=$PWD python -P THIS_FILE step_time gpt2

It is run by its path, so it lies in one checkout and measures the one that PYTHONPATH names. Prints "ready" after a
step that warms up, then a JSON object of seconds by name for each line that it reads; ends with its input. Modules have
moved since the tag before-house: both places are known.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

SCHEDULES = ("1f1b", "zb-h1")
BALANCED = (0, 11, 19)
"""5 layers and 3: the bounds, in halves of layers, that balance the model on two equal cores."""


def step_time(family: str, serve: Callable[..., None]) -> None:
    """A step of our engine without a pipeline, in this process."""
    import torch

    program = importlib.import_module("benchmarks.step_time")
    flags = f"--model {family} --contenders ours --rounds 1 --steps 1 --batch-size 4 --product-side 256"
    work = program.work_of(program.parse_args(flags.split()))
    torch.set_num_threads(work.threads)
    ours = first_of("benchmarks.turns.MODULES", "benchmarks.contenders.CONTENDERS")[family]
    contenders = importlib.import_module(ours).CONTENDERS if isinstance(ours, str) else ours  # a module, before
    step = contenders["ours"](work.sizes, work.batch_size, work.kind, work.dtype)

    def take(number: int) -> dict[str, float]:
        batch = work.sizes.batch(work.batch_size, number)
        start = time.perf_counter()
        float(step(batch))
        return {"step": time.perf_counter() - start}

    serve(take)


def pipeline(_: str, serve: Callable[..., None]) -> None:
    """A step of our pipeline engine on two ranks, by schedule."""
    benchmark = importlib.import_module("benchmarks.pipeline")
    if hasattr(benchmark, "team_of"):
        model = importlib.import_module("benchmarks.pipe.model")
        new_case = model.Case(name="m=4", sizes=benchmark.MAIN, micro_batch_size=4, num_micro_batches=4)
        with ExitStack() as stack:
            new_teams = {}
            for name in SCHEDULES:
                one = model.Contender(name=name, kind="ours", partition=BALANCED, schedule=name)
                new_teams[name] = stack.enter_context(closing(benchmark.team_of(new_case, one, "forkserver")))
            serve(lambda step: {name: max(a["seconds"] for a in answers_of(t, step)) for name, t in new_teams.items()})
        return
    cases_of = first_of("benchmarks.pipeline.cases_of", "benchmarks.pipe.cases.cases_of")
    contender = first_of("benchmarks.pipe.model.Contender", "benchmarks.pipe.case.Contender")
    assembled = first_of("benchmarks.pipe.cuts.assembled", "benchmarks.pipe.teams.assembled")
    (case,) = cases_of("gpt2", ["main"], [4], is_smoke=False)
    ours = [contender(name=each, kind="ours", layers="half", partition=BALANCED, schedule=each) for each in SCHEDULES]
    with assembled(case, ours, "forkserver") as teams:

        def take(number: int) -> dict[str, float]:
            return {name: max(each["seconds"] for each in answers_of(team, number)) for name, team in teams.items()}

        serve(take)


def answers_of(team: Any, number: int) -> Any:
    """Let all ranks take a step; before, they were asked by an ``Order``."""
    try:
        order = importlib.import_module("benchmarks.pipe.worker").Order
    except ImportError:
        return team.ask("run", number, 1)
    return team.ask(order("run", number, 1))


def first_of(*names: str) -> Any:
    """Return what the first of ``names`` that exists in this checkout stands for.

    Raises:
        ImportError: none does.
    """
    missing = []
    for name in names:
        module, _, part = name.rpartition(".")
        try:
            return getattr(importlib.import_module(module), part)
        except (ImportError, AttributeError) as error:
            missing.append(str(error))
    raise ImportError(f"PYTHONPATH must be a checkout that has one of {', '.join(names)}, got: {'; '.join(missing)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Serve turns on standard output, which is kept free of what engines print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("family", choices=("gpt2", "t5", "llama"), help="of step_time; a pipeline's is gpt2")
    args = parser.parse_args(argv)
    if args.benchmark == "pipeline" and args.family != "gpt2":
        parser.error(f"a pipeline is timed with gpt2, got {args.family}")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def serve(take: Callable[[int], dict[str, float]]) -> None:
        take(0)
        print("ready", file=answers, flush=True)
        for number, _ in enumerate(sys.stdin, 1):
            print(json.dumps(take(number)), file=answers, flush=True)

    BENCHMARKS[args.benchmark](args.family, serve)


BENCHMARKS = {"step_time": step_time, "pipeline": pipeline}

if __name__ == "__main__":
    main()
