"""Compare what the planner estimates with what short trainings measure, on CPU layouts of 1, 2 and 4 ranks.

    python benchmarks/plan.py --out runs/plan               # everything; wants an idle machine, about 8 minutes
    python benchmarks/plan.py --memory-only                 # bytes alone, which a busy machine does not change
    python benchmarks/plan.py --only "gpt2 1 rank" --cpu-time

For each number of ranks the machine is calibrated anew with so many at once, then each layout trains a few steps in
processes of its own. Step time must be within 15 % of the estimate, memory within 10 % on every rank. Memory is counted
in tensors (see benchmarks/plan_training.py). With --cpu-time both sides count processor time, in one thread: that
says something of the formulas on a busy machine, for layouts of one rank.

DIR gets table.txt, plan.json and the machines as machine-N.json. plan.json holds the machines, too: from it alone the
estimates can be made again (benchmarks/plan_training.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler that counts memory is talkative
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from benchmarks.machine import surroundings  # noqa: E402
from benchmarks.plan_cases import CASES, Case  # noqa: E402


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed, after one ahead (default: 5)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="layouts whose names hold one of these texts")
    parser.add_argument("--memory-only", action="store_true", help="count bytes; calibrate and time nothing")
    parser.add_argument("--cpu-time", action="store_true", help="processor time in one thread; layouts of one rank")
    parser.add_argument("--smoke", action="store_true", help="models of no use, a few steps: whether it runs at all")
    parser.add_argument("--strict", action="store_true", help="end with code 1 if a bar is not met")
    parser.add_argument("--list", action="store_true", help="name the layouts and end")
    parser.add_argument("--out", type=Path, default=Path("runs/plan"), metavar="DIR", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if args.memory_only and args.cpu_time:
        parser.error("--memory-only times nothing, so --cpu-time would do nothing: give one of the two")
    return args


def chosen(args: argparse.Namespace) -> list[Case]:
    """Return the layouts that the options ask for.

    Raises:
        SystemExit: none has such a name.
    """
    cases = [case for case in CASES if not args.only or any(text in case.name for text in args.only)]
    if args.cpu_time:
        cases = [case for case in cases if case.ranks == 1]
    if not cases:
        raise SystemExit(f"--only must name a layout{' of one rank' * args.cpu_time}, got {args.only}; see --list")
    return cases


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train the layouts, print and write the table."""
    args = parse_args(argv)
    cases = chosen(args)
    if args.list:
        print("\n".join(case.name for case in cases))
        return {}
    from benchmarks.plan_training import recorded, table

    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    machines = {} if args.memory_only else machines_of(sorted({case.ranks for case in cases}), args)
    for number, case in enumerate(cases, 1):
        rows.append(compare(case, machines.get(case.ranks), args))
        _log(f"{number} of {len(cases)}: {rows[-1]}")
    text = table(rows)
    print(text)
    result = {"surroundings": surroundings(), "load": os.getloadavg()}
    result |= recorded(rows, machines, is_smoke=args.smoke)
    (args.out / "table.txt").write_text(text + "\n")
    (args.out / "plan.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {args.out}/table.txt, plan.json")
    if args.strict and not all(row.is_met for row in rows):
        raise SystemExit("layouts beyond a bar: " + ", ".join(row.name for row in rows if not row.is_met))
    return result


def machines_of(numbers: Sequence[int], args: argparse.Namespace) -> dict[int, Any]:
    """Return this machine as each number of ranks at once finds it; write them down."""
    from megatron.planner.calibrate import calibrate
    from megatron.planner.microbenchmarks import TimingBudget

    pace = TimingBudget(by_cpu_time=args.cpu_time)
    if args.smoke:
        small = {"largest_side": 512, "numbers": 2**16, "widest": 128}
        pace = TimingBudget(window_s=0.01, windows=1, turns=1, by_cpu_time=args.cpu_time, **small)
    threads = 1 if args.cpu_time else None
    found = {}
    for ranks in numbers:
        found[ranks] = calibrate(ranks, "cpu", report=_log, pace=pace, round_s=pace.window_s, threads=threads)
        found[ranks].save(args.out / f"machine-{ranks}.json")
    return found


def compare(case: Case, machine: Any, args: argparse.Namespace) -> Any:
    """Train one layout; return its row. ``machine`` None: without time."""
    from benchmarks.plan_training import UNTIMED, estimate_of, row_of, train_rank
    from megatron.planner.spawn_ranks import run_ranks

    steps = 0 if machine is None else min(args.steps, 2) if args.smoke else args.steps
    threads = 1 if args.cpu_time else None
    ranks = run_ranks(case.ranks, train_rank, case, args.smoke, steps, threads=threads, deadline_s=600.0)
    estimate = estimate_of(case, machine or UNTIMED, is_smoke=args.smoke)
    return row_of(case, estimate, ranks, by_cpu_time=args.cpu_time)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
