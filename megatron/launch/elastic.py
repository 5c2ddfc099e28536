"""Elastic runs, ``--nnodes MIN:MAX``: which nodes make up the next start, who leads it, and how they agree on its end.

* The launchers are in the order of --node-list. The first that is there leads; its process holds the store of a start,
  a new one each time, and its ranks come first. When the leader is lost, the first of those that are left leads: who
  has taken part in the latest start comes before who has not, so that a node that comes back never leads a job that it
  knows nothing of.
* The first start waits for MAX nodes for --init-timeout, then begins with MIN or more. Each later one waits for those
  that are not lost, and where these are fewer than MIN, for --init-timeout for others to come.
* A node that comes to a job that runs waits. The ranks see the regroup file, end with the next save, all with 75, and
  the next start has that node in it.

What the ranks do with their number is megatron/config/elastic.py.
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
    """The job has ended while this node had no part in it; ``code`` is its exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class ElasticRendezvous(LaunchRendezvous):
    """Joins the launchers that are there; when one is lost or comes, the next start has others.

    Args:
        fewest, most: MIN and MAX of --nnodes.
        nproc: ranks on each node.
        durable: returns the step of the newest checkpoint that this job has written, or None.
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
        """Starts after the first that lost nodes and failures have cost."""
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
        span = f"{self.fewest * self._nproc}:{self.most * self._nproc}"
        return {VARIABLE: span, REGROUP_VARIABLE: str(folder / "regroup")}

    def board(self, store: Store, signals: Signals) -> NodeBoard:
        return ElasticBoard(self.control, signals, self._silence_s)

    def pass_on_waiting(self, folder: Path) -> None:
        control = self.control
        if control.leads:
            waits = "1" if control.waiting() else ""
            if (control.get("waiting") or "") != waits:
                control.set("waiting", waits)
        regroup = folder / "regroup"
        if control.get("waiting"):
            regroup.touch()
        else:
            regroup.unlink(missing_ok=True)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, this node's place and the number of nodes of the next start.

        Raises:
            PeerError: fewer than MIN nodes are there in time.
            ConfigError: another launcher has this NODE_RANK, or other flags.
            JobEnded: the job has ended, or this node is asked to stop, before it had a part in the next start.
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
                self._count_from_now()  # a node may wait for hours, and lose its leader then
            else:
                message = self._find_leader()
            if message is not None:
                break
            time.sleep(POLL_S)
        which = ", ".join(map(str, sorted(self.nodes)))
        log.info(f"launch: start {self.number} has {self.num_nodes} of {self.most} nodes: {which}")
        info = RendezvousStoreInfo(message["host"], message["port"])
        return RendezvousInfo(self._store or HashStore(), self.node_rank, self.num_nodes, info)

    def _count_from_now(self) -> None:
        """Let --init-timeout begin."""
        self._since, self._asked_at = time.monotonic(), 0.0
        self._deadline = self._since + self._timeout_s

    def _end_on_request(self) -> NoReturn:
        code = RESUMABLE if self._durable() is not None else self._signals.code
        self.close(code)
        raise JobEnded(code, f"{self._signals.first_name} came between two starts")

    def _lead(self) -> dict | None:
        """Begin the next start if all are there that can be waited for."""
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
            self._look_around(others)  # a node that stood still does not know that the others have gone on without it
            return None
        if has_enough:
            return self._begin([control.node, *ready])
        if now > self._deadline and len(joined) + 1 < self.fewest:
            why = self._too_few(others)
            control.end(4, why)
            raise PeerError(why)
        return None

    def _give_up(self, nodes: list[int]) -> None:
        """Count nodes as lost whose ranks do not end, as in a driver or a file system that hangs."""
        which = ", ".join(map(str, nodes))
        log.error(f"launch: the ranks of node {which} have not ended after {self._timeout_s:g} s; going on without it")
        for node in nodes:
            self.control.drop(node)

    def _look_around(self, others: list[int]) -> None:
        """Find out who of the last start is gone, and whether another node leads that is to be followed."""
        control = self.control
        own = (control.number, -control.node)
        answers = ask({node: control.hosts[node] for node in others})
        self._asked_at = time.monotonic()
        for node, answer in answers.items():
            if not answer:
                self._gone.add(node)
            elif answer["leads"] and (answer["number"], -answer["node"]) > own:
                control.abdicate()
                self._count_from_now()
                return

    def _is_expecting(self, joined: dict[int, int]) -> bool:
        """Whether a node of the last start may come yet that is neither here nor lost, as after a leader's end."""
        control = self.control
        absent = set(control.round) - {control.node} - set(joined) - set(control.lost()) - self._gone
        return bool(absent) and time.monotonic() < self._began_to_lead + self._silence_s

    def _begin(self, nodes: list[int]) -> dict:
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
        """Return the leader's word for the next start, if it has come."""
        while self.control.inbox:
            message = self.control.inbox.popleft()
            if "end" in message:
                raise JobEnded(message["end"], message["why"])
            if self.control.node in message["nodes"]:
                return message
        return None

    def _find_leader(self) -> dict | None:
        """Join whoever leads, or lead."""
        control = self.control
        if time.monotonic() > self._deadline:
            self._refuse_twin()
            raise PeerError(self._too_few([node for node in range(self.most) if node != control.node]))
        others = {node: host for node, host in enumerate(control.hosts) if node != control.node}
        found = ask(others)
        answers = {node: answer for node, answer in found.items() if answer}
        own = (control.number, -control.node)
        leaders = [one for one in answers.values() if one["leads"] and one["number"] >= control.number]
        if leaders:
            best = max(leaders, key=lambda one: (one["number"], -one["node"]))
            self._join(best["node"], best["number"])
        elif all((one["number"], -one["node"]) < own for one in answers.values()) and not self._is_silent(found):
            self._gone = {node for node, answer in found.items() if not answer}
            self._began_to_lead = time.monotonic()
            control.lead()
        else:
            time.sleep(BEAT_S / 2)
        return None

    def _is_silent(self, found: Collection[int]) -> bool:
        """Whether a node of the last start that comes before this one has not answered, and may be there yet."""
        control = self.control
        before = [node for node in control.round[1:] if node < control.node and node not in found]
        return bool(before) and time.monotonic() < self._since + self._silence_s

    def _join(self, leader: int, number: int) -> None:
        known = self.control.number
        refused = self.control.join(leader)
        if refused.startswith("differs: "):
            raise ConfigError(
                "every node needs the same --nnodes, --nproc-per-node and --node-list, got others on node "
                f"{self.control.node} than on node {leader}, which has {refused.removeprefix('differs: ')}"
            )
        self._is_taken = refused == "taken"
        if not refused and number > known:
            log.info(f"launch: node {leader} leads; this node is taken in with the next start, at the next save")

    def _refuse_twin(self) -> None:
        """Check that no other launcher has this NODE_RANK: the leader has refused this one for it to the last."""
        if self._is_taken:
            raise ConfigError(
                f"each node needs its own NODE_RANK, got NODE_RANK={self.control.node} twice. "
                f"Number the nodes from 0 to {self.most - 1}, in the order of --node-list."
            )

    def _too_few(self, others: list[int]) -> str:
        return (
            f"{self.most - len(others)} of at least {self.fewest} nodes after {self._timeout_s:g} s; missing: "
            f"NODE_RANK {', '.join(map(str, others))}. Start them with the same --nnodes and --node-list, wait longer "
            "with --init-timeout, or lower MIN of --nnodes MIN:MAX; with --resume the same command goes on from the "
            "newest checkpoint"
        )

    def close(self, code: int) -> None:
        if self.control.leads:
            self.control.end(code, f"the job has ended with code {code}")


