"""Test and benchmark the project on the GPU of this machine, and save the results.

    bash benchmarks/gpu/run.sh                          # cases without results, at most 9 minutes; start it again
    bash benchmarks/gpu/run.sh --minutes 26             # all parts in one start
    bash benchmarks/gpu/run.sh --out seen train speed   # only the parts train and speed; results in the folder "seen"
    bash benchmarks/gpu/run.sh --device cpu             # a dry run with toy sizes, to test the benchmark itself

Each case ends with a line (passed, failed, skipped with a reason, not run for lack of time), and a failure does not
stop the other cases. Results are written to gpu-<device>-<date>.json in --out. A second start with the same device and
commit runs only missing cases; with --failed it also repeats failed ones. If --minutes is shorter than the budgets of
all parts together, each part gets its proportion. Unused time of a part is available to later parts.

The complete output of failed cases is archived in gpu-<device>-<date>-logs.tgz in --out. The exit code is 1 if a
selected case failed, otherwise 75 if one was not run. ``benchmarks/gpu/first.sh`` runs the most important cases in 11
minutes.
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
from benchmarks.gpu.part import (
    FAILED,
    FINAL,
    NOT_RUN,
    NOT_RUN_CODE,
    ROOT,
    Machine,
    Part,
    Results,
    is_selected,
    run_part,
)
from benchmarks.gpu.references import REFERENCES_DIR

PART_OBJECTS = {
    "speed": "speed.PART",
    "tests": "checks.TESTS_PART",
    "train": "train.PART",
    "layouts": "checks.LAYOUTS_PART",
    "faults": "faults.PART",
    "tables": "publish.PART",
}
"""Name of a part -> module and object that define it, in the order of execution."""
PART_NAMES = tuple(PART_OBJECTS)
UNKNOWN = "unknown"
"""Commit that ``run_record.commit`` returns if git is not available."""
TOTAL_S, MAX_PART_S = 9 * 60.0, 8 * 60.0
"""Default maximum of the seconds of all parts together, below the 10 minutes that a command may take on lent machines,
and maximum seconds of a single part."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PART_NAMES)} (default: all, in this order)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="folder of the results (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run at toy sizes")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="run only cases whose names contain TEXT; may be repeated to select the cases of several texts",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="TEXT",
        help="do not run cases whose names contain TEXT; may be repeated",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder of the output of all commands (default: a temporary folder)"
    )
    parser.add_argument(
        "--references",
        type=Path,
        default=ROOT / REFERENCES_DIR,
        metavar="DIR",
        help="folder of CPU runs that `benchmarks/gpu/first.sh prepare` has computed (default: %(default)s)",
    )
    repeat_group = parser.add_mutually_exclusive_group()
    repeat_group.add_argument(
        "--again", action="store_const", dest="again", const=FINAL, help="repeat cases with a verdict"
    )
    repeat_group.add_argument(
        "--failed", action="store_const", dest="again", const=(FAILED,), help="repeat cases that failed"
    )
    parser.set_defaults(again=())
    parser.add_argument("--known", action="store_true", help="do not run cases that have no verdict yet")
    parser.add_argument(
        "--commit", default="", metavar="ID", help="commit of this code if git is not available: git rev-parse HEAD"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    parser.add_argument(
        "--minutes", type=float, default=TOTAL_S / 60, help="time limit of all parts together (default: %(default)g)"
    )
    parser.add_argument(
        "--limit-factor",
        type=float,
        default=1.0,
        metavar="F",
        help="factor of the time limits of cases and parts, but not of --minutes, for a busy machine (default: "
        "%(default)g)",
    )
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.parts) - set(PART_NAMES)):
        parser.error(f"a part must be one of {', '.join(PART_NAMES)}, got {', '.join(unknown)}")
    return args


def load_part(name: str) -> Part:
    """Return the part ``name``; its module is imported only now."""
    module, _, object_name = PART_OBJECTS[name].partition(".")
    return getattr(importlib.import_module(f"benchmarks.gpu.{module}"), object_name)


def make_machine(device_type: str, work: Path, out: Path) -> Machine:
    """Return the machine to test.

    Raises:
        SystemExit: there is no GPU that torch can use.
    """
    import torch

    num_cores = len(os.sched_getaffinity(0))
    if device_type == "cpu":
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machine(device_type, "CPU", True, 1, memory_bytes, num_cores, work, out)
    if not torch.cuda.is_available():
        raise SystemExit(
            f"error: a GPU and a CUDA build of torch are required, got torch {torch.__version__} without a GPU. Use "
            "--device cpu to test this program"
        )
    gpu_properties = torch.cuda.get_device_properties(0)
    return Machine(
        device_type,
        gpu_properties.name,
        False,
        torch.cuda.device_count(),
        gpu_properties.total_memory,
        num_cores,
        work,
        out,
    )


