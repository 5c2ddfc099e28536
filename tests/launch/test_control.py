"""The launchers of an elastic job in their rare moments: a join at the end, a leader lost late, a node that hangs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.launch import __main__ as launcher
from megatron.launch import control, elastic
from megatron.launch.attempt import RankGroup
from megatron.launch.control import RUNNING, Control
from megatron.launch.elastic import ElasticRendezvous, JobEnded
from megatron.launch.options import parse
from megatron.launch.outcome import Exit
from megatron.runtime import rank_status
from tests.helpers.harness import run_ranks

INIT_S = 0.15


class LauncherPair:
    """The ends of two launchers in one process, which beat and look around quickly."""

    def __init__(self, folder: Path) -> None:
        control.HEARTBEAT_S = elastic.HEARTBEAT_S = 0.05
        control.END_TIMEOUT_S, elastic.ASK_INTERVAL_S, elastic.POLL_S = 0.1, 0.02, 0.005
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.hosts = [("127.0.0.1", listener.getsockname()[1]) for listener in self.listeners]
        self._folder = folder

    def control(self, node: int, listener: socket.socket | None = None) -> Control:
        """Return the end of a node, at its own place of the list unless it has another ``listener``."""
        listener = listener or self.listeners[node]
        return Control(self.hosts, node, listener, {"nnodes": [1, 2]}, 5.0, self._folder / f"progress-{node}")

    def rendezvous(self, node_control: Control, *, signal: int | None = None, durable: int | None = None) -> Any:
        signals: Any = SimpleNamespace(is_asked_to_stop=signal is not None, first_name="SIGTERM", code=143)
        return ElasticRendezvous(
            node_control, min_nodes=1, max_nodes=2, nproc=1, timeout_s=INIT_S, silence_s=5.0, signals=signals,
            durable_step=lambda: durable,
        )  # fmt: skip


def start_job(node_control: Control, nodes: list[int]) -> None:
    """Let the node of ``node_control`` lead a start of these nodes."""
    node_control.become_leader()
    node_control.begin_start(
        {"start": 3, "nodes": nodes, "host": "127.0.0.1", "port": 1, "job": {"run": "a", "restarts": 0}}
    )


def run_in_process(function: Callable[[LauncherPair], None], folder: Path) -> None:
    """Call ``function`` in a process of its own, with which the threads of the launchers' ends go."""
    run_ranks(1, lambda rank: function(LauncherPair(folder)), init=False, deadline_s=20.0)


def test_late_joining_node_is_notified_of_job_end(tmp_path: Path) -> None:
    def last_moment(launchers: LauncherPair) -> None:
        leader, late = launchers.control(0), launchers.control(1)
        start_job(leader, [0])
        leader.end(0, "the job has ended with code 0")
        assert late.join(0) == ""
        with pytest.raises(JobEnded, match="ended with code 0"):
            launchers.rendezvous(late).next_rendezvous()

    run_in_process(last_moment, tmp_path)


def test_waiting_node_continues_after_leader_loss(tmp_path: Path) -> None:
    def lost_late(launchers: LauncherPair) -> None:
        leader, waiting = launchers.control(0), launchers.control(1)
        start_job(leader, [0])

        def lose() -> None:
            launchers.listeners[0].close()
            leader.abdicate()

        threading.Timer(3 * INIT_S, lose).start()
        launchers.rendezvous(waiting).next_rendezvous()
        assert (waiting.start_idx, waiting.start_nodes, waiting.job["run"]) == (4, [1], "a")

    run_in_process(lost_late, tmp_path)


def test_second_launcher_with_same_node_rank_raises(tmp_path: Path) -> None:
    def twice(launchers: LauncherPair) -> None:
        leader, first = launchers.control(0), launchers.control(1)
        start_job(leader, [0])
        assert first.join(0) == ""
        second = launchers.control(1, socket.create_server(("127.0.0.1", 0)))
        with pytest.raises(ConfigError, match="each node needs its own NODE_RANK, got NODE_RANK=1 twice"):
            launchers.rendezvous(second).next_rendezvous()

    run_in_process(twice, tmp_path)


def test_hanging_node_is_excluded_from_next_start(tmp_path: Path) -> None:
    def hanging(launchers: LauncherPair) -> None:
        leader, follower = launchers.control(0), launchers.control(1)
        leader.become_leader()
        assert follower.join(0) == ""
        start_job(leader, [0, 1])
        assert leader.joined_nodes() == {1: RUNNING}
        launchers.rendezvous(leader).next_rendezvous()
        assert leader.start_nodes == [0]
        assert leader.start_idx == 4

    run_in_process(hanging, tmp_path)


@pytest.mark.parametrize(("durable", "code"), [(7, 75), (None, 143)])
def test_signal_between_starts_ends_waiting_nodes_with_same_code(
    durable: int | None, code: int, tmp_path: Path
) -> None:
    def asked(launchers: LauncherPair) -> None:
        leader, waiting = launchers.control(0), launchers.control(1)
        start_job(leader, [0])
        assert waiting.join(0) == ""
        for node_control, signal in ((leader, 15), (waiting, None)):
            with pytest.raises(JobEnded) as exc_info:
                launchers.rendezvous(node_control, signal=signal, durable=durable).next_rendezvous()
            assert exc_info.value.code == code

    run_in_process(asked, tmp_path)


def test_port_held_by_killed_launcher_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "PORT_WAIT_S", 0.2)
    holder = socket.create_server(("", 0), backlog=1)
    port = holder.getsockname()[1]
    flags = f"--nnodes 1:2 --node-list 127.0.0.1:{port},127.0.0.1:1 --max-restarts 1 --nproc-per-node 1"
    options = parse([*flags.split(), __file__], {})
    with pytest.raises(ConfigError, match="--node-list must be free, got"):
        launcher._open_port(options)
    threading.Timer(0.05, holder.close).start()
    with launcher._open_port(options) as server:
        assert server.getsockname()[1] == port


@pytest.mark.parametrize(
    ("exits", "is_regrouping"),
    [
        ([], True),
        ([(75, rank_status.REGROUP)], True),
        ([(75, rank_status.REGROUP), (4, ""), (-15, rank_status.RUNNING)], True),
        ([(75, rank_status.REGROUP), (75, "")], False),
    ],
)
def test_regroup_exits_do_not_end_job(exits: list[tuple[int, str]], is_regrouping: bool) -> None:
    """All have saved, some have left for the node that waits, and the others are ended as their peers are gone."""
    group = RankGroup.__new__(RankGroup)
    group._exits = [
        Exit(rank=n, pid=n, status=status, time_s=0.0, state=state) for n, (status, state) in enumerate(exits)
    ]
    assert group.is_regrouping() is is_regrouping
