"""LaunchAgent: torch's elastic agent, adapted to start, watch and end the ranks of a node."""

from __future__ import annotations

import os
import shutil
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
from megatron.launch.attempt import BOARD_S, MEET_S, RankGroup
from megatron.launch.machine import threads_per_rank
from megatron.launch.options import Options
from megatron.launch.outcome import RESTARTED, Restarts, job_result
from megatron.launch.processes import RESUMABLE, Signals
from megatron.launch.rendezvous import LaunchRendezvous
from megatron.runtime import progress_file

PROGRESS = "progress"
"""Name of the progress file in the launcher's folder."""


class LaunchAgent(SimpleElasticAgent):
    """Runs the ranks of this node.

    Args:
        folder: folder for the files through which ranks and launcher communicate, with a subfolder for each start.

    Attributes:
        job_code: the job's exit code, set when ``run`` has returned.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        options: Options,
        rendezvous: LaunchRendezvous,
        signals: Signals,
        folder: Path,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=0)
        self.job_code = 1
        self._options, self._node, self._signals, self._folder = options, rendezvous, signals, folder
        self._progress = folder / PROGRESS
        self._place = folder
        self._restarts = Restarts(options.max_restarts, self._progress)
        self._attempt: RankGroup | None = None
        self._started = time.monotonic()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of this node; return their process ids by local rank."""
        node = self._node
        if node.restarts is not None:
            self._restarts.done = node.restarts
        for earlier in self._folder.glob("start-*"):
            shutil.rmtree(earlier, ignore_errors=True)
        folder = self._place = self._folder / f"start-{node.number}"
        folder.mkdir()
        self._board = node.board(cast(Store, worker_group.store), self._signals)
        self._attempt = RankGroup(self._options, node.node_rank, self._board, self._signals, folder)
        self._signals.begin()
        pids = {
            worker.local_rank: self._attempt.start(
                worker.global_rank,
                worker.local_rank,
                self._environment(worker_group, worker.global_rank, worker.local_rank, worker.world_size),
            )
            for worker in worker_group.workers
        }
        self._attempt.begin()
        return pids

    def _environment(self, group: WorkerGroup, rank: int, local_rank: int, world_size: int) -> dict[str, str]:
        """Return the environment variables of one rank."""
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
            "MEGATRON_FAILURE_FILE": str(self._of_this_start().failure_file),
            "MEGATRON_STARTED": str(self._started),
            progress_file.PROGRESS_FILE_VARIABLE: str(self._progress),
            "TORCHELASTIC_RUN_ID": self._node.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._node.number),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            **self._node.environment(self._place),
        }

    def _of_this_start(self) -> RankGroup:
        """Return the ranks of the current start."""
        assert self._attempt is not None  # the elastic agent starts the ranks before it watches them
        return self._attempt

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait for a signal or timeout, check the ranks, and decide whether the job ends or restarts."""
        self._signals.wait(BOARD_S / 2)
        self._node.pass_on_waiting(self._place)
        code = self._of_this_start().watch()
        if code is None:
            return RunResult(state=WorkerState.HEALTHY)
        self.job_code = code
        if code == 0:
            return RunResult(WorkerState.SUCCEEDED, {process.rank: None for process in self._of_this_start().ranks})
        restarts, reason = self._agree(code)
        end = self._of_this_start().end(code)
        if restarts and code == RESUMABLE:
            lost = f"{self._lost_text()}; " if self._board.lost() else ""
            log.info(f"launch: {lost}the run is saved; restarting {reason}, with the node that joined")
        elif restarts:
            self._restarts.done += 1
            restart_text = f"restart {self._restarts.done} of {self._restarts.most}"
            log.error(f"launch: {self._lost_text() or end}; restarting {reason} ({restart_text})")
        else:
            durable, max_restarts = self._restarts.durable, self._restarts.most
            reason = "; ".join(filter(None, (self._lost_text(), reason)))
            self.job_code, message = job_result(end, self._signals, durable, restarts=max_restarts, reason=reason)
            if message is not None:
                log.error(f"launch: {message}")
        self._node.restarts = self._restarts.done if self._node.is_elastic else None
        self._remaining_restarts = int(restarts)  # the elastic agent restarts while this is positive
        return RunResult(WorkerState.FAILED)

    def _agree(self, code: int) -> tuple[bool, str]:
        """Decide together with the other nodes whether the job restarts after ``code``; return (decision, reason)."""
        if self._signals.is_ended or (code == RESUMABLE and not self._node.is_elastic):
            return False, ""
        against = self._against(code)
        if self._signals.is_asked_to_stop:
            against = against or f"received {self._signals.first_name}"
        if not self._node.is_elastic and (not self._restarts.most or code not in RESTARTED):
            return False, ""
        return self._board.agree(against, MEET_S, self._restarts.origin)

    def _against(self, code: int) -> str:
        """Return this node's reason against a restart after ``code``, or "" if there is none.

        A start that ends because a node joins or is lost does not count as a start without progress.
        """
        restarts = self._restarts
        if code == RESUMABLE and self._node.is_elastic:
            return "" if self._of_this_start().is_regrouping() else "stopped on request"
        if code in RESTARTED and self._board.lost():
            return restarts.against_one_more()
        return restarts.against(code, is_node_0=self._node.node_rank == 0)

    def _lost_text(self) -> str:
        """Return text that names the lost nodes, "" if there are none."""
        lost = self._board.lost()
        return f"node {', '.join(map(str, lost))} was lost" if lost else ""

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._of_this_start().kill()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._attempt is not None:
            self._attempt.kill()
            self._board.leave(MEET_S)
        self._node.close(self.job_code)

    def _exit_barrier(self) -> None:
        return None  # _monitor_workers has already waited for the other nodes

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        """Return an event without the host's full name, whose lookup takes seconds if DNS is broken."""
        return Event(name=f"torchelastic.worker.status.{state}", source=source, metadata={})
