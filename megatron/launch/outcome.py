"""Which rank failed first, over all nodes; the exit code; whether the job starts again."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch.distributed import Store

from megatron.launch.processes import RESUMABLE, Signals
from megatron.runtime import progress_file, rank_status

# Which rank caused the end of a job, and the job's exit code.
#
# A rank that dies takes others with it: they report a lost peer (4) a little later, or even a little earlier, than the
# one that failed is gone. So the culprit is the weightiest of those that ended within ``WINDOW_S`` of the first
# failure, and among equals the first:
#
# | weight | how it ended | the job's code |
# |---|---|---|
# | 0 | 2, 3, 5 or 75 | the same |
# | 1 | by a signal; by any other exception | 4; 1 |
# | 2 | well (0) while others or its own run were not done; 4, and it says itself that the others waited for it | 4 |
# | 3 | 4: it lost a peer or timed out | 4 |
#
# Where all have lost a peer and a rank did not leave with them, so that the launcher had to kill it, that rank is
# named: the others waited for it.

SPECIFIC = (2, 3, 5, RESUMABLE)
WINDOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How one rank ended; ``status`` is its exit code, or minus the signal that ended it."""

    rank: int
    pid: int
    status: int
    at: float
    """When it said why it ends, else when it had ended: seconds since the start of the ranks, which all nodes begin
    together. Who says it first may take longest to end."""
    was_signalled: bool = False
    """The launcher had already told it to leave because a peer had died."""
    place: str = ""
    """Such as "stage 1, tensor 0, data 0"; empty if the rank did not come so far as to know it."""
    doing: str = ""
    """What it was at, such as "step 7, forward of micro-batch 3"."""
    words: str = ""
    """The error, if it is one that all ranks raised alike; rank 0 prints it unless it is ended before."""
    hint: str = ""
    """What may be behind it; the launcher alone says it."""
    state: str = ""
    """Whether its run had ended, and whether it has said that the others wait for it (runtime/rank_status.py)."""

    @property
    def weight(self) -> int:
        if self.status in SPECIFIC:
            return 0
        return {0: 2, 4: 2 if self.is_late else 3}.get(self.status, 1)

    @property
    def has_failed(self) -> bool:
        """Whether it left otherwise than at the end of its run or on request."""
        return self.status not in (0, RESUMABLE) or (self.status == 0 and bool(self.state))

    @property
    def is_late(self) -> bool:
        """Whether it has left since it got no further itself, for which the others waited."""
        return self.status == 4 and self.state == rank_status.LATE

    @property
    def is_consequence(self) -> bool:
        """Whether this end only follows from the launcher's own signal."""
        if self.is_late:
            return False
        return self.was_signalled and self.status in (0, 4, 75, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)

    @property
    def is_stuck(self) -> bool:
        """Whether it did not leave when the launcher told it to, and had to be killed."""
        return self.was_signalled and self.status == -signal.SIGKILL

    @property
    def job_code(self) -> int:
        if self.status in SPECIFIC:
            return self.status
        return 4 if self.status in (0, 4) or self.status < 0 else 1

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.place + '; ' if self.place else ''}pid {self.pid})"
        at = f", at {self.doing}" if self.doing else ""
        if self.is_stuck:
            return f"{who}, which did not leave with the others and had to be killed{at}"
        if self.status < 0:
            return f"{who} by {_signal_name(-self.status)}{at}"
        if self.status == 0:
            early = "before its run was done" if self.state else "while others were still running"
            return f"{who}, which left early with 0 {early}{at}"
        if self.is_late:
            return f"{who}, which got no further and left with exit code 4{at}"
        alike = "every rank alike, first by " if self.words else ""
        return f"{alike}{who} with exit code {self.status}{at}"


def root_cause(exits: Collection[Exit]) -> Exit | None:
    """Return the rank that caused the end, or None if no rank ended of itself."""
    own = [one for one in exits if not one.is_consequence]
    if not own:
        return None
    failed = [one.at for one in own if one.has_failed]
    start = min(failed) if failed else min(one.at for one in own)
    stuck = first_stuck(exits)
    if stuck is not None and all(one.status == 4 for one in own):
        return stuck
    near = [one for one in own if one.at <= start + WINDOW_S]
    return min(near, key=lambda one: (one.weight, one.at))


