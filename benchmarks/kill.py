"""Kill training runs at random moments, start them again until they are done, and compare them with undisturbed ones.

    python benchmarks/kill.py --kills 300 [--seed 0] [--layout t2p2 d2 ...] [--json kills.json]

Each run is that of ``pretrain_gpt2.py`` under the real launcher, forked from this process, which has imported torch:
a tiny GPT-2 with dropout that saves every step or two, at once or in the background. SIGKILL hits one rank, all ranks
or the launcher while the run starts, loads, steps or saves; some kills are followed by a spoilt ``latest``. Then the
launcher, or the next one with the same command, must go on by itself. A run that does not is bricked.

Checked of every start: it goes on from the newest checkpoint that was durable, with a save interval lost at most (two
with --async-save); each step has the loss of the undisturbed run, to the bit, and reads the same samples; over all
starts that count no sample is lost or repeated. Between starts every checkpoint verifies; at the end nothing of a
killed save is left. Exit code 1 if anything of this does not hold; the folder of such a run is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")  # both are read when torch and DeepSpeed are imported

from benchmarks.kill_parts.cases import LAYOUTS, Case, write_corpus  # noqa: E402
from benchmarks.kill_parts.chain import Outcome, Whole, run_killed, run_whole  # noqa: E402
from benchmarks.kill_parts.moments import draw_moments  # noqa: E402
from benchmarks.kill_parts.preload import preload  # noqa: E402


@dataclass
class Tally:
    """All runs so far."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        return sum(len(outcome.kills) for outcome in self.outcomes)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.problems]

    def by(self, what: str) -> dict[str, int]:
        """Return the number of kills by "phase" or "victims", the most frequent first."""
        found = [getattr(kill, what) for outcome in self.outcomes for kill in outcome.kills]
        return {name: found.count(name) for name in sorted(set(found), key=found.count, reverse=True)}

    def summary(self) -> dict[str, Any]:
        """Return the figures as JSON can hold them."""
        lost = [steps for outcome in self.outcomes for steps in outcome.lost_steps]
        waits = [seconds for outcome in self.outcomes for seconds in outcome.to_next_step_s]
        return {
            "kills": self.kills,
            "runs": len(self.outcomes),
            "starts": sum(outcome.starts for outcome in self.outcomes),
            "bricked": sum(outcome.is_bricked for outcome in self.outcomes),
            "runs_with_problems": len(self.failed),
            "steps_done_again": {"most": max(lost, default=0), "mean": sum(lost) / max(len(lost), 1)},
            "launcher_kill_to_next_step_s": {"median": median(waits or [0.0]), "most": max(waits, default=0.0)},
            "hints_spoilt": sum(outcome.hints_spoilt for outcome in self.outcomes),
            "seconds": self.seconds,
            "seconds_per_kill": self.seconds / max(self.kills, 1),
            "by_phase": self.by("phase"),
            "by_victims": self.by("victims"),
        }


def main(argv: Sequence[str] | None = None) -> Tally:
    """Print progress and a summary; return what became of all runs."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=300, help="at least so many; default: 300")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random here; default: 0")
    parser.add_argument("--layout", choices=LAYOUTS, nargs="+", default=list(LAYOUTS), help="default: all, in turn")
    parser.add_argument("--steps", type=int, default=12, help="of each run; default: 12")
    parser.add_argument("--json", type=Path, help="write the summary and all runs there")
    parser.add_argument(
        "--folder", type=Path, help="for the runs; made if need be; default: below the temporary folder"
    )
    args = parser.parse_args(argv)
    if args.folder is not None:
        try:
            args.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--folder must be a folder that can be made, got {args.folder}: {error}")
    preload()
    place = Path(tempfile.mkdtemp(prefix="kill-", dir=args.folder))
    tally = _kill_all(args, place)
    _print(tally)
    if args.json:
        runs = [asdict(outcome) for outcome in tally.outcomes]
        args.json.write_text(json.dumps({"summary": tally.summary(), "runs": runs}, indent=1) + "\n")
    if tally.failed:
        print(f"what went wrong lies in {place}")
    else:
        shutil.rmtree(place)
    return tally


def _kill_all(args: argparse.Namespace, place: Path) -> Tally:
    draw, tally, began = random.Random(args.seed), Tally(), time.monotonic()
    corpus, wholes = write_corpus(place), dict[str, Whole]()
    for number in count():
        if tally.kills >= args.kills:
            return tally
        case = _draw_case(draw, args.layout[number % len(args.layout)], args.steps)
        if case.layout not in wholes:
            wholes[case.layout] = run_whole(Case(case.layout, case.steps), corpus, place / f"whole-{case.layout}")
        own = random.Random(draw.random())
        moments = draw_moments(own, case.num_ranks, args.kills - tally.kills)
        outcome = run_killed(case, wholes[case.layout], place / f"run-{number}", own, moments)
        tally.outcomes.append(outcome)
        tally.seconds = time.monotonic() - began
        _print_outcome(tally, outcome)
    return tally


def _draw_case(draw: random.Random, layout: str, steps: int) -> Case:
    return Case(layout, steps, draw.choice((1, 1, 2)), draw.choice((0, 1, 2)), draw.random() < 0.5)


def _print_outcome(tally: Tally, outcome: Outcome) -> None:
    verdict = "BRICKED" if outcome.is_bricked else "WRONG" if outcome.problems else "as undisturbed"
    print(
        f"{tally.kills:4} kills, {tally.seconds:5.0f} s | {outcome.case.name}: {len(outcome.kills)} kills in "
        f"{outcome.starts} starts, {outcome.seconds:.1f} s, {verdict}",
        flush=True,
    )
    for problem in outcome.problems:
        print(f"    {problem}", flush=True)


def _print(tally: Tally) -> None:
    for name, value in tally.summary().items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:.3g}" for key, number in value.items())
        elif isinstance(value, float):
            value = f"{value:.2f}"
        print(f"{name:30} {value}")


if __name__ == "__main__":
    sys.exit(1 if main().failed else 0)
