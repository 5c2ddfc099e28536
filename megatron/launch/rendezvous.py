"""Rendezvous of the launchers of a job with a fixed number of nodes, and its port.

Node 0 hosts the store. The ranks use the same store (``TORCHELASTIC_USE_AGENT_STORE``), so the job needs no second
port, which another process could occupy.

| key | written by | content |
|---|---|---|
| ``node/R`` | node R | the number of launchers that claimed to be node R |
| ``node/looks``, ``node/missing`` | the first node that times out | marks that it is searching; the missing nodes |
| ``run`` | node 0, when all have joined | the run's id |
| ``come/N`` | every node | the number of nodes that are ready for restart N |
| ``begin/N`` | node 0, when all are ready | marks that the store is clean |
| ``agents/N/...`` | the launchers | their communication about start N |
| other keys | the ranks | their communication; deleted before the next start |
"""

from __future__ import annotations

import errno
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from megatron.errors import ConfigError, PeerError
from megatron.launch.outcome import NodeBoard
from megatron.launch.processes import Signals
from megatron.runtime.rendezvous import missing_ranks

POLL_S = 0.05
STORE_TIMEOUT_S = 10.0
LAUNCHER_KEYS = ("agents/", "node/", "run", "come/", "begin/")


class LaunchRendezvous(RendezvousHandler):
    """Base class of the rendezvous that ``LaunchAgent`` uses; methods that only torch calls return constants."""

    is_elastic = False
    restarts: int | None = None
    """Number of restarts that the nodes have agreed on; None: each node counts its own restarts."""

    @property
    def start_idx(self) -> int:
        """Number of the start, from 0."""
        raise NotImplementedError

    @property
    def run_id(self) -> str:
        """Id of the job, the same in all of its starts."""
        raise NotImplementedError

    @property
    def node_rank(self) -> int:
        """Rank of this node in the start."""
        raise NotImplementedError

    def make_board(self, store: Store, signals: Signals) -> NodeBoard:
        """Return the board on which the nodes communicate about the end of this start."""
        raise NotImplementedError

    def environment(self, folder: Path) -> dict[str, str]:
        """Return additional environment variables for the ranks of the start in ``folder``."""
        return {}

    def notify_waiting(self, folder: Path) -> None:
        """Notify the ranks of this node if a node waits to join."""

    def close(self, code: int) -> None:
        """Announce to waiting nodes that the job has ended with ``code``."""

    def get_run_id(self) -> str:
        return self.run_id

    def get_backend(self) -> str:
        return "megatron"

    @property
    def use_agent_store(self) -> bool:
        return True

    def num_nodes_waiting(self) -> int:
        return 0  # otherwise torch's agent would end the ranks at once; here they save first

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def shutdown(self) -> bool:
        return True


