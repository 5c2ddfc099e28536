"""One run, killed and started again until all of its steps are done."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.kill_job import Job, Stuck
from benchmarks.kill_parts import folder as folders
from benchmarks.kill_parts.cases import Case
from benchmarks.kill_parts.moments import LAUNCHER, LOAD, SAVE, STEP, Moment
from benchmarks.kill_records import Number, Start, losses, lost_steps, problems, read_starts

RESTARTED = 4
"""Code of a launcher whose rank was killed and that may not start again."""
MOST_RESTARTS = 2
"""Starts that a launcher adds by itself, at most: a third without progress would end the job, as it should."""


@dataclass
class Kill:
    """A kill that ended the start ``number``: ``phase`` is where the run was, ``at`` when, as ``time.time()``."""

    number: Number
    phase: str
    victims: str
    at: float


@dataclass
class Outcome:
    """What became of one run: the kills that it survived, and what should not have been (nothing, if all is well)."""

    case: Case
    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    starts: int = 0
    lives: int = 0
    hints_spoilt: int = 0
    seconds: float = 0.0
    lost_steps: list[int] = field(default_factory=list)
    to_next_step_s: list[float] = field(default_factory=list)
    is_bricked: bool = False


@dataclass(frozen=True)
class Whole:
    """The undisturbed run that the others are compared with."""

    start: Start
    losses: list[tuple[int, str, str]]
    corpus: Path


def run_whole(case: Case, corpus: Path, place: Path) -> Whole:
    """Run ``case`` without a kill.

    Raises:
        RuntimeError: it fails.
    """
    chain = Chain(case, corpus, place, random.Random(0), iter(()))
    chain.live(0)
    if chain.outcome.problems:
        raise RuntimeError("\n".join(chain.outcome.problems))
    (start,) = read_starts(chain.record).values()
    return Whole(start, losses(chain.run), corpus)


def run_killed(case: Case, whole: Whole, place: Path, draw: random.Random, moments: Iterable[Moment]) -> Outcome:
    """Kill runs of ``case`` at these moments, start after start, until it is done; check all that they did.

    Moments that the run does not come to are let go. A run without fault leaves nothing in ``place``.
    """
    chain = Chain(case, whole.corpus, place, draw, iter(moments))
    began = time.monotonic()
    while not chain.is_done:
        chain.live(draw.randint(0, MOST_RESTARTS))
    chain.judge(whole)
    chain.outcome.seconds = time.monotonic() - began
    if not chain.outcome.problems:
        shutil.rmtree(place)
    return chain.outcome


class Chain:
    """A run with its lives: each launcher starts the ranks once or a few times, and the next goes on by itself."""

    def __init__(self, case: Case, corpus: Path, place: Path, draw: random.Random, moments: Iterator[Moment]) -> None:
        self.case, self.place, self.run, self.record = case, place, place / "run", place / "record"
        self.record.mkdir(parents=True)
        self.outcome = Outcome(case)
        self.is_done = False
        self._argv = case.flags(corpus, self.run)
        self._draw, self._moments = draw, moments

    def live(self, max_restarts: int) -> None:
        """Run one launcher to its end, and look at what it leaves."""
        out = self.outcome
        newest = folders.newest_step(self.run)
        job = Job(
            self.place / f"life-{out.lives}", out.lives, self.record, self._argv, self.case.num_ranks, max_restarts
        )
        try:
            victims = self._kill_starts(job)
        except Stuck as error:
            return self._give_up(str(error))
        finally:
            job.end()
        begins = read_starts(self.record).get((out.lives, 0), Start()).begins.values()
        if any(begin != newest for begin in begins):
            out.problems.append(f"life {out.lives} goes on after step {set(begins)}, the newest checkpoint is {newest}")
        out.lives += 1
        if job.code not in (0, -9 if victims == LAUNCHER else RESTARTED) or (job.code and victims is None):
            return self._give_up(f"a start ended with code {job.code} by itself:\n{job.output[-12000:]}")
        out.problems += folders.broken(self.run)
        self.is_done = job.code == 0
        if not self.is_done and self._draw.random() < 0.2:
            out.hints_spoilt += folders.spoil_hint(self.run, self._draw)
        return None

    def _kill_starts(self, job: Job) -> str | None:
        """Kill each start of ``job`` while there are moments; return the last victims, None if nobody was killed."""
        start, victims = -1, None
        while (number := job.next_start(start)) is not None:
            self.outcome.starts += 1
            start, moment = number, next(self._moments, None)
            victims = None if moment is None else self._kill(job, start, moment)
            if victims is None and job.next_start(start) is not None:
                told = f"start {start} of life {self.outcome.lives} ended, though nobody was killed"
                self.outcome.problems.append(f"{told}:\n{job.output[-12000:]}")
        return victims

    def _kill(self, job: Job, start: int, moment: Moment) -> str | None:
        """Kill ``start`` at ``moment``; return who was killed, None if the start has ended before."""
        if moment.phase == LOAD and not folders.newest_step(self.run):
            moment = replace(moment, phase=STEP)  # there is nothing to load yet
        if not job.reaches(start, moment):
            return None
        kill = Kill((self.outcome.lives, start), self._phase(job, start, moment), moment.victims, time.time())
        if not job.kill(moment, self._draw):
            return None
        if job.next_start(start) is not None or job.code != 0:  # else it came behind the last word of the job
            self.outcome.kills.append(kill)
        return moment.victims

    def _phase(self, job: Job, start: int, moment: Moment) -> str:
        now, disk = job.phase(start, moment.rank), folders.saving_now(self.run)
        if not disk or now not in (STEP, SAVE):
            return now
        return f"{SAVE}, {disk}" if now == SAVE else f"{now}, a save {disk}"

    def _give_up(self, problem: str) -> None:
        self.outcome.problems.append(problem)
        self.outcome.is_bricked = self.is_done = True

    def judge(self, whole: Whole) -> None:
        """Compare all starts with the undisturbed run."""
        out, starts = self.outcome, read_starts(self.record)
        out.problems += problems(self.case, starts, whole.start)
        out.lost_steps = [*lost_steps(starts)]
        out.to_next_step_s = [*self._seconds_to_next_step(starts)]
        if not out.is_bricked:
            if losses(self.run) != whole.losses:
                out.problems.append("the metrics are not those of the undisturbed run")
            has_saved = bool(starts[max(starts)].durable)
            out.problems += folders.left_over(self.run, self.case.keep_last, has_saved=has_saved)

    def _seconds_to_next_step(self, starts: dict[Number, Start]) -> Iterator[float]:
        """Yield how long the launcher took from a kill to the next step, where its next start came so far."""
        for kill in self.outcome.kills:
            life, number = kill.number
            following = starts.get((life, number + 1))
            if following is not None and following.times:
                yield min(following.times) - kill.at
