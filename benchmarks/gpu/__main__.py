"""Test and benchmark the project on the GPU of this machine, and save the results.

    bash benchmarks/gpu/run.sh                          # all parts without results, at most 26 minutes
    bash benchmarks/gpu/run.sh --out seen train speed   # only the parts train and speed; results in the folder "seen"
    bash benchmarks/gpu/run.sh --device cpu             # a dry run with toy sizes, to test the benchmark itself

Each case ends with a line (passed, failed, skipped with a reason, not run for lack of time), and a failure does not
stop the other cases. Results are written to gpu-<device>-<date>.json in --out. A second start with the same device and
commit runs only missing cases; with --failed it also repeats failed ones. Unused time of a part is available to later
parts.
The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron.environment  # noqa: F401  isort: skip  reports missing packages in one line
from benchmarks.gpu.part import FAILED, FINAL, Machine, Part, Results, run_part

PLACES = {
    "tests": "checks.TESTS_PART",
    "train": "train.PART",
    "layouts": "checks.LAYOUTS_PART",
    "faults": "faults.PART",
    "speed": "speed.PART",
    "tables": "publish.PART",
}
"""Name of a part -> module and object that define it, in the order of execution."""
NAMES = tuple(PLACES)
UNKNOWN = "unknown"
"""Commit that ``run_record.commit`` returns if git is not available."""
TOTAL_S, LONGEST_S = 26 * 60.0, 8 * 60.0
"""Maximum seconds of all parts together, which is the sum of their budgets, and maximum seconds of a single part."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(NAMES)} (default: all, in this order)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="folder of the results (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run at toy sizes")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only cases whose names contain TEXT")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--again", action="store_const", dest="again", const=FINAL, help="repeat cases with a verdict")
    again.add_argument("--failed", action="store_const", dest="again", const=(FAILED,), help="repeat cases that failed")
    parser.set_defaults(again=())
    parser.add_argument(
        "--commit", default="", metavar="ID", help="commit of this code if git is not available: git rev-parse HEAD"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    parser.add_argument(
        "--minutes", type=float, default=TOTAL_S / 60, help="time limit of all parts together (default: %(default)g)"
    )
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.parts) - set(NAMES)):
        parser.error(f"a part must be one of {', '.join(NAMES)}, got {', '.join(unknown)}")
    return args


def part_of(name: str) -> Part:
    """Return the part ``name``; its module is imported only now."""
    module, _, part = PLACES[name].partition(".")
    return getattr(importlib.import_module(f"benchmarks.gpu.{module}"), part)


def machine_of(kind: str, work: Path, out: Path) -> Machine:
    """Return the machine to test.

    Raises:
        SystemExit: there is no GPU that torch can use.
    """
    import torch

    cores = len(os.sched_getaffinity(0))
    if kind == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machine(kind, "CPU", True, 1, memory, cores, work, out)
    if not torch.cuda.is_available():
        raise SystemExit(
            f"error: a GPU and a CUDA build of torch are required, got torch {torch.__version__} without a GPU. Use "
            "--device cpu to test this program"
        )
    facts = torch.cuda.get_device_properties(0)
    return Machine(kind, facts.name, False, torch.cuda.device_count(), facts.total_memory, cores, work, out)


def about(machine: Machine, commit: str = "") -> dict[str, Any]:
    """Return the facts that the results depend on.

    Args:
        commit: commit of the code, in place of git's answer.
    """
    import torch

    from benchmarks.turns import surroundings

    return {
        "device": machine.name,
        "kind": machine.kind,
        "is_dry": machine.is_dry,
        "date": datetime.date.today().isoformat(),
        "num_devices": machine.num_devices,
        "memory_bytes": machine.memory_bytes,
        "cores": machine.num_cores,
        "cuda": torch.version.cuda,
        **surroundings(),
        **({"commit": commit} if commit else {}),
    }


def share_of(parts: Sequence[Part], left_s: float) -> float:
    """Return the time limit in seconds of the first of ``parts``, if ``left_s`` seconds are left for all of them.

    The limit is the part's own budget, or the time that the other parts do not need if this is longer, but at most
    ``LONGEST_S``. The budgets of parts that always run are reserved.
    """
    first, *others = parts
    reserved_s = sum(part.budget_s for part in others if part.is_always)
    later_s = sum(part.budget_s for part in others)
    return max(0.0, min(LONGEST_S, left_s - reserved_s, max(first.budget_s, left_s - later_s)))


def main(argv: list[str] | None = None) -> int:
    """Run the parts; return the exit code."""
    args, start = parse_args(argv), time.monotonic()
    names = args.parts or list(NAMES)
    with tempfile.TemporaryDirectory(prefix="megatron-gpu-") as work:
        machine = machine_of(args.device, Path(work), args.out)
        if args.list:
            for name in names:
                print(*(f"{name}: {case.name}" for case in part_of(name).cases(machine)), sep="\n")
            return 0
        facts = about(machine, args.commit)
        results = machine.results = Results.begin_or_go_on(args.out, facts)
        results.save()
        print(f"{machine.name}, commit {facts['commit']}, results in {results.path}", flush=True)
        if facts["commit"] == UNKNOWN:
            print("the commit is unknown because git is not available. Set --commit to record it", flush=True)
        parts = [part_of(name) for name in names]
        for part_idx, part in enumerate(parts):
            left_s = args.minutes * 60 - (time.monotonic() - start)
            part = replace(part, budget_s=share_of(parts[part_idx:], left_s))
            run_part(part, machine, results, again=args.again, only=args.only, say=lambda line: print(line, flush=True))
    return summary(results, names)


def summary(results: Results, names: list[str]) -> int:
    """Print the number of cases of each part by verdict; return 1 if one failed."""
    code = 0
    for name in names:
        verdicts = results.of(name)
        counts = {status: sum(v.status == status for v in verdicts.values()) for status in (*FINAL, "not run")}
        print(f"== {name}: " + ", ".join(f"{count} {status}" for status, count in counts.items() if count))
        code |= int(counts[FAILED] > 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
