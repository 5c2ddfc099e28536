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
from megatron.launch.processes import RESUMABLE_CODE, Signals
from megatron.runtime import launcher_files, rank_status

# Counts of the kernel's OOM killer, which can be read without the kernel's log.
#
# | count of kills in | file |
# |---|---|
# | this memory cgroup, version 2 | ``memory.events``, ``oom_kill`` |
# | this memory cgroup, version 1 | ``memory.oom_control``, ``oom_kill`` |
# | this machine | ``/proc/vmstat``, ``oom_kill`` |

ROOT = Path("/")


def count_oom_kills(root: Path = ROOT) -> dict[str, int]:
    """Count OOM kills by scope ("this machine", "this job's memory cgroup"), without unreadable counts."""
    files = {"this machine": root / "proc/vmstat", **_cgroup_files(root)}
    counts = {name: _read_count(path) for name, path in files.items()}
    return {name: count for name, count in counts.items() if count is not None}


def explain_kill(before: dict[str, int], after: dict[str, int]) -> str:
    """Explain the likely cause of a SIGKILL from the counts at the start and now."""
    known = {name: (before[name], after[name]) for name in before if name in after}
    increases = [
        f"{name}: {old_count} to {new_count}" for name, (old_count, new_count) in known.items() if new_count > old_count
    ]
    if increases:
        return (
            f"possibly the OOM killer, whose count rose since the start ({', '.join(increases)}); increase the job's "
            "memory, or lower --batch-size, --num-workers or the number of ranks on this node"
        )
    if known:
        return f"probably not the OOM killer, whose count has not risen ({', '.join(known)}), but another process"
    return "possibly the OOM killer, whose counts cannot be read"


def _cgroup_files(root: Path) -> dict[str, Path]:
    """Find the memory cgroup files that count this process's OOM kills, by scope."""
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


def _read_count(path: Path) -> int | None:
    """Read an OOM kill count; return None if the file is unreadable."""
    try:
        match = re.search(r"^oom_kill (\d+)", path.read_text(), re.M)
    except OSError:
        return None
    return int(match.group(1)) if match else None


# Files of a rank that has ended, next to the failure file.


def read_rank_position(failure_file: Path, rank: int) -> rank_status.RankStatus:
    """Read a rank's last status: coordinates, operation, state; empty without a status file."""
    try:
        return rank_status.parse_status(Path(rank_status.status_path(str(failure_file), rank)).read_bytes())
    except OSError:
        return rank_status.RankStatus()


def print_native_trace(failure_file: Path, rank: int) -> None:
    """Print the trace of a crash in native code; each line starts with the rank."""
    try:
        trace = Path(launcher_files.trace_path(str(failure_file), rank)).read_text(errors="replace")
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
# write next to it are described in megatron/runtime/launcher_files.py, their status files in
# megatron/runtime/rank_status.py.

NOTICE_S = 0.2
"""Seconds after a failure in which other ranks may notice it by themselves."""
NOTICE_UNKNOWN_S = 0.35
"""Replaces ``NOTICE_S`` while all known exits are consequences of a failure elsewhere, because the rank that failed may
still be printing its traceback."""
KILL_AFTER_S = 0.75
BOARD_POLL_S = 0.5
NODE_WAIT_S = 3.0