def first_stuck(exits: Collection[Exit]) -> Exit | None:
    """Return the lowest rank that had to be killed, or None."""
    return min((one for one in exits if one.is_stuck), key=lambda one: one.rank, default=None)


def deciding(exits: Collection[Exit]) -> list[Exit]:
    """Return the few of ``exits`` that ``root_cause`` needs of them, whatever others are added later.

    The first of each weight is the best within any window; the first that failed opens the window; of those that were
    killed the lowest rank counts, and only as long as all others ended with 4.
    """
    exits = sorted(exits, key=lambda one: (one.at, one.rank, repr(one)))  # the same of the same, in whatever order
    own = [one for one in exits if not one.is_consequence]
    kept = [next((one for one in own if one.weight == weight), None) for weight in range(4)]
    kept += [next((one for one in own if one.has_failed), None), next((one for one in own if one.status != 4), None)]
    kept.append(first_stuck(exits))
    return list(dict.fromkeys(one for one in kept if one is not None))


def exits_of(text: str) -> list[Exit]:
    """Return the exits of a JSON list; none of an empty text."""
    return [Exit(**fields) for fields in json.loads(text or "[]")]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# What the launchers of one job tell each other about the end of one start, over the store of node 0.
#
# | key | written by | holds |
# |---|---|---|
# | ``failed`` | a node that lost a rank | that it happened |
# | ``verdicts`` | a node that knows more than it says | the exits that decide who the culprit is, as JSON |
# | ``left`` | every node | how many nodes have no rank left |
# | ``restart/R`` | node R, once all have left | why it would not start again; empty if it would |
# | ``decision`` | node 0, once all have voted | "go" or "stop", a space, and the reason |
# | ``gone`` | every node | how many nodes have read what they want to know |
#
# Each start has a board of its own: the agent hands over a store with the start's number in its keys.

POLL_S = 0.05
T = TypeVar("T")


