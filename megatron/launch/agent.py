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
from megatron.launch.attempt import BOARD_POLL_S, NODE_WAIT_S, RankGroup
from megatron.launch.machine import threads_per_rank
from megatron.launch.options import Options
from megatron.launch.outcome import RESTARTABLE_CODES, Restarts, job_result
from megatron.launch.processes import RESUMABLE_CODE, Signals
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
        self._options, self._node_rendezvous, self._signals, self._folder = options, rendezvous, signals, folder
        self._progress = folder / PROGRESS
        self._start_folder = folder
        self._restarts = Restarts(options.max_restarts, self._progress)
        self._rank_group: RankGroup | None = None
        self._started_at = time.monotonic()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start this node's ranks and return their process ids by local rank."""
        rendezvous = self._node_rendezvous
        if rendezvous.restarts is not None:
            self._restarts.num_done = rendezvous.restarts
        for old_folder in self._folder.glob("start-*"):
            shutil.rmtree(old_folder, ignore_errors=True)
        folder = self._start_folder = self._folder / f"start-{rendezvous.start_idx}"
        folder.mkdir()
        self._board = rendezvous.make_board(cast(Store, worker_group.store), self._signals)
        self._rank_group = RankGroup(self._options, rendezvous.node_rank, self._board, self._signals, folder)
        self._signals.set_ranks_running()
        pids = {
            worker.local_rank: self._rank_group.start(
                worker.global_rank,
                worker.local_rank,
                self._environment(worker_group, worker.global_rank, worker.local_rank, worker.world_size),
            )
            for worker in worker_group.workers
        }
        self._rank_group.release()
        return pids

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
            "MEGATRON_RUN_ID": self._node_rendezvous.run_id,
            "MEGATRON_FAILURE_FILE": str(self._current_ranks().failure_file),
            "MEGATRON_STARTED": str(self._started_at),
            progress_file.PROGRESS_FILE_VARIABLE: str(self._progress),
            "TORCHELASTIC_RUN_ID": self._node_rendezvous.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._node_rendezvous.start_idx),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            **self._node_rendezvous.environment(self._start_folder),
        }

    def _current_ranks(self) -> RankGroup:
        assert self._rank_group is not None  # the elastic agent starts the ranks before it watches them
        return self._rank_group

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait for a signal or timeout, check the ranks, and decide whether the job ends or restarts."""
        self._signals.wait(BOARD_POLL_S / 2)
        self._node_rendezvous.notify_waiting(self._start_folder)
        code = self._current_ranks().watch()
        if code is None:
            return RunResult(state=WorkerState.HEALTHY)
        self.job_code = code
        if code == 0:
            return RunResult(WorkerState.SUCCEEDED, {process.rank: None for process in self._current_ranks().ranks})
        should_restart, reason = self._agree_on_restart(code)
        end = self._current_ranks().describe_end(code)
        if should_restart and code == RESUMABLE_CODE:
            lost_prefix = f"{self._lost_text()}; " if self._board.lost_nodes() else ""
            log.info(f"launch: {lost_prefix}the run is saved; restarting {reason}, with the node that joined")
        elif should_restart:
            self._restarts.num_done += 1
            restart_text = f"restart {self._restarts.num_done} of {self._restarts.max_restarts}"
            log.error(f"launch: {self._lost_text() or end}; restarting {reason} ({restart_text})")
        else:
            durable_step, max_restarts = self._restarts.durable_step, self._restarts.max_restarts
            reason = "; ".join(filter(None, (self._lost_text(), reason)))
            self.job_code, message = job_result(
                end, self._signals, durable_step, max_restarts=max_restarts, reason=reason
            )
            if message is not None:
                log.error(f"launch: {message}")
        self._node_rendezvous.restarts = self._restarts.num_done if self._node_rendezvous.is_elastic else None
        self._remaining_restarts = int(should_restart)  # the elastic agent restarts while this is positive
        return RunResult(WorkerState.FAILED)

    def _agree_on_restart(self, code: int) -> tuple[bool, str]:
        """Agree with the other nodes on a restart after ``code``; return (decision, reason)."""
        if self._signals.is_ended or (code == RESUMABLE_CODE and not self._node_rendezvous.is_elastic):
            return False, ""
        objection = self._objection(code)
        if self._signals.is_asked_to_stop:
            objection = objection or f"received {self._signals.first_name}"
        if not self._node_rendezvous.is_elastic and (not self._restarts.max_restarts or code not in RESTARTABLE_CODES):
            return False, ""
        return self._board.agree(objection, NODE_WAIT_S, self._restarts.origin)

    def _objection(self, code: int) -> str:
        """Return this node's reason against a restart after ``code``, or "" if there is none.

        A start that ends because a node joins or is lost does not count as a start without progress.
        """
        restarts = self._restarts
        if code == RESUMABLE_CODE and self._node_rendezvous.is_elastic:
            return "" if self._current_ranks().is_regrouping() else "stopped on request"
        if code in RESTARTABLE_CODES and self._board.lost_nodes():
            return restarts.objection_to_one_more()
        return restarts.objection(code, is_node_0=self._node_rendezvous.node_rank == 0)

    def _lost_text(self) -> str:
        lost = self._board.lost_nodes()
        return f"node {', '.join(map(str, lost))} was lost" if lost else ""

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._current_ranks().kill()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._rank_group is not None:
            self._rank_group.kill()
            self._board.release_store(NODE_WAIT_S)
        self._node_rendezvous.close(self.job_code)

    def _exit_barrier(self) -> None:
        return None  # _monitor_workers has already waited for the other nodes

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        """Omit the host's full name from the event, because its lookup takes seconds if DNS is broken."""
        return Event(name=f"torchelastic.worker.status.{state}", source=source, metadata={})
