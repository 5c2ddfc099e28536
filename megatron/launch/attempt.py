"""RankGroup: the ranks of one start on a node, and the root cause of their end. Also counts OOM kills."""

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

# Counts of the kernel's OOM killer, which can be read without the kernel's log.
#
# | count of kills in | file |
# |---|---|
# | this memory cgroup, version 2 | ``memory.events``, ``oom_kill`` |
# | this memory cgroup, version 1 | ``memory.oom_control``, ``oom_kill`` |
# | this machine | ``/proc/vmstat``, ``oom_kill`` |

ROOT = Path("/")


def oom_kills(root: Path = ROOT) -> dict[str, int]:
    """Return the readable counts of OOM kills by their scope ("this machine", "this job's memory cgroup")."""
    files = {"this machine": root / "proc/vmstat", **_of_cgroup(root)}
    counts = {name: _count(path) for name, path in files.items()}
    return {name: count for name, count in counts.items() if count is not None}


def explain_kill(before: dict[str, int], after: dict[str, int]) -> str:
    """Return text on the likely cause of a SIGKILL, from the counts at the start and now."""
    known = {name: (before[name], after[name]) for name in before if name in after}
    grown = [
        f"{name}: {old_count} to {new_count}" for name, (old_count, new_count) in known.items() if new_count > old_count
    ]
    if grown:
        return (
            f"possibly the OOM killer, whose count rose since the start ({', '.join(grown)}); increase the job's "
            "memory, or lower --batch-size, --num-workers or the number of ranks on this node"
        )
    if known:
        return f"probably not the OOM killer, whose count has not risen ({', '.join(known)}), but another process"
    return "possibly the OOM killer, whose counts cannot be read"


def _of_cgroup(root: Path) -> dict[str, Path]:
    """Return the file with the OOM counts of the memory cgroup of this process, by scope."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    files = {}
    for line in lines:
        _, controllers, cgroup = line.split(":", 2)
        if not controllers:
            files["this job's memory cgroup"] = root / "sys/fs/cgroup" / cgroup.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            files["this job's memory cgroup"] = (
                root / "sys/fs/cgroup/memory" / cgroup.lstrip("/") / "memory.oom_control"
            )
            break  # the memory controller is in version 1
    return files


def _count(path: Path) -> int | None:
    """Return the count of OOM kills in a file, or None if it cannot be read."""
    try:
        match = re.search(r"^oom_kill (\d+)", path.read_text(), re.M)
    except OSError:
        return None
    return int(match.group(1)) if match else None


# Files of a rank that has ended, next to the failure file.


def position_of(failure_file: Path, rank: int) -> rank_status.Position:
    """Return the last status of a rank: coordinates, operation, state; empty if it has not written its status page."""
    try:
        return rank_status.read_position(Path(rank_status.page_of(str(failure_file), rank)).read_bytes())
    except OSError:
        return rank_status.Position()


def show_trace(failure_file: Path, rank: int) -> None:
    """Print the trace of a crash in native code, each line with the rank's number."""
    try:
        trace = Path(launcher_files.trace_of(str(failure_file), rank)).read_text(errors="replace")
    except OSError:
        return
    if trace.strip():
        sys.stderr.write("".join(f"rank {rank}: {line}\n" for line in trace.splitlines() if line.strip()))
        sys.stderr.flush()


# One start of a node's ranks, from their first process to the root cause of its end.
#
# When a rank fails, the launcher writes the failure file, waits shortly for the other ranks to notice by themselves,
# then sends SIGTERM, then SIGKILL: all ranks have exited within a second. The failure file (environment variable
# MEGATRON_FAILURE_FILE of each rank) is complete before that SIGTERM; a SIGTERM without it is a request to save and
# exit with 75. It contains one line of text, such as "a peer died: rank 3 (pid 4711) by SIGKILL". The files that ranks
# write next to it are described in megatron/runtime/launcher_files.py, their status pages in
# megatron/runtime/rank_status.py.

QUIET_S = 0.2
"""Seconds after a failure in which other ranks may notice it by themselves."""
QUIET_UNKNOWN_S = 0.35
"""As ``QUIET_S``, while all known exits are consequences of another one: that rank may still print its traceback."""
KILL_S = 0.75
BOARD_S = 0.5
MEET_S = 3.0


