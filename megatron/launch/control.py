"""Control: TCP connections between the launchers of an elastic job; membership, leader and lost nodes. No torch.

Every launcher listens at its entry of --node-list. One of them is the leader: the others keep a connection to it, and
both ends send a line of JSON every ``HEARTBEAT_S``. A node is lost if its connection is silent for --node-timeout or is
closed. The kernel closes the connections of a process that dies. The launchers use torch's elastic agent and stores,
but not its dynamic rendezvous; docs/architecture.md explains why.

| line | sender | meaning |
|---|---|---|
| ``query_status`` | any launcher | request the status: node number, is leader, number of the last start |
| ``join`` | a launcher | request to join, with settings that must agree; ``refused``: reason for a rejection |
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

HEARTBEAT_S = 0.5
ASK_TIMEOUT_S = 1.0
SEND_TIMEOUT_S = 2.0
END_TIMEOUT_S = 1.0
MAX_LINE_BYTES = 1 << 24
RUNNING = -2
"""Value of ``Peer.waiting_since_start`` for a node that still has ranks."""
Address = tuple[str, int]
Message = dict[str, Any]


class Peer:
    """The remote end of a connection; ``node`` is set for the leader, and for other nodes once they have joined."""

    def __init__(self, connection: socket.socket, node: int | None = None) -> None:
        self.socket, self.node = connection, node
        self.received_at = time.monotonic()
        self.waiting_since_start = RUNNING
        """Number of the last start of a node that waits for the next one (-1: none yet); ``RUNNING`` while it runs."""
        self._buffer = b""
        self._send_lock = threading.Lock()
        connection.settimeout(SEND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> None:
        """Send one line. A broken connection raises no error; it is detected later by its silence."""
        with self._send_lock, suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[Message] | None:
        """Return the received messages, or None at the end of the connection."""
        try:
            received = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        self.received_at = time.monotonic()
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        if not received or len(self._buffer) > MAX_LINE_BYTES:
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
        shared_settings: settings that must be the same on all nodes.
        silence_s: seconds of silence after which a node is lost (--node-timeout).
        progress: file with the step of the newest durable checkpoint.
    """

    def __init__(
        self,
        hosts: Sequence[Address],
        node: int,
        listener: socket.socket,
        shared_settings: Mapping[str, Any],
        silence_s: float,
        progress: Path,
    ) -> None:
        self.hosts, self.node = list(hosts), node
        self.is_leader = False
        self.start_idx = -1
        self.start_nodes: list[int] = []
        self.job: dict[str, Any] = {}
        """The job's id and the number of restarts used."""
        self.members: dict[int, Peer] = {}
        self.leader: Peer | None = None
        self.inbox: deque[Message] = deque()
        self.summarize: Callable[[Control, str, str], dict[str, str]] = lambda control, key, value: {key: value}
        """Function that returns the entries to send to all followers after a new entry. If every entry was sent, the
        number of lines would be quadratic in the number of nodes."""
        self.num_entries: Counter[str] = Counter()
        """Number of entries in the table of this start by the part of their key before the slash."""
        self.last_broadcast, self.last_broadcast_at = "", 0.0
        """Last forwarded value of the entries with a rate limit, and its time."""
        self._table: dict[str, str] = {}
        self._end_message: Message | None = None
        self._shared_settings, self._silence_s, self._progress = dict(shared_settings), silence_s, progress
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, daemon=True, name="control").start()

    # Methods for the launcher.

    @property
    def status(self) -> Message:
        """Answer to ``query_status``: this node, whether it is the leader, and its last start number."""
        return {"node": self.node, "leads": self.is_leader, "number": self.start_idx}

    def become_leader(self) -> None:
        """Become the leader and accept nodes that join."""
        with self._lock:
            if self.start_nodes and self.start_nodes[0] != self.node:
                self.set_local(
                    f"lost/{self.start_nodes[0]}", "1"
                )  # a node takes over only after the loss of the previous leader
            self.is_leader, self.leader = True, None

    def abdicate(self) -> None:
        """Stop leading, and disconnect the followers so that they look for another leader."""
        with self._lock:
            self.is_leader = False
            for peer in list(self.members.values()):
                self._drop(peer)

    def join(self, node: int) -> str:
        """Join the leader ``node``; return the reason for a rejection, or "" if the leader accepts this node."""
        try:
            connection = socket.create_connection(self.hosts[node], timeout=ASK_TIMEOUT_S)
        except OSError as error:
            return str(error)
        peer = Peer(connection, node)
        peer.send({"join": self.node, "facts": self._shared_settings, "ready": self.start_idx})
        answers = _first_answers(peer)
        if not answers or "welcome" not in answers[0]:
            connection.close()
            return str(answers[0].get("refused")) if answers else "no answer"
        with self._lock:
            self.inbox.clear()
            self.leader = peer
            self._copy_state(answers[0])
            for message in answers[1:]:
                self._handle(peer, message)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        return ""

    def begin_start(self, message: Message) -> None:
        """Begin a start of the job as the leader, and send ``message`` to the nodes that take part."""
        with self._lock:
            self._set_start(message)
            sent = {**message, "nodes": to_ranges(message["nodes"])}
            for node in message["nodes"]:
                if node != self.node and node in self.members:
                    self.members[node].send(sent)
                elif node != self.node:
                    self._mark_lost(node)  # the node was lost after the nodes were counted

    def report_ready(self) -> None:
        """Report to the leader that this node waits for the next start."""
        if leader := self.leader:
            leader.send({"ready": self.start_idx})

    def end(self, code: int, reason: str) -> None:
        """Announce the job's end to all nodes, and wait until the nodes that wait for a start have exited.

        A node that joins later receives the announcement too.
        """
        with self._lock:
            self._end_message = self._end_message or {"end": code, "why": reason}
            for peer in self.members.values():
                peer.send(self._end_message)
        deadline = time.monotonic() + END_TIMEOUT_S
        while any(last_start > RUNNING for last_start in self.joined_nodes().values()) and time.monotonic() < deadline:
            time.sleep(0.01)

    def set(self, key: str, value: str) -> None:
        """Set an entry in this start's table. The leader's copy is authoritative; followers receive summaries."""
        with self._lock:
            is_unchanged = self._table.get(key) == value
            self.set_local(key, value)
            if not self.is_leader:
                if self.leader is not None:
                    self.leader.send({"set": [self.start_idx, key, value]})
                return
            for name, text in ({} if is_unchanged else self.summarize(self, key, value)).items():
                self._table[name] = text
                for node in self.start_nodes:
                    if node in self.members:
                        self.members[node].send({"set": [self.start_idx, name, text]})

    def set_local(self, key: str, value: str) -> None:
        """Set an entry only in this node's copy of the table."""
        self.num_entries[key.partition("/")[0]] += key not in self._table
        self._table[key] = value

    def get(self, key: str) -> str | None:
        """Return a table entry, or None."""
        return self._table.get(key)

    @property
    def has_lost_leader(self) -> bool:
        """True if this node has lost its leader."""
        return not self.is_leader and self.leader is None

    def lost_nodes(self) -> list[int]:
        """Return this start's lost nodes, including the leader if its connection is lost."""
        lost_nodes = [node for node in self.start_nodes if f"lost/{node}" in self._table]
        is_leader_lost = (
            self.has_lost_leader and self.start_nodes and self.start_nodes[0] not in (self.node, *lost_nodes)
        )
        return [self.start_nodes[0], *lost_nodes] if is_leader_lost else lost_nodes

    def drop(self, node: int) -> None:
        """Mark a node as lost because it does not respond."""
        with self._lock:
            if node in self.members:
                self._drop(self.members[node])
            elif node in self.start_nodes:
                self._mark_lost(node)

    def joined_nodes(self) -> dict[int, int]:
        """Map each joined node to its last start number if it is waiting, otherwise to ``RUNNING``."""
        with self._lock:
            return {node: peer.waiting_since_start for node, peer in self.members.items()}

    def waiting_nodes(self) -> list[int]:
        """Return joined nodes that are not part of this start."""
        with self._lock:
            return sorted(set(self.members) - set(self.start_nodes))

    # Methods of the receiving thread.

    def _serve(self) -> None:
        """Receive messages and send heartbeats; runs in a separate thread."""
        next_heartbeat_at = last_poll_at = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(0.01, min(HEARTBEAT_S, next_heartbeat_at - time.monotonic()))):
                with self._lock:
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
            now = time.monotonic()
            if (
                now - last_poll_at > 2 * HEARTBEAT_S
            ):  # this process was suspended, so received messages are still unread
                with self._lock:
                    for peer in self._connected():
                        peer.received_at += now - last_poll_at
            last_poll_at = now
            if now >= next_heartbeat_at:
                next_heartbeat_at = now + HEARTBEAT_S
                self._send_heartbeats(now)

    def _accept(self) -> None:
        """Accept a connection; its node is unknown until it joins."""
        with suppress(OSError):
            connection, _ = self._listener.accept()
            self._selector.register(connection, selectors.EVENT_READ, Peer(connection))

    def _connected(self) -> list[Peer]:
        return [*self.members.values(), *([self.leader] if self.leader else [])]

    def _send_heartbeats(self, now: float) -> None:
        """Send a heartbeat to all peers, and drop those that have been silent for too long."""
        durable_step = progress_file.read_committed_step(self._progress) if self.is_leader else None
        with self._lock:
            for peer in self._connected():
                if now - peer.received_at > self._silence_s:
                    self._drop(peer)
                else:
                    peer.send({"beat": durable_step})

    def _read(self, peer: Peer) -> None:
        """Handle the messages that a peer has sent; drop the peer if its connection is closed."""
        messages = peer.read()
        if messages is None:
            self._drop(peer)
            return
        try:
            for message in messages:
                self._handle(peer, message)
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
            if peer.node in self.start_nodes:
                self._mark_lost(peer.node)

    def _mark_lost(self, node: int) -> None:
        """Mark a node of this start as lost."""
        self.set(f"lost/{node}", "1")
        # After its ranks have ended, the loss of a node is not a failure.
        if f"left/{node}" not in self._table:
            self.set("failed", "1")

    def _handle(self, peer: Peer, message: Message) -> None:
        if "ask" in message:
            peer.send(self.status)
        elif "join" in message:
            self._handle_join(peer, message)
        elif "ready" in message and peer.node is not None:
            peer.waiting_since_start = int(message["ready"])
        elif "set" in message:
            start_idx, key, value = message["set"]
            if start_idx == self.start_idx and self.is_leader and peer.node in self.start_nodes:
                self.set(key, value)
            elif start_idx == self.start_idx and peer is self.leader:
                self._table[key] = value
        elif peer is self.leader and "start" in message:
            message["nodes"] = from_ranges(message["nodes"])
            self._set_start(message)
            self.inbox.append(message)
        elif peer is self.leader and "end" in message:
            self.inbox.append(message)
        elif peer is self.leader and message.get("beat") is not None:
            progress_file.write_committed_step(self._progress, int(message["beat"]))

    def _handle_join(self, peer: Peer, message: Message) -> None:
        node = message["join"]
        member = self.members.get(node)
        if not self.is_leader:
            peer.send({"refused": "not the leader"})
        elif message.get("facts") != self._shared_settings:
            peer.send({"refused": f"differs: {json.dumps(self._shared_settings)}"})
        elif node == self.node or (member is not None and time.monotonic() - member.received_at < 3 * HEARTBEAT_S):
            peer.send({"refused": "taken"})
        else:
            if member is not None:
                self._drop(member)
            peer.node, peer.waiting_since_start = node, int(message["ready"])
            self.members[node] = peer
            peer.send({"welcome": self.start_idx, "nodes": to_ranges(self.start_nodes), "job": self.job})
            if self._end_message is not None:
                peer.send(self._end_message)

    def _copy_state(self, welcome: Message) -> None:
        """Copy the leader's state, because a waiting node may become the only remaining one."""
        if welcome["welcome"] > self.start_idx:
            self.start_idx, self.start_nodes, self._table = welcome["welcome"], from_ranges(welcome["nodes"]), {}
            self.num_entries.clear()
            self.last_broadcast, self.last_broadcast_at = "", 0.0
            self.job = welcome["job"]

    def _set_start(self, message: Message) -> None:
        self.start_idx, self.start_nodes, self._table = message["start"], list(message["nodes"]), {}
        self.num_entries.clear()
        self.last_broadcast, self.last_broadcast_at = "", 0.0
        self.job = message["job"]
        for peer in self.members.values():
            if peer.node in self.start_nodes:
                peer.waiting_since_start = RUNNING


