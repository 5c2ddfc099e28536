"""Timed worker of ``same_program.py`` in each of two checkouts: one training step per line of standard input.

    cd CHECKOUT && PYTHONPATH=$PWD python -P THIS_FILE step_time gpt2

The file measures the checkout in PYTHONPATH; it may itself be in another checkout, because it is run by its path. It
prints "ready" after a warm-up step, then a JSON object of name -> seconds for each line that it reads. It exits when
its input ends.
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

SCHEDULES = ("1f1b", "zb-h1")
BALANCED = (0, 11, 19)
"""Bounds of the stages in layers of pipe/model.py (5 and 3 transformer layers), which balance two equal cores."""


def step_time(family: str, serve: Callable[..., None]) -> None:
    """Time a step of our engine without a pipeline, in this process."""
    import torch

    program = importlib.import_module("benchmarks.step_time")
    flags = f"--model {family} --contenders ours --rounds 1 --steps 1 --batch-size 4 --product-side 256"
    work = program.work_of(program.parse_args(flags.split()))
    torch.set_num_threads(work.threads)
    contenders = importlib.import_module("benchmarks.contenders").CONTENDERS[family]
    step = contenders["ours"](work.sizes, work.batch_size, work.kind, work.dtype)

    def run_turn(step_idx: int) -> dict[str, float]:
        batch = work.sizes.batch(work.batch_size, step_idx)
        start_time = time.perf_counter()
        float(step(batch))
        return {"step": time.perf_counter() - start_time}

    serve(run_turn)


def pipeline(_: str, serve: Callable[..., None]) -> None:
    """Time a step of our pipeline engine on two ranks, for each schedule."""
    benchmark, model = (importlib.import_module(f"benchmarks.{name}") for name in ("pipeline", "pipe.model"))
    with ExitStack() as stack:
        if hasattr(benchmark, "team_of"):
            case = model.Case(name="m=4", sizes=benchmark.MAIN, micro_batch_size=4, num_micro_batches=4)
            teams = {}
            for name in SCHEDULES:
                contender = model.Contender(name=name, kind="ours", partition=BALANCED, schedule=name)
                teams[name] = stack.enter_context(closing(benchmark.team_of(case, contender, "forkserver")))
        else:  # the checkout is older than the current interface of the benchmark
            cuts = importlib.import_module("benchmarks.pipe.cuts")
            (case,) = benchmark.cases_of("gpt2", ["main"], [4], is_smoke=False)
            settings = {"kind": "ours", "layers": "half", "partition": BALANCED}
            ours = [model.Contender(name=schedule, schedule=schedule, **settings) for schedule in SCHEDULES]
            teams = stack.enter_context(cuts.assembled(case, ours, "forkserver"))

        def run_turn(step: int) -> dict[str, float]:
            return {name: max(answer["seconds"] for answer in team.ask("run", step, 1)) for name, team in teams.items()}

        serve(run_turn)


def main(argv: Sequence[str] | None = None) -> None:
    """Answer each line of input with a timed turn. The output of the engines is kept out of standard output."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("family", choices=("gpt2", "t5", "llama"), help="model family; pipeline supports only gpt2")
    args = parser.parse_args(argv)
    if args.benchmark == "pipeline" and args.family != "gpt2":
        parser.error(f"pipeline supports only gpt2, got {args.family}")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def serve(run_turn: Callable[[int], dict[str, float]]) -> None:
        run_turn(0)
        print("ready", file=answers, flush=True)
        for step, _ in enumerate(sys.stdin, 1):
            print(json.dumps(run_turn(step)), file=answers, flush=True)

    BENCHMARKS[args.benchmark](args.family, serve)


BENCHMARKS = {"step_time": step_time, "pipeline": pipeline}

if __name__ == "__main__":
    main()
