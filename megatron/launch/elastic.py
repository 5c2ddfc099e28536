"""Rendezvous of elastic jobs (``--nnodes MIN:MAX``): nodes and leader of the next start, and agreement on its end.

* The launchers are in the order of --node-list. The first one present is the leader: its process hosts the store of
  each start, and its ranks have the lowest numbers. If the leader is lost, the first remaining node takes over. Nodes
  that took part in the latest start take precedence, so that a returning node never leads a job whose state it does
  not know.
* The first start waits for MAX nodes for up to --init-timeout, then begins with MIN or more. Later starts wait for the
  nodes that are not lost; if these are fewer than MIN, they wait for further nodes for up to --init-timeout.
* A node that joins a running job waits. The ranks detect the regroup file and exit with 75 after the next save, and the
  next start includes the node.

megatron/config/elastic.py determines the layout for the number of ranks.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn, cast

from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from megatron import log
from megatron.config.elastic import VARIABLE
from megatron.errors import ConfigError, PeerError
from megatron.launch.control import HEARTBEAT_S, RUNNING, Control, query_status
from megatron.launch.outcome import POLL_S, Exit, NodeBoard, parse_exits, relevant_exits
from megatron.launch.processes import RESUMABLE_CODE, Signals
from megatron.launch.rendezvous import LaunchRendezvous
from megatron.runtime.exit_signals import REGROUP_VARIABLE

ASK_INTERVAL_S = 0.5


class JobEnded(Exception):
    """The job has ended while this node did not participate; ``code`` is the job's exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ElasticRendezvous(LaunchRendezvous):
    """Connects the available launchers; the set of nodes may change with each start.

    Args:
        min_nodes, max_nodes: MIN and MAX of --nnodes.
        nproc: number of ranks on each node.
        durable_step: function that returns the step of the newest durable checkpoint of this job, or None.
    """

    def __init__(
        self, control: Control, *, min_nodes: int, max_nodes: int, nproc: int, timeout_s: float, silence_s: float,
        signals: Signals, durable_step: Callable[[], int | None],
    ) -> None:  # fmt: skip
        self.control, self._signals, self._durable_step = control, signals, durable_step
        self.min_nodes, self.max_nodes, self._nproc = min_nodes, max_nodes, nproc
        control.summarize = broadcast_entries
        control.job = {"run": uuid.uuid4().hex[:12], "restarts": 0}
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self._waiting_since = self._deadline = 0.0
        self._leader_since = self._asked_at = 0.0
        self._is_node_rank_taken = False
        self._gone_nodes: set[int] = set()
        self._store: Store | None = None

    is_elastic = True

    @property
    def start_idx(self) -> int:
        return self.control.start_idx

    @property
    def run_id(self) -> str:
        return str(self.control.job["run"])

    @property
    def restarts(self) -> int:
        """Number of restarts after failures and lost nodes."""
        return int(self.control.job["restarts"])

    @restarts.setter
    def restarts(self, num_restarts: int) -> None:
        self.control.job = {**self.control.job, "restarts": num_restarts}

    @property
    def nodes(self) -> list[int]:
        """The nodes of the start, the leader first."""
        return self.control.start_nodes

    @property
    def node_rank(self) -> int:
        return self.nodes.index(self.control.node)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def environment(self, folder: Path) -> dict[str, str]:
        rank_range = f"{self.min_nodes * self._nproc}:{self.max_nodes * self._nproc}"
        return {VARIABLE: rank_range, REGROUP_VARIABLE: str(folder / "regroup")}

    def make_board(self, store: Store, signals: Signals) -> NodeBoard:
        return ElasticBoard(self.control, signals, self._silence_s)

    def notify_waiting(self, folder: Path) -> None:
        control = self.control
        if control.is_leader:
            is_waiting = "1" if control.waiting_nodes() else ""
            if (control.get("waiting") or "") != is_waiting:
                control.set("waiting", is_waiting)
        regroup = folder / "regroup"
        if control.get("waiting"):
            regroup.touch()
        else:
            regroup.unlink(missing_ok=True)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next start's store, node rank and node count.

        Raises:
            PeerError: fewer than MIN nodes have joined in time.
            ConfigError: another launcher has this NODE_RANK, or has other flags.
            JobEnded: the job has ended, or this node was asked to stop, before the next start.
        """
        self._store = None
        self._reset_deadline()
        self.control.report_ready()
        while True:
            if self._signals.is_asked_to_stop:
                self._end_on_request()
            if self.control.is_leader:
                message = self._lead()
            elif self.control.leader is not None:
                message = self._follow()
                self._reset_deadline()  # a node may wait for hours before it loses its leader
            else:
                message = self._find_leader()
            if message is not None:
                break
            time.sleep(POLL_S)
        node_list = ", ".join(map(str, sorted(self.nodes)))
        log.info(f"launch: start {self.start_idx} has {self.num_nodes} of {self.max_nodes} nodes: {node_list}")
        info = RendezvousStoreInfo(message["host"], message["port"])
        return RendezvousInfo(self._store or HashStore(), self.node_rank, self.num_nodes, info)

    def _reset_deadline(self) -> None:
        """Restart the period of --init-timeout."""
        self._waiting_since, self._asked_at = time.monotonic(), 0.0
        self._deadline = self._waiting_since + self._timeout_s

    def _end_on_request(self) -> NoReturn:
        """Raise JobEnded, because this node has received a signal between two starts."""
        code = RESUMABLE_CODE if self._durable_step() is not None else self._signals.code
        self.close(code)
        raise JobEnded(code, f"received {self._signals.first_name} between two starts")

    def _lead(self) -> dict | None:
        """Begin the next start and return its message if all expected nodes have joined; otherwise return None."""
        control, now = self.control, time.monotonic()
        joined = control.joined_nodes()
        ready = [node for node, last_start in sorted(joined.items()) if last_start > RUNNING]
        if now > self._deadline and len(ready) < len(joined):
            self._drop_nodes(sorted(set(joined) - set(ready)))
            return None
        others = [node for node in range(self.max_nodes) if node != control.node and node not in joined]
        has_all = len(ready) == len(joined) and not self._is_waiting_for_nodes(joined)
        if control.start_idx == -1:
            has_all = has_all and (len(joined) + 1 == self.max_nodes or now > self._deadline)
        has_enough = has_all and len(ready) + 1 >= self.min_nodes
        if others and now > self._asked_at + ASK_INTERVAL_S:
            self._query_others(others)  # if this process was suspended, the others may have continued without it
            return None
        if has_enough:
            return self._begin([control.node, *ready])
        if now > self._deadline and len(joined) + 1 < self.min_nodes:
            reason = self._too_few_message(others)
            control.end(4, reason)
            raise PeerError(reason)
        return None

    def _drop_nodes(self, nodes: list[int]) -> None:
        """Count nodes as lost because their ranks do not exit, for example if a driver or file system hangs."""
        node_list = ", ".join(map(str, nodes))
        log.error(
            f"launch: the ranks of node {node_list} have not ended after {self._timeout_s:g} s; continuing without it"
        )
        for node in nodes:
            self.control.drop(node)

    def _query_others(self, others: list[int]) -> None:
        """Request the status of ``others``: find nodes that are gone; abdicate if another leader takes precedence."""
        control = self.control
        local_priority = (control.start_idx, -control.node)
        answers = query_status({node: control.hosts[node] for node in others})
        self._asked_at = time.monotonic()
        for node, answer in answers.items():
            if not answer:
                self._gone_nodes.add(node)
            elif answer["leads"] and (answer["number"], -answer["node"]) > local_priority:
                control.abdicate()
                self._reset_deadline()
                return

    def _is_waiting_for_nodes(self, joined: dict[int, int]) -> bool:
        """Return True if a node of the last start may still join this new leader.

        A node needs up to --node-timeout to detect that the previous leader is lost.
        """
        control = self.control
        absent = set(control.start_nodes) - {control.node} - set(joined) - set(control.lost_nodes()) - self._gone_nodes
        return bool(absent) and time.monotonic() < self._leader_since + self._silence_s

    def _begin(self, nodes: list[int]) -> dict:
        """Open the next start's store, send the start to its nodes, and return the leader's message."""
        host = self.control.hosts[self.control.node][0]
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._gone_nodes.clear()
        message = {
            "start": self.control.start_idx + 1, "nodes": nodes, "host": host, "port": cast(TCPStore, self._store).port,
            "job": self.control.job,
        }  # fmt: skip
        self.control.begin_start(message)
        return message

    def _follow(self) -> dict | None:
        """Return the leader's message about the next start if it has arrived."""
        while self.control.inbox:
            message = self.control.inbox.popleft()
            if "end" in message:
                raise JobEnded(message["end"], message["why"])
            if self.control.node in message["nodes"]:
                return message
        return None

    def _find_leader(self) -> dict | None:
        """Join the leader, or become the leader if no node takes precedence; return None.

        If neither is possible yet, return after a short wait. The caller tries again.

        Raises:
            PeerError: --init-timeout has passed.
            ConfigError: raised by ``_join``, or another launcher has this NODE_RANK.
        """
        control = self.control
        if time.monotonic() > self._deadline:
            self._raise_if_node_rank_taken()
            raise PeerError(self._too_few_message([node for node in range(self.max_nodes) if node != control.node]))
        others = {node: host for node, host in enumerate(control.hosts) if node != control.node}
        responses = query_status(others)
        answers = {node: answer for node, answer in responses.items() if answer}
        local_priority = (control.start_idx, -control.node)
        leaders = [status for status in answers.values() if status["leads"] and status["number"] >= control.start_idx]
        if leaders:
            best = max(leaders, key=lambda status: (status["number"], -status["node"]))
            self._join(best["node"], best["number"])
        elif all(
            (status["number"], -status["node"]) < local_priority for status in answers.values()
        ) and not self._has_silent_predecessor(responses):
            self._gone_nodes = {node for node, answer in responses.items() if not answer}
            self._leader_since = time.monotonic()
            control.become_leader()
        else:
            time.sleep(HEARTBEAT_S / 2)
        return None

    def _has_silent_predecessor(self, responding_nodes: Collection[int]) -> bool:
        """Return True if a preceding node of the last start has not responded but may still be alive."""
        control = self.control
        preceding = [node for node in control.start_nodes[1:] if node < control.node and node not in responding_nodes]
        return bool(preceding) and time.monotonic() < self._waiting_since + self._silence_s

    def _join(self, leader: int, start_idx: int) -> None:
        """Request to join ``leader``, whose last start has the number ``start_idx``.

        Raises:
            ConfigError: the leader has other flags.
        """
        last_start_idx = self.control.start_idx
        rejection = self.control.join(leader)
        if rejection.startswith("differs: "):
            raise ConfigError(
                "every node needs the same --nnodes, --nproc-per-node and --node-list, but those of node "
                f"{self.control.node} differ from those of node {leader}: {rejection.removeprefix('differs: ')}"
            )
        self._is_node_rank_taken = rejection == "taken"
        if not rejection and start_idx > last_start_idx:
            log.info(f"launch: node {leader} is the leader; this node joins with the next start, after the next save")

    def _raise_if_node_rank_taken(self) -> None:
        """Raise if the leader has rejected this node because another launcher has its NODE_RANK."""
        if self._is_node_rank_taken:
            raise ConfigError(
                f"each node needs its own NODE_RANK, got NODE_RANK={self.control.node} twice. "
                f"Number the nodes from 0 to {self.max_nodes - 1}, in the order of --node-list."
            )

    def _too_few_message(self, missing_nodes: list[int]) -> str:
        return (
            f"{self.max_nodes - len(missing_nodes)} of at least {self.min_nodes} nodes joined within "
            f"{self._timeout_s:g} s; missing: NODE_RANK {', '.join(map(str, missing_nodes))}. Start them with the same "
            "--nnodes and --node-list, wait longer with --init-timeout, or lower MIN of --nnodes MIN:MAX; with "
            "--resume the same command continues from the newest checkpoint"
        )

    def close(self, code: int) -> None:
        if self.control.is_leader:
            self.control.end(code, f"the job has ended with code {code}")