def describe_run(machine: Machine, commit: str = "") -> dict[str, Any]:
    """Return the facts that the results depend on.

    Args:
        commit: commit of the code, used instead of the commit that git reports.
    """
    import torch

    from benchmarks.turns import measurement_info

    return {
        "device": machine.name,
        "kind": machine.device_type,
        "is_dry": machine.is_dry,
        "date": datetime.date.today().isoformat(),
        "num_devices": machine.num_devices,
        "memory_bytes": machine.memory_bytes,
        "cores": machine.num_cores,
        "cuda": torch.version.cuda,
        **measurement_info(),
        **({"commit": commit} if commit else {}),
    }


def time_limit_s(parts: Sequence[Part], remaining_s: float, limit_factor: float = 1.0) -> float:
    """Return the time limit in seconds of the first of ``parts``, if ``remaining_s`` seconds are left for all of them.

    The limit is in proportion to the budgets, at most ``MAX_PART_S``. The budgets of parts that always run are
    reserved.

    Args:
        limit_factor: factor of ``MAX_PART_S`` and of the reserved budgets.
    """
    current_part, *others = parts
    max_part_s = MAX_PART_S * limit_factor
    reserved_s = limit_factor * sum(other_part.budget_s for other_part in others if other_part.always_runs)
    if current_part.always_runs:
        return max(0.0, min(max_part_s, limit_factor * current_part.budget_s, remaining_s))
    total_s = sum(part.budget_s for part in parts if not part.always_runs)
    proportion = current_part.budget_s / total_s if total_s else 0.0
    return max(0.0, min(max_part_s, proportion * (remaining_s - reserved_s)))


def main(argv: list[str] | None = None) -> int:
    """Run the parts; return the exit code."""
    args, start = parse_args(argv), time.monotonic()
    names = args.parts or list(PART_NAMES)
    with tempfile.TemporaryDirectory(prefix="megatron-gpu-") as work:
        machine = make_machine(args.device, Path(work), args.out)
        machine.logs, machine.references = args.logs or Path(work) / "logs", args.references
        machine.limit_factor = args.limit_factor
        if args.list:
            for name in names:
                cases = load_part(name).cases(machine)
                selected = [case for case in cases if is_selected(case.name, only=args.only, skip=args.skip)]
                print(*(f"{name}: {case.name}" for case in selected), sep="\n")
            return 0
        run_info = describe_run(machine, args.commit)
        results = machine.results = Results.continue_or_start(args.out, run_info)
        results.save()
        print(f"{machine.name}, commit {run_info['commit']}, results in {results.path}", flush=True)
        if run_info["commit"] == UNKNOWN:
            print("the commit is unknown because git is not available. Set --commit to record it", flush=True)
        parts = [load_part(name) for name in names]
        for part_idx, current_part in enumerate(parts):
            remaining_s = args.minutes * 60 - (time.monotonic() - start)
            limit_s = time_limit_s(parts[part_idx:], remaining_s, args.limit_factor)
            current_part = replace(current_part, budget_s=limit_s)
            run_part(
                current_part,
                machine,
                results,
                repeated_statuses=args.again,
                only=args.only,
                skip=args.skip,
                known_only=args.known,
                print_line=lambda line: print(line, flush=True),
            )
    return summary(results, parts, only=args.only, skip=args.skip)


def summary(results: Results, parts: Sequence[Part], *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> int:
    """Print the number of selected cases of each part by verdict; return the exit code.

    Args:
        only, skip: texts that select cases; see ``run_part``.

    Returns:
        1 if a selected case failed, otherwise ``NOT_RUN_CODE`` if one was not run, otherwise 0.
    """
    statuses: set[str] = set()
    for part in parts:
        selected = [
            verdict.status
            for name, verdict in results.of(part.name).items()
            if part.always_runs or is_selected(name, only=only, skip=skip)
        ]
        counts = {status: selected.count(status) for status in (*FINAL, NOT_RUN)}
        print(f"== {part.name}: " + ", ".join(f"{count} {status}" for status, count in counts.items() if count))
        statuses.update(selected)
    return 1 if FAILED in statuses else NOT_RUN_CODE if NOT_RUN in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
