"""Encode units as Ray tasks on several machines; a unit whose machine is lost is encoded again.

This is the only module that imports ``ray``. The inputs, the output and this program must have the same paths on all
machines. A task is a generator that yields the same reports as a worker process.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron import log, object_store
from megatron.data.preprocess.encode import Encoder
from megatron.data.preprocess.job_types import Counts, Unit
from megatron.data.preprocess.shards import Shard, ShardFolder
from megatron.data.preprocess.workers import (
    Failed,
    Finished,
    Report,
    Running,
    UnitError,
    Work,
    encode_with_reports,
    make_error,
)
from megatron.errors import DataError

AUTO = "auto"
MAX_LOSSES = 3
"""A unit whose worker is lost this many times is considered to be the cause."""

_REPORT_INTERVAL_S = 1.0
_CPU_POLL_S = 5.0
"""Interval of updating the number of CPUs, because machines join and leave the cluster."""

_QUEUED_PER_RUNNING = 1.0
"""Queued tasks per running task, so that a CPU that becomes free can start the next task immediately."""

_CONNECT_TIMEOUT_S = 10.0
VISIBILITY_TIMEOUT_S = 90.0
"""Timeout for files written by another machine, longer than the default NFS directory cache (60 s)."""

# Code that runs in the Ray tasks.


def encode_unit(setup: tuple[Encoder, ShardFolder], folder: str, unit: Unit) -> Iterator[tuple[Report, float]]:
    """Encode a unit; yield (report, seconds since the unit's start)."""
    start_s = time.monotonic()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        if not all(object_store.is_remote(path) or os.path.isabs(path) for path in unit.paths):
            os.chdir(folder)
        encoder, shard_folder = setup
        if not shard_folder.folder.is_dir():
            raise DataError(
                f"{shard_folder.folder} must exist on every machine of the cluster; {_describe_host()} does not have it"
            )
    except (OSError, DataError) as error:
        reason = str(error) if isinstance(error, DataError) else f"{error}, on {_describe_host()} of the cluster"
        yield Failed(reason, is_data_error=True), 0.0
        return
    for report in encode_with_reports(encoder, shard_folder, unit, _REPORT_INTERVAL_S):
        yield report, time.monotonic() - start_s


def _describe_host() -> str:
    return f"the machine {socket.gethostname()}"


# Code that runs on the job's machine.


@dataclass
class _Utilization:
    """CPU utilization of the cluster."""

    cpu_s: float = 0.0
    busy_s: float = 0.0
    start_s: float | None = None
    created_s: float = field(default_factory=time.monotonic)
    updated_s: float = field(default_factory=time.monotonic)

    def begin(self, seconds: float) -> None:
        """Start the measurement at the first unit's start, ``seconds`` ago, to exclude Ray's startup."""
        if self.start_s is None:
            self.updated_s = time.monotonic() - seconds
            self.start_s = self.updated_s - self.created_s

    def update(self, num_cpus: int) -> None:
        """Add the time since the last call, during which the cluster had ``num_cpus``."""
        now = time.monotonic()
        if self.start_s is not None:
            self.cpu_s += num_cpus * (now - self.updated_s)
        self.updated_s = now

    @property
    def idle(self) -> float:
        """Share of CPU time since the first unit's start that was not spent on finished units."""
        return max(0.0, 1 - self.busy_s / self.cpu_s) if self.cpu_s else 0.0


class ClusterWorkers:
    """Pool of Ray workers with the interface of ``Workers``, used as a context manager.

    Args:
        address: HOST:PORT of an existing cluster that includes this machine, or ``auto``. ``auto`` selects the cluster
            in RAY_ADDRESS; if the variable is not set, a cluster with only this machine is created for the job.
        max_units: maximum concurrent units; 0: the CPU count.

    Raises:
        DataError: Ray is not installed, or the cluster cannot be joined.
    """

    def __init__(self, work: Work, address: str, max_units: int) -> None:
        self._work, self._address, self._max_units = work, address, max_units
        self.utilization = _Utilization()
        self._ray = _import_ray()
        self._running: dict[Any, int] = {}

    def __enter__(self) -> ClusterWorkers:
        shard_folder = ShardFolder(
            self._work.shard_folder.folder.absolute(),
            self._work.shard_folder.dtype,
            self._work.shard_folder.plan,
            is_shared=True,
        )
        self._join_cluster()
        self._setup = self._ray.put((self._work.encoder, shard_folder)), os.getcwd()
        self._task = self._ray.remote(encode_unit).options(num_cpus=1, max_retries=0)
        return self

    def _join_cluster(self) -> None:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        options: dict[str, Any] = {
            "runtime_env": {"env_vars": {"PYTHONPATH": path}},
            "log_to_driver": False,
            "logging_level": "error",  # lost workers are logged by _report_lost
        }
        address = os.environ.get("RAY_ADDRESS", "") if self._address == AUTO else self._address
        if not address:
            options |= {"num_cpus": self._max_units or None, "include_dashboard": False}
            self._max_units = 0  # the local cluster's CPUs already limit the units
        elif address != AUTO:  # RAY_ADDRESS=auto: Ray searches for a cluster on this machine
            _check_reachable(address)
        try:
            self._ray.init(address or "local", **options)
        except Exception as error:  # Ray raises RuntimeError, ConnectionError, ValueError and Exception
            raise DataError(
                f"--cluster {self._address} cannot be joined: {error}. This machine must be part of it "
                f"(ray start --address={address or 'HOST:PORT'}), with the same versions of Ray and Python."
            ) from error
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        log.info(f"encoding on {len(nodes)} Ray machine{'s' if len(nodes) != 1 else ''} with {self._num_cpus()} CPUs")
        if not self._num_cpus():
            log.warning("the cluster has no CPUs yet; waiting for a machine to join")

    def __exit__(self, *_: object) -> None:
        for task in self._running:
            with suppress(Exception):  # the cluster may be gone
                self._ray.cancel(task, force=True)
        self._ray.shutdown()

    def _num_cpus(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))

    def encode(
        self,
        units: Sequence[int],
        on_report: Callable[[Mapping[int, Counts]], None],
        on_finished: Callable[[Shard, bool], None],
    ) -> None:
        """Encode all ``units`` like ``Workers.encode``; encode units from lost machines again.

        Raises:
            DataError: a unit cannot be read.
            UnitError: a unit failed, or its worker was lost ``MAX_LOSSES`` times; the message names the unit.
        """
        queue, counts, losses = deque(units), dict[int, Counts](), dict[int, int]()
        num_cpus, self.utilization = self._num_cpus(), _Utilization()
        while queue or self._running:
            if time.monotonic() - self.utilization.updated_s >= _CPU_POLL_S:
                self.utilization.update(num_cpus)
                num_cpus = self._num_cpus()
            max_tasks = self._max_units or max(1, int(num_cpus * (1 + _QUEUED_PER_RUNNING)))
            while queue and len(self._running) < max_tasks:
                unit_idx = queue.popleft()
                self._running[self._task.remote(*self._setup, self._work.units[unit_idx])] = unit_idx
            for task in self._wait_for_tasks():
                report, seconds = self._next_report(task)
                self.utilization.begin(seconds)
                unit_idx = self._running[task]
                if isinstance(report, Running):
                    counts[unit_idx] = report.counts
                else:
                    del self._running[task]
                    counts.pop(unit_idx, None)
                    if isinstance(report, Finished):
                        self.utilization.busy_s += seconds
                        _wait_until_visible(self._work.shard_folder, report.shard)
                        on_finished(report.shard, report.is_new)
                    elif isinstance(report, Failed):
                        raise make_error(report, self._work.units[unit_idx].name())
                    else:
                        losses[unit_idx] = losses.get(unit_idx, 0) + 1
                        self._report_lost(unit_idx, losses[unit_idx], report)
                        queue.appendleft(unit_idx)
                on_report(counts)
        self.utilization.update(num_cpus)
        log.info(
            f"the CPUs of the cluster were idle for {100 * self.utilization.idle:.0f}% of the encoding, which started "
            f"after {self.utilization.start_s or 0:.1f} s"
        )

    def _wait_for_tasks(self) -> list[Any]:
        """Wait at most one second for reports; the result is the tasks with a new report."""
        tasks = list(self._running)
        first, _ = self._ray.wait(tasks, num_returns=1, timeout=1.0)
        return self._ray.wait(tasks, num_returns=len(tasks), timeout=0)[0] if first else []

    def _next_report(self, task: Any) -> tuple[Report | Exception, float]:
        """Wait for (a task's next report, its seconds), or (Ray's error, 0) if the task's worker was lost."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(next(task))
        except exceptions.RayTaskError as error:
            unit_name = self._work.units[self._running[task]].name()
            raise UnitError(f"a Ray task failed while it encoded {unit_name}: {error}") from None
        except (exceptions.RuntimeEnvSetupError, exceptions.TaskUnschedulableError) as error:
            raise UnitError(f"Ray cannot start a task: {error}") from None
        except (exceptions.RayError, StopIteration) as error:
            return error, 0.0

    def _report_lost(self, unit_idx: int, num_losses: int, error: Exception) -> None:
        unit_name = self._work.units[unit_idx].name()
        summary = str(error).strip().split("\n")[0][:200]
        reason = f"{type(error).__name__}{f': {summary}' if summary else ''}"
        if num_losses >= MAX_LOSSES:
            raise UnitError(
                f"the worker that encoded {unit_name} was lost {num_losses} times ({reason}), possibly out of memory. "
                "Check the logs of Ray, and reduce --workers"
            )
        log.warning(f"the worker that encoded {unit_name} was lost ({reason}); retrying the unit")


def _wait_until_visible(shard_folder: ShardFolder, shard: Shard) -> None:
    """Wait until another machine's files for a finished unit are visible here, which NFS may delay."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
    while True:
        os.listdir(shard_folder.folder)  # refreshes the NFS directory cache
        missing_paths = [
            path
            for file_type, (size, _) in shard.file_stats.items()
            if not _has_size(path := shard_folder.path(shard.unit, file_type), size)
        ]
        if not missing_paths:
            return
        if time.monotonic() >= deadline:
            raise DataError(
                f"{missing_paths[0]} was written by a machine of the cluster, but is not visible on this machine after "
                f"{VISIBILITY_TIMEOUT_S:.0f} s. --output-prefix must be in a folder that all machines share."
            )
        time.sleep(0.1)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise DataError(f"--cluster needs Ray: pip install -e '.[ray]' ({error})") from error
    return ray


def _check_reachable(address: str) -> None:
    """Check that a server listens at HOST:PORT, because Ray would retry for a long time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise DataError(f"--cluster must be auto or HOST:PORT, got {address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise DataError(
            f"--cluster {address} does not answer ({error}). Start it (ray start --head --port={port}) or correct the "
            "address."
        ) from error
