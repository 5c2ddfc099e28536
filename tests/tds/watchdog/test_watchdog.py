"""A rank that does not come is named by all others, whether it died, was stopped, or is stuck in a user's code."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tds.watchdog
from tds.p2p import collective_scope
from tds.p2p.collective_scope import PeerLost
from tds.schedule import Backward, Forward, Kind, Message
from tds.watchdog import thread_stack
from tds.watchdog.alarm import POLL_S
from tds.watchdog.diagnosis import Report, format_history, report, verdict
from tds.watchdog.watchdog import STORE_LOST, EngineWatchdog, is_timeout, peer_lost
from tests.helpers.harness import GROUP_TIMEOUT_S, fork_ranks, run_ranks
from tests.helpers.toys import Toy, make_engine

RANKS = 4
ABSENT = 1
LIMIT_S = 3.0
SLACK_S = 5.0
"""Of what is promised within 1 s or 2 s: the machine may have more to do."""


def _world(rank: int, place: str) -> None:
    store = dist.FileStore(f"{place}/store", RANKS)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)


def _lose_one(rank: int, place: str, how: str, num_stages: int) -> None:
    """Train on four ranks of which one is lost at its third micro-batch; leave what this rank was told, and when."""
    _world(rank, place)
    sys.stderr = open(f"{place}/lines-{rank}", "w")  # noqa: SIM115 - the process ends with it
    toy = Toy("chain", pipeline={"timeout_s": LIMIT_S})
    engine = make_engine(toy, num_stages)

    def lose(index: int) -> None:
        if rank == ABSENT and index == 2:
            Path(f"{place}/lost").write_text(f"{os.getpid()} {time.monotonic()}")
            if how == "sleep":
                time.sleep(LIMIT_S + SLACK_S)
                raise InterruptedError
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    engine.on_micro_batch = lose
    message = "trained"
    try:
        engine.train_batch(iter(toy.batches(engine.grid.get_data_parallel_rank())))
    except (RuntimeError, InterruptedError) as error:
        message = str(error)
    pid, lost_at = Path(f"{place}/lost").read_text().split()
    text = json.dumps({"message": message, "after_s": time.monotonic() - float(lost_at)})
    Path(f"{place}/message-{rank}").write_text(text)
    if rank == 0 and how != "kill":
        end = time.monotonic() + SLACK_S
        while len(list(Path(place).glob("message-*"))) < RANKS - 1 and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(int(pid), signal.SIGKILL)
    raise SystemExit(4)


def _survivors(place: Path, how: str, num_stages: int = RANKS) -> list[tuple[int, str, float, list[str]]]:
    """Return (rank, what it was told, seconds after the loss, the watchdog's lines) of those that are left."""
    codes, _, reports = fork_ranks(
        RANKS, _lose_one, str(place), how, num_stages, init=False, deadline_s=LIMIT_S + 2 * SLACK_S
    )
    wanted = [4] * RANKS
    wanted[ABSENT] = -signal.SIGKILL
    assert codes == wanted, reports
    survivors = []
    for rank in set(range(RANKS)) - {ABSENT}:
        content = json.loads((place / f"message-{rank}").read_text())
        text = (place / f"lines-{rank}").read_text()
        lines = [line for line in text.splitlines() if line.startswith("tds watchdog: ")]
        survivors.append((rank, content["message"], content["after_s"], lines))
    return survivors


def test_a_killed_rank_ends_all_others_at_once_even_those_that_do_not_talk_to_it(tmp_path: Path) -> None:
    for rank, message, after_s, lines in _survivors(tmp_path, "kill"):
        assert f"stage {rank} lost stage" in message and "of micro-batch" in message
        assert after_s < SLACK_S and not lines


def test_a_killed_rank_of_one_replica_ends_all_of_both_and_is_named(tmp_path: Path) -> None:
    """Stage 0 is on ranks 0 and 1, stage 1 on 2 and 3. What is promised is 1 s; see what is printed."""
    ends_s = []
    for number in range(3):
        place = tmp_path / str(number)
        place.mkdir()
        survivors = {rank: (message, after_s) for rank, message, after_s, _ in _survivors(place, "kill", 2)}
        ends_s.append(max(after_s for _, after_s in survivors.values()))
        assert "stage 1 lost stage 0 (rank 1) while" in survivors[3][0]
        assert all(f"stage {rank // 2} lost " in message for rank, (message, _) in survivors.items()), survivors
    print(f"all others had their error {min(ends_s):.2f} s after the loss, the best of {len(ends_s)}")
    assert max(ends_s) < SLACK_S


def test_a_stopped_rank_is_named_by_all_others_when_the_time_is_up(tmp_path: Path) -> None:
    for rank, message, after_s, lines in _survivors(tmp_path, "stop"):
        assert message.startswith("rank 1 (stage 1, replica 0) is missing and does not answer: stopped"), message
        assert f"stage {rank} lost stage" in message or f"stage {rank} lost a rank" in message
        assert LIMIT_S - 1 < after_s < LIMIT_S + SLACK_S
        assert len(lines) == 1 and f"rank {rank} (stage {rank}, replica 0) has " in lines[0]
        assert "of micro-batch" in lines[0] and "last messages: " in lines[0]


def test_a_rank_stuck_in_a_users_code_answers_and_is_named(tmp_path: Path) -> None:
    for _, message, after_s, lines in _survivors(tmp_path, "sleep"):
        assert message.startswith(
            "rank 1 (stage 1, replica 0) is missing: it has been in its forward of micro-batch 2"
        )
        assert after_s < LIMIT_S + SLACK_S and len(lines) == 1
    own = [line for line in (tmp_path / "lines-1").read_text().splitlines() if line.startswith("tds watchdog: ")]
    assert len(own) == 1 and "rank 1 (stage 1, replica 0) has been in its forward of micro-batch 2 for" in own[0]


def _leave_nothing(rank: int) -> list[int]:
    counts = []
    for _ in range(2):
        engine = make_engine(Toy("chain"), 2)
        engine.train_batch(iter(Toy("chain").batches()))
        counts.append(sum(thread.name == "tds watchdog" for thread in threading.enumerate()))
        del engine
        gc.collect()
        end = time.monotonic() + SLACK_S
        while any(thread.name == "tds watchdog" for thread in threading.enumerate()) and time.monotonic() < end:
            time.sleep(0.02)
        counts += [threading.active_count(), len(os.listdir("/proc/self/fd"))]
    return counts


def test_an_engine_that_is_gone_leaves_neither_thread_nor_file(tmp_path: Path) -> None:
    for counts in run_ranks(2, _leave_nothing):
        first, again = counts[:3], counts[3:]
        assert first[:2] == again[:2] == [2, 1], "a timer and a listener, then the main thread alone"
        assert again[2] <= first[2], "file handles grow from engine to engine"


def _watching(rank: int, store: Any, limit_s: float = math.inf) -> Any:
    exchange = SimpleNamespace(
        action=None,
        waiting=None,
        waits=[],
        history=deque(),
        links=SimpleNamespace(ranks=[0, 1]),
        action_of_device=lambda: None,
    )
    return EngineWatchdog(exchange, store, rank, [f"rank {i}" for i in range(2)], limit_s)


def _fail(dog: Any) -> str:
    """Return what a wait that timed out is told within a call that the program goes on after."""
    with pytest.raises(RuntimeError) as caught, dog.over("in train_batch"):
        dog.exchange.waiting = "receiving", Kind.GRADIENT, Message(Kind.GRADIENT, 3, 0, 1)
        with collective_scope.collective_scope(0, "agreeing on the loss"):
            raise RuntimeError("timed out")
    assert isinstance(caught.value, PeerLost)
    return str(caught.value)


def test_an_error_that_the_program_caught_leaves_nothing_and_the_next_one_has_its_own_verdict() -> None:
    store = dist.HashStore()
    own = _watching(0, store)
    assert _fail(own).startswith("rank 1 is missing and does not answer")
    assert collective_scope.current_collective() is None and own.exchange.waiting is None
    with pytest.raises(ArithmeticError), collective_scope.collective_scope(0, "averaging"):
        raise ArithmeticError
    assert collective_scope.current_collective() is None
    users = "a filter lost 3 samples, timeout=5"
    with pytest.raises(RuntimeError, match=f"^{users}$") as raised, own.over("in train_batch"):
        raise RuntimeError(users)
    assert not isinstance(raised.value, PeerLost)
    other = _watching(1, store)
    assert _fail(own).startswith("rank 1 is missing: it has been outside of train_batch")  # it answers now
    assert all(thread.is_alive() for dog in (own, other) for thread in (dog._timer, dog._listener))


def test_a_wait_that_was_only_late_raises_one_alarm_and_the_watchdog_goes_on() -> None:
    own = _watching(0, dist.HashStore(), limit_s=0.0)
    for alarm in (1, 2):
        with own.over("in train_batch"):
            own.exchange.waiting = "receiving", Kind.GRADIENT, Message(Kind.GRADIENT, 3, 0, 1)
            end = time.monotonic() + SLACK_S
            while own._alarms.number < alarm and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(3 * POLL_S)
            assert own._alarms.number == alarm and own._verdict is not None
        assert own._verdict is None and not own._heard.is_set()


def test_a_store_that_hangs_is_said_by_a_rank_whose_wait_cannot_time_out(capfd: pytest.CaptureFixture[str]) -> None:
    own, released = _watching(0, dist.HashStore(), limit_s=0.0), threading.Event()
    own._alarms.is_raised = own._alarms.answer = lambda *seen: released.wait(2 * SLACK_S)
    with own.over("in train_batch"):
        own.exchange.waiting = "receiving", Kind.GRADIENT, Message(Kind.GRADIENT, 3, 0, 1)
        end = time.monotonic() + 2 * SLACK_S
        while own._verdict is None and time.monotonic() < end:
            time.sleep(0.02)
        assert own._verdict == STORE_LOST
    own.close()
    released.set()
    assert capfd.readouterr().err.count("tds watchdog: rank 0 has waited for the gradient of micro-batch 3") == 1


@pytest.mark.parametrize("is_over", [False, True])
def test_a_late_wait_that_ends_with_its_call_is_not_concluded(is_over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    dog = _watching(0, dist.HashStore(), limit_s=1.0)
    monkeypatch.setattr(dog, "_is_late", lambda: True)
    monkeypatch.setattr(dog._finished, "wait", lambda limit_s: dog._forget() if is_over else None)
    concluded: list[Any] = []
    monkeypatch.setattr(dog, "_conclude", lambda *seen: concluded.append(seen))
    dog._look()
    assert len(concluded) == (not is_over)


def test_many_short_waits_are_not_one_long_wait() -> None:
    dog = _watching(0, None, limit_s=1.0)

    def waited_s() -> float:
        dog._update(time.monotonic())
        return time.monotonic() - dog._since

    with dog.over("in train_batch"):
        assert dog._may_last(dog._update(time.monotonic())) == math.inf
        for _ in range(3):
            with collective_scope.collective_scope(0, "agreeing on the loss"):
                waited_s()
                time.sleep(0.02)
                assert waited_s() >= 0.02
            with collective_scope.collective_scope(0, "agreeing on the loss"):
                assert waited_s() < 0.02
            dog.exchange.waiting = "receiving", Kind.GRADIENT, Message(Kind.GRADIENT, 3, 0, 1)
            assert waited_s() < 0.02
            time.sleep(0.02)
            dog.exchange.waiting = "receiving", Kind.GRADIENT, Message(Kind.GRADIENT, 3, 0, 1)
            assert waited_s() < 0.02
    assert format_history(dog.exchange.history).startswith("last messages: ended agreeing on the loss, ended agreeing")


def _collectives(rank: int) -> str:
    toy = Toy("tied", clip=1e-3)
    engine = make_engine(toy, 2)
    engine.train_batch(iter(toy.batches()))
    return format_history(engine._stage.exchange.history)


def test_the_last_messages_tell_of_collectives_too() -> None:
    for message in run_ranks(2, _collectives):
        places = [message.index(f"ended {what}") for what in (
            "all-reducing the loss", "all-reducing the gradients of tied weights", "computing the norm"
        )]  # fmt: skip
        assert places == sorted(places) and message.index("gradient of micro-batch 3") < places[0]


def _says(is_waiting: bool, waits_for: int | None = None, since_s: float = 3.0, words: str = "waits") -> Report:
    return Report(is_waiting, waits_for, since_s, words)


NAMES = [f"rank {i}" for i in range(4)]


@pytest.mark.parametrize(
    ("reports", "start"),
    [
        ({0: _says(True, 1), 2: _says(True, 1), 3: _says(True, 2)}, "rank 1 is missing and does not answer"),
        ({0: _says(True, 1), 1: _says(False, words="sleeps"), 2: _says(True, 1), 3: _says(False, since_s=9)},
         "rank 1 is missing: it sleeps"),
        ({0: _says(True), 1: _says(False, since_s=1), 2: _says(False, since_s=7, words="reads"), 3: _says(True)},
         "rank 2 is missing: it reads"),
        ({0: _says(True, 1), 1: _says(True, 0), 2: _says(True), 3: _says(True, 2)}, "no rank is working"),
        ({0: _says(True, 3)}, "rank 1, rank 2, rank 3 is missing and does not answer"),
    ],
)  # fmt: skip
def test_the_verdict_follows_the_chain_of_waits(reports: dict[int, Report], start: str) -> None:
    assert verdict(reports, NAMES, 0).startswith(start)
    assert {rank: Report.decode(each.encode()) for rank, each in reports.items()} == reports


def test_a_report_says_what_where_and_for_how_long() -> None:
    message = Message(Kind.GRADIENT, 3, 1, 2)
    waiting = "receiving", Kind.GRADIENT, message
    reported = report("in train_batch", Backward(3, 1), waiting, None, 3.04, [0, 2, 4])
    assert reported.waits_for == 4 and reported.is_waiting
    assert reported.words == (
        "has waited for the gradient of micro-batch 3 chunk 1 from stage 2 (rank 4) before its backward of "
        "micro-batch 3 chunk 1 for 3.0 s"
    )
    together = report("in train_batch", None, None, "agreeing on the loss", 2, [0])
    assert together.words == "has been agreeing on the loss for 2.0 s" and together.waits_for is None
    stuck = report("in train_batch", Forward(7), None, None, 7, [0])
    assert stuck.words == "has been in its forward of micro-batch 7 for 7.0 s" and not stuck.is_waiting
    sent = "sent", Kind.ACTIVATION, Message(Kind.ACTIVATION, 0, 0, 1)
    assert format_history([sent, ("received", Kind.GRADIENT, message)]) == (
        "last messages: sent activation of micro-batch 0 to stage 1, "
        "received gradient of micro-batch 3 chunk 1 from stage 2"
    )
    assert format_history([]) == "last messages: none"


def test_a_timeout_is_known_by_its_cause() -> None:
    try:
        try:
            raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")
        except RuntimeError as cause:
            raise PeerLost("stage 0 lost stage 1") from cause
    except PeerLost as error:
        lost = error
    assert is_timeout(lost) and not is_timeout(PeerLost("stage 0 lost stage 1, timeout"))
    wrapped = RuntimeError("a layer failed")
    wrapped.__cause__ = lost
    assert peer_lost(wrapped) is lost and peer_lost(RuntimeError("a filter lost 3 samples, timeout=5")) is None


def test_two_engines_of_a_process_tell_each_of_what_it_does_itself() -> None:
    """As a teacher that is evaluated within the call of its student."""
    student, teacher = _watching(0, None), _watching(0, None)
    with student.over("in train_batch"), collective_scope.collective_scope(0, "agreeing on the loss"):
        with teacher.over("in eval_batch"):
            assert teacher._update(0.0).together is None
            with collective_scope.collective_scope(0, "adding up the losses"):
                assert teacher._update(0.0).together == collective_scope.current_collective() == "adding up the losses"
        assert student._update(0.0).together == collective_scope.current_collective() == "agreeing on the loss"
    assert list(teacher.exchange.history) == ["ended adding up the losses"]
    assert list(student.exchange.history) == ["ended agreeing on the loss"]
    with collective_scope.collective_scope(0, "measuring the bubble"):
        assert student._update(0.0).together == "measuring the bubble"
    assert collective_scope.current_collective() is None


def _called_from(file: str, inner: Any) -> Any:
    """Return what ``inner`` returns where code of ``file`` calls it."""
    names: dict[str, Any] = {}
    exec(compile("def wait(inner): return inner()", file, "exec"), names)
    return names["wait"](inner)


@pytest.mark.parametrize(
    "file",
    [
        "/elsewhere/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        os.path.join(next(iter(torch.__path__)), "distributed", "distributed_c10d.py"),
        threading.__file__,
        "<frozen importlib._bootstrap>",
    ],
)
def test_the_place_of_a_stack_is_the_programs_own_wherever_libraries_lie(file: str) -> None:
    frame = _called_from(file, lambda: _called_from(file, sys._getframe))
    assert thread_stack.format_place(frame).partition(" (")[2].startswith("test_watchdog.py:"), file
    own = _called_from("/home/user/my-site-packages.py", sys._getframe)
    assert thread_stack.format_place(own) == "wait (my-site-packages.py:1)"


def test_torch_is_a_library_where_it_is_built_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__path__", ["/opt/pytorch/torch"])
    monkeypatch.delitem(sys.modules, thread_stack.__name__)
    monkeypatch.setattr(tds.watchdog, "thread_stack", thread_stack)  # to be put back: the import replaces it
    rebuilt: Any = importlib.import_module(thread_stack.__name__)
    frame = _called_from("/opt/pytorch/torch/distributed/distributed_c10d.py", sys._getframe)
    assert "test_watchdog.py:" in rebuilt.format_place(frame)