ALL_LEFT, VERDICTS = "all left", "verdicts"
VERDICTS_S = 0.1
"""The leader passes on no more often which exits decide: on all nodes ranks may fail within a moment."""
TO_LEADER = ("left", "verdict", "restart", "gone")
"""What nodes enter for the leader alone."""


def heard_by_all(control: Control, key: str, value: str) -> dict[str, str]:
    """Return what the leader tells all nodes of an entry: that all have left, and which exits decide on the culprit."""
    name = key.partition("/")[0]
    found = {} if name in TO_LEADER else {key: value}
    number = control.entries["left"] + control.entries["lost"]  # else all are gone over for each of them
    if name in ("left", "lost") and number >= len(control.round) and have_all(control, "left"):
        statuses = [control.get(f"left/{node}") for node in control.round]
        found[ALL_LEFT] = str(max((int(status) for status in statuses if status is not None), default=0))
    if name == "verdict":
        known = exits_of(control.get(VERDICTS) or "")
        control.keep(VERDICTS, json.dumps([asdict(one) for one in deciding([*known, *exits_of(f"[{value}]")])]))
    verdicts, now = control.get(VERDICTS) or "", time.monotonic()
    if verdicts != control.passed_on and (ALL_LEFT in found or now > control.passed_on_at + VERDICTS_S):
        control.passed_on, control.passed_on_at = verdicts, now
        found = {VERDICTS: verdicts, **found}  # whoever hears that all have left knows the culprit
    return found


def have_all(control: Control, name: str) -> bool:
    """Return whether each node of this start has entered something of ``name``, but for those that are lost."""
    lost = set(control.lost())
    return all(control.get(f"{name}/{node}") is not None or node in lost for node in control.round)


class ElasticBoard(NodeBoard):
    """The same as ``NodeBoard`` over the table of ``Control``, of those nodes that are not lost.

    | key | written by | holds |
    |---|---|---|
    | ``lost/N`` | the leader | that node N is lost |
    | ``left/N`` | node N, to the leader | the highest code of its ranks |
    | ``all left`` | the leader | that all have left, and the highest of their codes |
    | ``verdict/N`` | node N, to the leader | its culprit, as JSON |
    | ``verdicts``, ``failed``, ``decision`` | the leader, who may have it of a node | as in ``NodeBoard`` |
    | ``restart/N`` | node N, to the leader | why it would not start again; empty if it would |
    | ``gone/N`` | node N, to the leader | that it has read what it wants to know |
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
        """As ``NodeBoard.agree``; a node that does not answer is lost, and a lost leader decides nothing."""
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
            is_known = lambda: control.get("decision") is not None or control.is_cut_off  # noqa: E731
            self._wait(is_known, 2 * (timeout_s + self._silence_s))
        decision = control.get("decision")
        if decision is None and control.is_cut_off:
            return (False, against) if against else (True, "from the newest durable checkpoint")
        word, _, reason = (decision or "stop the leader did not decide").partition(" ")
        return word == "go", reason

    def leave(self, timeout_s: float) -> None:
        self._control.set(f"gone/{self._control.node}", "1")
        if self._control.leads:
            self._wait(lambda: have_all(self._control, "gone"), timeout_s)
