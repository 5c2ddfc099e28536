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
from megatron.data.preprocess.shards import Part, ShardFolder
from megatron.data.preprocess.workers import Failed, Finished, Report, Running, UnitError, Work, error_of, reports
from megatron.errors import DataError

AUTO = "auto"
MOST_LOSSES = 3
"""A unit whose worker is lost this many times is considered to be the cause."""

_SECONDS_BETWEEN_REPORTS = 1.0
_SECONDS_BETWEEN_LOOKS = 5.0
"""Interval of updating the number of CPUs, because machines join and leave the cluster."""

_WAITING_PER_RUNNING = 1.0
"""Queued tasks per running task, so that a CPU that becomes free can start the next task immediately."""

_ANSWER_S = 10.0
PATIENCE_S = 90.0
"""Timeout for files written by another machine, longer than the default NFS directory cache (60 s)."""

# Code that runs in the Ray tasks.


def encode_unit(setup: tuple[Encoder, ShardFolder], folder: str, unit: Unit) -> Iterator[tuple[Report, float]]:
    """Encode a unit; yield (report, seconds since the start of the unit)."""
    began = time.monotonic()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        if not all(object_store.is_remote(path) or os.path.isabs(path) for path in unit.paths):
            os.chdir(folder)
        encoder, parts = setup
        if not parts.folder.is_dir():
            raise DataError(f"{parts.folder} must exist on every machine of the cluster; {_here()} does not have it")
    except (OSError, DataError) as error:
        reason = str(error) if isinstance(error, DataError) else f"{error}, on {_here()} of the cluster"
        yield Failed(reason, is_data_error=True), 0.0
        return
    for report in reports(encoder, parts, unit, _SECONDS_BETWEEN_REPORTS):
        yield report, time.monotonic() - began


def _here() -> str:
    return f"the machine {socket.gethostname()}"


# Code that runs on the machine of the job.


@dataclass
class _Use:
    """The utilization of the CPUs of the cluster."""

    cpu_s: float = 0.0
    busy_s: float = 0.0
    start_s: float | None = None
    began_s: float = field(default_factory=time.monotonic)
    looked_s: float = field(default_factory=time.monotonic)

    def begin(self, seconds: float) -> None:
        """Start the measurement at the start of the first unit, ``seconds`` ago, to exclude the startup of Ray."""
        if self.start_s is None:
            self.looked_s = time.monotonic() - seconds
            self.start_s = self.looked_s - self.began_s

    def look(self, num_cpus: int) -> None:
        """Add the time since the last call, during which the cluster had ``num_cpus``."""
        now = time.monotonic()
        if self.start_s is not None:
            self.cpu_s += num_cpus * (now - self.looked_s)
        self.looked_s = now

    @property
    def idle(self) -> float:
        """The share of CPU time since the start of the first unit that was not spent on finished units."""
        return max(0.0, 1 - self.busy_s / self.cpu_s) if self.cpu_s else 0.0