class NodeBoard:
    """One node's view of the table above; with one node there is nobody to tell.

    Waiting ends at the latest with a second signal.
    """

    def __init__(self, store: Store, node_rank: int, num_nodes: int, signals: Signals) -> None:
        self._store, self._node_rank, self._num_nodes, self._signals = store, node_rank, num_nodes, signals

    def is_failed(self) -> bool:
        """Whether a node has lost a rank, or node 0 is gone."""
        return self._num_nodes > 1 and self._ask(lambda: self._store.check(["failed"]), True)

    def all_left(self) -> bool:
        """Whether no node has a rank left."""
        return self._num_nodes == 1 or self._ask(lambda: self._store.add("left", 0) >= self._num_nodes, True)

    def report_left(self, status: int = 0) -> None:
        """Say that this node has no rank left; ``status`` is the highest code of its ranks."""
        if self._num_nodes > 1:
            self._ask(lambda: self._store.add("left", 1), 0)

    def report_failed(self, verdict: Exit | None) -> None:
        """Say which rank of this node ended the job, if one did."""
        if self._num_nodes > 1:
            if verdict is not None:
                self._ask(lambda: self._enter(verdict), None)
            self._ask(lambda: self._store.set("failed", "1"), None)

    def _enter(self, verdict: Exit) -> None:
        """Add ``verdict`` to those of all nodes if it may decide: with a key for each, all nodes would read all."""
        known = self._read("verdicts")
        while True:
            merged = json.dumps([asdict(one) for one in deciding([*exits_of(known), verdict])])
            if merged == known:
                return
            before, known = known, self._store.compare_set("verdicts", known, merged).decode()
            if known in (merged, before):  # torch gives back what is there now: ours, or what another node has entered
                return

    def statuses(self) -> list[int]:
        """Return the codes of nodes with which their ranks have ended, where nodes may have no ranks to tell."""
        return []

    def lost(self) -> list[int]:
        """Return the nodes of this start that are lost, where the job can go on without them."""
        return []

    def verdicts(self) -> list[Exit]:
        """Return those of the culprits that the nodes have named so far among which the job's is."""
        return exits_of(self._ask(lambda: self._read("verdicts"), "")) if self._num_nodes > 1 else []

    def agree(self, against: str, timeout_s: float, go: Callable[[], str]) -> tuple[bool, str]:
        """Return whether the job starts again and the reason, the same on every node.

        Sound because node 0 says "go" only when every node has said that it has no rank left and would start again; a
        node that is lost, or asked to stop, says nothing or no.

        Args:
            against: why this node would not start again; empty if it would.
            go: called on node 0 when all would: where the next start begins, in words.
        """
        if self._num_nodes == 1:
            return (False, against) if against else (True, go())
        self._ask(lambda: self._store.set(f"restart/{self._node_rank}", against), None)
        if self._node_rank == 0:
            against = self._count_votes(timeout_s)
            decision = f"stop {against}" if against else f"go {go()}"
            self._ask(lambda: self._store.set("decision", decision), None)
        else:
            self._wait(lambda: self._ask(lambda: self._store.check(["decision"]), True), 2 * timeout_s)
            decision = self._ask(lambda: self._read("decision"), "") or "stop node 0 was lost"
        word, _, reason = decision.partition(" ")
        return word == "go", reason

    def leave(self, timeout_s: float) -> None:
        """Let node 0, whose store this is, be the last to go."""
        if self._num_nodes == 1:
            return
        self._ask(lambda: self._store.add("gone", 1), 0)
        if self._node_rank == 0:
            self._wait(lambda: self._ask(lambda: self._store.add("gone", 0) >= self._num_nodes, True), timeout_s)

    def _count_votes(self, timeout_s: float) -> str:
        """Return why the job does not start again, or "" if all nodes would."""
        keys = [f"restart/{node}" for node in range(self._num_nodes)]
        self._wait(lambda: self._ask(lambda: self._store.check(keys), True), timeout_s)
        missing = [
            str(node) for node, key in enumerate(keys) if not self._ask(partial(self._store.check, [key]), False)
        ]
        if missing:
            return f"node {', '.join(missing)} did not answer"
        return next((reason for reason in map(self._read, keys) if reason), "")

    def _read(self, key: str) -> str:
        """Return what a key holds, or "" if nobody wrote it."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not is_done() and time.monotonic() < end and not self._signals.is_ended:
            self._signals.wait(POLL_S)

    @staticmethod
    def _ask(question: Callable[[], T], without_store: T) -> T:
        try:
            return question()
        except RuntimeError:  # node 0 is gone, and the store with it
            return without_store


# Whether a job that has failed starts again: --max-restarts, and progress.
#
# A start makes progress when a checkpoint becomes durable whose step is above that of the last one before it, which may
# have been a step back; rank 0 tells of it in the progress file (megatron/runtime/exit_guard.py). ``FRUITLESS``
# starts in a row without progress end the job: what ends them will end the next one too.

FRUITLESS = 3
RESTARTED = (1, 4)
"""Codes after which another start may help: a rank died or timed out, or a defect. The others come back as they are."""


class Restarts:
    """Counts the starts of one job.

    Args:
        most: starts after the first.
        progress: the progress file; only node 0's is written.
    """

    def __init__(self, most: int, progress: Path) -> None:
        self.most, self.done = most, 0
        self._progress = progress
        self._last: int | None = None
        self._fruitless = 0

    @property
    def durable(self) -> int | None:
        """The step of the newest checkpoint that this job has written, or None."""
        return progress_file.committed_step(self._progress)

    def against(self, code: int, *, is_node_0: bool) -> str:
        """Return why there is no start after one that ended with ``code``, or "" if there may be.

        Called once after each start that failed.
        """
        if code not in RESTARTED:
            return f"code {code} comes back as it is"
        if is_node_0 and self._is_fruitless():
            newest = "no checkpoint is durable" if self._last is None else f"the newest is that of step {self._last}"
            return (
                f"{FRUITLESS} starts in a row ended before a new checkpoint was durable ({newest}), so no further one "
                "is made. Look at what ended them above, and lower --save-interval if they only came too short"
            )
        return self.against_one_more()

    def against_one_more(self) -> str:
        """Return that all starts are used, or "" if there may be another."""
        return f"all of --max-restarts {self.most} are used" if self.done >= self.most else ""

    def origin(self) -> str:
        """Return where the next start begins, in words."""
        step = self.durable
        return (
            "as the first one did, for this job has no durable checkpoint yet"
            if step is None
            else (f"from the checkpoint of step {step}")
        )

    def _is_fruitless(self) -> bool:
        """Whether this start was the last of ``FRUITLESS`` without progress."""
        last, self._last = self._last, self.durable
        has_grown = self._last is not None and (last is None or self._last > last)
        self._fruitless = 0 if has_grown else self._fruitless + 1
        return self._fruitless >= FRUITLESS


# What a start of the ranks that is not followed by another one makes of the job: its exit code, and one line.
#
# "75 if durable" is 75 once a checkpoint of this job is durable, or when SLURM's warning was the first signal; else the
# first signal's own code.
#
# | the ranks ended | the job was asked to stop | the job's code | the line |
# |---|---|---|---|
# | by a second signal, at once | yes | 128 + its number | that a second signal came |
# | by the request, for which they were not ready | yes | 75 if durable | how to go on; who ended, unless 75 |
# | with 1 or 4, before the request, and would start again | then | 75 if durable | the same |
# | with 75 | perhaps | 75 | none: rank 0 has said it |
# | all with 2 | perhaps | 2 | none: rank 0 has said it |
# | otherwise | perhaps | the culprit's | who ended, and why it does not start again |

BY_REQUEST = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True)
class End:
    """How one start ended, as this node knows it.

    ``late`` holds what is said of ranks that took longer than --stop-grace; ``is_said``: a rank of this node has
    printed why the job ends; ``is_alike``: the ranks of this node, one of which says so, ended with 2 of themselves.
    """

    code: int
    verdict: Exit | None
    exits: Collection[Exit]
    late: str
    was_asked_to_stop: bool
    is_said: bool
    is_alike: bool

    @property
    def is_by_request(self) -> bool:
        """Whether the ranks ended of a signal that they had no handler for yet."""
        return self.verdict is not None and self.verdict.status in BY_REQUEST

    def __str__(self) -> str:
        """Say in words what ended this start."""
        verdict = self.verdict
        if verdict is None or verdict.status in (0, RESUMABLE):
            ended = f"ended by {verdict}" if verdict is not None else "ended by another node, or node 0 was lost"
            return self.late or ended
        also = [str(one.rank) for one in self.exits if one.is_stuck and one.rank != verdict.rank]
        text = f"ended by {verdict}"
        if verdict.is_stuck and also:
            text += f", as had rank {', '.join(also)}"
        if verdict.words and not self.is_said:
            text += f": {verdict.words}"
        return text + (f" ({verdict.hint})" if verdict.hint else "")


def job_result(
    end: End, signals: Signals, durable: int | None, *, restarts: int, reason: str
) -> tuple[int, str | None]:
    """Return the job's exit code and the line that says so, by the table at the top of this file.

    Args:
        durable: the step of the newest checkpoint of this job.
        restarts: --max-restarts.
        reason: why there is no other start; may be empty.
    """
    if signals.is_ended:
        code = 128 + signals.seen[1]
        return code, f"ended at once by a second signal, code {code}"
    code, is_between = end.code, restarts > 0 and end.code in RESTARTED and not end.was_asked_to_stop
    if signals.is_asked_to_stop and end.is_by_request:
        code = signals.code if durable is None else RESUMABLE
    elif signals.is_asked_to_stop and is_between and durable is not None:
        code = RESUMABLE
    if code == RESUMABLE != end.code:
        return code, f"{signals.first_name} while the ranks could not save; {_how_to_go_on(durable)}; code {code}"
    if code == RESUMABLE or (code == 2 and end.is_alike):
        return code, None
    return code, f"{end}{f'; {reason}' if reason else ''}; the job ends with code {code}"


def _how_to_go_on(durable: int | None) -> str:
    if durable is None:
        return "nothing was lost: start the same command later"
    return f"the checkpoint of step {durable} is durable: go on with the same command and --load RUN_FOLDER"
