"""Rendezvous of elastic jobs (``--nnodes MIN:MAX``): nodes and leader of the next start, and agreement on its end.

* The launchers are in the order of --node-list. The first one present is the leader: its process hosts the store of
  each start, and its ranks have the lowest numbers. If the leader is lost, the first remaining node takes over. Nodes
  that took part in the latest start take precedence, so that a returning node never leads a job whose state it does
  not know.
* The first start waits for MAX nodes for up to --init-timeout, then begins with MIN or more. Later starts wait for the
  nodes that are not lost; if these are fewer than MIN, they wait for further nodes for up to --init-timeout.
* A node that joins a running job waits. The ranks see the regroup file and exit with 75 after the next save, and the
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
from megatron.launch.control import BEAT_S, RUNS, Control, ask
from megatron.launch.outcome import POLL_S, Exit, NodeBoard, deciding, exits_of
from megatron.launch.processes import RESUMABLE, Signals
from megatron.launch.rendezvous import LaunchRendezvous
from megatron.runtime.exit_signals import REGROUP_VARIABLE

ASK_AGAIN_S = 0.5


class JobEnded(Exception):
    """The job has ended while this node took no part in it; ``code`` is its exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class ElasticRendezvous(LaunchRendezvous):
    """Connects the available launchers; the set of nodes may change with each start.

    Args:
        fewest, most: MIN and MAX of --nnodes.
        nproc: number of ranks on each node.
        durable: function that returns the step of the newest durable checkpoint of this job, or None.
    """

    def __init__(
        self, control: Control, *, fewest: int, most: int, nproc: int, timeout_s: float, silence_s: float,
        signals: Signals, durable: Callable[[], int | None],
    ) -> None:  # fmt: skip
        self.control, self._signals, self._durable = control, signals, durable
        self.fewest, self.most, self._nproc = fewest, most, nproc
        control.summary = heard_by_all
        control.job = {"run": uuid.uuid4().hex[:12], "restarts": 0}
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self._since = self._deadline = 0.0
        self._began_to_lead = self._asked_at = 0.0
        self._is_taken = False
        self._gone: set[int] = set()
        self._store: Store | None = None

    is_elastic = True

    @property
    def number(self) -> int:
        return self.control.number

    @property
    def run_id(self) -> str:
        return str(self.control.job["run"])

    @property
    def restarts(self) -> int:
        """Number of restarts after failures and lost nodes."""
        return int(self.control.job["restarts"])

    @restarts.setter
    def restarts(self, number: int) -> None:
        self.control.job = {**self.control.job, "restarts": number}

    @property
    def nodes(self) -> list[int]:
        """The nodes of the start, the leader first."""
        return self.control.round

    @property
    def node_rank(self) -> int:
        return self.nodes.index(self.control.node)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def environment(self, folder: Path) -> dict[str, str]:
        rank_range = f"{self.fewest * self._nproc}:{self.most * self._nproc}"
        return {VARIABLE: rank_range, REGROUP_VARIABLE: str(folder / "regroup")}

    def board(self, store: Store, signals: Signals) -> NodeBoard:
        return ElasticBoard(self.control, signals, self._silence_s)

    def pass_on_waiting(self, folder: Path) -> None:
        control = self.control
        if control.leads:
            is_waiting = "1" if control.waiting() else ""
            if (control.get("waiting") or "") != is_waiting:
                control.set("waiting", is_waiting)
        regroup = folder / "regroup"
        if control.get("waiting"):
            regroup.touch()
        else:
            regroup.unlink(missing_ok=True)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, this node's rank and the number of nodes of the next start.

        Raises:
            PeerError: fewer than MIN nodes have joined in time.
            ConfigError: another launcher has this NODE_RANK, or has other flags.
            JobEnded: the job has ended, or this node was asked to stop, before the next start.
        """
        self._store = None
        self._count_from_now()
        self.control.report_ready()
        while True:
            if self._signals.is_asked_to_stop:
                self._end_on_request()
            if self.control.leads:
                message = self._lead()
            elif self.control.leader is not None:
                message = self._follow()
                self._count_from_now()  # a node may wait for hours before it loses its leader
            else:
                message = self._find_leader()
            if message is not None:
                break
            time.sleep(POLL_S)
        node_list = ", ".join(map(str, sorted(self.nodes)))
        log.info(f"launch: start {self.number} has {self.num_nodes} of {self.most} nodes: {node_list}")
        info = RendezvousStoreInfo(message["host"], message["port"])
        return RendezvousInfo(self._store or HashStore(), self.node_rank, self.num_nodes, info)

    def _count_from_now(self) -> None:
        """Restart the period of --init-timeout."""
        self._since, self._asked_at = time.monotonic(), 0.0
        self._deadline = self._since + self._timeout_s

    def _end_on_request(self) -> NoReturn:
        """Raise a JobEnded, because this node has received a signal between two starts."""
        code = RESUMABLE if self._durable() is not None else self._signals.code
        self.close(code)
        raise JobEnded(code, f"received {self._signals.first_name} between two starts")

    def _lead(self) -> dict | None:
        """Begin the next start and return its message if all expected nodes have joined; otherwise return None."""
        control, now = self.control, time.monotonic()
        joined = control.joined()
        ready = [node for node, behind in sorted(joined.items()) if behind > RUNS]
        if now > self._deadline and len(ready) < len(joined):
            self._give_up(sorted(set(joined) - set(ready)))
            return None
        others = [node for node in range(self.most) if node != control.node and node not in joined]
        has_all = len(ready) == len(joined) and not self._is_expecting(joined)
        if control.number == -1:
            has_all = has_all and (len(joined) + 1 == self.most or now > self._deadline)
        has_enough = has_all and len(ready) + 1 >= self.fewest
        if others and now > self._asked_at + ASK_AGAIN_S:
            self._look_around(others)  # if this process was suspended, the others may have continued without it
            return None
        if has_enough:
            return self._begin([control.node, *ready])
        if now > self._deadline and len(joined) + 1 < self.fewest:
            reason = self._too_few(others)
            control.end(4, reason)
            raise PeerError(reason)
        return None

    def _give_up(self, nodes: list[int]) -> None:
        """Count nodes as lost because their ranks do not exit, for example if a driver or file system hangs."""
        node_list = ", ".join(map(str, nodes))
        log.error(
            f"launch: the ranks of node {node_list} have not ended after {self._timeout_s:g} s; continuing without it"
        )
        for node in nodes:
            self.control.drop(node)

    def _look_around(self, others: list[int]) -> None:
        """Request the status of ``others``: find nodes that are gone; abdicate if another leader takes precedence."""
        control = self.control
        own_priority = (control.number, -control.node)
        answers = ask({node: control.hosts[node] for node in others})
        self._asked_at = time.monotonic()
        for node, answer in answers.items():
            if not answer:
                self._gone.add(node)
            elif answer["leads"] and (answer["number"], -answer["node"]) > own_priority:
                control.abdicate()
                self._count_from_now()
                return

    def _is_expecting(self, joined: dict[int, int]) -> bool:
        """Return True if a node of the last start may still join this new leader.

        A node needs up to --node-timeout to detect that the previous leader is lost.
        """
        control = self.control
        absent = set(control.round) - {control.node} - set(joined) - set(control.lost()) - self._gone
        return bool(absent) and time.monotonic() < self._began_to_lead + self._silence_s

    def _begin(self, nodes: list[int]) -> dict:
        """Open the store of the next start, send the start to its nodes, and return the leader's message."""
        host = self.control.hosts[self.control.node][0]
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._gone.clear()
        message = {
            "start": self.control.number + 1, "nodes": nodes, "host": host, "port": cast(TCPStore, self._store).port,
            "job": self.control.job,
        }  # fmt: skip
        self.control.begin(message)
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
        """Join the leader, or become the leader."""
        control = self.control
        if time.monotonic() > self._deadline:
            self._refuse_twin()
            raise PeerError(self._too_few([node for node in range(self.most) if node != control.node]))
        others = {node: host for node, host in enumerate(control.hosts) if node != control.node}
        responses = ask(others)
        answers = {node: answer for node, answer in responses.items() if answer}
        own_priority = (control.number, -control.node)
        leaders = [one for one in answers.values() if one["leads"] and one["number"] >= control.number]
        if leaders:
            best = max(leaders, key=lambda one: (one["number"], -one["node"]))
            self._join(best["node"], best["number"])
        elif all((one["number"], -one["node"]) < own_priority for one in answers.values()) and not self._is_silent(
            responses
        ):
            self._gone = {node for node, answer in responses.items() if not answer}
            self._began_to_lead = time.monotonic()
            control.lead()
        else:
            time.sleep(BEAT_S / 2)
        return None

    def _is_silent(self, found: Collection[int]) -> bool:
        """Return True if a preceding node of the last start has not responded, but may still be alive."""
        control = self.control
        preceding = [node for node in control.round[1:] if node < control.node and node not in found]
        return bool(preceding) and time.monotonic() < self._since + self._silence_s

    def _join(self, leader: int, number: int) -> None:
        """Request to join ``leader``, whose last start has the number ``number``.

        Raises:
            ConfigError: the leader has other flags.
        """
        last_number = self.control.number
        refused = self.control.join(leader)
        if refused.startswith("differs: "):
            raise ConfigError(
                "every node needs the same --nnodes, --nproc-per-node and --node-list, but those of node "
                f"{self.control.node} differ from those of node {leader}: {refused.removeprefix('differs: ')}"
            )
        self._is_taken = refused == "taken"
        if not refused and number > last_number:
            log.info(f"launch: node {leader} is the leader; this node joins with the next start, after the next save")

    def _refuse_twin(self) -> None:
        """Raise if the leader has rejected this node because another launcher has its NODE_RANK."""
        if self._is_taken:
            raise ConfigError(
                f"each node needs its own NODE_RANK, got NODE_RANK={self.control.node} twice. "
                f"Number the nodes from 0 to {self.most - 1}, in the order of --node-list."
            )

    def _too_few(self, others: list[int]) -> str:
        """Return the error message if fewer than MIN nodes have joined; ``others`` are the missing nodes."""
        return (
            f"{self.most - len(others)} of at least {self.fewest} nodes joined within {self._timeout_s:g} s; missing: "
            f"NODE_RANK {', '.join(map(str, others))}. Start them with the same --nnodes and --node-list, wait longer "
            "with --init-timeout, or lower MIN of --nnodes MIN:MAX; with --resume the same command continues from the "
            "newest checkpoint"
        )

    def close(self, code: int) -> None:
        if self.control.leads:
            self.control.end(code, f"the job has ended with code {code}")