def to_ranges(nodes: Sequence[int]) -> list[list[int]]:
    """Compress node numbers to runs [[first, last], ...], which shortens the list of all nodes in messages."""
    ranges: list[list[int]] = []
    for node in nodes:
        if ranges and ranges[-1][1] == node - 1:
            ranges[-1][1] = node
        else:
            ranges.append([node, node])
    return ranges


def from_ranges(ranges: Sequence[Sequence[int]]) -> list[int]:
    """Expand runs [[first, last], ...] to node numbers."""
    return [node for first, last in ranges for node in range(first, last + 1)]


def _first_answers(peer: Peer) -> list[Message]:
    """Wait for the first line and return all messages received with it, or an empty list after a timeout."""
    peer.socket.settimeout(ASK_TIMEOUT_S)
    deadline = time.monotonic() + ASK_TIMEOUT_S
    messages: list[Message] | None = []
    while messages == [] and time.monotonic() < deadline:
        messages = peer.read()
    peer.socket.settimeout(SEND_TIMEOUT_S)
    return messages or []


def query_status(hosts: Mapping[int, Address]) -> dict[int, Message]:
    """Request the status of all ``hosts`` in parallel.

    Returns:
        node -> status, or {} if nothing listens there. Nodes that do not answer are missing.
    """

    def query_one(address: Address) -> Message | None:
        try:
            with socket.create_connection(address, timeout=ASK_TIMEOUT_S) as connection:
                peer = Peer(connection)
                peer.send({"ask": True})
                answer = next(iter(_first_answers(peer)), None)
                return answer if answer is not None and {"node", "leads", "number"} <= answer.keys() else None
        except ConnectionRefusedError:
            return {}
        except OSError:
            return None

    with ThreadPoolExecutor(max_workers=min(64, max(1, len(hosts)))) as pool:
        answers = dict(zip(hosts, pool.map(query_one, hosts.values()), strict=True))
    return {node: answer for node, answer in answers.items() if answer is not None}
