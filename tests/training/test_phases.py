"""A rank that is stuck is named by all others once the limit of its phase has passed; one that is slow is not."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.mpu.groups import build_grid, single_grid
from megatron.mpu.mappings import all_reduce
from megatron.mpu.topology import Topology
from megatron.runtime import exit_guard, rank_status
from megatron.training import timeouts
from megatron.training.timeouts import EVALUATING, FIRST_STEP, LOADING, NET_S, OPENING_DATA, SAVING, STEP, Sections
from megatron.training.world import World
from tds.watchdog import watchdog
from tests.helpers.harness import fork_ranks, run_ranks
from tests.helpers.toys import Toy, make_engine

CPU = torch.device("cpu")
RANKS, ABSENT = 4, 1
LIMIT_S = 1
LONG_S = 6.0
SLACK_S = 8.0
"""What is promised within 2 s of the limit: the machine may have more to do."""
NAME = "rank 1 (stage 0, tensor 1, data 0)"


def make_world(rank: int, size: int, tensor: int = 1) -> World:
    topology = Topology.of_world(size, tensor, 1)
    return World("cpu", CPU, build_grid(topology, rank, timedelta(seconds=60)), rank)


def _config(step_s: int = LIMIT_S, long_s: float = LONG_S) -> Any:
    return SimpleNamespace(parallel=ParallelConfig(step_timeout=step_s, phase_timeout_minutes=long_s / 60))


def _guarded(rank: int, place: Path, main: Callable[[], None]) -> None:
    """Run ``main`` as ``pretrain`` does, what it writes to standard error going to a file."""
    descriptor = os.open(place / f"lines-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    exit_guard.guard(main, lambda: f"rank {rank}")


def _note_loss(place: Path) -> None:
    (place / "lost").write_text(f"{os.getpid()} {time.monotonic()}")


def _be_stuck(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "hold":
        ctypes.PyDLL(None).sleep(LIMIT_S + 4)  # PyDLL keeps Python's lock
    else:
        time.sleep(LIMIT_S + SLACK_S)


def _train(rank: int, place: Path, how: str) -> None:
    """Three steps of two micro-batches over tensor and data groups; one rank gets stuck in the second."""
    here = make_world(rank, RANKS, tensor=2)
    this = Sections(here, _config())
    value = torch.ones(2, 3)

    def main() -> None:
        with this.over(STEP):
            for step in range(3):
                for micro_batch in range(2):
                    rank_status.heartbeat_note(f"step {step + 1}, forward of micro-batch {micro_batch}")
                    if (rank, step, micro_batch) == (ABSENT, 1, 1):
                        while this._watch._armed[1] != LIMIT_S:  # type: ignore[union-attr]
                            time.sleep(0.01)
                        _note_loss(place)
                        _be_stuck(how)
                    all_reduce(value, here.grid.tensor)
                all_reduce(value, here.grid.world)
                this.step_done()

    _guarded(rank, place, main)


def _stuck(place: Path, function: Callable[..., None], how: str) -> tuple[list[int], dict[int, str]]:
    """Return the exit codes and what each rank wrote."""
    helper = threading.Thread(target=_end_stopped, args=(place, how), daemon=True)
    helper.start()
    codes, _, reports = fork_ranks(RANKS, function, place, how, deadline_s=LIMIT_S + 3 * SLACK_S)
    helper.join(SLACK_S)
    assert not any(reports), reports
    return codes, {rank: (place / f"lines-{rank}").read_text() for rank in range(RANKS)}


def _end_stopped(place: Path, how: str) -> None:
    """Kill the rank that was stopped once the others have said their last words."""
    end = time.monotonic() + LIMIT_S + 2 * SLACK_S
    others = [place / f"lines-{rank}" for rank in range(RANKS) if rank != ABSENT]
    while how == "stop" and time.monotonic() < end:
        time.sleep(0.05)
        if all(each.exists() and "exiting" in each.read_text() for each in others):
            os.kill(int((place / "lost").read_text().split()[0]), signal.SIGKILL)
            return


@pytest.mark.parametrize("how", ["stop", *(pytest.param(how, marks=pytest.mark.slow) for how in ("sleep", "hold"))])
def test_a_rank_that_is_stuck_in_a_step_without_a_pipeline_is_named_by_all(how: str, tmp_path: Path) -> None:
    """Rows A13 and A19: stopped, asleep in a user's code, in code that holds Python's lock."""
    codes, lines = _stuck(tmp_path, _train, how)
    assert codes == [4, -signal.SIGKILL if how == "stop" else 4, 4, 4], lines
    for rank in set(range(RANKS)) - {ABSENT}:
        line = lines[rank]
        assert re.search(rf"exiting.*, {re.escape(NAME)} is missing", line), line
        assert "step 2" in line and "waiting in all_reduce, at all_reduce (mappings.py:" in line
        assert "last 20 operations: " in line and "all_reduce float[2, 3] (tensor)" in line
        wanted = "forward of micro-batch 1" if how == "sleep" else "does not answer: stopped, dead or disconnected"
        assert wanted in line
    if how == "sleep":
        assert "_be_stuck\n" in lines[ABSENT] and "time.sleep(" in lines[ABSENT], "the stack of the one that sleeps"
        assert f"{NAME} has been in step 2, forward of micro-batch 1 for " in lines[ABSENT]
    if how == "hold":
        assert "Timeout (0:00:01)!" in lines[ABSENT] and "in _be_stuck" in lines[ABSENT]


def _pipeline(rank: int, place: Path, how: str) -> None:
    here = World("cpu", CPU, build_grid(Topology.of_world(RANKS, 1, 2), rank, timedelta(seconds=60)), rank)
    this = Sections(here, _config())
    toy = Toy("chain")
    engine = make_engine(toy, 2)
    this.follow(SimpleNamespace(engine=engine))
    steps = [0]

    def lose(index: int) -> None:
        if (rank, steps[0], index) == (ABSENT, 1, 2):
            _note_loss(place)
            _be_stuck(how)

    engine.on_micro_batch = lose

    def main() -> None:
        with this.over(STEP):
            for step in range(3):
                steps[0] = step
                engine.train_batch(iter(toy.batches(engine.grid.get_data_parallel_rank())))
                this.step_done()

    _guarded(rank, place, main)


@pytest.mark.parametrize("how", ["sleep", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_rank_that_is_stuck_in_a_pipeline_is_named_with_micro_batch_and_action(how: str, tmp_path: Path) -> None:
    """The run's watch takes the place of the engine's own."""
    codes, lines = _stuck(tmp_path, _pipeline, how)
    assert codes == [4, -signal.SIGKILL if how == "stop" else 4, 4, 4], lines
    name = "rank 1 (stage 0, tensor 0, data 1)"
    for rank in set(range(RANKS)) - {ABSENT}:
        assert f"{name} is missing" in lines[rank] and "last messages: " in lines[rank]
        assert "tds watchdog" not in lines[rank]
    assert "activation of micro-batch 2 from stage 0 (rank 1)" in lines[3]
    if how == "sleep":
        assert all(f"{name} is missing: it has been in its forward of micro-batch 2" in each for each in lines.values())


def _slow(rank: int) -> list[float]:
    """Be slower than a step may be, on one rank alone, in all that may take long; return the waits of the others."""
    here = make_world(rank, 2)
    this = Sections(here, _config())
    waited = []

    def slow_on(which: int) -> None:
        if rank == which:
            time.sleep(LIMIT_S + 0.6)

    with this.over(OPENING_DATA):
        slow_on(0)
    with this.over(STEP):
        assert this.name == FIRST_STEP
        slow_on(1)
        all_reduce(torch.ones(1), here.grid.data)
        this.step_done()
        assert this.name == STEP
        for name, which in ((EVALUATING, 1), (SAVING, 0)):
            began = time.monotonic()
            with this.over(name):
                slow_on(which)
            assert this.name == STEP
            waited.append(time.monotonic() - began)
            all_reduce(torch.ones(1), here.grid.data)
            this.step_done()
    this.close()
    return waited


def test_a_rank_that_is_slow_where_it_may_be_is_waited_for() -> None:
    for waited in run_ranks(2, _slow):
        assert len(waited) == 2 and min(waited) > LIMIT_S


def _behind(rank: int, place: Path, how: str) -> None:
    """One rank is stuck in a step while the others are about to save, which may take long."""
    here = make_world(rank, RANKS)
    this = Sections(here, _config(long_s=120.0))

    def main() -> None:
        with this.over(STEP):
            this.step_done()
            if rank == ABSENT:
                _note_loss(place)
                _be_stuck(how)
            with this.over(SAVING):
                pass

    _guarded(rank, place, main)


def test_a_rank_stuck_in_a_step_has_the_limit_of_a_step_though_the_others_save_already(tmp_path: Path) -> None:
    codes, lines = _stuck(tmp_path, _behind, "stop")
    assert codes == [4, -signal.SIGKILL, 4, 4], lines
    assert "waiting for all ranks before saving" in lines[0] and "rank 1 (stage 0, tensor 0, data 1)" in lines[0]


def _lose_store(rank: int, place: Path) -> None:
    """Rank 0 holds the store of the process group and is stopped."""
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        (place / "port.tmp").write_text(str(store.port))
        (place / "port.tmp").rename(place / "port")
    else:
        while not (place / "port").exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int((place / "port").read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    here = make_world(rank, 2)
    this = Sections(here, _config())

    def main() -> None:
        with this.over(STEP):
            this.step_done()
            if rank == 0:
                (place / "lost").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            all_reduce(torch.ones(1), here.grid.data)

    _guarded(rank, place, main)


def test_a_host_that_is_lost_with_the_store_of_the_process_group_takes_the_limit(tmp_path: Path) -> None:
    def end_host() -> None:
        end = time.monotonic() + LIMIT_S + 2 * SLACK_S
        lines = tmp_path / "lines-1"
        while time.monotonic() < end and not (lines.exists() and "exiting" in lines.read_text()):
            time.sleep(0.05)
        os.kill(int((tmp_path / "lost").read_text()), signal.SIGKILL)

    helper = threading.Thread(target=end_host, daemon=True)
    helper.start()
    codes, _, reports = fork_ranks(2, _lose_store, tmp_path, init=False, deadline_s=LIMIT_S + 3 * SLACK_S)
    helper.join(SLACK_S)
    assert codes == [-signal.SIGKILL, 4], reports
    assert watchdog.STORE_LOST in (tmp_path / "lines-1").read_text()


def _limits(rank: int) -> list[Any]:
    """Return the limits of groups, of messages and of the watch, phase by phase; one group is no step's."""
    here = World("cpu", CPU, build_grid(Topology.of_world(2, 1, 2), rank, timedelta(seconds=60)), rank)
    apart = dist.new_group(backend="gloo", timeout=timedelta(seconds=77))
    this = Sections(here, _config())
    engine = make_engine(Toy("chain"), 2)
    this.follow(SimpleNamespace(engine=engine))

    def seen() -> tuple[float, ...]:
        handles = here.grid.pipe.handle, engine.grid.get_pipe_parallel_group(), here.grid.host.handle, apart
        groups = [each._get_backend(CPU).options._timeout.total_seconds() for each in handles]
        return *groups, engine._stage.exchange.links.timeout.total_seconds(), this._watch.limit_s  # type: ignore[union-attr]

    found = [seen()]
    with this.over(STEP):
        found.append(seen())
        this.step_done()
        found.append(seen())
        with this.over(LOADING):
            found.append(seen())
        found.append(seen())
        with pytest.raises(ArithmeticError), this.over(SAVING):
            raise ArithmeticError
        found.append(seen())
    found.append(seen())
    threads = [this.name, sum(each.name.startswith(("watch", "tds watchdog")) for each in threading.enumerate())]
    this.close()
    return [*found, threads, threading.active_count()]


