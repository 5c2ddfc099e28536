"""Several launchers of an elastic job on this machine, each with its ranks in the place of a host."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed.elastic.agent.server.api  # noqa: F401 - once here, and not in each launcher, which is a fork

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
    """Return ports that were free a moment ago, below the range that the kernel assigns to connections."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(20000, 32000)
        with suppress(OSError), socket.create_server(("", port)):
            ports.add(port)
    return list(ports)


class Nodes:
    """The launchers of a job; the nodes ``started`` are started, all by default, and the first of them leads.

    Args:
        span: MIN:MAX.
        script, arguments: of the ranks; None: ``RANK``, which ends with 75 once there is a file ``saves`` and a node
            waits, and with the code in the file ``done`` once there is one.
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
        """Start the launcher of a node, which may have flags of its own."""
        if node in self.jobs:
            self.ended.append(self.jobs[node])
        number = len(self.ended)
        own = [*flags, "--node-rank", str(node), "--master-port", "29500"]
        folder = self.place / f"node{node}-{number}"
        folder.mkdir()
        (folder / "output").touch()
        self.jobs[node] = Job(
            folder, [], *self._flags, *own, nproc=self._nproc, script=self._script,
            arguments=self._arguments,
        )  # fmt: skip
        return self.jobs[node]

    def lose(self, *nodes: int) -> float:
        """Kill these launchers with their ranks, as the loss of their hosts; return when, as ``time.time()``."""
        found = [(node, _children(self.jobs[node].pid)) for node in nodes]
        at = time.time()
        for node, ranks in found:
            for pid in (self.jobs[node].pid, *ranks):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for node in nodes:
            job = self.jobs.pop(node)
            job.wait()
            self.ended.append(job)
        return at

    def ranks(self, start: int, number: int) -> list[list[str]]:
        """Return what each of ``number`` ranks of a start has written, when all have."""
        paths = [self.ranks_place / f"{start}.{rank}" for rank in range(number)]
        self.until(lambda: all(path.exists() for path in paths), f"{number} ranks of start {start}")
        return [path.read_text().split() for path in paths]

    def let(self, name: str, text: str = "") -> None:
        """Make the file that the ranks look for."""
        temporary = self.ranks_place / f".{name}"
        temporary.write_text(text)
        temporary.rename(self.ranks_place / name)

    def until(self, is_so: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
        """Return once that is so."""
        end = time.monotonic() + deadline_s
        while not is_so():
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not come:\n{self.output}")
            time.sleep(0.005)

    def wait(self, deadline_s: float = 20.0) -> dict[int, int]:
        """Return the exit codes of the launchers."""
        return {node: job.wait(deadline_s) for node, job in self.jobs.items()}

    def kill(self) -> None:
        """End what still runs."""
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
