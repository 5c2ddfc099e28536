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
from megatron.launch.control import RUNS, Control
from megatron.launch.elastic import ElasticRendezvous, JobEnded
from megatron.launch.options import parse
from megatron.launch.outcome import Exit
from megatron.runtime import rank_status
from tests.helpers.harness import run_ranks

INIT_S = 0.15


class Launchers:
    """The ends of two launchers in one process, which beat and look around quickly."""

    def __init__(self, place: Path) -> None:
        control.BEAT_S = elastic.BEAT_S = 0.05
        control.HEARD_S, elastic.ASK_AGAIN_S, elastic.POLL_S = 0.1, 0.02, 0.005
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.hosts = [("127.0.0.1", each.getsockname()[1]) for each in self.listeners]
        self._place = place

    def control(self, node: int, listener: socket.socket | None = None) -> Control:
        """Return the end of a node, at its own place of the list unless it has another ``listener``."""
        listener = listener or self.listeners[node]
        return Control(self.hosts, node, listener, {"nnodes": [1, 2]}, 5.0, self._place / f"progress-{node}")

    def rendezvous(self, end: Control, *, signal: int | None = None, durable: int | None = None) -> Any:
        signals: Any = SimpleNamespace(is_asked_to_stop=signal is not None, first_name="SIGTERM", code=143)
        return ElasticRendezvous(
            end, fewest=1, most=2, nproc=1, timeout_s=INIT_S, silence_s=5.0, signals=signals,
            durable=lambda: durable,
        )  # fmt: skip


def begin(end: Control, nodes: list[int]) -> None:
    """Let the node of ``end`` lead a start of these nodes."""
    end.lead()
    end.begin({"start": 3, "nodes": nodes, "host": "127.0.0.1", "port": 1, "job": {"run": "a", "restarts": 0}})


def alone(function: Callable[[Launchers], None], place: Path) -> None:
    """Call ``function`` in a process of its own, with which the threads of the launchers' ends go."""
    run_ranks(1, lambda rank: function(Launchers(place)), init=False, deadline_s=20.0)


def test_a_node_that_joins_a_job_in_its_last_moment_hears_that_it_has_ended(tmp_path: Path) -> None:
    def last_moment(launchers: Launchers) -> None:
        leader, late = launchers.control(0), launchers.control(1)
        begin(leader, [0])
        leader.end(0, "the job has ended with code 0")
        assert late.join(0) == ""
        with pytest.raises(JobEnded, match="ended with code 0"):
            launchers.rendezvous(late).next_rendezvous()

    alone(last_moment, tmp_path)


def test_a_node_that_has_waited_for_longer_than_the_init_timeout_goes_on_without_its_leader(tmp_path: Path) -> None:
    def lost_late(launchers: Launchers) -> None:
        leader, waiting = launchers.control(0), launchers.control(1)
        begin(leader, [0])

        def lose() -> None:
            launchers.listeners[0].close()
            leader.abdicate()

        threading.Timer(3 * INIT_S, lose).start()
        launchers.rendezvous(waiting).next_rendezvous()
        assert (waiting.number, waiting.round, waiting.job["run"]) == (4, [1], "a")

    alone(lost_late, tmp_path)


def test_a_second_launcher_of_a_node_is_refused_on_whatever_host_it_is(tmp_path: Path) -> None:
    def twice(launchers: Launchers) -> None:
        leader, first = launchers.control(0), launchers.control(1)
        begin(leader, [0])
        assert first.join(0) == ""
        second = launchers.control(1, socket.create_server(("127.0.0.1", 0)))
        with pytest.raises(ConfigError, match="each node needs its own NODE_RANK, got NODE_RANK=1 twice"):
            launchers.rendezvous(second).next_rendezvous()

    alone(twice, tmp_path)


def test_a_node_whose_ranks_do_not_end_is_left_behind(tmp_path: Path) -> None:
    def hanging(launchers: Launchers) -> None:
        leader, follower = launchers.control(0), launchers.control(1)
        leader.lead()
        assert follower.join(0) == ""
        begin(leader, [0, 1])
        assert leader.joined() == {1: RUNS}
        launchers.rendezvous(leader).next_rendezvous()
        assert leader.round == [0]
        assert leader.number == 4

    alone(hanging, tmp_path)


@pytest.mark.parametrize(("durable", "code"), [(7, 75), (None, 143)])
def test_a_signal_between_two_starts_ends_the_nodes_that_wait_with_the_same_code(
    durable: int | None, code: int, tmp_path: Path
) -> None:
    def asked(launchers: Launchers) -> None:
        leader, waiting = launchers.control(0), launchers.control(1)
        begin(leader, [0])
        assert waiting.join(0) == ""
        for end, signal in ((leader, 15), (waiting, None)):
            with pytest.raises(JobEnded) as found:
                launchers.rendezvous(end, signal=signal, durable=durable).next_rendezvous()
            assert found.value.code == code

    alone(asked, tmp_path)


def test_a_port_that_a_killed_launcher_still_holds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "PORT_WAIT_S", 0.2)
    holder = socket.create_server(("", 0), backlog=1)
    port = holder.getsockname()[1]
    flags = f"--nnodes 1:2 --node-list 127.0.0.1:{port},127.0.0.1:1 --max-restarts 1 --nproc-per-node 1"
    options = parse([*flags.split(), __file__], {})
    with pytest.raises(ConfigError, match="--node-list must be free, got"):
        launcher._open_port(options)
    threading.Timer(0.05, holder.close).start()
    with launcher._open_port(options) as found:
        assert found.getsockname()[1] == port


@pytest.mark.parametrize(
    ("exits", "is_regrouping"),
    [
        ([], True),
        ([(75, rank_status.REGROUP)], True),
        ([(75, rank_status.REGROUP), (4, ""), (-15, rank_status.RUNNING)], True),
        ([(75, rank_status.REGROUP), (75, "")], False),
    ],
)
def test_ranks_that_a_lost_node_has_kept_from_leaving_do_not_end_the_job(
    exits: list[tuple[int, str]], is_regrouping: bool
) -> None:
    """All have saved, some have left for the node that waits, and the others are ended as their peers are gone."""
    group = RankGroup.__new__(RankGroup)
    group._exits = [Exit(rank=n, pid=n, status=status, at=0.0, state=state) for n, (status, state) in enumerate(exits)]
    assert group.is_regrouping() is is_regrouping
