"""Kill training runs at random moments, restart them until they finish, and compare them with undisturbed runs.

    python benchmarks/kill.py --kills 300
    python benchmarks/kill.py --kills 40 --seed 1 --layout t2p2 d2 --json kills.json

Each run is ``pretrain_gpt2.py`` under the real launcher, forked from this process, which has imported torch. It trains
a tiny GPT-2 with dropout and saves every one or two steps, synchronously or in the background. SIGKILL hits one rank,
all ranks or the launcher while the run starts, loads, steps or saves; some kills are followed by a corrupted
``latest``. The launcher, or the next launcher with the same command, must then continue automatically. Otherwise the
run counts as bricked.

Checks:

* Every start resumes from the newest durable checkpoint and loses at most one save interval (two with --async-save).
* Each step reads the same samples as in the undisturbed run and has bitwise the same loss.
* No sample is lost or repeated, not counting steps that a later start repeats.
* All checkpoints are valid after each launcher, and at the end no file of a killed save is left.

The exit code is 1 if a check fails; the folder of such a run is kept.
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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")  # both are read when torch and DeepSpeed are imported
os.environ.setdefault("MEGATRON_PROVE", "0")  # hundreds of starts need not check the same layout

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
from benchmarks.kill_job import (
    LAUNCHER,
    LAYOUTS,
    LOAD,
    SAVE,
    STEP,
    Case,
    Job,
    JobTimeoutError,
    Moment,
    draw_moments,
    preload,
    save_activity,
    write_corpus,
)
from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.folders import LATEST, list_checkpoints, newest_first, step_of
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from megatron.training import run_lock
from megatron.training.callbacks.metrics_writer import read_metrics

RESTARTS_EXHAUSTED = 4
"""Exit code of a launcher whose rank was killed and that has no restarts left."""
MAX_RESTARTS = 2
"""Maximum number of restarts of a launcher; it ends the job by design after a third restart without progress."""


@dataclass
class Kill:
    """A kill that ended a start.

    Args:
        number: indices of the launcher and of its start.
        phase: phase of the run at the kill.
        at: time of the kill, as ``time.time()``.
    """

    number: StartKey
    phase: str
    victims: str
    at: float


@dataclass
class Outcome:
    """Outcome of a run: the kills that it survived, and its problems (empty if all checks passed)."""

    case: Case
    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    starts: int = 0
    lives: int = 0
    hints_spoilt: int = 0
    to_next_step_s: list[float] = field(default_factory=list)
    is_bricked: bool = False


@dataclass(frozen=True)
class UndisturbedRun:
    """The undisturbed run, which is the reference for the killed runs."""

    start: Start
    losses: list[tuple[int, str, str]]
    corpus: Path


def run_undisturbed(case: Case, corpus: Path, folder: Path) -> UndisturbedRun:
    """Run ``case`` without a kill.

    Raises:
        RuntimeError: the run fails.
    """
    chain = KilledRun(case, corpus, folder, random.Random(0), iter(()))
    chain.run_launcher(0)
    if chain.outcome.problems:
        raise RuntimeError("\n".join(chain.outcome.problems))
    (start,) = read_starts(chain.record_dir).values()
    return UndisturbedRun(start, read_losses(chain.run_dir), corpus)


def run_killed(
    case: Case, undisturbed: UndisturbedRun, folder: Path, rng: random.Random, moments: Iterable[Moment]
) -> Outcome:
    """Run ``case``, kill each start at the next of ``moments`` until the run finishes, and check all starts.

    Moments that the run does not reach are dropped. The folder ``folder`` is removed if there are no problems.
    """
    chain = KilledRun(case, undisturbed.corpus, folder, rng, iter(moments))
    while not chain.is_done:
        chain.run_launcher(rng.randint(0, MAX_RESTARTS))
    chain.check_starts(undisturbed)
    if not chain.outcome.problems:
        shutil.rmtree(folder)
    return chain.outcome


class KilledRun:
    """A run over several launchers, each of which resumes it. A launcher starts the ranks one or more times."""

    def __init__(self, case: Case, corpus: Path, folder: Path, rng: random.Random, moments: Iterator[Moment]) -> None:
        self.case, self.folder, self.run_dir, self.record_dir = case, folder, folder / "run", folder / "record"
        self.record_dir.mkdir(parents=True)
        self.outcome = Outcome(case)
        self.is_done = False
        self._argv = case.flags(corpus, self.run_dir)
        self._rng, self._moments = rng, moments

    def run_launcher(self, max_restarts: int) -> None:
        """Run one launcher to its end and check its results."""
        outcome = self.outcome
        newest = newest_step(self.run_dir)
        job = Job(
            self.folder / f"life-{outcome.lives}",
            outcome.lives,
            self.record_dir,
            self._argv,
            self.case.num_ranks,
            max_restarts,
        )
        try:
            victims = self._kill_starts(job)
        except JobTimeoutError as error:
            return self._give_up(str(error))
        finally:
            job.kill_launcher()
        resume_steps = read_starts(self.record_dir).get((outcome.lives, 0), Start()).resume_steps.values()
        if any(resume_step != newest for resume_step in resume_steps):
            outcome.problems.append(
                f"launcher {outcome.lives} resumes after step {set(resume_steps)}, the newest checkpoint is {newest}"
            )
        outcome.lives += 1
        if job.code not in (0, -9 if victims == LAUNCHER else RESTARTS_EXHAUSTED) or (job.code and victims is None):
            return self._give_up(f"a start ended with code {job.code} without a kill:\n{job.output[-12000:]}")
        outcome.problems += broken_checkpoints(self.run_dir)
        self.is_done = job.code == 0
        if not self.is_done and self._rng.random() < 0.2:
            outcome.hints_spoilt += corrupt_latest(self.run_dir, self._rng)
        return None

    def _kill_starts(self, job: Job) -> str | None:
        """Kill each start of ``job`` at the next moment, as long as moments are left.

        Returns:
            Victims of the last kill, None if the last start was not killed.
        """
        start, victims = -1, None
        while (next_start := job.next_start(start)) is not None:
            self.outcome.starts += 1
            start, moment = next_start, next(self._moments, None)
            victims = None if moment is None else self._kill(job, start, moment)
            if victims is None and job.next_start(start) is not None:
                problem = f"start {start} of launcher {self.outcome.lives} ended without a kill"
                self.outcome.problems.append(f"{problem}:\n{job.output[-12000:]}")
        return victims

    def _kill(self, job: Job, start: int, moment: Moment) -> str | None:
        """Kill ``start`` at ``moment``; return the victims, or None if the start ended before."""
        if moment.phase == LOAD and not newest_step(self.run_dir):
            moment = replace(moment, phase=STEP)  # there is nothing to load yet
        if not job.wait_for_moment(start, moment):
            return None
        kill = Kill((self.outcome.lives, start), self._phase(job, start, moment), moment.victims, time.time())
        if not job.kill(moment, self._rng):
            return None
        if job.next_start(start) is not None or job.code != 0:  # a job with code 0 had finished before the kill
            self.outcome.kills.append(kill)
        return moment.victims

    def _phase(self, job: Job, start: int, moment: Moment) -> str:
        now, disk = job.phase(start, moment.rank), save_activity(self.run_dir)
        if not disk or now not in (STEP, SAVE):
            return now
        return f"{SAVE}, {disk}" if now == SAVE else f"{now}, a save {disk}"

    def _give_up(self, problem: str) -> None:
        self.outcome.problems.append(problem)
        self.outcome.is_bricked = self.is_done = True

    def check_starts(self, undisturbed: UndisturbedRun) -> None:
        """Compare all starts with the undisturbed run."""
        outcome, starts = self.outcome, read_starts(self.record_dir)
        outcome.problems += find_problems(self.case, starts, undisturbed.start)
        outcome.to_next_step_s = [*self._seconds_to_next_step(starts)]
        if not outcome.is_bricked:
            if read_losses(self.run_dir) != undisturbed.losses:
                outcome.problems.append("the metrics differ from the undisturbed run")
            has_saved = bool(starts[max(starts)].durable_steps)
            outcome.problems += leftover_files(self.run_dir, self.case.keep_last, has_saved=has_saved)

    def _seconds_to_next_step(self, starts: dict[StartKey, Start]) -> Iterator[float]:
        """Yield the seconds from each kill to the first step of the launcher's next start, if it reached a step."""
        for kill in self.outcome.kills:
            launcher_idx, idx = kill.number
            next_start = starts.get((launcher_idx, idx + 1))
            if next_start is not None and next_start.times:
                yield min(next_start.times) - kill.at