def test_limits_of_all_waits_follow_the_phase_and_leave_other_groups_alone() -> None:
    long = (LONG_S + NET_S, LONG_S + NET_S, LONG_S + NET_S, 77.0, LONG_S + NET_S, LONG_S)
    step = (LIMIT_S + NET_S, LIMIT_S + NET_S, LONG_S + NET_S, 77.0, LIMIT_S + NET_S, LIMIT_S)
    for found in run_ranks(2, _limits):
        assert found[:7] == [long, long, step, long, step, step, long]
        assert found[7] == [timeouts.ENDING, 2] and found[8] == 1, "no thread of the engine's, none of ours once closed"


def _alone(rank: int, place: Path) -> None:
    os.environ["MEGATRON_FAILURE_FILE"] = str(place / "failure")
    this = Sections(World("cpu", CPU, single_grid(), 0), _config())

    def main() -> None:
        with this.over(STEP):
            for _ in range(3):
                this.step_done()
            rank_status.heartbeat_note("step 4, forward of micro-batch 1")
            _be_stuck("sleep")

    _guarded(rank, place, main)


def test_a_single_rank_of_the_launcher_that_is_stuck_ends_with_its_stack(tmp_path: Path) -> None:
    """Row A19: with --max-restarts the launcher starts it again."""
    codes, _, reports = fork_ranks(1, _alone, tmp_path, deadline_s=LIMIT_S + 2 * SLACK_S)
    output = (tmp_path / "lines-0").read_text()
    assert codes == [4], reports
    assert "_be_stuck\n" in output and "time.sleep(" in output
    name = re.escape("rank 0 (stage 0, tensor 0, data 0)")
    assert re.search(rf"exiting.*, {name} is missing: it has been in step 4, forward of micro-batch 1 for ", output)
    assert "limit without progress is 1 s (--step-timeout; " in output


@pytest.mark.parametrize("has_launcher", [False, True])
def test_a_run_of_one_rank_that_a_person_may_be_at_is_not_watched(
    has_launcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A debugger may hold it."""
    monkeypatch.delenv("MEGATRON_FAILURE_FILE", raising=False)
    if has_launcher:
        monkeypatch.setenv("MEGATRON_FAILURE_FILE", "nowhere")
        monkeypatch.setattr(timeouts.os, "isatty", lambda file: True)
    number = threading.active_count()
    for this in (Sections(), Sections(World("cpu", CPU, single_grid(), 0), _config())):
        with this.over(STEP):
            this.step_done()
        this.follow(SimpleNamespace(engine=None))
        assert threading.active_count() == number
        this.close()
    assert threading.active_count() == number


def _count(rank: int) -> list[int]:
    this = Sections(make_world(rank, 2), _config())
    found = []
    with this.over(STEP):
        for _ in range(3):
            this.step_done()
            found.append(this._watch.progress)  # type: ignore[union-attr]
    this.close()
    return found


def test_a_step_that_is_done_is_progress() -> None:
    for first, second, third in run_ranks(2, _count):
        assert first < second < third
