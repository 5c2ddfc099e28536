"""Start-up and end of a job of thousands of ranks, counted: process groups, messages to the stores, checks, exits.

Each function takes a number of ranks and returns its figures by their titles; ``Figure`` says how each was found.
"""

from __future__ import annotations

import json
import os
import random
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.many_ranks_counting import (
    CountingGroup,
    CountingStore,
    cpu_seconds,
    fake_world,
    layout_of,
    lines_run,
)
from megatron.arguments import parse
from megatron.config import Config
from megatron.launch.control import Control, Peer
from megatron.launch.elastic import heard_by_all
from megatron.launch.outcome import Exit, NodeBoard
from megatron.mpu import groups
from megatron.mpu.groups import Grid
from megatron.runtime import rendezvous
from megatron.runtime.rendezvous import ALL, missing_of
from megatron.training import initialize, rank_consistency
from tds.deepspeed_api import Grid as PipelineGrid
from tds.deepspeed_api import deepspeed, places_of, sharing_groups
from tds.watchdog import watchdog
from tds.watchdog.alarm import Alarms
from tds.watchdog.diagnosis import Report

RANKS_OF_A_NODE = 8
THREADS = 64
COUNTED, SECONDS = "counted", "processor seconds"
BY_LAW, BY_FORMULA = "64 ranks counted", "by formula"


class Figure(NamedTuple):
    """What was found for one number of ranks: ``how`` is one of the four above."""

    value: float
    unit: str
    how: str = COUNTED


Figures = dict[str, Figure]


def config_of() -> Config:
    """Return the settings of a run, which all ranks compare."""
    words = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 51200 --seq-length 2048"
    return parse([*words.split(), *"--max-position-embeddings 2048 --batch-size 1 --data-path none --bf16".split()],
                 world_size=1, env={})  # fmt: skip


def process_groups(ranks: int) -> Figures:
    """Return what it takes to make the grid of this project, and that of DeepSpeed for a pipeline."""
    topology = layout_of(ranks)
    with fake_world(ranks) as made:
        grid = groups.build_grid(topology, 0)
        calls, listed = made.calls, made.ranks
        seconds = cpu_seconds(partial(_forgotten, topology), 1)
        found = {
            "process groups named": Figure(calls, "calls"),
            "ranks in their lists": Figure(listed, "ranks"),
            "making the grid": Figure(seconds, "s", SECONDS),
        }
        return found | _pipeline_grid(grid, ranks)


def _forgotten(topology: Any) -> None:
    with mock.patch.object(dist, "new_group", lambda *given, **more: None):
        groups.build_grid(topology, 0)


def _pipeline_grid(grid: Grid, ranks: int) -> Figures:
    topology = grid.topology
    known = groups.groups_by_ranks(grid)
    axes = deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology(topology.pipe, topology.tensor, topology.data)
    backend = mock.Mock(get_rank=lambda group=None: 0, get_world_size=lambda group=None: ranks)
    made: list[Any] = []

    def build() -> None:
        made.append(PipelineGrid(axes, dist.group.WORLD))

    def names() -> None:
        made.append([watchdog.name_of(rank, place) for rank, place in enumerate(places_of(made[0]))])

    with mock.patch("deepspeed.comm.comm.cdb", backend), mock.patch("builtins.print"), sharing_groups(known):
        seconds = cpu_seconds(build, 3)
        lines = lines_run(build) if ranks <= 512 else 0
    found = {
        "DeepSpeed's grid of a pipeline": Figure(seconds, "s", SECONDS),
        "names of all ranks, for the watchdog": Figure(cpu_seconds(names, 3), "s", SECONDS),
    }
    return found | ({"lines of Python of both": Figure(lines + lines_run(names), "lines")} if lines else {})