class RankGroup:
    """The ranks of one start on this node.

    Args:
        folder: folder of this start.
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
        """Release the ranks, now that all have been forked."""
        self._gate.open()

    def start(self, rank: int, local_rank: int, env: Mapping[str, str]) -> int:
        """Start one rank and return its process id; with --preload it waits for ``begin``."""
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
        """Check ranks and other nodes; return the exit code once this start has ended on all nodes, else None."""
        self._reap()
        if self._signals.is_ended:
            return self._end_at_once()
        if self._signals.is_asked_to_stop and self._stop_deadline is None:
            self._ask_to_stop()
        if self._is_failed():
            return self._end()
        if any(one.is_alive for one in self.ranks) or not self._all_nodes_left():
            return None
        if self._board.is_failed():  # another node has failed since the check above
            return self._end()
        return max([one.status for one in self._exits] + self._board.statuses())  # 0, or 75 if stopped on request

    def end(self, code: int) -> End:
        """Return the description of this start's end, once ``watch`` has returned ``code``."""
        own_exits = [rank_exit for rank_exit in self._exits if not rank_exit.is_consequence]
        has_reporter = self._node_rank > 0 or any(rank_exit.rank == 0 for rank_exit in own_exits)
        return End(
            code=code,
            verdict=self._verdict,
            exits=self._exits,
            late=self._late(),
            was_asked_to_stop=self._stop_deadline is not None,
            is_said=launcher_files.is_reported(str(self.failure_file)),
            is_alike=has_reporter and bool(own_exits) and all(rank_exit.status == 2 for rank_exit in own_exits),
        )

    def is_regrouping(self) -> bool:
        """Return True if a node that joins is the reason for every exit with 75 on this node.

        The launcher may have ended the other ranks, if a node was lost at the same time.
        """
        return all(rank_exit.state == rank_status.REGROUP for rank_exit in self._exits if rank_exit.status == RESUMABLE)

    def _late(self) -> str:
        """Return the message about ranks that exceeded --stop-grace; otherwise ""."""
        late = [str(process.rank) for process in self.ranks if process.status not in (0, RESUMABLE)]
        if self._stop_deadline is None or not late:
            return ""
        return f"rank {', '.join(late)} did not exit within --stop-grace {self._options.stop_grace_s:g} s"

    def kill(self) -> None:
        """Kill all ranks, and wait until they have exited."""
        for process in self.ranks:
            process.kill()
        while any(process.is_alive for process in self.ranks):
            self._reap()
            time.sleep(0.005)

    def _reap(self) -> None:
        """Record the exits of ranks that have just ended."""
        for process in self.ranks:
            if process.reap() and process.status is not None:
                ended = self._exit_of(process, process.status)
                if ended.status or ended.state != rank_status.IDLE:
                    self._exits.append(ended)

    def _exit_of(self, one: processes.RankProcess, status: int) -> Exit:
        """Return the description of the exit of one rank."""
        position = position_of(self.failure_file, one.rank)
        if status < 0 and not self._was_signalled:
            show_trace(self.failure_file, one.rank)
        hint = explain_kill(self._kills, oom_kills()) if status == -signal.SIGKILL and not self._was_signalled else ""
        error_text = launcher_files.words_of(str(self.failure_file), one.rank) if status > 0 else ""
        ended_at = min(one.ended_at, position.said_at or one.ended_at) - self._began
        return Exit(
            rank=one.rank, pid=one.pid, status=status, at=ended_at, was_signalled=self._was_signalled,
            place=position.place, doing=position.doing, words=error_text, hint=hint, state=position.state,
        )  # fmt: skip

    def _ask_to_stop(self) -> None:
        """Send SIGTERM to all ranks, as a request to save and exit within --stop-grace."""
        self._stop_deadline = time.monotonic() + self._options.stop_grace_s
        log.info(
            f"launch: {self._signals.first_name}: the ranks finish their step, save and exit; "
            "a second signal ends them immediately"
        )
        launcher_files.note_asked(str(self.failure_file), self._signals.first_name)
        for process in self.ranks:
            process.terminate()

    def _is_failed(self) -> bool:
        """Return True if a rank failed, exited too early or too late, or another node has reported a failure."""
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
        """Report that this node has no running rank; return True if no node has one."""
        self._leave()
        return self._board.all_left()

    def _leave(self) -> None:
        """Report once that this node has no running rank."""
        if not self._has_left:
            self._has_left = True
            self._board.report_left(max((rank_exit.status for rank_exit in self._exits), default=0))

    def _end(self) -> int:
        """End the remaining ranks within ``KILL_S``, and determine the root cause with the other nodes."""
        start = time.monotonic()
        reported: Exit | None = None
        while any(process.is_alive for process in self.ranks):
            verdict = self._root_cause()
            if verdict != reported or not self.failure_file.exists():
                self._write_failure(verdict)
                self._board.report_failed(verdict)
                reported = verdict
            spent = time.monotonic() - start
            if spent > KILL_S or self._signals.is_ended:
                for process in self.ranks:
                    process.kill()
            elif not self._was_signalled and spent > (QUIET_UNKNOWN_S if verdict and verdict.weight > 1 else QUIET_S):
                self._was_signalled = True
                for process in self.ranks:
                    process.terminate()
            self._signals.wait(0.02)
            self._reap()
        return self._conclude()

    def _conclude(self) -> int:
        """Wait until no node has a running rank, determine the root cause, and return the exit code of the start."""
        self._board.report_failed(root_cause(self._exits) or first_stuck(self._exits))
        self._leave()
        deadline = time.monotonic() + MEET_S
        while not self._board.all_left() and time.monotonic() < deadline and not self._signals.is_ended:
            self._signals.wait(0.02)
        self._verdict = self._root_cause()
        return 4 if self._verdict is None else self._verdict.job_code

    def _root_cause(self) -> Exit | None:
        """Return the root cause among the exits that are known so far on all nodes, or None."""
        return root_cause([*self._exits, *self._board.verdicts()])

    def _write_failure(self, verdict: Exit | None) -> None:
        """Write the failure file atomically."""
        if verdict is None:
            reason = f"the job ends: {self._late() or 'another node failed, or node 0 was lost'}"
        else:
            reason = f"{'the job ends' if verdict.words else 'a peer died'}: {verdict}"
        temporary = self.failure_file.with_suffix(".tmp")
        temporary.write_text(reason + "\n")
        temporary.replace(self.failure_file)

    def _end_at_once(self) -> int:
        """Kill all ranks after a second signal, and return the exit code of that signal."""
        self.kill()
        return 128 + self._signals.seen[1]