class NodeRendezvous(LaunchRendezvous):
    """Rendezvous of ``num_nodes`` launchers over the store of node 0.

    Args:
        listener: node 0's listening socket; None on other nodes.
    """

    node_rank = 0
    run_id = ""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        node_rank: int,
        num_nodes: int,
        listener: socket.socket | None,
        timeout_s: float,
    ) -> None:
        self.host, self.port = host, port
        self.node_rank, self.num_nodes = node_rank, num_nodes
        self._listener = listener
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._start_idx = 0

    @property
    def start_idx(self) -> int:
        return self._start_idx

    def make_board(self, store: Store, signals: Signals) -> NodeBoard:
        return NodeBoard(store, self.node_rank, self.num_nodes, signals)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, this node's rank and the node count once all nodes have joined.

        Raises:
            PeerError: node 0 cannot be reached, or a node did not join in time.
        """
        if self._store is None:
            self._store = self._open_store()
            self._join_nodes(self._store)
        else:
            self._start_idx += 1
            self._rejoin_nodes(self._store)
        info = RendezvousStoreInfo(self.host, self.port)
        agents_store = PrefixStore(f"agents/{self._start_idx}", self._store)
        return RendezvousInfo(agents_store, self.node_rank, self.num_nodes, info)

    def _open_store(self) -> TCPStore:
        """Connect to the store of node 0, or host it on node 0.

        Raises:
            PeerError: the store cannot be reached.
        """
        self._wait_for_node_0()
        try:
            store = TCPStore(
                self.host, self.port, is_master=self._listener is not None, wait_for_workers=False,
                timeout=timedelta(seconds=max(1.0, self._remaining_s())),
                master_listen_fd=os.dup(self._listener.fileno()) if self._listener else None,
            )  # fmt: skip
        except RuntimeError as error:
            raise PeerError(
                self._unreachable_message(f"the process that listens there does not respond: {_first_line(error)}")
            ) from error
        if self._listener:
            self._listener.close()
        store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        return store

    def _wait_for_node_0(self) -> None:
        """Wait until the port responds; node 0 tries once, because it already listens."""
        while True:
            try:
                socket.create_connection(
                    (self.host, self.port), timeout=min(5.0, max(0.1, self._remaining_s()))
                ).close()
                return
            except OSError as error:
                if self._listener:
                    raise PeerError(
                        f"MASTER_ADDR must name this machine on node 0, got {self.host}, but {self.host}:{self.port} "
                        f"cannot be reached from it ({error.strerror or error}). Set MASTER_ADDR to this machine's "
                        "name."
                    ) from error
                if self._remaining_s() <= 0:
                    raise PeerError(self._unreachable_message(error.strerror or str(error))) from error
            time.sleep(POLL_S)

    def _join_nodes(self, store: Store) -> None:
        """Claim this node's rank and wait until all nodes have joined.

        Raises:
            ConfigError: two launchers have the same NODE_RANK.
            PeerError: a node did not join in time.
        """
        if store.add(f"node/{self.node_rank}", 1) > 1:
            raise ConfigError(
                f"each node needs its own NODE_RANK, got NODE_RANK={self.node_rank} twice at {self.host}:{self.port}. "
                f"Number the nodes from 0 to {self.num_nodes - 1}."
            )
        if self.node_rank == 0:
            keys = [f"node/{node}" for node in range(self.num_nodes)]
            self._wait(lambda: store.check(keys), self._missing_message)  # one request, not one per node
            store.set("run", uuid.uuid4().hex[:12])
        else:
            self._wait(lambda: store.check(["run"]), self._missing_message)
        self.run_id = store.get("run").decode()

    def _rejoin_nodes(self, store: TCPStore) -> None:
        """Wait until all nodes are ready for a restart, and node 0 has deleted the previous ranks' keys.

        Before this call, all nodes have reported that none of their ranks is alive.
        """
        self._timeout_s = STORE_TIMEOUT_S
        self._deadline = time.monotonic() + self._timeout_s
        ready_key, begin_key = f"come/{self._start_idx}", f"begin/{self._start_idx}"
        store.add(ready_key, 1)
        if self.node_rank == 0:
            self._wait(
                lambda: store.add(ready_key, 0) >= self.num_nodes, lambda _: self._lost_message(store.add(ready_key, 0))
            )
            for key in store.list_keys():
                if not key.startswith(LAUNCHER_KEYS):
                    store.delete_key(key)
            store.set(begin_key, "1")
        else:
            self._wait(lambda: store.check([begin_key]), lambda _: self._lost_message(store.add(ready_key, 0)))

    def _lost_message(self, num_ready: int) -> str:
        return f"{num_ready} of {self.num_nodes} nodes joined restart {self._start_idx} within {self._timeout_s:g} s"

    def _missing_message(self, store: Store) -> str:
        missing = missing_ranks(store, "node/", self.num_nodes)
        return (
            f"{self.num_nodes - len(missing)} of {self.num_nodes} nodes joined within {self._timeout_s:g} s at "
            f"{self.host}:{self.port}; missing: NODE_RANK {', '.join(map(str, missing))}. Start them with the same "
            "MASTER_ADDR, MASTER_PORT and NNODES, or wait longer with --init-timeout."
        )

    def _wait(self, is_done: Callable[[], bool], explain: Callable[[Store], str]) -> None:
        """Wait until ``is_done`` returns True.

        Raises:
            PeerError: the deadline has passed; the message is the result of ``explain``.
        """
        try:
            while not is_done():
                if self._remaining_s() <= 0 and self._store is not None:
                    raise PeerError(explain(self._store))
                time.sleep(POLL_S)
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            raise PeerError(
                self._unreachable_message("node 0 closed the connection while the nodes were joining")
            ) from error

    def _remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    def _unreachable_message(self, reason: str) -> str:
        return (
            f"cannot reach {self.host}:{self.port} after {self._timeout_s:g} s ({reason}). "
            "Start node 0 with the same MASTER_ADDR, MASTER_PORT and NNODES, or wait longer with --init-timeout."
        )


def listen(host: str, port: int, num_nodes: int) -> socket.socket:
    """Open node 0's listening socket on ``port``; with a single node, on the first free port from ``port`` on.

    Raises:
        OSError: the port is not available.
    """
    is_local = num_nodes == 1 and host in ("127.0.0.1", "localhost")
    last_port = min(port + 200, 65535) if num_nodes == 1 else port
    for candidate in range(port, last_port + 1):
        try:
            return _open_listener("127.0.0.1" if is_local else "", candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or candidate == last_port:
                raise
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _open_listener(address: str, port: int) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server((address, port), backlog=1024)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