def meeting(ranks: int) -> Figures:
    """Return the messages to the store with which ranks come together, and with which they find who is missing."""
    store = CountingStore()
    with mock.patch.object(rendezvous.time, "sleep"):
        for rank in range(ranks):
            rendezvous._claim(store, rank, ranks, "here")
            for name in (rendezvous._COME, rendezvous._BEGIN):
                _pass(store, name, rank, ranks)
    late = CountingStore()
    for rank in range(ranks):
        if rank:
            late._store.set(f"come/{rank}", "1")
    for _ in range(ranks):
        assert missing_of(late, "come/", ranks) == [0]
    return {
        "rendezvous, without its polls": Figure(store.messages, "messages"),
        "rendezvous: polls, four a second of each rank": Figure(ranks / rendezvous._POLL_S, "messages/s", BY_FORMULA),
        "all ranks find who is missing": Figure(late.messages, "messages"),
    }


def _pass(store: CountingStore, name: str, rank: int, ranks: int) -> None:
    """Go through a barrier of the rendezvous as the last one does; those before it would only poll longer."""
    if rank < ranks - 1:
        store.compare_set(f"{name}/{rank}", "", rendezvous._own())
        store.add(f"{name}/number", 1)
        store.check([name])
        store._count("get", name, ALL)  # of what the last one writes
        return
    rendezvous._barrier(store, name, rank, ranks, float("inf"), "", lambda: None)


def connecting(ranks: int) -> Figures:
    """Return what a gloo group and its first sum ask of the store, and the connections of a rank.

    Each rank is a thread with a process group of its own. More than ``THREADS`` go by the law, which the counts below
    keep to the message: a rank writes once, and reads and waits once for each of its two neighbours. Gloo asks once
    in a process whether it is to make a mesh, so this one counts as one of a job of many ranks from here on.
    """
    if ranks > THREADS:
        few = connecting(THREADS).items()
        shares = {title: ranks / THREADS if each.unit in ("messages", "bytes") else 1.0 for title, each in few}
        return {title: Figure(each.value * shares[title], each.unit, BY_LAW) for title, each in few}
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "10000"}):
        initialize.connect_as_needed()
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "0")
        return _first_sum(ranks)


