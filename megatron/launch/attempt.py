"""One start of the ranks up to its verdict; OOM kills."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megatron import log
from megatron.launch import processes
from megatron.launch.options import Options
from megatron.launch.outcome import End, Exit, NodeBoard, first_stuck, root_cause
from megatron.launch.processes import RESUMABLE, Signals
from megatron.runtime import launcher_files, rank_status

# How often the kernel's OOM killer has struck here: what can be known of it without reading the kernel's log.
#
# | count | file |
# |---|---|
# | of this memory cgroup, version 2 | ``memory.events``, ``oom_kill`` |
# | of this memory cgroup, version 1 | ``memory.oom_control``, ``oom_kill`` |
# | of this machine | ``/proc/vmstat``, ``oom_kill`` |

ROOT = Path("/")


def oom_kills(root: Path = ROOT) -> dict[str, int]:
    """Return the counts that can be read, by the name of what they count over."""
    files = {"this machine": root / "proc/vmstat", **_of_cgroup(root)}
    counts = {name: _count(path) for name, path in files.items()}
    return {name: count for name, count in counts.items() if count is not None}


def explain_kill(before: dict[str, int], after: dict[str, int]) -> str:
    """Say what the counts at the start and now mean for a process that ended by SIGKILL."""
    known = {name: (before[name], after[name]) for name in before if name in after}
    grown = [f"{name}: {was} to {now}" for name, (was, now) in known.items() if now > was]
    if grown:
        return (
            f"perhaps the OOM killer, whose count rose since the start ({', '.join(grown)}); give the job more memory, "
            "or lower --batch-size, --num-workers or the ranks on this node"
        )
    if known:
        return f"perhaps the OOM killer, but its count has not risen ({', '.join(known)}): rather a kill from outside"
    return "perhaps the OOM killer, whose counts cannot be read here"


def _of_cgroup(root: Path) -> dict[str, Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers:
            found["this job's memory cgroup"] = root / "sys/fs/cgroup" / place.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            found["this job's memory cgroup"] = root / "sys/fs/cgroup/memory" / place.lstrip("/") / "memory.oom_control"
            break  # version 1 holds memory: its files are the ones that count
    return found


def _count(path: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)", path.read_text(), re.M)
    except OSError:
        return None
    return int(found.group(1)) if found else None


# What a rank that has ended left beside the failure file.


def position_of(failure_file: Path, rank: int) -> rank_status.Position:
    """Return its place, what it was at last and whether its run had ended; empty if it did not come so far."""
    try:
        return rank_status.read_position(Path(rank_status.page_of(str(failure_file), rank)).read_bytes())
    except OSError:
        return rank_status.Position()


def show_trace(failure_file: Path, rank: int) -> None:
    """Show what a crash in native code has left, each line with the rank's number."""
    try:
        trace = Path(launcher_files.trace_of(str(failure_file), rank)).read_text(errors="replace")
    except OSError:
        return
    if trace.strip():
        sys.stderr.write("".join(f"rank {rank}: {line}\n" for line in trace.splitlines() if line.strip()))
        sys.stderr.flush()


# One start of a node's ranks, from their first process to the verdict on how it ended.
#
# When a rank fails, the launcher writes the failure file, waits a moment in which the others notice by themselves, then
# sends SIGTERM, then SIGKILL: all are gone within a second. The failure file (environment variable
# MEGATRON_FAILURE_FILE of each rank) is there, whole, before that SIGTERM; a SIGTERM without it is a request to save
# and leave with 75. It holds one line of text, such as "a peer died: rank 3 (pid 4711) by SIGKILL". What ranks leave
# beside it is in megatron/runtime/exit_guard.py, and so is where they are at.

QUIET_S = 0.2
"""After a failure the others may notice by themselves for this long."""
QUIET_UNKNOWN_S = 0.35
"""The same while only lost peers are known: the rank that caused it may still be printing its traceback."""
KILL_S = 0.75
BOARD_S = 0.5
MEET_S = 3.0


