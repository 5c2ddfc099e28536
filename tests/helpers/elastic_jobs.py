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

from megatron.launch.control import ask
from tests.helpers.launch_jobs import Job

RANK = """\
import os, sys, time
place, rank, start = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
words = [os.environ[name] for name in ("WORLD_SIZE", "MEGATRON_ELASTIC", "MEGATRON_RUN_ID", "MASTER_PORT")]
with open(f"{place}/.{start}.{rank}", "w") as file:
    file.write(" ".join([*words, str(os.getpid())]))
os.rename(f"{place}/.{start}.{rank}", f"{place}/{start}.{rank}")
while not os.path.exists(f"{place}/done"):
    if os.path.exists(f"{place}/saves") and os.path.exists(os.environ["MEGATRON_REGROUP_FILE"]):
        from megatron.runtime import rank_status
        rank_status.open_page()
        rank_status.note_state(rank_status.REGROUP)
        sys.exit(75)
    time.sleep(0.01)
sys.exit(int(open(f"{place}/done").read() or 0))
"""


def free_ports(count: int) -> list[int]:
    """Return ports that are currently free, below the range that the kernel assigns to connections."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(20000, 32000)
        with suppress(OSError), socket.create_server(("", port)):
            ports.add(port)
    return list(ports)


class Nodes:
    """The launchers of an elastic job, one per node.

    Args:
        span: minimum and maximum number of nodes, as MIN:MAX.
        started: nodes to start, of which the first becomes the leader; None for all.
        script: script of the ranks. The default ``RANK`` exits with 75 if the file ``saves`` exists and a node is
            waiting, and with the code in the file ``done`` once it exists.
        arguments: arguments of ``script``; None for the folder of the ranks.
    """

    def __init__(
        self,
        place: Path,
        span: str,
        *flags: str,
        started: Sequence[int] | None = None,
        nproc: int = 1,
        restarts: int = 99,
        script: Path | None = None,
        arguments: Sequence[str] | None = None,
    ) -> None:
        place.mkdir(exist_ok=True)
        self.place, self.ranks_place, self._nproc = place, place / "ranks", nproc
        self.ranks_place.mkdir()
        if script is None:
            script = place / "rank.py"
            script.write_text(RANK)
        self._script, self._arguments = script, list(arguments if arguments is not None else [str(self.ranks_place)])
        most = int(span.partition(":")[2])
        self.hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(most))
        self._flags = ["--nnodes", span, "--node-list", self.hosts, "--max-restarts", str(restarts), *flags]
        self.jobs: dict[int, Job] = {}
        self.ended: list[Job] = []
        first, *others = range(most) if started is None else started
        self.start(first)
        address = "127.0.0.1", int(self.hosts.split(",")[first].rpartition(":")[2])
        self.until(lambda: ask({first: address}).get(first, {}).get("leads", False), f"node {first}, to lead")
        for node in others:
            self.start(node)

    def start(self, node: int, *flags: str) -> Job:
        """Start the launcher of a node, which may have additional flags."""
        if node in self.jobs:
            self.ended.append(self.jobs[node])
        start_idx = len(self.ended)
        node_flags = [*flags, "--node-rank", str(node), "--master-port", "29500"]
        folder = self.place / f"node{node}-{start_idx}"
        folder.mkdir()
        (folder / "output").touch()
        self.jobs[node] = Job(
            folder, [], *self._flags, *node_flags, nproc=self._nproc, script=self._script,
            arguments=self._arguments,
        )  # fmt: skip
        return self.jobs[node]

    def lose(self, *nodes: int) -> float:
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
            self.ended.append(job)
        return lost_at

    def ranks(self, start: int, number: int) -> list[list[str]]:
        """Wait until ``number`` ranks of a start have written their records, and return the words of each record."""
        paths = [self.ranks_place / f"{start}.{rank}" for rank in range(number)]
        self.until(lambda: all(path.exists() for path in paths), f"{number} ranks of start {start}")
        return [path.read_text().split() for path in paths]

    def let(self, name: str, text: str = "") -> None:
        """Create the file ``name``, to which the ranks react, with the content ``text``."""
        temporary = self.ranks_place / f".{name}"
        temporary.write_text(text)
        temporary.rename(self.ranks_place / name)

    def until(self, is_so: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
        """Wait until ``is_so()`` is true; raise TimeoutError with ``what`` after the deadline."""
        end = time.monotonic() + deadline_s
        while not is_so():
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not come:\n{self.output}")
            time.sleep(0.005)

    def wait(self, deadline_s: float = 20.0) -> dict[int, int]:
        """Return the exit codes of the launchers."""
        return {node: job.wait(deadline_s) for node, job in self.jobs.items()}

    def kill(self) -> None:
        """Kill the launchers that are still running."""
        for job in (*self.jobs.values(), *self.ended):
            if job.code is None:
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