class ClusterWorkers:
    """A pool of Ray workers with the interface of ``Workers``, used as a context manager.

    Args:
        address: HOST:PORT of an existing cluster that includes this machine, or ``auto``. ``auto`` selects the cluster
            in RAY_ADDRESS; if the variable is not set, a cluster of only this machine is created for the job.
        most: maximum number of concurrent units; 0: the number of CPUs.

    Raises:
        DataError: Ray is not installed, or the cluster cannot be joined.
    """

    def __init__(self, work: Work, address: str, most: int) -> None:
        self._work, self._address, self._most = work, address, most
        self.use = _Use()
        self._ray = _imported()
        self._running: dict[Any, int] = {}

    def __enter__(self) -> ClusterWorkers:
        absolute = ShardFolder(
            self._work.parts.folder.absolute(), self._work.parts.dtype, self._work.parts.plan, is_shared=True
        )
        self._join()
        self._setup = self._ray.put((self._work.encoder, absolute)), os.getcwd()
        self._task = self._ray.remote(encode_unit).options(num_cpus=1, max_retries=0)
        return self

    def _join(self) -> None:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        options: dict[str, Any] = {
            "runtime_env": {"env_vars": {"PYTHONPATH": path}},
            "log_to_driver": False,
            "logging_level": "error",  # lost workers are logged by _report_lost
        }
        address = os.environ.get("RAY_ADDRESS", "") if self._address == AUTO else self._address
        if not address:
            options |= {"num_cpus": self._most or None, "include_dashboard": False}
            self._most = 0  # the CPUs of the local cluster already limit the units
        elif address != AUTO:  # RAY_ADDRESS=auto: Ray searches for a cluster on this machine
            _check_answers(address)
        try:
            self._ray.init(address or "local", **options)
        except Exception as error:  # Ray raises RuntimeError, ConnectionError, ValueError and Exception
            raise DataError(
                f"--cluster {self._address} cannot be joined: {error}. This machine must be part of it "
                f"(ray start --address={address or 'HOST:PORT'}), with the same versions of Ray and Python."
            ) from error
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        log.info(f"encoding on {len(nodes)} Ray machine{'s' if len(nodes) != 1 else ''} with {self._cpus()} CPUs")
        if not self._cpus():
            log.warning("the cluster has no CPUs yet; waiting for a machine to join")

    def __exit__(self, *_: object) -> None:
        for task in self._running:
            with suppress(Exception):  # the cluster may be gone
                self._ray.cancel(task, force=True)
        self._ray.shutdown()

    def _cpus(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))

    def encode(
        self,
        units: Sequence[int],
        on_report: Callable[[Mapping[int, Counts]], None],
        on_finished: Callable[[Part, bool], None],
    ) -> None:
        """Encode all ``units`` like ``Workers.encode``; encode units of lost machines again.

        Raises:
            DataError: a unit cannot be read.
            UnitError: a unit failed, or its worker was lost ``MOST_LOSSES`` times; the message names the unit.
        """
        waiting, counts, losses = deque(units), dict[int, Counts](), dict[int, int]()
        num_cpus, self.use = self._cpus(), _Use()
        while waiting or self._running:
            if time.monotonic() - self.use.looked_s >= _SECONDS_BETWEEN_LOOKS:
                self.use.look(num_cpus)
                num_cpus = self._cpus()
            max_tasks = self._most or max(1, int(num_cpus * (1 + _WAITING_PER_RUNNING)))
            while waiting and len(self._running) < max_tasks:
                unit = waiting.popleft()
                self._running[self._task.remote(*self._setup, self._work.units[unit])] = unit
            for task in self._ready():
                report, seconds = self._take(task)
                self.use.begin(seconds)
                unit = self._running[task]
                if isinstance(report, Running):
                    counts[unit] = report.counts
                else:
                    del self._running[task]
                    counts.pop(unit, None)
                    if isinstance(report, Finished):
                        self.use.busy_s += seconds
                        _wait_until_seen(self._work.parts, report.part)
                        on_finished(report.part, report.is_new)
                    elif isinstance(report, Failed):
                        raise error_of(report, self._work.units[unit].name())
                    else:
                        losses[unit] = losses.get(unit, 0) + 1
                        self._report_lost(unit, losses[unit], report)
                        waiting.appendleft(unit)
                on_report(counts)
        self.use.look(num_cpus)
        log.info(
            f"the CPUs of the cluster were idle for {100 * self.use.idle:.0f}% of the encoding, which started after "
            f"{self.use.start_s or 0:.1f} s"
        )

    def _ready(self) -> list[Any]:
        """Wait at most one second for reports and return the tasks with a new report."""
        tasks = list(self._running)
        first, _ = self._ray.wait(tasks, num_returns=1, timeout=1.0)
        return self._ray.wait(tasks, num_returns=len(tasks), timeout=0)[0] if first else []

    def _take(self, task: Any) -> tuple[Report | Exception, float]:
        """Return (next report of a task, its seconds), or (Ray's error, 0) if the worker of the task was lost."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(next(task))
        except exceptions.RayTaskError as error:
            unit = self._work.units[self._running[task]].name()
            raise UnitError(f"a Ray task failed while it encoded {unit}: {error}") from None
        except (exceptions.RuntimeEnvSetupError, exceptions.TaskUnschedulableError) as error:
            raise UnitError(f"Ray cannot start a task: {error}") from None
        except (exceptions.RayError, StopIteration) as error:
            return error, 0.0

    def _report_lost(self, number: int, times: int, error: Exception) -> None:
        unit = self._work.units[number].name()
        opening = str(error).strip().split("\n")[0][:200]
        reason = f"{type(error).__name__}{f': {opening}' if opening else ''}"
        if times >= MOST_LOSSES:
            raise UnitError(
                f"the worker that encoded {unit} was lost {times} times ({reason}), possibly out of memory. Check the "
                "logs of Ray, and reduce --workers"
            )
        log.warning(f"the worker that encoded {unit} was lost ({reason}); retrying the unit")


def _wait_until_seen(parts: ShardFolder, part: Part) -> None:
    """Wait until the files of a unit finished by another machine are visible here, which NFS may delay."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        os.listdir(parts.folder)  # refreshes the NFS directory cache
        unseen = [
            path for kind, (size, _) in part.facts.items() if not _has_size(path := parts.path(part.unit, kind), size)
        ]
        if not unseen:
            return
        if time.monotonic() >= deadline:
            raise DataError(
                f"{unseen[0]} was written by a machine of the cluster, but is not visible on this machine after "
                f"{PATIENCE_S:.0f} s. --output-prefix must be in a folder that all machines share."
            )
        time.sleep(0.1)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _imported() -> Any:
    try:
        import ray
    except ImportError as error:
        raise DataError(f"--cluster needs Ray: pip install -e '.[ray]' ({error})") from error
    return ray


def _check_answers(address: str) -> None:
    """Check that a server listens at HOST:PORT, because Ray would retry for a long time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise DataError(f"--cluster must be auto or HOST:PORT, got {address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise DataError(
            f"--cluster {address} does not answer ({error}). Start it (ray start --head --port={port}) or correct the "
            "address."
        ) from error
