"""Both checkouts timed in turns, by benchmarks that each of them has."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from benchmarks.same_program_parts.checkout import Check, Checkout, Found, Job
from benchmarks.same_program_parts.compare import median_interval

SPEED_BAR, HELP_BAR_S = 1.02, 0.35


def speed(job: Job) -> Iterator[Check]:
    """Time both in turns, the order changing from pair to pair."""
    for name in job.args.benchmarks:
        measure, cases = BENCHMARKS[name]
        for case in cases:
            yield f"{name} {case}".strip(), partial(same_speed, job, partial(measure, case=case))


def same_speed(job: Job, measure: Callable[..., dict[str, float]]) -> Found:
    """Compare the seconds of what ``measure`` names, in pairs."""
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for number in range(job.args.pairs):
        turns = [job.here, job.other][:: 1 if number % 2 else -1]
        took = {where: measure(job, where) for where in turns}
        shared: dict[str, list[str]] = {}
        for name in took[job.here].keys() & took[job.other].keys():
            shared.setdefault(" ".join(name.split()[:2]), []).append(name)  # cuts of a schedule count as one
        for what, names in shared.items():
            each = [took[job.here][name] / took[job.other][name] for name in names]
            ratios.setdefault(what, []).append(statistics.median(each))
            seconds.setdefault(what, []).append(statistics.median(took[job.here][name] for name in names))
    return judge_speed(ratios, seconds, job.args.pairs)


def judge_speed(ratios: Mapping[str, list[float]], seconds: Mapping[str, list[float]], pairs: int) -> Found:
    """Return what is slower than allowed, or was compared in too few pairs to say."""
    found, told = [], []
    for name, each in sorted(ratios.items()):
        middle, low, high = median_interval(each)
        text = f"{name}: {middle:.3f} times the other's time, 95 % interval {low:.3f} ... {high:.3f}, {len(each)} pairs"
        if name == "--help":
            text += f", {(took := statistics.median(seconds[name])):.2f} s of {HELP_BAR_S}"
            found += [f"--help takes {took:.2f} s, allowed {HELP_BAR_S}"] if took > HELP_BAR_S else []
        found += [f"{name}: the interval must lie below {SPEED_BAR}, ends at {high:.3f}"] if high >= SPEED_BAR else []
        told.append(text)
    if len(max(ratios.values(), key=len, default=[])) < pairs:
        found.append(f"{pairs} pairs must be comparable, got { ({name: len(each) for name, each in ratios.items()}) }")
    return found, "\n    ".join(told)


def step_time(job: Job, where: Checkout, case: str) -> dict[str, float]:
    out = job.folder / "step_time.json"
    flags = f"--model {case} --contenders ours --rounds 3 --steps 2 --batch-size 4 --product-side 256 --json {out}"
    if job.args.tiny:
        flags += " --num-layers 1 --hidden-size 64 --vocab-size 512"
    where.run(f"benchmarks/step_time.py {flags}")
    return {"step": statistics.median(json.loads(out.read_text())["contenders"]["ours"]["turns_s"])}


def pipeline(job: Job, where: Checkout, case: str) -> dict[str, float]:
    """Return seconds by schedule and cut: cuts, which are chosen by times, are compared where both have them."""
    out = job.folder / "pipeline"
    flags = f"--cases main --micro-batches 8 --cuts 3 --only {case} --rounds 3 --out {out}"
    where.run(["benchmarks/pipeline.py", *flags.split(), *(["--smoke"] if job.args.tiny else [])])
    turns: dict[str, list[float]] = {}
    for row in map(json.loads, (out / "turns.jsonl").read_text().splitlines()):
        if row["what"] == "turn" and row["counts"]:
            turns.setdefault(row["contender"], []).append(max(row["seconds"]))
    return {name: statistics.median(each) for name, each in turns.items()}


def start_up(job: Job, where: Checkout, case: str) -> dict[str, float]:
    found = json.loads(where.run("benchmarks/start_up.py --runs 1").splitlines()[0])
    return {name: row["wall_s"] for name, row in found.items() if isinstance(row, dict) and "wall_s" in row}


BENCHMARKS = {
    "step_time": (step_time, ("gpt2", "t5")),
    "pipeline": (pipeline, ("1f1b", "zb-h1")),
    "start_up": (start_up, ("",)),
}
