"""Outcome of a job: the rank that failed first over all nodes, the exit code, and whether the job restarts."""

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

from megatron.launch.processes import RESUMABLE_CODE, Signals
from megatron.runtime import progress_file, rank_status

# Root cause of the end of a job, and the job's exit code.
#
# If a rank dies, other ranks report a lost peer (4) shortly after its exit, or even shortly before. So the root cause
# is the exit with the smallest weight within ``WINDOW_S`` of the first failure, and among equal weights the first one:
#
# | weight | exit of the rank | the job's code |
# |---|---|---|
# | 0 | 2, 3, 5 or 75 | the same |
# | 1 | by a signal; by any other exception | 4; 1 |
# | 2 | 0, before its run or the runs of other ranks ended; 4, if it reports that other ranks waited for it | 4 |
# | 3 | 4: it lost a peer or timed out | 4 |
#
# If all ranks have lost a peer, except for one that did not exit and had to be killed by the launcher, that rank is the
# root cause: the others waited for it.

SPECIFIC_CODES = (2, 3, 5, RESUMABLE_CODE)
WINDOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Exit:
    """Exit of one rank; ``status`` is its exit code, or minus the signal that ended it."""

    rank: int
    pid: int
    status: int
    time_s: float
    """Seconds from the start of the ranks, which is simultaneous on all nodes, to the rank's error report, or otherwise
    to its exit. The rank that reports first may take longest to exit."""
    was_signalled: bool = False
    """The launcher had already signalled the rank to exit because a peer had died."""
    coordinates: str = ""
    """Coordinates such as "stage 1, tensor 0, data 0"; empty if the rank exited before it knew them."""
    operation: str = ""
    """Last operation, such as "step 7, forward of micro-batch 3"."""
    error: str = ""
    """The error, if all ranks raised the same one; rank 0 prints it unless it is killed before."""
    hint: str = ""
    """Possible cause; only reported by the launcher."""
    state: str = ""
    """State of the rank's run (runtime/rank_status.py): empty if it had ended, LATE if other ranks waited for it."""

    @property
    def weight(self) -> int:
        """Weight of this exit in the table at the top of this module; the root cause has the smallest."""
        if self.status in SPECIFIC_CODES:
            return 0
        return {0: 2, 4: 2 if self.is_late else 3}.get(self.status, 1)

    @property
    def has_failed(self) -> bool:
        """True unless the rank exited at the end of its run or on request."""
        return self.status not in (0, RESUMABLE_CODE) or (self.status == 0 and bool(self.state))

    @property
    def is_late(self) -> bool:
        """True if the rank exited with code 4 and reports that other ranks waited for it."""
        return self.status == 4 and self.state == rank_status.LATE

    @property
    def is_consequence(self) -> bool:
        """True if this exit is only a consequence of the launcher's signal."""
        if self.is_late:
            return False
        return self.was_signalled and self.status in (0, 4, 75, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)

    @property
    def is_stuck(self) -> bool:
        """True if the rank did not exit after the launcher's signal and had to be killed."""
        return self.was_signalled and self.status == -signal.SIGKILL

    @property
    def job_code(self) -> int:
        """The job's exit code if this exit is the root cause."""
        if self.status in SPECIFIC_CODES:
            return self.status
        return 4 if self.status in (0, 4) or self.status < 0 else 1

    def __str__(self) -> str:
        rank_text = f"rank {self.rank} ({self.coordinates + '; ' if self.coordinates else ''}pid {self.pid})"
        operation = f", at {self.operation}" if self.operation else ""
        if self.is_stuck:
            return f"{rank_text}, which did not exit with the other ranks and had to be killed{operation}"
        if self.status < 0:
            return f"{rank_text} by {_signal_name(-self.status)}{operation}"
        if self.status == 0:
            early = "before its run was complete" if self.state else "while other ranks were still running"
            return f"{rank_text}, which exited early with code 0 {early}{operation}"
        if self.is_late:
            return f"{rank_text}, which made no progress and exited with code 4{operation}"
        prefix = "the same error on every rank, first by " if self.error else ""
        return f"{prefix}{rank_text} with exit code {self.status}{operation}"


def root_cause(exits: Collection[Exit]) -> Exit | None:
    """Find the exit that ended the job, or None if all are consequences of the launcher's signals."""
    independent_exits = [rank_exit for rank_exit in exits if not rank_exit.is_consequence]
    if not independent_exits:
        return None
    failure_times = [rank_exit.time_s for rank_exit in independent_exits if rank_exit.has_failed]
    first_time = min(failure_times) if failure_times else min(rank_exit.time_s for rank_exit in independent_exits)
    stuck = first_stuck(exits)
    if stuck is not None and all(rank_exit.status == 4 for rank_exit in independent_exits):
        return stuck
    candidates = [rank_exit for rank_exit in independent_exits if rank_exit.time_s <= first_time + WINDOW_S]
    return min(candidates, key=lambda rank_exit: (rank_exit.weight, rank_exit.time_s))