ALL_LEFT, VERDICTS = "all left", "verdicts"
VERDICTS_S = 0.1
"""Minimum seconds between two broadcasts of verdicts by the leader, because ranks of all nodes may fail almost
simultaneously."""
LEADER_ONLY_KEYS = ("left", "verdict", "restart", "gone")
"""Entries that only the leader needs."""


def broadcast_entries(control: Control, key: str, value: str) -> dict[str, str]:
    """Return the entries (key -> value) that the leader broadcasts after the new entry ``key`` has been set.

    Entries that only the leader needs are replaced by two summaries: ``all left``, and ``verdicts``, which contains the
    exits that determine the root cause.
    """
    name = key.partition("/")[0]
    entries = {} if name in LEADER_ONLY_KEYS else {key: value}
    num_ended = (
        control.num_entries["left"] + control.num_entries["lost"]
    )  # avoids a scan of all entries for each new one
    if name in ("left", "lost") and num_ended >= len(control.start_nodes) and have_all_reported(control, "left"):
        statuses = [control.get(f"left/{node}") for node in control.start_nodes]
        entries[ALL_LEFT] = str(max((int(status) for status in statuses if status is not None), default=0))
    if name == "verdict":
        known = parse_exits(control.get(VERDICTS) or "")
        control.set_local(
            VERDICTS,
            json.dumps([asdict(rank_exit) for rank_exit in relevant_exits([*known, *parse_exits(f"[{value}]")])]),
        )
    verdicts, now = control.get(VERDICTS) or "", time.monotonic()
    if verdicts != control.last_broadcast and (ALL_LEFT in entries or now > control.last_broadcast_at + VERDICTS_S):
        control.last_broadcast, control.last_broadcast_at = verdicts, now
        entries = {VERDICTS: verdicts, **entries}  # the root cause is sent before the notice that no rank is running
    return entries


