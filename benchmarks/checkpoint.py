"""Save, stall, verification, load and reshard of one state, beside torch.save and DeepSpeed's own, in one run.

    python benchmarks/checkpoint.py --json checkpoint.json
    python benchmarks/checkpoint.py --ranks 1 --rounds 3 --skip-run

Weights in fp32 and AdamW's moments are cut over tensor ranks, so each rank holds and writes its part, whoever saves.
Contenders take turns in the same processes, the order rotates, each load is checked for every bit; medians over rounds
are reported and ratios within rounds. What is read has just been written, so it comes from memory. Bars:

| what | at most |
|---|---|
| a save with checksums, flush and commit, over torch.save and a flush of its file | 1.3 |
| the time that an async save stalls training, over the same | 0.45 |
| verification of every byte, over the save | 0.25 |
| the stall, over the 30 minutes between saves of a run that says nothing of them | 0.01 |

Last a small run of GPT-2 saves in the background, and its own metrics tell the stall.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.checkpoint_contenders import Task, run_team
from benchmarks.machine import surroundings
from benchmarks.turns import quartiles
from megatron.training.callbacks.metrics_writer import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"NHIDDEN": "256", "GAS": "4", "GPUS_PER_NODE": "1", "pp_size": "1", "mp_size": "1"}
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Stalls:
    """What a run told of its saves: seconds that training stood still, and their share of the time between saves."""

    seconds: list[float]
    shares: list[float]
    staged_bytes: int


def run_small(folder: Path, steps: int, interval: int) -> Stalls:
    """Train GPT-2 by ``run_gpt2.sh`` for ``steps`` steps, saving every ``interval``.

    Raises:
        RuntimeError: the run failed, or told of no save.
    """
    environment = {**os.environ, **SETTINGS, "TRAIN_ITERS": str(steps), "CHECKPOINT_PATH": str(folder)}
    words = "--vocab-size 8192 --async-save --keep-last 1 --eval-iters 0 --progress plain --save-interval".split()
    done = subprocess.run(
        ["bash", str(ROOT / "run_gpt2.sh"), *words, str(interval)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the small run ended with code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    staged = [record for record in read_metrics(folder / "metrics.jsonl") if "save_stall_s" in record]
    if not staged:
        raise RuntimeError(f"the small run told of no save in {steps} steps, saving every {interval}")
    return Stalls(
        seconds=[record["save_stall_s"] for record in staged],
        shares=[record["save_stall_share"] for record in staged],
        staged_bytes=staged[-1]["staged_bytes"],
    )


@dataclass(frozen=True)
class Ceiling:
    """A ratio that must not be passed, and what was found: quartiles over rounds."""

    name: str
    at_most: float
    quartiles: tuple[float, float, float]

    @classmethod
    def of(cls, name: str, at_most: float, ours: Sequence[float], theirs: Sequence[float]) -> Ceiling:
        """Return the bar for ``ours`` over ``theirs``, divided round by round."""
        return cls(name, at_most, quartiles([a / b for a, b in zip(ours, theirs, strict=True)]))

    @property
    def is_met(self) -> bool:
        """Whether the median stays below it."""
        return self.quartiles[1] <= self.at_most

    @property
    def text(self) -> str:
        low, middle, high = self.quartiles
        verdict = "met" if self.is_met else "NOT MET"
        return f"{self.name:58}{middle:9.5f} (quartiles {low:.5f}, {high:.5f})  at most {self.at_most:g}: {verdict}"


def bars_of(seconds: dict[str, list[float]], interval_s: float) -> list[Ceiling]:
    """Return the bars of one team from the seconds of its rounds.

    Args:
        interval_s: between two saves of a run that says nothing about them.
    """
    flushed, save, stall = seconds["torch.save + fsync"], seconds["save"], seconds["stall of an async save"]
    return [
        Ceiling.of("save / (torch.save + fsync)", 1.3, save, flushed),
        Ceiling.of("stall of an async save / (torch.save + fsync)", 0.45, stall, flushed),
        Ceiling.of("verification / save", 0.25, seconds["verification"], save),
        Ceiling.of(f"stall / {interval_s / 60:g} minutes", 0.01, stall, [interval_s] * len(stall)),
    ]


DEFAULT_INTERVAL_S = 30.0 * 60.0
SMOKE = "--megabytes 2 --rounds 1 --skip-run"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="processes of each team (default: 1 2)")
    parser.add_argument("--megabytes", type=float, default=450.0, help="of the whole state, about (default: 450)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender that count (default: 7)")
    parser.add_argument("--folder", type=Path, help="write below it, on the disk that matters (default: the system's)")
    parser.add_argument("--skip-run", action="store_true", help="leave out the small run")
    parser.add_argument("--steps", type=int, default=24, help="of the small run, which saves four times (default: 24)")
    parser.add_argument("--smoke", action="store_true", help=f"a run of seconds that says nothing: {SMOKE}")
    parser.add_argument("--json", type=Path, help="write the result here too")
    words = list(sys.argv[1:] if argv is None else argv)
    return parser.parse_args([*SMOKE.split(), *words] if "--smoke" in words else words)


def measure(args: argparse.Namespace, folder: Path, start_method: str) -> dict[str, Any]:
    """Return what each team and the small run told."""
    num_bytes, cores = int(args.megabytes * 1e6), len(os.sched_getaffinity(0))
    teams, saved = {}, {}
    for ranks in {*args.ranks, *map(_other, args.ranks)}:
        saved[ranks] = run_team(Task(ranks, num_bytes, 0, 1, folder / f"{ranks}-saves"), start_method).saved
    for ranks in args.ranks:
        threads, other = max(1, cores // ranks), saved[_other(ranks)]
        task = Task(ranks, num_bytes, args.rounds, threads, folder / f"{ranks}-ranks", other)
        teams[ranks] = run_team(task, start_method)
    result: dict[str, Any] = {"teams": teams, "bars": {}}
    for ranks, told in teams.items():
        result["bars"][ranks] = bars_of(told.seconds, DEFAULT_INTERVAL_S)
    if not args.skip_run:
        result["small run"] = run_small(folder / "run", args.steps, max(1, args.steps // 4))
    return result


def _other(ranks: int) -> int:
    """Return how many ranks saved what a team of ``ranks`` reshards."""
    return 1 if ranks > 1 else 2


def table(result: dict[str, Any]) -> str:
    """Return the result as lines of text."""
    lines = []
    for ranks, told in result["teams"].items():
        lines.append(f"{ranks} rank{'s' if ranks > 1 else ''}, {told.state_bytes / 1e6:,.0f} MB")
        plain = statistics.median(told.seconds["torch.save + fsync"])
        for name, values in told.seconds.items():
            middle = statistics.median(values)
            rate = told.state_bytes / 1e6 / middle
            lines.append(f"  {name:38}{middle:9.3f} s{rate:10,.0f} MB/s{middle / plain:9.2f} of torch.save + fsync")
        lines += [f"  {bar.text}" for bar in result["bars"][ranks]]
    if "small run" in result:
        run = result["small run"]
        stall, share = statistics.median(run.seconds), statistics.median(run.shares)
        lines.append(
            f"small run, {run.staged_bytes / 1e6:.0f} MB: a save stalls training for {stall:.3f} s, {share:.2%} of the "
            f"time between its saves, {stall / DEFAULT_INTERVAL_S:.4%} of 30 minutes"
        )
    return "\n".join(lines)


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result as plain values."""
    told: dict[str, Any] = {"teams": {}}
    for ranks, team in result["teams"].items():
        bars = [asdict(bar) | {"met": bar.is_met} for bar in result["bars"][ranks]]
        facts = {"state_bytes": team.state_bytes, "files_bytes": team.files_bytes}
        told["teams"][str(ranks)] = {"seconds": team.seconds, "bars": bars, **facts}
    if "small run" in result:
        told["small_run"] = asdict(result["small run"])
    return told


def main(argv: Sequence[str] | None = None, start_method: str = "fork") -> dict[str, Any]:
    """Measure, print the table, write the JSON."""
    args = parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="megatron-checkpoints-", dir=args.folder) as folder:
        result = measure(args, Path(folder), start_method)
    print(table(result))
    told = surroundings() | {"options": {name: str(value) for name, value in vars(args).items()}} | as_json(result)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return told


if __name__ == "__main__":
    main()
