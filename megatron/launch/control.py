"""Control: TCP connections between the launchers of an elastic job; membership, leader and lost nodes. No torch.

Every launcher listens at its entry of --node-list. One of them is the leader: the others keep a connection to it, and
both ends send a line of JSON every ``BEAT_S``. A node is lost if its connection is closed, as the kernel does when a
process dies, or silent for --node-timeout. The launchers use torch's elastic agent and stores, but not its dynamic
rendezvous; docs/architecture.md explains why.

| line | sender | meaning |
|---|---|---|
| ``ask`` | any launcher | request the status: node number, is leader, number of the last start |
| ``join`` | a launcher | request to join, with facts that must agree on all nodes; ``refused``: reason of a rejection |
| ``ready`` | a follower | no rank of this node is alive, so the next start may begin |
| ``start`` | the leader | the next start: its number, its nodes, the address of its store |
| ``set`` | both | an entry in the table of this start, or the leader's summary of entries: failures, decisions |
| ``end`` | the leader | the job has ended with this code |
| ``beat`` | both | heartbeat; the leader's contains the step of the newest durable checkpoint |
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.runtime import progress_file

BEAT_S = 0.5
ASK_S = 1.0
SEND_S = 2.0
HEARD_S = 1.0
MOST_BYTES = 1 << 24
RUNS = -2
"""Value of ``Peer.ready`` for a node that still has ranks."""
Address = tuple[str, int]
Message = dict[str, Any]


class Peer:
    """The remote end of a connection; ``node`` is set once it has joined, or if it is the leader."""

    def __init__(self, connection: socket.socket, node: int | None = None) -> None:
        self.socket, self.node = connection, node
        self.heard_at = time.monotonic()
        self.ready = RUNS
        """Number of the last start of a node that waits for the next one (-1: none yet); ``RUNS`` while it runs."""
        self._rest = b""
        self._sending = threading.Lock()
        connection.settimeout(SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> None:
        """Send one line. A broken connection raises no error; it is detected later by its silence."""
        with self._sending, suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[Message] | None:
        """Return the received messages, or None at the end of the connection."""
        try:
            received = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        self.heard_at = time.monotonic()
        *lines, self._rest = (self._rest + received).split(b"\n")
        if not received or len(self._rest) > MOST_BYTES:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None


class Control:
    """The connections of this launcher. A thread receives messages, so that the launcher responds while it is busy.

    Args:
        hosts: addresses from --node-list, one for each node.
        facts: settings that must be the same on all nodes.
        silence_s: seconds of silence after which a node is lost (--node-timeout).
        progress: file with the step of the newest durable checkpoint.
    """

    def __init__(
        self,
        hosts: Sequence[Address],
        node: int,
        listener: socket.socket,
        facts: Mapping[str, Any],
        silence_s: float,
        progress: Path,
    ) -> None:
        self.hosts, self.node = list(hosts), node
        self.leads = False
        self.number = -1
        self.round: list[int] = []
        self.job: dict[str, Any] = {}
        """The job's id and the number of restarts used."""
        self.members: dict[int, Peer] = {}
        self.leader: Peer | None = None
        self.inbox: deque[Message] = deque()
        self.summary: Callable[[Control, str, str], dict[str, str]] = lambda control, key, value: {key: value}
        """Function that returns the entries to send to all followers after a new entry. If every entry was sent, the
        number of lines would be quadratic in the number of nodes."""
        self.entries: Counter[str] = Counter()
        """Number of entries in the table of this start by the part of their key before the slash."""
        self.passed_on, self.passed_on_at = "", 0.0
        """Last forwarded value of the entries with a rate limit, and its time."""
        self._table: dict[str, str] = {}
        self._end: Message | None = None
        self._facts, self._silence_s, self._progress = dict(facts), silence_s, progress
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, daemon=True, name="control").start()

    # Methods for the launcher.

    @property
    def status(self) -> Message:
        """Message that answers ``ask``: this node, whether it is the leader, and the number of its last start."""
        return {"node": self.node, "leads": self.leads, "number": self.number}

    def lead(self) -> None:
        """Become the leader and accept nodes that join."""
        with self._lock:
            if self.round and self.round[0] != self.node:
                self.keep(f"lost/{self.round[0]}", "1")  # a node takes over only after the loss of the previous leader
            self.leads, self.leader = True, None

    def abdicate(self) -> None:
        """Stop leading, and disconnect the followers so that they look for another leader."""
        with self._lock:
            self.leads = False
            for peer in list(self.members.values()):
                self._drop(peer)

    def join(self, node: int) -> str:
        """Join the leader ``node``; return the reason of a rejection, or "" if it was accepted."""
        try:
            connection = socket.create_connection(self.hosts[node], timeout=ASK_S)
        except OSError as error:
            return str(error)
        peer = Peer(connection, node)
        peer.send({"join": self.node, "facts": self._facts, "ready": self.number})
        answers = _first_answers(peer)
        if not answers or "welcome" not in answers[0]:
            connection.close()
            return str(answers[0].get("refused")) if answers else "no answer"
        with self._lock:
            self.inbox.clear()
            self.leader = peer
            self._learn(answers[0])
            for message in answers[1:]:
                self._take(peer, message)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        return ""

    def begin(self, message: Message) -> None:
        """Begin a start as its leader, and send it to its nodes."""
        with self._lock:
            self._start(message)
            sent = {**message, "nodes": in_runs(message["nodes"])}
            for node in message["nodes"]:
                if node != self.node and node in self.members:
                    self.members[node].send(sent)
                elif node != self.node:
                    self._lose(node)  # it was lost after the nodes were counted

    def report_ready(self) -> None:
        """Report to the leader that this node waits for the next start."""
        if leader := self.leader:
            leader.send({"ready": self.number})

    def end(self, code: int, why: str) -> None:
        """Announce the end of the job to all nodes, including later ones; wait for the exit of nodes without ranks."""
        with self._lock:
            self._end = self._end or {"end": code, "why": why}
            for peer in self.members.values():
                peer.send(self._end)
        deadline = time.monotonic() + HEARD_S
        while any(ready > RUNS for ready in self.joined().values()) and time.monotonic() < deadline:
            time.sleep(0.01)

    def set(self, key: str, value: str) -> None:
        """Set an entry in the table of this start. The leader's copy is authoritative; followers receive summaries."""
        with self._lock:
            is_unchanged = self._table.get(key) == value
            self.keep(key, value)
            if not self.leads:
                if self.leader is not None:
                    self.leader.send({"set": [self.number, key, value]})
                return
            for name, text in ({} if is_unchanged else self.summary(self, key, value)).items():
                self._table[name] = text
                for node in self.round:
                    if node in self.members:
                        self.members[node].send({"set": [self.number, name, text]})

    def keep(self, key: str, value: str) -> None:
        """Set an entry only in this node's copy of the table."""
        self.entries[key.partition("/")[0]] += key not in self._table
        self._table[key] = value

    def get(self, key: str) -> str | None:
        """Return an entry of the table, or None."""
        return self._table.get(key)

    @property
    def is_cut_off(self) -> bool:
        """True if this node has lost its leader."""
        return not self.leads and self.leader is None

    def lost(self) -> list[int]:
        """Return the lost nodes of this start, including the leader if this node has lost its connection to it."""
        lost_nodes = [node for node in self.round if f"lost/{node}" in self._table]
        is_leader_lost = self.is_cut_off and self.round and self.round[0] not in (self.node, *lost_nodes)
        return [self.round[0], *lost_nodes] if is_leader_lost else lost_nodes

    def drop(self, node: int) -> None:
        """Count a node that does not respond as lost."""
        with self._lock:
            if node in self.members:
                self._drop(self.members[node])
            elif node in self.round:
                self._lose(node)

    def joined(self) -> dict[int, int]:
        """Return node -> number of the last start of a waiting node, or ``RUNS``, for all nodes that have joined."""
        with self._lock:
            return {node: peer.ready for node, peer in self.members.items()}

    def waiting(self) -> list[int]:
        """Return the nodes that have joined but are not part of this start."""
        with self._lock:
            return sorted(set(self.members) - set(self.round))

    # Methods of the receiving thread.

    def _serve(self) -> None:
        """Receive messages and send heartbeats, in a thread of its own."""
        beat_at = last = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(0.01, min(BEAT_S, beat_at - time.monotonic()))):
                with self._lock:
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
            now = time.monotonic()
            if now - last > 2 * BEAT_S:  # this process was suspended, so received messages are still unread
                with self._lock:
                    for peer in self._connected():
                        peer.heard_at += now - last
            last = now
            if now >= beat_at:
                beat_at = now + BEAT_S
                self._beat(now)

    def _accept(self) -> None:
        """Accept a connection; its node is unknown until it joins."""
        with suppress(OSError):
            connection, _ = self._listener.accept()
            self._selector.register(connection, selectors.EVENT_READ, Peer(connection))

    def _connected(self) -> list[Peer]:
        """Return the peers of this node: its followers, and its leader."""
        return [*self.members.values(), *([self.leader] if self.leader else [])]

    def _beat(self, now: float) -> None:
        """Send a heartbeat to all peers, and drop those that have been silent for too long."""
        durable = progress_file.committed_step(self._progress) if self.leads else None
        with self._lock:
            for peer in self._connected():
                if now - peer.heard_at > self._silence_s:
                    self._drop(peer)
                else:
                    peer.send({"beat": durable})

    def _read(self, peer: Peer) -> None:
        """Handle the messages that a peer has sent; drop the peer if its connection is closed."""
        messages = peer.read()
        if messages is None:
            self._drop(peer)
            return
        try:
            for message in messages:
                self._take(peer, message)
        except (KeyError, TypeError, ValueError):  # not a message of this protocol
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        """Close a connection; if it belonged to a node of this start, the node is lost."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer is self.leader:
            self.leader = None
        elif peer.node is not None and self.members.get(peer.node) is peer:
            del self.members[peer.node]
            if peer.node in self.round:
                self._lose(peer.node)

    def _lose(self, node: int) -> None:
        """Mark a node of this start as lost."""
        self.set(f"lost/{node}", "1")
        # After its ranks have ended, the loss of a node is not a failure.
        if f"left/{node}" not in self._table:
            self.set("failed", "1")

    def _take(self, peer: Peer, message: Message) -> None:
        """Handle one received message."""
        if "ask" in message:
            peer.send(self.status)
        elif "join" in message:
            self._take_in(peer, message)
        elif "ready" in message and peer.node is not None:
            peer.ready = int(message["ready"])
        elif "set" in message:
            start, key, value = message["set"]
            if start == self.number and self.leads and peer.node in self.round:
                self.set(key, value)
            elif start == self.number and peer is self.leader:
                self._table[key] = value
        elif peer is self.leader and "start" in message:
            message["nodes"] = from_runs(message["nodes"])
            self._start(message)
            self.inbox.append(message)
        elif peer is self.leader and "end" in message:
            self.inbox.append(message)
        elif peer is self.leader and message.get("beat") is not None:
            progress_file.write_committed_step(self._progress, int(message["beat"]))

    def _take_in(self, peer: Peer, message: Message) -> None:
        """Accept or reject a node that requests to join."""
        node = message["join"]
        member = self.members.get(node)
        if not self.leads:
            peer.send({"refused": "not the leader"})
        elif message.get("facts") != self._facts:
            peer.send({"refused": f"differs: {json.dumps(self._facts)}"})
        elif node == self.node or (member is not None and time.monotonic() - member.heard_at < 3 * BEAT_S):
            peer.send({"refused": "taken"})
        else:
            if member is not None:
                self._drop(member)
            peer.node, peer.ready = node, int(message["ready"])
            self.members[node] = peer
            peer.send({"welcome": self.number, "nodes": in_runs(self.round), "job": self.job})
            if self._end is not None:
                peer.send(self._end)

    def _learn(self, welcome: Message) -> None:
        """Copy the leader's state, because a waiting node may become the only remaining one."""
        if welcome["welcome"] > self.number:
            self.number, self.round, self._table = welcome["welcome"], from_runs(welcome["nodes"]), {}
            self.entries.clear()
            self.passed_on, self.passed_on_at = "", 0.0
            self.job = welcome["job"]

    def _start(self, message: Message) -> None:
        """Set the state of the next start from the leader's message."""
        self.number, self.round, self._table = message["start"], list(message["nodes"]), {}
        self.entries.clear()
        self.passed_on, self.passed_on_at = "", 0.0
        self.job = message["job"]
        for peer in self.members.values():
            if peer.node in self.round:
                peer.ready = RUNS