def _first_sum(ranks: int) -> Figures:
    store = CountingStore()
    made: dict[int, Any] = {}

    def first_sum(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
        made[rank].allreduce([torch.ones(1)]).wait()

    before = _sockets()
    _all_at_once(first_sum, ranks)
    connections = (_sockets() - before) / ranks
    made.clear()
    return {
        "gloo: a group and its first sum": Figure(store.messages, "messages"),
        "gloo: bytes of the same": Figure(store.num_bytes, "bytes"),
        "gloo: connections of each rank": Figure(connections, "sockets"),
    }


def _sockets() -> int:
    """Return how many sockets this process has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return found


def _all_at_once(do: Callable[[int], object], number: int) -> None:
    problems: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            do(rank)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if problems:
        raise problems[0]


def checks(ranks: int) -> Figures:
    """Return what rank 0 gets from all ranks and does with it, to see that all run the same: alike, and not alike."""
    host, config = CountingGroup.of(ranks), config_of()
    grid = replace(groups.single_grid(), topology=layout_of(ranks), world=host, host=host)
    rank_consistency.code_checksum()  # read from the disk once; its seconds do not depend on the ranks
    alike = cpu_seconds(lambda: rank_consistency.check_ranks_identical(config, grid))
    facts = rank_consistency.facts(config)
    everyone = [facts | {"version: torch": str(rank % 2)} for rank in range(ranks)]
    naming = cpu_seconds(lambda: list(rank_consistency.differences(everyone)))
    return {
        "versions, flags and code that come to rank 0": Figure(host.received[0], "bytes"),
        "comparing them": Figure(alike, "s", SECONDS),
        "naming what differs": Figure(naming, "s", SECONDS),
    }


def watching(ranks: int) -> Figures:
    """Return what the watchdogs ask of the store: each second, and for one alarm that all ranks answer."""
    store = CountingStore()
    alarms = [Alarms(store, rank, [f"rank {each}" for each in range(ranks)] if rank == 0 else ["x"] * ranks)
              for rank in (0, 1)]  # fmt: skip
    inner = dist.PrefixStore("0", store)
    own = Report(True, None, 1.0, "waits")
    for rank in range(1, ranks):
        inner.set(f"report/{rank}", own.encode())
    with mock.patch("tds.watchdog.alarm.time.sleep"):
        assert alarms[0].answer(own) is not None
        before = store.messages
        assert alarms[1].answer(own) is not None
        other = store.messages - before
    listens_s = max(watchdog.LOOK_S, alarms[0].pause_s)
    return {
        "watchdogs of run and engine, looking": Figure(2 * ranks / listens_s, "messages/s", BY_FORMULA),
        "an alarm that all ranks answer": Figure(before + other * (ranks - 1), "messages"),
    }


def ending(ranks: int) -> Figures:
    """Return what the launchers ask of their store when a job fails on all nodes at once, and what ranks do."""
    nodes, store, chance = max(1, ranks // RANKS_OF_A_NODE), CountingStore(), random.Random(0)
    boards = [NodeBoard(store, node, nodes, mock.Mock()) for node in range(nodes)]
    exits = [Exit(rank=RANKS_OF_A_NODE * node, pid=1, status=4, at=chance.random()) for node in range(nodes)]
    for board, own in zip(boards, exits, strict=True):
        board.report_failed(own)
        board.report_left()
    for board in boards:
        board.all_left()
        board.verdicts()
    return {
        "launchers agree on the culprit": Figure(store.messages, "messages"),
        "launchers: bytes of the same": Figure(store.num_bytes, "bytes"),
        **_elastic(exits),
    }


class _Follower:
    """What the leader of an elastic job sees of a node; it counts the lines of a start that are sent to it."""

    lines, num_bytes = 0, 0

    def __init__(self, node: int) -> None:
        self.node, self.ready, self.heard_at = node, 0, float("inf")
        self.socket = mock.Mock()

    def send(self, message: dict[str, Any]) -> None:
        if "set" in message or "start" in message:
            _Follower.lines += 1
            _Follower.num_bytes += len(json.dumps(message))


def _elastic(exits: Sequence[Exit]) -> Figures:
    """Return what the leader of an elastic job sends when all nodes fail and leave at once, and start again."""
    nodes, facts = len(exits), {"nodes": len(exits)}
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory() as folder:
        control = Control([("127.0.0.1", 0)] * nodes, 0, listener, facts, 1e9, Path(folder) / "progress")
        control.summary = heard_by_all
        control.lead()
        followers = [_Follower(node) for node in range(1, nodes)]
        control.members = {each.node: cast(Peer, each) for each in followers}
        _Follower.lines = _Follower.num_bytes = 0
        control.begin({"start": 0, "nodes": list(range(nodes)), "host": "leader", "port": 1, "job": {}})
        quick = mock.patch("megatron.launch.elastic.VERDICTS_S", float("inf"))  # else also ten times a second
        quick.start()
        for name in ("verdict", "failed", "left", "restart", "gone"):
            for peer, own in zip(followers, exits[1:], strict=True):
                value = json.dumps(asdict(own)) if name == "verdict" else "1"
                key = name if name == "failed" else f"{name}/{peer.node}"
                control._take(cast(Peer, peer), {"set": [0, key, value]})
        quick.stop()
        control.members.clear()
    return {
        "elastic: what the leader sends for a sudden end": Figure(_Follower.lines, "messages"),
        "elastic: bytes of the same": Figure(_Follower.num_bytes, "bytes"),
    }


PARTS: dict[str, Callable[[int], Figures]] = {
    "groups": process_groups,
    "meeting": meeting,
    "connecting": connecting,
    "checks": checks,
    "watching": watching,
    "ending": ending,
}
