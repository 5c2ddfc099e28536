"""Several launchers of an elastic job on this machine, each of which simulates a host with its ranks."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed.elastic.agent.server.api  # noqa: F401 - imported once here instead of in each launcher, which is a fork

from megatron.launch.control import query_status
from tests.helpers.launch_jobs import Job

RANK_SCRIPT = """\
import os, sys, time
place, rank, start = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
words = [os.environ[name] for name in ("WORLD_SIZE", "MEGATRON_ELASTIC", "MEGATRON_RUN_ID", "MASTER_PORT")]
with open(f"{place}/.{start}.{rank}", "w") as file:
    file.write(" ".join([*words, str(os.getpid())]))
os.rename(f"{place}/.{start}.{rank}", f"{place}/{start}.{rank}")
while not os.path.exists(f"{place}/done"):
    if os.path.exists(f"{place}/saves") and os.path.exists(os.environ["MEGATRON_REGROUP_FILE"]):
        from megatron.runtime import rank_status
        rank_status.open_status_file()
        rank_status.write_state(rank_status.REGROUP)
        sys.exit(75)
    time.sleep(0.01)
sys.exit(int(open(f"{place}/done").read() or 0))
"""


def find_free_ports(num_ports: int) -> list[int]:
    """Return ports that are currently free, below the range that the kernel assigns to connections."""
    ports: set[int] = set()
    while len(ports) < num_ports:
        port = random.SystemRandom().randrange(20000, 32000)
        with suppress(OSError), socket.create_server(("", port)):
            ports.add(port)
    return list(ports)


class ElasticNodes:
    """The launchers of an elastic job, one per node.

    Args:
        node_range: minimum and maximum number of nodes, as MIN:MAX.
        started_nodes: nodes to start, of which the first becomes the leader; None for all.
        script: script of the ranks. The default ``RANK_SCRIPT`` exits with 75 if the file ``saves`` exists and a node
            is waiting, and with the code in the file ``done`` once it exists.
        arguments: arguments of ``script``; None for the folder of the ranks.
    """

    def __init__(
        self,
        folder: Path,
        node_range: str,
        *flags: str,
        started_nodes: Sequence[int] | None = None,
        nproc_per_node: int = 1,
        max_restarts: int = 99,
        script: Path | None = None,
        arguments: Sequence[str] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.ranks_folder, self._nproc_per_node = folder, folder / "ranks", nproc_per_node
        self.ranks_folder.mkdir()
        if script is None:
            script = folder / "rank.py"
            script.write_text(RANK_SCRIPT)
        self._script, self._arguments = script, list(arguments if arguments is not None else [str(self.ranks_folder)])
        max_nodes = int(node_range.partition(":")[2])
        self.hosts = ",".join(f"127.0.0.1:{port}" for port in find_free_ports(max_nodes))
        self._flags = ["--nnodes", node_range, "--node-list", self.hosts, "--max-restarts", str(max_restarts), *flags]
        self.jobs: dict[int, Job] = {}
        self.ended_jobs: list[Job] = []
        first, *other_nodes = range(max_nodes) if started_nodes is None else started_nodes
        self.start(first)
        address = "127.0.0.1", int(self.hosts.split(",")[first].rpartition(":")[2])
        self.wait_until(
            lambda: query_status({first: address}).get(first, {}).get("leads", False), f"node {first}, to lead"
        )
        for node in other_nodes:
            self.start(node)

    def start(self, node: int, *flags: str) -> Job:
        """Start the launcher of a node, which may have additional flags."""
        if node in self.jobs:
            self.ended_jobs.append(self.jobs[node])
        start_idx = len(self.ended_jobs)
        node_flags = [*flags, "--node-rank", str(node), "--master-port", "29500"]
        folder = self.folder / f"node{node}-{start_idx}"
        folder.mkdir()
        (folder / "output").touch()
        self.jobs[node] = Job(
            folder, [], *self._flags, *node_flags, nproc_per_node=self._nproc_per_node, script=self._script,
            arguments=self._arguments,
        )  # fmt: skip
        return self.jobs[node]

    def kill_nodes(self, *nodes: int) -> float:
        """Kill these launchers and their ranks, as if their hosts were lost; return the time, as ``time.time()``."""
        ranks_of_nodes = [(node, _children(self.jobs[node].pid)) for node in nodes]
        lost_at = time.time()
        for node, ranks in ranks_of_nodes:
            for pid in (self.jobs[node].pid, *ranks):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for node in nodes:
            job = self.jobs.pop(node)
            job.wait()
            self.ended_jobs.append(job)
        return lost_at

    def wait_for_ranks(self, start: int, num_ranks: int) -> list[list[str]]:
        """Wait until ``num_ranks`` ranks of a start have written their records, and return the words of each record."""
        paths = [self.ranks_folder / f"{start}.{rank}" for rank in range(num_ranks)]
        self.wait_until(lambda: all(path.exists() for path in paths), f"{num_ranks} ranks of start {start}")
        return [path.read_text().split() for path in paths]

    def write_file(self, name: str, text: str = "") -> None:
        """Create the file ``name``, to which the ranks react, with the content ``text``."""
        temporary = self.ranks_folder / f".{name}"
        temporary.write_text(text)
        temporary.rename(self.ranks_folder / name)

    def wait_until(self, condition: Callable[[], bool], description: str, deadline_s: float = 20.0) -> None:
        """Wait until ``condition()`` is true; raise TimeoutError with ``description`` after the deadline."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{description} did not come:\n{self.output}")
            time.sleep(0.005)

    def wait(self, deadline_s: float = 20.0) -> dict[int, int]:
        """Return the exit codes of the launchers."""
        return {node: job.wait(deadline_s) for node, job in self.jobs.items()}

    def kill(self) -> None:
        """Kill the launchers that are still running."""
        for job in (*self.jobs.values(), *self.ended_jobs):
            if job.exit_code is None:
                with suppress(ProcessLookupError):
                    os.kill(job.pid, signal.SIGKILL)
                    os.waitpid(job.pid, 0)

    @property
    def output(self) -> str:
        return "\n".join(f"node {node}:\n{job.output}" for node, job in self.jobs.items())


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