class RankGroup:
    """The ranks of one start on this node.

    Args:
        folder: of this start alone.
    """

    def __init__(self, options: Options, node_rank: int, board: NodeBoard, signals: Signals, folder: Path) -> None:
        self._options, self._node_rank, self._board, self._signals = options, node_rank, board, signals
        self.failure_file = folder / "failure"
        self.ranks: list[processes.RankProcess] = []
        self._exits: list[Exit] = []
        self._kills = oom_kills()
        self._was_signalled = self._has_left = False
        self._stop_deadline: float | None = None
        self._next_look = 0.0
        self._verdict: Exit | None = None
        self._began = time.monotonic()
        self._gate = processes.Gate()

    def begin(self) -> None:
        """Let the ranks run, now that all are started."""
        self._gate.open()

    def start(self, rank: int, local_rank: int, env: Mapping[str, str]) -> int:
        """Start one rank and return its process id; with --preload it runs after ``begin``."""
        options = self._options
        pid = processes.start(
            options.script,
            options.script_args,
            env,
            in_fork=bool(options.preload),
            keeps_input=options.stdin and rank == 0,
            gate=self._gate,
        )
        self.ranks.append(processes.RankProcess(rank, local_rank, pid))
        return pid

    def watch(self) -> int | None:
        """Take in the news; return the start's exit code once it has ended on all nodes, else None."""
        self._reap()
        if self._signals.is_ended:
            return self._end_at_once()
        if self._signals.is_asked_to_stop and self._stop_deadline is None:
            self._ask_to_stop()
        if self._is_failed():
            return self._end()
        if any(one.is_alive for one in self.ranks) or not self._all_nodes_left():
            return None
        if self._board.is_failed():  # said after the last look
            return self._end()
        return max([one.status for one in self._exits] + self._board.statuses())  # 0, or 75: stopped on request

    def end(self, code: int) -> End:
        """Return how this start ended, once ``watch`` has returned ``code``."""
        own = [one for one in self._exits if not one.is_consequence]
        has_teller = self._node_rank > 0 or any(one.rank == 0 for one in own)
        return End(
            code=code,
            verdict=self._verdict,
            exits=self._exits,
            late=self._late(),
            was_asked_to_stop=self._stop_deadline is not None,
            is_said=launcher_files.is_reported(str(self.failure_file)),
            is_alike=has_teller and bool(own) and all(one.status == 2 for one in own),
        )

    def is_regrouping(self) -> bool:
        """Whether those ranks of this node, if any, that have left with 75 did so for a node to be taken in.

        Others may have been ended by the launcher, where a node was lost at that moment.
        """
        return all(one.state == rank_status.REGROUP for one in self._exits if one.status == RESUMABLE)

    def _late(self) -> str:
        late = [str(one.rank) for one in self.ranks if one.status not in (0, RESUMABLE)]
        if self._stop_deadline is None or not late:
            return ""
        return f"rank {', '.join(late)} did not leave within --stop-grace {self._options.stop_grace_s:g} s"

    def kill(self) -> None:
        """End all ranks at once, and wait until they have."""
        for one in self.ranks:
            one.kill()
        while any(one.is_alive for one in self.ranks):
            self._reap()
            time.sleep(0.005)

    def _reap(self) -> None:
        for one in self.ranks:
            if one.reap() and one.status is not None:
                ended = self._exit_of(one, one.status)
                if ended.status or ended.state != rank_status.IDLE:
                    self._exits.append(ended)

    def _exit_of(self, one: processes.RankProcess, status: int) -> Exit:
        last = position_of(self.failure_file, one.rank)
        if status < 0 and not self._was_signalled:
            show_trace(self.failure_file, one.rank)
        hint = explain_kill(self._kills, oom_kills()) if status == -signal.SIGKILL and not self._was_signalled else ""
        words = launcher_files.words_of(str(self.failure_file), one.rank) if status > 0 else ""
        at = min(one.ended_at, last.said_at or one.ended_at) - self._began
        return Exit(
            rank=one.rank, pid=one.pid, status=status, at=at, was_signalled=self._was_signalled,
            place=last.place, doing=last.doing, words=words, hint=hint, state=last.state,
        )  # fmt: skip

    def _ask_to_stop(self) -> None:
        self._stop_deadline = time.monotonic() + self._options.stop_grace_s
        log.info(
            f"launch: {self._signals.first_name}: the ranks finish their step, save and leave; "
            "a second signal ends them at once"
        )
        launcher_files.note_asked(str(self.failure_file), self._signals.first_name)
        for one in self.ranks:
            one.terminate()

    def _is_failed(self) -> bool:
        """Whether a rank failed, left too early or too late, or another node says so."""
        if any(one.has_failed for one in self._exits):
            return True
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + BOARD_S
            if self._board.is_failed():
                return True
        if self._stop_deadline is not None:
            return any(one.is_alive for one in self.ranks) and time.monotonic() > self._stop_deadline
        is_waiting = self._has_left or any(one.is_alive for one in self.ranks)
        spent = time.monotonic() - self._began
        return is_waiting and any(spent > one.at + self._options.exit_grace_s for one in self._exits)

    def _all_nodes_left(self) -> bool:
        self._leave()
        return self._board.all_left()

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._board.report_left(max((one.status for one in self._exits), default=0))

    def _end(self) -> int:
        """End the ranks that are left within ``KILL_S``, and settle with the other nodes who the culprit is."""
        start = time.monotonic()
        named: Exit | None = None
        while any(one.is_alive for one in self.ranks):
            verdict = self._root_cause()
            if verdict != named or not self.failure_file.exists():
                self._write_failure(verdict)
                self._board.report_failed(verdict)
                named = verdict
            spent = time.monotonic() - start
            if spent > KILL_S or self._signals.is_ended:
                for one in self.ranks:
                    one.kill()
            elif not self._was_signalled and spent > (QUIET_UNKNOWN_S if verdict and verdict.weight > 1 else QUIET_S):
                self._was_signalled = True
                for one in self.ranks:
                    one.terminate()
            self._signals.wait(0.02)
            self._reap()
        return self._conclude()

    def _conclude(self) -> int:
        self._board.report_failed(root_cause(self._exits) or first_stuck(self._exits))
        self._leave()
        end = time.monotonic() + MEET_S
        while not self._board.all_left() and time.monotonic() < end and not self._signals.is_ended:
            self._signals.wait(0.02)
        self._verdict = self._root_cause()
        return 4 if self._verdict is None else self._verdict.job_code

    def _root_cause(self) -> Exit | None:
        return root_cause([*self._exits, *self._board.verdicts()])

    def _write_failure(self, verdict: Exit | None) -> None:
        """Put the failure file in place in one step."""
        if verdict is None:
            reason = f"the job ends: {self._late() or 'another node failed, or node 0 was lost'}"
        else:
            reason = f"{'the job ends' if verdict.words else 'a peer died'}: {verdict}"
        temporary = self.failure_file.with_suffix(".tmp")
        temporary.write_text(reason + "\n")
        temporary.replace(self.failure_file)

    def _end_at_once(self) -> int:
        self.kill()
        return 128 + self._signals.seen[1]
