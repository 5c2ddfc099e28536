"""Torch's elastic agent, told how this project starts, watches and ends the ranks of a node.

When a rank fails, the launcher writes the failure file, waits a moment in which the others notice by themselves, then
sends SIGTERM, then SIGKILL: all are gone within a second. The failure file (environment variable
MEGATRON_FAILURE_FILE of each rank) is there, whole, before that SIGTERM; a SIGTERM without it is a request to save and
leave with 75. It holds one line of text, such as "a peer died: rank 3 (pid 4711) by SIGKILL".
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, cast

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource

from megatron import log
from megatron.launch import ranks
from megatron.launch.board import Board
from megatron.launch.machine import threads_per_rank
from megatron.launch.options import Options
from megatron.launch.rendezvous import NodeRendezvous
from megatron.launch.signals import Signals
from megatron.launch.verdict import Exit, culprit

QUIET_S = 0.2
"""After a failure the others may notice by themselves for this long."""
QUIET_UNKNOWN_S = 0.35
"""The same while only lost peers are known: the rank that caused it may still be printing its traceback."""
KILL_S = 0.75
BOARD_S = 0.5
MEET_S = 3.0


class LaunchAgent(SimpleElasticAgent):
    """Runs the ranks of this node; ``job_code`` is the job's exit code when ``run`` has returned."""

    def __init__(
        self, spec: WorkerSpec, options: Options, rendezvous: NodeRendezvous, signals: Signals, folder: Path
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=0)
        self.job_code = 1
        self._options, self._node, self._signals = options, rendezvous, signals
        self._failure_file = folder / "failure"
        self._ranks: list[ranks.RankProcess] = []
        self._exits: list[Exit] = []
        self._told = False
        self._has_left = False
        self._stop_deadline: float | None = None
        self._next_look = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for left_over in self._failure_file.parent.iterdir():  # of the start before this one
            left_over.unlink()
        self._exits, self._told = [], False
        self._board = Board(cast(Store, worker_group.store), self._node.node_rank, self._node.num_nodes)
        self._ranks = [
            ranks.RankProcess(
                worker.global_rank,
                worker.local_rank,
                ranks.start(
                    self._options.script,
                    self._options.script_args,
                    self._environment(worker_group, worker.global_rank, worker.local_rank, worker.world_size),
                    in_fork=bool(self._options.preload),
                ),
            )
            for worker in worker_group.workers
        ]
        return {one.local_rank: one.pid for one in self._ranks}

    def _environment(self, group: WorkerGroup, rank: int, local_rank: int, world_size: int) -> dict[str, str]:
        spec = group.spec
        return os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_per_rank(spec.local_world_size)),
            "MEGATRON_RUN_ID": self._node.run_id,
            "MEGATRON_FAILURE_FILE": str(self._failure_file),
            "TORCHELASTIC_RUN_ID": self._node.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait for news, and return what it means for the ranks."""
        self._signals.wait(BOARD_S / 2)
        self._reap()
        if len(self._signals.seen) > 1:
            return self._end_at_once()
        if self._signals.seen and self._stop_deadline is None:
            self._ask_to_stop()
        if self._is_failed():
            return self._end_job()
        if any(one.is_alive for one in self._ranks) or not self._all_nodes_left():
            return RunResult(state=WorkerState.HEALTHY)
        self.job_code = max(one.status for one in self._exits)  # 0, or 75 when a rank stopped on request
        return self._result(self.job_code)

    def _reap(self) -> None:
        for one in self._ranks:
            if one.reap() and one.status is not None:
                self._exits.append(
                    Exit(rank=one.rank, pid=one.pid, status=one.status, at=one.ended_at, was_told=self._told)
                )

    def _ask_to_stop(self) -> None:
        name = signal.Signals(self._signals.seen[0]).name
        self._stop_deadline = time.monotonic() + self._options.stop_grace_s
        log.info(f"launch: {name}: the ranks finish their step, save and leave; a second signal ends them at once")
        for one in self._ranks:
            one.terminate()

    def _is_failed(self) -> bool:
        """Whether a rank failed, left too early or too late, or another node says so."""
        if any(one.status not in (0, 75) for one in self._exits):
            return True
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + BOARD_S
            if self._board.is_failed():
                return True
        if self._stop_deadline is not None:
            return any(one.is_alive for one in self._ranks) and time.monotonic() > self._stop_deadline
        is_waiting = self._has_left or any(one.is_alive for one in self._ranks)
        return is_waiting and any(time.time() > one.at + self._options.exit_grace_s for one in self._exits)

    def _all_nodes_left(self) -> bool:
        if not self._has_left:
            self._has_left = True
            self._board.tell_left()
        return self._board.all_left()

    def _end_job(self) -> RunResult:
        """End the ranks that are left within ``KILL_S``, and settle with the other nodes who the culprit is."""
        start = time.monotonic()
        named: Exit | None = None
        while any(one.is_alive for one in self._ranks):
            verdict = self._culprit()
            if verdict != named or not self._failure_file.exists():
                self._write_failure(verdict)
                self._board.tell_failed(verdict)
                named = verdict
            spent = time.monotonic() - start
            if spent > KILL_S:
                for one in self._ranks:
                    one.kill()
            elif not self._told and spent > (QUIET_UNKNOWN_S if verdict and verdict.weight > 1 else QUIET_S):
                self._told = True
                for one in self._ranks:
                    one.terminate()
            self._signals.wait(0.02)
            self._reap()
        return self._settle()

    def _settle(self) -> RunResult:
        own = culprit(self._exits)
        self._board.tell_failed(own)
        if not self._has_left:
            self._has_left = True
            self._board.tell_left()
        end = time.monotonic() + MEET_S
        while not self._board.all_left() and time.monotonic() < end:
            time.sleep(0.02)
        verdict = self._culprit()
        self.job_code = self._code(verdict)
        if not self._is_told_already():
            log.error(f"launch: {self._describe(verdict)}; the job ends with code {self.job_code}")
        return self._result(self.job_code)

    def _is_told_already(self) -> bool:
        """Whether the ranks agreed that the user's input is wrong: rank 0 has said so, and who ended is no news."""
        own = [one for one in self._exits if not one.is_consequence]
        is_said = self._node.node_rank > 0 or any(one.rank == 0 for one in own)
        return self.job_code == 2 and is_said and bool(own) and all(one.status == 2 for one in own)

    def _culprit(self) -> Exit | None:
        return culprit([*self._exits, *self._board.verdicts()])

    def _code(self, verdict: Exit | None) -> int:
        if verdict is None:
            return 4
        if self._signals.seen and verdict.status == -signal.SIGTERM:
            return 128 + self._signals.seen[0]  # it had not got as far as to have something to save
        return verdict.job_code

    def _describe(self, verdict: Exit | None) -> str:
        if verdict is not None and verdict.status not in (0, 75):
            return f"ended by {verdict}"
        late = [str(one.rank) for one in self._ranks if one.status not in (0, 75)]
        if self._stop_deadline is not None:
            return f"rank {', '.join(late)} did not leave within --stop-grace {self._options.stop_grace_s:g} s"
        if verdict is not None:
            return f"ended by {verdict}"
        return "ended by another node, or node 0 was lost"

    def _write_failure(self, verdict: Exit | None) -> None:
        """Put the failure file in place in one step."""
        told = f"a peer died: {verdict}" if verdict is not None else f"the job ends: {self._describe(None)}"
        temporary = self._failure_file.with_suffix(".tmp")
        temporary.write_text(told + "\n")
        temporary.replace(self._failure_file)

    def _end_at_once(self) -> RunResult:
        self._kill_all()
        self.job_code = 128 + self._signals.seen[1]
        log.error(f"launch: ended at once by a second signal, code {self.job_code}")
        return self._result(self.job_code)

    def _result(self, code: int) -> RunResult:
        """Return what the elastic agent needs to know; it starts again only after a death or a defect."""
        if code == 0:
            return RunResult(WorkerState.SUCCEEDED, {one.rank: None for one in self._ranks})
        if code not in (1, 4) or self._signals.seen:
            self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED)

    def _kill_all(self) -> None:
        for one in self._ranks:
            one.kill()
        while any(one.is_alive for one in self._ranks):
            self._reap()
            time.sleep(0.005)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._kill_all()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._kill_all()
        if self._ranks:
            self._board.leave(MEET_S)

    def _exit_barrier(self) -> None:
        return None  # _monitor_workers has waited for the other nodes

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        """Return an event without the host's full name: looking that up takes seconds where DNS is broken."""
        return Event(name=f"torchelastic.worker.status.{state}", source=source, metadata={})
