"""One start of a node's ranks, from their first process to the verdict on how it ended.

When a rank fails, the launcher writes the failure file, waits a moment in which the others notice by themselves, then
sends SIGTERM, then SIGKILL: all are gone within a second. The failure file (environment variable
MEGATRON_FAILURE_FILE of each rank) is there, whole, before that SIGTERM; a SIGTERM without it is a request to save and
leave with 75. It holds one line of text, such as "a peer died: rank 3 (pid 4711) by SIGKILL".

| file beside it | a rank leaves there |
|---|---|
| ``.at-R`` | its place and what it is at (megatron/training/position.py) |
| ``.trace-R`` | the trace of a crash in native code |
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megatron import log
from megatron.launch import memory, ranks
from megatron.launch.board import Board
from megatron.launch.options import Options
from megatron.launch.signals import RESUMABLE, Signals
from megatron.launch.verdict import Exit, culprit
from megatron.training import failure, position

QUIET_S = 0.2
"""After a failure the others may notice by themselves for this long."""
QUIET_UNKNOWN_S = 0.35
"""The same while only lost peers are known: the rank that caused it may still be printing its traceback."""
KILL_S = 0.75
BOARD_S = 0.5
MEET_S = 3.0


class Attempt:
    """The ranks of one start on this node.

    Args:
        folder: of this start alone.
    """

    def __init__(self, options: Options, node_rank: int, board: Board, signals: Signals, folder: Path) -> None:
        self._options, self._node_rank, self._board, self._signals = options, node_rank, board, signals
        self.failure_file = folder / "failure"
        self.ranks: list[ranks.RankProcess] = []
        self._exits: list[Exit] = []
        self._kills = memory.oom_kills()
        self._told = self._has_left = False
        self._stop_deadline: float | None = None
        self._next_look = 0.0
        self.verdict: Exit | None = None

    def start(self, rank: int, local_rank: int, env: Mapping[str, str]) -> int:
        """Start one rank and return its process id."""
        options = self._options
        keeps_input = options.stdin and rank == 0
        pid = ranks.start(
            options.script, options.script_args, env, in_fork=bool(options.preload), keeps_input=keeps_input
        )
        self.ranks.append(ranks.RankProcess(rank, local_rank, pid))
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
        return max(one.status for one in self._exits)  # 0, or 75 when a rank stopped on request

    def describe(self) -> str:
        """Say in words what ended this start."""
        verdict = self.verdict
        if verdict is not None and verdict.status not in (0, RESUMABLE):
            return f"ended by {verdict}{f' ({verdict.hint})' if verdict.hint else ''}"
        late = [str(one.rank) for one in self.ranks if one.status not in (0, RESUMABLE)]
        if self._stop_deadline is not None and late:
            return f"rank {', '.join(late)} did not leave within --stop-grace {self._options.stop_grace_s:g} s"
        if verdict is not None:
            return f"ended by {verdict}"
        return "ended by another node, or node 0 was lost"

    def is_told_already(self, code: int) -> bool:
        """Whether the ranks agreed that the user's input is wrong: rank 0 has said so, and who ended is no news."""
        own = [one for one in self._exits if not one.is_consequence]
        is_said = self._node_rank > 0 or any(one.rank == 0 for one in own)
        return code == 2 and is_said and bool(own) and all(one.status == 2 for one in own)

    @property
    def was_asked_to_stop(self) -> bool:
        return self._stop_deadline is not None

    def is_ended_by_signal(self) -> bool:
        """Whether what ended the ranks is the request to stop, which they were not ready for."""
        return self._signals.is_asked_to_stop and self.verdict is not None and self.verdict.status == -signal.SIGTERM

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
                self._exits.append(self._exit_of(one, one.status))

    def _exit_of(self, one: ranks.RankProcess, status: int) -> Exit:
        place, doing = self._position_of(one.rank)
        if status < 0 and not self._told:
            self._show_trace(one.rank)
        hint = memory.told(self._kills, memory.oom_kills()) if status == -signal.SIGKILL and not self._told else ""
        return Exit(
            rank=one.rank,
            pid=one.pid,
            status=status,
            at=one.ended_at,
            was_told=self._told,
            place=place,
            doing=doing,
            hint=hint,
        )

    def _position_of(self, rank: int) -> tuple[str, str]:
        try:
            return position.read(Path(position.page_of(str(self.failure_file), rank)).read_bytes())
        except OSError:
            return "", ""

    def _show_trace(self, rank: int) -> None:
        """Show what a crash in native code has left, each line with the rank's number."""
        try:
            trace = Path(failure.trace_of(str(self.failure_file), rank)).read_text(errors="replace")
        except OSError:
            return
        if trace.strip():
            sys.stderr.write("".join(f"rank {rank}: {line}\n" for line in trace.splitlines() if line.strip()))
            sys.stderr.flush()

    def _ask_to_stop(self) -> None:
        self._stop_deadline = time.monotonic() + self._options.stop_grace_s
        log.info(
            f"launch: {self._signals.first_name}: the ranks finish their step, save and leave; "
            "a second signal ends them at once"
        )
        for one in self.ranks:
            one.terminate()

    def _is_failed(self) -> bool:
        """Whether a rank failed, left too early or too late, or another node says so."""
        if any(one.status not in (0, RESUMABLE) for one in self._exits):
            return True
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + BOARD_S
            if self._board.is_failed():
                return True
        if self._stop_deadline is not None:
            return any(one.is_alive for one in self.ranks) and time.monotonic() > self._stop_deadline
        is_waiting = self._has_left or any(one.is_alive for one in self.ranks)
        return is_waiting and any(time.time() > one.at + self._options.exit_grace_s for one in self._exits)

    def _all_nodes_left(self) -> bool:
        self._leave()
        return self._board.all_left()

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._board.tell_left()

    def _end(self) -> int:
        """End the ranks that are left within ``KILL_S``, and settle with the other nodes who the culprit is."""
        start = time.monotonic()
        named: Exit | None = None
        while any(one.is_alive for one in self.ranks):
            verdict = self._culprit()
            if verdict != named or not self.failure_file.exists():
                self._write_failure(verdict)
                self._board.tell_failed(verdict)
                named = verdict
            spent = time.monotonic() - start
            if spent > KILL_S or self._signals.is_ended:
                for one in self.ranks:
                    one.kill()
            elif not self._told and spent > (QUIET_UNKNOWN_S if verdict and verdict.weight > 1 else QUIET_S):
                self._told = True
                for one in self.ranks:
                    one.terminate()
            self._signals.wait(0.02)
            self._reap()
        return self._settle()

    def _settle(self) -> int:
        self._board.tell_failed(culprit(self._exits))
        self._leave()
        end = time.monotonic() + MEET_S
        while not self._board.all_left() and time.monotonic() < end and not self._signals.is_ended:
            self._signals.wait(0.02)
        self.verdict = self._culprit()
        return 4 if self.verdict is None else self.verdict.job_code

    def _culprit(self) -> Exit | None:
        return culprit([*self._exits, *self._board.verdicts()])

    def _write_failure(self, verdict: Exit | None) -> None:
        """Put the failure file in place in one step."""
        told = f"a peer died: {verdict}" if verdict is not None else f"the job ends: {self.describe()}"
        temporary = self.failure_file.with_suffix(".tmp")
        temporary.write_text(told + "\n")
        temporary.replace(self.failure_file)

    def _end_at_once(self) -> int:
        self.kill()
        return 128 + self._signals.seen[1]