def first_stuck(exits: Collection[Exit]) -> Exit | None:
    """Find the lowest rank that had to be killed, or None."""
    return min(
        (rank_exit for rank_exit in exits if rank_exit.is_stuck), key=lambda rank_exit: rank_exit.rank, default=None
    )


def relevant_exits(exits: Collection[Exit]) -> list[Exit]:
    """Return the subset of ``exits`` that can affect ``root_cause``, whatever exits are added later.

    The subset contains the first exit of each weight, and the first failure, from which ``WINDOW_S`` is measured. It
    also contains the first exit with a status other than 4, and the lowest rank that had to be killed. This rank is the
    root cause if all other exits are 4.
    """
    # Sorted, so that the result does not depend on the order of ``exits``.
    exits = sorted(exits, key=lambda rank_exit: (rank_exit.time_s, rank_exit.rank, repr(rank_exit)))
    independent_exits = [rank_exit for rank_exit in exits if not rank_exit.is_consequence]
    selected = [
        next((rank_exit for rank_exit in independent_exits if rank_exit.weight == weight), None) for weight in range(4)
    ]
    selected += [
        next((rank_exit for rank_exit in independent_exits if rank_exit.has_failed), None),
        next((rank_exit for rank_exit in independent_exits if rank_exit.status != 4), None),
    ]
    selected.append(first_stuck(exits))
    return list(dict.fromkeys(rank_exit for rank_exit in selected if rank_exit is not None))


def parse_exits(text: str) -> list[Exit]:
    """Parse the exits in a JSON list; return an empty list for an empty text."""
    return [Exit(**fields) for fields in json.loads(text or "[]")]


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


# Communication of the launchers of one job about the end of one start, over the store of node 0.
#
# | key | written by | content |
# |---|---|---|
# | ``failed`` | a node that lost a rank | set after a failure |
# | ``verdicts`` | a node that adds an exit | the exits that determine the root cause, as JSON |
# | ``left`` | every node | the number of nodes without ranks |
# | ``restart/R`` | node R, once no node has a running rank | its reason against a restart; empty if there is none |
# | ``decision`` | node 0, once all have voted | "go" or "stop", a space, and the reason |
# | ``gone`` | every node | the number of nodes that have read all that they need |
#
# Each start has its own board: the agent passes a store with the start's number in its keys.

POLL_S = 0.05
T = TypeVar("T")