def have_all_reported(control: Control, name: str) -> bool:
    """Return True if every remaining node of this start has made an entry ``name``."""
    lost = set(control.lost_nodes())
    return all(control.get(f"{name}/{node}") is not None or node in lost for node in control.start_nodes)


class ElasticBoard(NodeBoard):
    """``NodeBoard`` over the table of ``Control``, for the nodes that are not lost.

    | key | written by | content |
    |---|---|---|
    | ``lost/N`` | the leader | node N is lost |
    | ``left/N`` | node N, for the leader | the highest exit code of its ranks |
    | ``all left`` | the leader, when no node has a running rank | the highest exit code of all ranks |
    | ``verdict/N`` | node N, for the leader | its root cause, as JSON |
    | ``verdicts``, ``failed``, ``decision`` | the leader, perhaps on behalf of a node | as in ``NodeBoard`` |
    | ``restart/N`` | node N, for the leader | its reason against a restart; empty if there is none |
    | ``gone/N`` | node N, for the leader | it has read all that it needs |
    """

    def __init__(self, control: Control, signals: Signals, silence_s: float) -> None:
        self._control, self._signals, self._silence_s = control, signals, silence_s
        self._nodes = list(control.start_nodes)

    def is_failed(self) -> bool:
        return self._control.get("failed") is not None or self._control.has_lost_leader

    def have_all_ended(self) -> bool:
        return self._control.get(ALL_LEFT) is not None or self._control.has_lost_leader

    def report_ended(self, status: int = 0) -> None:
        self._control.set(f"left/{self._control.node}", str(status))

    def statuses(self) -> list[int]:
        status = self._control.get(ALL_LEFT)
        return [] if status is None else [int(status)]

    def report_failed(self, verdict: Exit | None) -> None:
        if verdict is not None:
            self._control.set(f"verdict/{self._control.node}", json.dumps(asdict(verdict)))
        self._control.set("failed", "1")

    def verdicts(self) -> list[Exit]:
        return parse_exits(self._control.get(VERDICTS) or "")

    def lost_nodes(self) -> list[int]:
        return self._control.lost_nodes()

    def agree(self, objection: str, timeout_s: float, get_origin: Callable[[], str]) -> tuple[bool, str]:
        """Decide as in ``NodeBoard.agree``; the leader decides, and drops nodes that do not respond.

        If the leader is lost before it decides, this node decides alone: it restarts if ``objection`` is empty.
        """
        control = self._control
        control.set(f"restart/{control.node}", objection)
        if control.is_leader:
            self._wait(lambda: have_all_reported(control, "restart"), timeout_s + self._silence_s)
            for node in self._nodes:
                if node not in control.lost_nodes() and control.get(f"restart/{node}") is None:
                    control.drop(node)
            votes = [control.get(f"restart/{node}") for node in self._nodes if node not in control.lost_nodes()]
            reason = next((vote for vote in votes if vote), "")
            control.set("decision", f"stop {reason}" if reason else f"go {get_origin()}")
        else:
            is_decided = lambda: control.get("decision") is not None or control.has_lost_leader  # noqa: E731
            self._wait(is_decided, 2 * (timeout_s + self._silence_s))
        decision = control.get("decision")
        if decision is None and control.has_lost_leader:
            return (False, objection) if objection else (True, "from the newest durable checkpoint")
        verb, _, reason = (decision or "stop the leader did not decide").partition(" ")
        return verb == "go", reason

    def release_store(self, timeout_s: float) -> None:
        self._control.set(f"gone/{self._control.node}", "1")
        if self._control.is_leader:
            self._wait(lambda: have_all_reported(self._control, "gone"), timeout_s)