class RankGroup:
    """This node's ranks in one start.

    Args:
        folder: folder of this start.
    """

    def __init__(self, options: Options, node_rank: int, board: NodeBoard, signals: Signals, folder: Path) -> None:
        self._options, self._node_rank, self._board, self._signals = options, node_rank, board, signals
        self.failure_file = folder / "failure"
        self.ranks: list[processes.RankProcess] = []
        self._exits: list[Exit] = []
        self._oom_kills_at_start = count_oom_kills()
        self._was_signalled = self._has_reported_end = False
        self._stop_deadline: float | None = None
        self._next_poll_at = 0.0
        self._verdict: Exit | None = None
        self._started_at = time.monotonic()
        self._gate = processes.Gate()

    def release(self) -> None:
        """Release the ranks, now that all have been forked."""
        self._gate.open()

    def start(self, rank: int, local_rank: int, env: Mapping[str, str]) -> int:
        """Start one rank and return its process id; with --preload it waits for ``release``."""
        options = self._options
        pid = processes.start_rank(
            options.script,
            options.script_args,
            env,
            is_forked=bool(options.preload),
            inherits_stdin=options.stdin and rank == 0,
            gate=self._gate,
        )
        self.ranks.append(processes.RankProcess(rank, local_rank, pid))
        return pid

    def watch(self) -> int | None:
        """Check ranks and other nodes; return the exit code once this start has ended on all nodes, else None."""
        self._reap()
        if self._signals.is_ended:
            return self._kill_at_once()
        if self._signals.is_asked_to_stop and self._stop_deadline is None:
            self._request_stop()
        if self._is_failed():
            return self._end_ranks()
        if any(rank.is_alive for rank in self.ranks) or not self._have_all_nodes_ended():
            return None
        if self._board.is_failed():  # another node has failed since the check above
            return self._end_ranks()
        return max([rank.status for rank in self._exits] + self._board.statuses())  # 0, or 75 if stopped on request

    def describe_end(self, code: int) -> End:
        """Describe this start's end, once ``watch`` has returned ``code``."""
        independent_exits = [rank_exit for rank_exit in self._exits if not rank_exit.is_consequence]
        has_reporter = self._node_rank > 0 or any(rank_exit.rank == 0 for rank_exit in independent_exits)
        return End(
            code=code,
            verdict=self._verdict,
            exits=self._exits,
            late_message=self._late_message(),
            was_asked_to_stop=self._stop_deadline is not None,
            is_error_printed=launcher_files.is_reported(str(self.failure_file)),
            is_same_on_all_ranks=has_reporter
            and bool(independent_exits)
            and all(rank_exit.status == 2 for rank_exit in independent_exits),
        )

    def is_regrouping(self) -> bool:
        """Return True if all ranks of this node that exited with code 75 did so because a node joins.

        Ranks with other exit codes are ignored: the launcher may have ended them because a node was lost at the same
        time.
        """
        return all(
            rank_exit.state == rank_status.REGROUP for rank_exit in self._exits if rank_exit.status == RESUMABLE_CODE
        )

    def _late_message(self) -> str:
        late_ranks = [str(process.rank) for process in self.ranks if process.status not in (0, RESUMABLE_CODE)]
        if self._stop_deadline is None or not late_ranks:
            return ""
        return f"rank {', '.join(late_ranks)} did not exit within --stop-grace {self._options.stop_grace_s:g} s"

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
                rank_exit = self._exit_of(process, process.status)
                if rank_exit.status or rank_exit.state != rank_status.IDLE:
                    self._exits.append(rank_exit)

    def _exit_of(self, process: processes.RankProcess, status: int) -> Exit:
        position = read_rank_position(self.failure_file, process.rank)
        if status < 0 and not self._was_signalled:
            print_native_trace(self.failure_file, process.rank)
        hint = (
            explain_kill(self._oom_kills_at_start, count_oom_kills())
            if status == -signal.SIGKILL and not self._was_signalled
            else ""
        )
        error_text = launcher_files.read_common_error(str(self.failure_file), process.rank) if status > 0 else ""
        ended_at = min(process.ended_at, position.reported_at or process.ended_at) - self._started_at
        return Exit(
            rank=process.rank, pid=process.pid, status=status, time_s=ended_at, was_signalled=self._was_signalled,
            coordinates=position.coordinates, operation=position.operation, error=error_text, hint=hint,
            state=position.state,
        )  # fmt: skip

    def _request_stop(self) -> None:
        """Send SIGTERM to all ranks, as a request to save and exit within --stop-grace."""
        self._stop_deadline = time.monotonic() + self._options.stop_grace_s
        log.info(
            f"launch: {self._signals.first_name}: the ranks finish their step, save and exit; "
            "a second signal ends them immediately"
        )
        launcher_files.write_forwarded_signal(str(self.failure_file), self._signals.first_name)
        for process in self.ranks:
            process.terminate()

    def _is_failed(self) -> bool:
        """Return True if a rank failed, exited too early or too late, or another node has reported a failure."""
        if any(rank.has_failed for rank in self._exits):
            return True
        if time.monotonic() >= self._next_poll_at:
            self._next_poll_at = time.monotonic() + BOARD_POLL_S
            if self._board.is_failed():
                return True
        if self._stop_deadline is not None:
            return any(rank.is_alive for rank in self.ranks) and time.monotonic() > self._stop_deadline
        is_waiting = self._has_reported_end or any(rank.is_alive for rank in self.ranks)
        elapsed_s = time.monotonic() - self._started_at
        return is_waiting and any(elapsed_s > rank.time_s + self._options.exit_grace_s for rank in self._exits)

    def _have_all_nodes_ended(self) -> bool:
        """Report that this node has no running rank; return True if no node has one."""
        self._report_ended()
        return self._board.have_all_ended()

    def _report_ended(self) -> None:
        """Report once that this node has no running rank."""
        if not self._has_reported_end:
            self._has_reported_end = True
            self._board.report_ended(max((rank_exit.status for rank_exit in self._exits), default=0))

    def _end_ranks(self) -> int:
        """End the remaining ranks within ``KILL_AFTER_S``, and determine the root cause with the other nodes."""
        start = time.monotonic()
        reported: Exit | None = None
        while any(process.is_alive for process in self.ranks):
            verdict = self._root_cause()
            if verdict != reported or not self.failure_file.exists():
                self._write_failure(verdict)
                self._board.report_failed(verdict)
                reported = verdict
            elapsed_s = time.monotonic() - start
            if elapsed_s > KILL_AFTER_S or self._signals.is_ended:
                for process in self.ranks:
                    process.kill()
            elif not self._was_signalled and elapsed_s > (
                NOTICE_UNKNOWN_S if verdict and verdict.weight > 1 else NOTICE_S
            ):
                self._was_signalled = True
                for process in self.ranks:
                    process.terminate()
            self._signals.wait(0.02)
            self._reap()
        return self._wait_for_nodes()

    def _wait_for_nodes(self) -> int:
        """Wait until no node has a running rank, determine the root cause, and return the start's exit code."""
        self._board.report_failed(root_cause(self._exits) or first_stuck(self._exits))
        self._report_ended()
        deadline = time.monotonic() + NODE_WAIT_S
        while not self._board.have_all_ended() and time.monotonic() < deadline and not self._signals.is_ended:
            self._signals.wait(0.02)
        self._verdict = self._root_cause()
        return 4 if self._verdict is None else self._verdict.job_code

    def _root_cause(self) -> Exit | None:
        """Determine the root cause from all exits known so far, or None."""
        return root_cause([*self._exits, *self._board.verdicts()])

    def _write_failure(self, verdict: Exit | None) -> None:
        """Write the failure file atomically."""
        if verdict is None:
            reason = f"the job ends: {self._late_message() or 'another node failed, or node 0 was lost'}"
        else:
            reason = f"{'the job ends' if verdict.error else 'a peer died'}: {verdict}"
        temporary = self.failure_file.with_suffix(".tmp")
        temporary.write_text(reason + "\n")
        temporary.replace(self.failure_file)

    def _kill_at_once(self) -> int:
        """Kill all ranks after a second signal, and return the exit code of that signal."""
        self.kill()
        return 128 + self._signals.received[1]