ALL_LEFT, VERDICTS = "all left", "verdicts"
VERDICTS_S = 0.1
"""Minimum seconds between two broadcasts of verdicts by the leader, because ranks of all nodes may fail almost
simultaneously."""
TO_LEADER = ("left", "verdict", "restart", "gone")
"""Entries that only the leader needs."""


def heard_by_all(control: Control, key: str, value: str) -> dict[str, str]:
    """Return the entries that the leader broadcasts for a new entry.

    Entries that only the leader needs are replaced by two summaries: ``all left``, and ``verdicts``, which contains the
    exits that determine the root cause.
    """
    name = key.partition("/")[0]
    entries = {} if name in TO_LEADER else {key: value}
    num_ended = control.entries["left"] + control.entries["lost"]  # avoids a scan of all entries for each new one
    if name in ("left", "lost") and num_ended >= len(control.round) and have_all(control, "left"):
        statuses = [control.get(f"left/{node}") for node in control.round]
        entries[ALL_LEFT] = str(max((int(status) for status in statuses if status is not None), default=0))
    if name == "verdict":
        known = exits_of(control.get(VERDICTS) or "")
        control.keep(
            VERDICTS, json.dumps([asdict(rank_exit) for rank_exit in deciding([*known, *exits_of(f"[{value}]")])])
        )
    verdicts, now = control.get(VERDICTS) or "", time.monotonic()
    if verdicts != control.passed_on and (ALL_LEFT in entries or now > control.passed_on_at + VERDICTS_S):
        control.passed_on, control.passed_on_at = verdicts, now
        entries = {VERDICTS: verdicts, **entries}  # the root cause is sent before the notice that no rank is running
    return entries