# Records of a run's ranks over all starts, and checks of the records and of the run folder.

StartKey = tuple[int, int]


@dataclass
class Start:
    """Records of one start; a rank that was killed early has no entries.

    Args:
        resume_steps: rank -> step after which it resumes.
        loaded: rank -> name of the checkpoint that it loaded.
        steps: rank -> step -> (loss, checksums of the samples read).
        durable_steps: steps of the durable checkpoints that rank 0 reported to the launcher.
        times: times of all steps of all ranks, as ``time.time()``.
    """

    resume_steps: dict[int, int] = field(default_factory=dict)
    loaded: dict[int, str | None] = field(default_factory=dict)
    steps: dict[int, dict[int, tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    durable_steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max((step for steps in self.steps.values() for step in steps), default=0)


def read_starts(record: Path) -> dict[StartKey, Start]:
    """Return the starts by (index of the launcher, index of its start), in chronological order."""
    starts: dict[StartKey, Start] = {}
    for path in record.glob("rank-*.jsonl"):
        rank = int(path.stem.removeprefix("rank-"))
        for line in path.read_bytes().splitlines():
            _add(starts, rank, json.loads(line))
    return dict(sorted(starts.items()))


def _add(starts: dict[StartKey, Start], rank: int, line: dict) -> None:
    start = starts.setdefault(tuple(line["start"]), Start())
    if "begins" in line:
        start.resume_steps[rank], start.loaded[rank] = line["begins"], line["loaded"]
    elif "step" in line:
        start.steps.setdefault(rank, {})[line["step"]] = (line["loss"], tuple(line["tokens"]))
        start.times.append(line["at"])
    else:
        start.durable_steps.append(line["durable"])


def read_losses(folder: Path) -> list[tuple[int, str, str]]:
    """Return (step, loss, gradient norm) from a run's metrics, as hexadecimal numbers."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(r["step"], float(r["loss"]).hex(), float(r["grad_norm"]).hex()) for r in records]


def find_problems(case: Case, starts: dict[StartKey, Start], undisturbed: Start) -> Iterator[str]:
    """Yield the differences of the starts from the undisturbed run."""
    yield from _differing_steps(starts, undisturbed)
    yield from _wrong_resumes(case, starts)
    yield from _lost_samples(case, starts, undisturbed)


def _differing_steps(starts: dict[StartKey, Start], undisturbed: Start) -> Iterator[str]:
    for key, start in starts.items():
        for rank, steps in start.steps.items():
            for step, (loss, tokens) in steps.items():
                wanted_loss, wanted_tokens = undisturbed.steps[rank].get(step, ("none", ()))
                if loss != wanted_loss:
                    yield f"start {key}, rank {rank}: the loss of step {step} is {loss}, undisturbed {wanted_loss}"
                if tokens != wanted_tokens:
                    yield f"start {key}, rank {rank}: step {step} read other samples than in the undisturbed run"


def _wrong_resumes(case: Case, starts: dict[StartKey, Start]) -> Iterator[str]:
    """Yield starts that resume from a wrong step: ranks disagree, or more steps are lost than ``case`` allows."""
    last_done = durable = 0
    for key, start in starts.items():
        for resume_step in set(start.resume_steps.values()):
            if len(set(start.resume_steps.values())) > 1:
                yield f"start {key}: ranks resume after different steps: {start.resume_steps}"
            if resume_step < durable:
                yield f"start {key} resumes after step {resume_step}, although checkpoint {durable} was durable"
            if last_done - resume_step > case.max_lost_steps:
                num_lost = last_done - resume_step
                yield f"start {key} resumes after step {resume_step}: {num_lost} of {last_done} steps are lost"
        for rank, name in start.loaded.items():
            if start.resume_steps[rank] != (int(name.split("-")[1]) if name else 0):
                yield f"start {key}, rank {rank}: resumes after step {start.resume_steps[rank]} from {name}"
        last_done = max(last_done, start.last_step)
        durable = max([durable, *start.durable_steps])


def _lost_samples(case: Case, starts: dict[StartKey, Start], undisturbed: Start) -> Iterator[str]:
    """Yield ranks that lost or repeated samples. Steps after the one from which the next start resumes do not count."""
    for rank in undisturbed.steps:
        samples_by_step: list[tuple[int, ...]] = []
        for key, start in starts.items():
            if rank in start.resume_steps:
                if start.resume_steps[rank] > len(samples_by_step):
                    resumed, num_done = start.resume_steps[rank], len(samples_by_step)
                    yield f"start {key}, rank {rank}: resumes after step {resumed}, {num_done} are done"
                    break
                del samples_by_step[start.resume_steps[rank] :]
            samples_by_step += [tokens for _, (_, tokens) in sorted(start.steps.get(rank, {}).items())]
        read = Counter(sum(samples_by_step, ()))
        expected = Counter(sum((tokens for _, (_, tokens) in sorted(undisturbed.steps[rank].items())), ()))
        if read != expected or any(times > 1 for times in read.values()):
            lost, repeated = sum((expected - read).values()), sum((read - expected).values())
            yield f"rank {rank}: {lost} samples lost, {repeated} repeated over {case.steps} steps"


# The folder of a run, between two starts and at its end.

CORRUPT_CONTENTS = (b"", b"step-0000", b"\x00\xff\xfe", b"step-99999999\n")


def broken_checkpoints(run: Path) -> Iterator[str]:
    """Yield each folder with the name of a checkpoint that is incomplete or contains another step."""
    root = run / CHECKPOINTS
    for path in root.glob("step-*") if root.is_dir() else ():
        try:
            saved_step = open_checkpoint(path, SINGLE).metadata["progress"]["step"]
        except CheckpointError as error:
            yield f"{path.name} is not a complete checkpoint: {error}"
            continue
        if saved_step != step_of(path):
            yield f"{path.name} contains the state of step {saved_step}"


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    checkpoints = newest_first(list_checkpoints(run / CHECKPOINTS))
    return step_of(checkpoints[0]) if checkpoints else 0


def corrupt_latest(run: Path, rng: random.Random) -> bool:
    """Corrupt ``latest`` as a kill during an in-place write could; return True if the file exists.

    This is row A05 of docs/reliability.md.
    """
    latest_path = run / CHECKPOINTS / LATEST
    if latest_path.exists():
        latest_path.write_bytes(rng.choice(CORRUPT_CONTENTS))
    return latest_path.exists()


def leftover_files(run: Path, num_kept: int, *, has_saved: bool) -> Iterator[str]:
    """Yield files of a finished run other than its results.

    Args:
        has_saved: the last start saved a checkpoint. Otherwise files of a killed save may remain, because only the next
            save removes them.
    """
    root = run / CHECKPOINTS
    for path in [*run.iterdir(), *(root.iterdir() if has_saved else ())]:
        if path.name.startswith(".") or path.name == run_lock.LOCK_NAME:
            yield f"{path.relative_to(run)} was not removed"
    if not has_saved:
        return
    checkpoints = newest_first(list_checkpoints(root))
    if num_kept and len(checkpoints) > num_kept + 1:  # the checkpoint that the last start loaded is kept, too
        yield f"{len(checkpoints)} checkpoints remain, more than --keep-last {num_kept}"
    if (root / LATEST).read_text().strip() != checkpoints[0].name:
        yield f"{LATEST} does not name the newest checkpoint"


@dataclass
class Tally:
    """The outcomes of all runs so far."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(len(outcome.kills) for outcome in self.outcomes)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.problems]

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        kills = [kill for outcome in self.outcomes for kill in outcome.kills]
        recovery_s = [seconds for outcome in self.outcomes for seconds in outcome.to_next_step_s] or [0.0]
        return {
            "kills": len(kills),
            "runs": len(self.outcomes),
            "starts": sum(outcome.starts for outcome in self.outcomes),
            "bricked": sum(outcome.is_bricked for outcome in self.outcomes),
            "runs_with_problems": len(self.failed),
            "kill_to_next_step_s": {"median": round(median(recovery_s), 3), "most": round(max(recovery_s), 3)},
            "hints_spoilt": sum(outcome.hints_spoilt for outcome in self.outcomes),
            "by_phase": dict(Counter(kill.phase for kill in kills).most_common()),
            "by_victims": dict(Counter(kill.victims for kill in kills).most_common()),
        }


def main(argv: Sequence[str] | None = None) -> Tally:
    """Kill runs, print progress and a summary, and return the outcomes."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=300, help="number of kills, at least; default: 300")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices; default: 0")
    parser.add_argument("--layout", choices=LAYOUTS, nargs="+", default=list(LAYOUTS), help="default: all, in turn")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run; default: 12")
    parser.add_argument("--json", type=Path, help="write the summary and all runs to this file")
    parser.add_argument("--folder", type=Path, help="folder for the runs; default: the system's temporary folder")
    args = parser.parse_args(argv)
    if args.folder is not None:
        try:
            args.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--folder must be a folder that can be created, got {args.folder}: {error}")
    preload()
    work_dir = Path(tempfile.mkdtemp(prefix="kill-", dir=args.folder))
    rng, tally = random.Random(args.seed), Tally()
    corpus, undisturbed_runs = write_corpus(work_dir), dict[str, UndisturbedRun]()
    while tally.kills < args.kills:
        run_idx = len(tally.outcomes)
        layout = args.layout[run_idx % len(args.layout)]
        case = Case(layout, args.steps, rng.choice((1, 1, 2)), rng.choice((0, 1, 2)), rng.random() < 0.5)
        if layout not in undisturbed_runs:
            undisturbed_runs[layout] = run_undisturbed(Case(layout, args.steps), corpus, work_dir / f"whole-{layout}")
        run_rng = random.Random(rng.random())
        moments = draw_moments(run_rng, case.num_ranks, args.kills - tally.kills)
        outcome = run_killed(case, undisturbed_runs[layout], work_dir / f"run-{run_idx}", run_rng, moments)
        tally.outcomes.append(outcome)
        verdict = "BRICKED" if outcome.is_bricked else "WRONG" if outcome.problems else "as undisturbed"
        print(f"{tally.kills:4} kills | {case.name}: {len(outcome.kills)} kills in {outcome.starts} starts, {verdict}")
        print(*(f"    {problem}\n" for problem in outcome.problems), sep="", end="", flush=True)
    for name, value in tally.summary().items():
        print(f"{name:30} {value}")
    if args.json:
        runs = [asdict(outcome) for outcome in tally.outcomes]
        args.json.write_text(json.dumps({"summary": tally.summary(), "runs": runs}, indent=1) + "\n")
    if tally.failed:
        print(f"the files of the failed runs are in {work_dir}")
    else:
        shutil.rmtree(work_dir)
    return tally


if __name__ == "__main__":
    sys.exit(1 if main().failed else 0)