def in_runs(nodes: Sequence[int]) -> list[list[int]]:
    """Compress node numbers to runs [[first, last], ...], which shortens the list of all nodes in messages."""
    runs: list[list[int]] = []
    for node in nodes:
        if runs and runs[-1][1] == node - 1:
            runs[-1][1] = node
        else:
            runs.append([node, node])
    return runs


def from_runs(runs: Sequence[Sequence[int]]) -> list[int]:
    """Return the node numbers that ``in_runs`` has compressed."""
    return [node for first, last in runs for node in range(first, last + 1)]


def _first_answers(peer: Peer) -> list[Message]:
    """Wait for the first line, and return the messages received with it; an empty list after a timeout."""
    peer.socket.settimeout(ASK_S)
    deadline = time.monotonic() + ASK_S
    messages: list[Message] | None = []
    while messages == [] and time.monotonic() < deadline:
        messages = peer.read()
    peer.socket.settimeout(SEND_S)
    return messages or []


def ask(hosts: Mapping[int, Address]) -> dict[int, Message]:
    """Request the status of all ``hosts`` in parallel.

    Returns:
        node -> status, or {} if nothing listens there. Nodes that do not answer are missing.
    """

    def ask_one(address: Address) -> Message | None:
        try:
            with socket.create_connection(address, timeout=ASK_S) as connection:
                peer = Peer(connection)
                peer.send({"ask": True})
                answer = next(iter(_first_answers(peer)), None)
                return answer if answer is not None and {"node", "leads", "number"} <= answer.keys() else None
        except ConnectionRefusedError:
            return {}
        except OSError:
            return None

    with ThreadPoolExecutor(max_workers=min(64, max(1, len(hosts)))) as pool:
        answers = dict(zip(hosts, pool.map(ask_one, hosts.values()), strict=True))
    return {node: answer for node, answer in answers.items() if answer is not None}