class NodeBoard:
    """One node's view of the keys in the table before this class; a job with one node sends no messages.

    A second signal ends all waits.
    """

    def __init__(self, store: Store, node_rank: int, num_nodes: int, signals: Signals) -> None:
        self._store, self._node_rank, self._num_nodes, self._signals = store, node_rank, num_nodes, signals

    def is_failed(self) -> bool:
        """Return True if a node has lost a rank, or node 0 is gone."""
        return self._num_nodes > 1 and self._call_store(lambda: self._store.check(["failed"]), True)

    def have_all_ended(self) -> bool:
        """Return True if no node has a running rank."""
        return self._num_nodes == 1 or self._call_store(lambda: self._store.add("left", 0) >= self._num_nodes, True)

    def report_ended(self, status: int = 0) -> None:
        """Report that this node has no running rank; ``status`` is the highest exit code of its ranks."""
        if self._num_nodes > 1:
            self._call_store(lambda: self._store.add("left", 1), 0)

    def report_failed(self, verdict: Exit | None) -> None:
        """Report a failure, and the exit of this node's rank that caused it, if there is one."""
        if self._num_nodes > 1:
            if verdict is not None:
                self._call_store(lambda: self._add_verdict(verdict), None)
            self._call_store(lambda: self._store.set("failed", "1"), None)

    def _add_verdict(self, verdict: Exit) -> None:
        """Add ``verdict`` to the shared list if it can affect the root cause.

        The nodes share one key. If each node had its own key, every node would have to read the keys of all nodes.
        """
        known = self._read("verdicts")
        while True:
            merged = json.dumps([asdict(rank_exit) for rank_exit in relevant_exits([*parse_exits(known), verdict])])
            if merged == known:
                return
            before, known = known, self._store.compare_set("verdicts", known, merged).decode()
            if known in (merged, before):  # torch returns the current value: ours, or another node's
                return

    def statuses(self) -> list[int]:
        """Return exit codes of other nodes' ranks; empty except in elastic jobs, in which a node may have no ranks."""
        return []

    def lost_nodes(self) -> list[int]:
        """Return this start's lost nodes, if the job can continue without them."""
        return []

    def verdicts(self) -> list[Exit]:
        """Return the exits reported by all nodes so far that determine the root cause."""
        return parse_exits(self._call_store(lambda: self._read("verdicts"), "")) if self._num_nodes > 1 else []

    def agree(self, objection: str, timeout_s: float, get_origin: Callable[[], str]) -> tuple[bool, str]:
        """Decide whether the job restarts; return (decision, reason), the same on every node.

        Node 0 decides "go" only if every node has reported that it has no running rank and agrees to a restart. A node
        that was asked to stop objects. A missing vote, for example of a lost node, counts as an objection.

        Args:
            objection: this node's reason against a restart; empty if there is none.
            timeout_s: seconds to wait for the other nodes' votes.
            get_origin: called on node 0 if all nodes agree; returns the origin of the next start as text.
        """
        if self._num_nodes == 1:
            return (False, objection) if objection else (True, get_origin())
        self._call_store(lambda: self._store.set(f"restart/{self._node_rank}", objection), None)
        if self._node_rank == 0:
            objection = self._count_votes(timeout_s)
            decision = f"stop {objection}" if objection else f"go {get_origin()}"
            self._call_store(lambda: self._store.set("decision", decision), None)
        else:
            self._wait(lambda: self._call_store(lambda: self._store.check(["decision"]), True), 2 * timeout_s)
            decision = self._call_store(lambda: self._read("decision"), "") or "stop node 0 was lost"
        verb, _, reason = decision.partition(" ")
        return verb == "go", reason

    def release_store(self, timeout_s: float) -> None:
        """Report that this node no longer needs the store; node 0, which hosts it, waits for all nodes."""
        if self._num_nodes == 1:
            return
        self._call_store(lambda: self._store.add("gone", 1), 0)
        if self._node_rank == 0:
            self._wait(lambda: self._call_store(lambda: self._store.add("gone", 0) >= self._num_nodes, True), timeout_s)

    def _count_votes(self, timeout_s: float) -> str:
        """Return the reason against a restart, or "" if all nodes agree."""
        keys = [f"restart/{node}" for node in range(self._num_nodes)]
        self._wait(lambda: self._call_store(lambda: self._store.check(keys), True), timeout_s)
        missing_nodes = [
            str(node) for node, key in enumerate(keys) if not self._call_store(partial(self._store.check, [key]), False)
        ]
        if missing_nodes:
            return f"node {', '.join(missing_nodes)} did not answer"
        return next((reason for reason in map(self._read, keys) if reason), "")

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``is_done`` returns True, the timeout has passed, or a second signal has arrived."""
        deadline = time.monotonic() + timeout_s
        while not is_done() and time.monotonic() < deadline and not self._signals.is_ended:
            self._signals.wait(POLL_S)

    @staticmethod
    def _call_store(operation: Callable[[], T], default: T) -> T:
        try:
            return operation()
        except RuntimeError:  # node 0 is gone, and the store with it
            return default


# Restarts of a failed job: --max-restarts, and progress.
#
# A start makes progress if it makes a checkpoint durable with a higher step than the previous durable checkpoint. After
# a rollback, the step of that checkpoint may be lower than the steps of earlier ones. Rank 0 reports the step in the
# progress file (megatron/runtime/progress_file.py). ``MAX_FRUITLESS_STARTS`` consecutive starts without progress end
# the job, because the next one would fail in the same way.

MAX_FRUITLESS_STARTS = 3
RESTARTABLE_CODES = (1, 4)
"""Exit codes after which a restart may help: a rank died or timed out, or an exception. Other errors would recur."""


class Restarts:
    """Counts the restarts of one job.

    Args:
        max_restarts: maximum number of restarts (--max-restarts).
        progress: path of the progress file; ranks write to it only on node 0.
    """

    def __init__(self, max_restarts: int, progress: Path) -> None:
        self.max_restarts, self.num_done = max_restarts, 0
        self._progress = progress
        self._last_durable_step: int | None = None
        self._num_fruitless = 0

    @property
    def durable_step(self) -> int | None:
        """Step of the newest durable checkpoint of this job, or None."""
        return progress_file.read_committed_step(self._progress)

    def objection(self, code: int, *, is_node_0: bool) -> str:
        """Return the reason against a restart after ``code``, or "" if there is none.

        Must be called once after each failed start.
        """
        if code not in RESTARTABLE_CODES:
            return f"a restart would end with code {code} again"
        if is_node_0 and self._is_fruitless():
            newest = (
                "no checkpoint is durable"
                if self._last_durable_step is None
                else f"the newest is of step {self._last_durable_step}"
            )
            return (
                f"{MAX_FRUITLESS_STARTS} consecutive starts ended before a new checkpoint was durable ({newest}), so "
                "the job does not restart. See their errors above, and lower --save-interval if they only ended too "
                "early"
            )
        return self.objection_to_one_more()

    def objection_to_one_more(self) -> str:
        """Return the message that all restarts are used, or "" if another one is allowed."""
        return (
            f"all restarts of --max-restarts {self.max_restarts} are used" if self.num_done >= self.max_restarts else ""
        )

    def origin(self) -> str:
        """Return a text on the checkpoint that the next start begins from, for messages."""
        step = self.durable_step
        return (
            "like the first start, because this job has no durable checkpoint yet"
            if step is None
            else (f"from the checkpoint of step {step}")
        )

    def _is_fruitless(self) -> bool:
        """Count this start; return True if ``MAX_FRUITLESS_STARTS`` consecutive starts have made no progress."""
        previous_step, self._last_durable_step = self._last_durable_step, self.durable_step
        has_grown = self._last_durable_step is not None and (
            previous_step is None or self._last_durable_step > previous_step
        )
        self._num_fruitless = 0 if has_grown else self._num_fruitless + 1
        return self._num_fruitless >= MAX_FRUITLESS_STARTS


# Exit code and final message of a job after its last start.
#
# "75 if durable" means 75 if a checkpoint of this job is durable, or if SLURM's warning was the first signal; otherwise
# the first signal's code.
#
# | the ranks ended | a stop was requested | the job's code | message |
# |---|---|---|---|
# | by a second signal, immediately | yes | 128 + its number | a second signal was received |
# | by the request, before they could handle it | yes | 75 if durable | how to resume; the cause, unless 75 |
# | with 1 or 4, before the request, with restarts allowed | after that | 75 if durable | the same |
# | with 75 | perhaps | 75 | none: rank 0 has reported it |
# | all with 2 | perhaps | 2 | none: rank 0 has reported it |
# | otherwise | perhaps | the root cause's | the root cause, and the reason against a restart |

STOP_STATUSES = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True)
class End:
    """End of one start, as known on this node.

    Args:
        code: exit code of the start.
        verdict: the root cause.
        exits: exits of this node's ranks.
        late_message: message about ranks that exceeded --stop-grace; otherwise "".
        is_error_printed: a rank of this node has printed why the job ends.
        is_same_on_all_ranks: every rank of this node that exited by itself has code 2, and rank 0, which reports the
            error, is one of these ranks or runs on another node.
    """

    code: int
    verdict: Exit | None
    exits: Collection[Exit]
    late_message: str
    was_asked_to_stop: bool
    is_error_printed: bool
    is_same_on_all_ranks: bool

    @property
    def is_by_request(self) -> bool:
        """True if the ranks were ended by a signal for which they had no handler yet."""
        return self.verdict is not None and self.verdict.status in STOP_STATUSES

    def __str__(self) -> str:
        verdict = self.verdict
        if verdict is None or verdict.status in (0, RESUMABLE_CODE):
            cause = f"ended by {verdict}" if verdict is not None else "ended by another node, or node 0 was lost"
            return self.late_message or cause
        other_stuck = [
            str(rank_exit.rank) for rank_exit in self.exits if rank_exit.is_stuck and rank_exit.rank != verdict.rank
        ]
        text = f"ended by {verdict}"
        if verdict.is_stuck and other_stuck:
            text += f", as had rank {', '.join(other_stuck)}"
        if verdict.error and not self.is_error_printed:
            text += f": {verdict.error}"
        return text + (f" ({verdict.hint})" if verdict.hint else "")


def job_result(
    end: End, signals: Signals, durable_step: int | None, *, max_restarts: int, reason: str
) -> tuple[int, str | None]:
    """Return the job's exit code and final message (or None), according to the table before ``End``.

    Args:
        durable_step: step of the newest durable checkpoint of this job, or None.
        max_restarts: --max-restarts.
        reason: reason against a restart; may be empty.
    """
    if signals.is_ended:
        code = 128 + signals.received[1]
        return code, f"ended immediately by a second signal, code {code}"
    code, is_between_starts = end.code, max_restarts > 0 and end.code in RESTARTABLE_CODES and not end.was_asked_to_stop
    if signals.is_asked_to_stop and end.is_by_request:
        code = signals.code if durable_step is None else RESUMABLE_CODE
    elif signals.is_asked_to_stop and is_between_starts and durable_step is not None:
        code = RESUMABLE_CODE
    if code == RESUMABLE_CODE != end.code:
        return (
            code,
            f"received {signals.first_name} while the ranks could not save; {_how_to_resume(durable_step)}; code "
            f"{code}",
        )
    if code == RESUMABLE_CODE or (code == 2 and end.is_same_on_all_ranks):
        return code, None
    return code, f"{end}{f'; {reason}' if reason else ''}; the job ends with code {code}"


def _how_to_resume(durable_step: int | None) -> str:
    if durable_step is None:
        return "nothing was lost: run the same command later"
    return f"the checkpoint of step {durable_step} is durable: resume with the same command and --load RUN_FOLDER"