def have_all(control: Control, name: str) -> bool:
    """Return True if each node of this start that is not lost has made an entry ``name``."""
    lost = set(control.lost())
    return all(control.get(f"{name}/{node}") is not None or node in lost for node in control.round)


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
        self._nodes = list(control.round)

    def is_failed(self) -> bool:
        return self._control.get("failed") is not None or self._control.is_cut_off

    def all_left(self) -> bool:
        return self._control.get(ALL_LEFT) is not None or self._control.is_cut_off

    def report_left(self, status: int = 0) -> None:
        self._control.set(f"left/{self._control.node}", str(status))

    def statuses(self) -> list[int]:
        status = self._control.get(ALL_LEFT)
        return [] if status is None else [int(status)]

    def report_failed(self, verdict: Exit | None) -> None:
        if verdict is not None:
            self._control.set(f"verdict/{self._control.node}", json.dumps(asdict(verdict)))
        self._control.set("failed", "1")

    def verdicts(self) -> list[Exit]:
        return exits_of(self._control.get(VERDICTS) or "")

    def lost(self) -> list[int]:
        return self._control.lost()

    def agree(self, against: str, timeout_s: float, go: Callable[[], str]) -> tuple[bool, str]:
        """Decide as in ``NodeBoard.agree``; the leader decides, and drops nodes that do not respond.

        If the leader is lost before its decision, a node restarts unless it has a reason against it.
        """
        control = self._control
        control.set(f"restart/{control.node}", against)
        if control.leads:
            self._wait(lambda: have_all(control, "restart"), timeout_s + self._silence_s)
            for node in self._nodes:
                if node not in control.lost() and control.get(f"restart/{node}") is None:
                    control.drop(node)
            votes = [control.get(f"restart/{node}") for node in self._nodes if node not in control.lost()]
            reason = next((vote for vote in votes if vote), "")
            control.set("decision", f"stop {reason}" if reason else f"go {go()}")
        else:
            is_decided = lambda: control.get("decision") is not None or control.is_cut_off  # noqa: E731
            self._wait(is_decided, 2 * (timeout_s + self._silence_s))
        decision = control.get("decision")
        if decision is None and control.is_cut_off:
            return (False, against) if against else (True, "from the newest durable checkpoint")
        verb, _, reason = (decision or "stop the leader did not decide").partition(" ")
        return verb == "go", reason

    def leave(self, timeout_s: float) -> None:
        self._control.set(f"gone/{self._control.node}", "1")
        if self._control.leads:
            self._wait(lambda: have_all(self._control, "gone"), timeout_s)
