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

from megatron.config.data import DataConfig
from megatron.config.parallel import ParallelConfig
from megatron.mpu.groups import build_grid, single_grid
from megatron.mpu.mappings import all_reduce
from megatron.mpu.topology import Topology
from megatron.runtime import exit_guard, rank_status
from megatron.training import timeouts
from megatron.training.timeouts import (
    EVALUATING,
    FIRST_STEP,
    GROUP_TIMEOUT_MARGIN_S,
    LOADING,
    OPENING_DATA,
    SAVING,
    STEP,
    RunPhases,
)
from megatron.training.world import World
from tds.watchdog import watchdog
from tests.helpers.harness import fork_ranks, run_ranks
from tests.helpers.toys import Toy, make_engine

CPU = torch.device("cpu")
NUM_RANKS, STUCK_RANK = 4, 1
STEP_LIMIT_S = 1
PHASE_LIMIT_S = 6.0
SLACK_S = 8.0
"""What is promised within 2 s of the limit: the machine may have more to do."""
NAME = "rank 1 (stage 0, tensor 1, data 0)"


def make_world(rank: int, world_size: int, tensor_size: int = 1) -> World:
    topology = Topology.from_world_size(world_size, tensor_size, 1)
    return World("cpu", CPU, build_grid(topology, rank, timedelta(seconds=60)), rank)


def _make_config(step_limit_s: int = STEP_LIMIT_S, phase_limit_s: float = PHASE_LIMIT_S) -> Any:
    parallel = ParallelConfig(step_timeout=step_limit_s, phase_timeout_minutes=phase_limit_s / 60)
    return SimpleNamespace(parallel=parallel, data=DataConfig())


def _run_guarded(rank: int, folder: Path, main: Callable[[], None]) -> None:
    """Run ``main`` as ``pretrain`` does, what it writes to standard error going to a file."""
    descriptor = os.open(folder / f"lines-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    exit_guard.guard(main, lambda: f"rank {rank}")


def _record_lost_process(folder: Path) -> None:
    (folder / "lost").write_text(f"{os.getpid()} {time.monotonic()}")


def _be_stuck(hang_type: str) -> None:
    if hang_type == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif hang_type == "hold":
        ctypes.PyDLL(None).sleep(STEP_LIMIT_S + 4)  # PyDLL keeps Python's lock
    else:
        time.sleep(STEP_LIMIT_S + SLACK_S)


def _train_until_stuck(rank: int, folder: Path, hang_type: str) -> None:
    """Three steps of two micro-batches over tensor and data groups; one rank gets stuck in the second."""
    world = make_world(rank, NUM_RANKS, tensor_size=2)
    phases = RunPhases(world, _make_config())
    value = torch.ones(2, 3)

    def main() -> None:
        with phases.during(STEP):
            for step in range(3):
                for micro_batch in range(2):
                    rank_status.write_operation(f"step {step + 1}, forward of micro-batch {micro_batch}")
                    if (rank, step, micro_batch) == (STUCK_RANK, 1, 1):
                        while phases._watchdog._armed[1] != STEP_LIMIT_S:  # type: ignore[union-attr]
                            time.sleep(0.01)
                        _record_lost_process(folder)
                        _be_stuck(hang_type)
                    all_reduce(value, world.grid.tensor)
                all_reduce(value, world.grid.world)
                phases.step_done()

    _run_guarded(rank, folder, main)


def _run_stuck_ranks(folder: Path, function: Callable[..., None], hang_type: str) -> tuple[list[int], dict[int, str]]:
    """Return the exit codes and what each rank wrote."""
    killer = threading.Thread(target=_kill_stopped_rank, args=(folder, hang_type), daemon=True)
    killer.start()
    codes, _, reports = fork_ranks(NUM_RANKS, function, folder, hang_type, deadline_s=STEP_LIMIT_S + 3 * SLACK_S)
    killer.join(SLACK_S)
    assert not any(reports), reports
    return codes, {rank: (folder / f"lines-{rank}").read_text() for rank in range(NUM_RANKS)}


def _kill_stopped_rank(folder: Path, hang_type: str) -> None:
    """Kill the rank that was stopped once the others have said their last words."""
    deadline = time.monotonic() + STEP_LIMIT_S + 2 * SLACK_S
    other_outputs = [folder / f"lines-{rank}" for rank in range(NUM_RANKS) if rank != STUCK_RANK]
    while hang_type == "stop" and time.monotonic() < deadline:
        time.sleep(0.05)
        if all(path.exists() and "exiting" in path.read_text() for path in other_outputs):
            os.kill(int((folder / "lost").read_text().split()[0]), signal.SIGKILL)
            return


@pytest.mark.parametrize(
    "hang_type", ["stop", *(pytest.param(hang_type, marks=pytest.mark.slow) for hang_type in ("sleep", "hold"))]
)
def test_all_ranks_name_rank_stuck_in_step_without_pipeline(hang_type: str, tmp_path: Path) -> None:
    """Rows A13 and A19: stopped, asleep in a user's code, in code that holds Python's lock."""
    codes, outputs = _run_stuck_ranks(tmp_path, _train_until_stuck, hang_type)
    assert codes == [4, -signal.SIGKILL if hang_type == "stop" else 4, 4, 4], outputs
    for rank in set(range(NUM_RANKS)) - {STUCK_RANK}:
        output = outputs[rank]
        assert re.search(rf"exiting.*, {re.escape(NAME)} is missing", output), output
        assert "step 2" in output and "waiting in all_reduce, at all_reduce (mappings.py:" in output
        assert "last 20 operations: " in output and "all_reduce float[2, 3] (tensor)" in output
        expected = (
            "forward of micro-batch 1" if hang_type == "sleep" else "does not answer: stopped, dead or disconnected"
        )
        assert expected in output
    if hang_type == "sleep":
        assert "_be_stuck\n" in outputs[STUCK_RANK] and "time.sleep(" in outputs[STUCK_RANK], (
            "the stack of the one that sleeps"
        )
        assert f"{NAME} has been in step 2, forward of micro-batch 1 for " in outputs[STUCK_RANK]
    if hang_type == "hold":
        assert "Timeout (0:00:01)!" in outputs[STUCK_RANK] and "in _be_stuck" in outputs[STUCK_RANK]


def _run_stuck_pipeline(rank: int, folder: Path, hang_type: str) -> None:
    world = World("cpu", CPU, build_grid(Topology.from_world_size(NUM_RANKS, 1, 2), rank, timedelta(seconds=60)), rank)
    phases = RunPhases(world, _make_config())
    toy = Toy("chain")
    engine = make_engine(toy, 2)
    phases.attach_engine(SimpleNamespace(engine=engine))
    current_step = [0]

    def hang_at_micro_batch(micro_batch_idx: int) -> None:
        if (rank, current_step[0], micro_batch_idx) == (STUCK_RANK, 1, 2):
            _record_lost_process(folder)
            _be_stuck(hang_type)

    engine.on_micro_batch = hang_at_micro_batch

    def main() -> None:
        with phases.during(STEP):
            for step in range(3):
                current_step[0] = step
                engine.train_batch(iter(toy.make_batches(engine.grid.get_data_parallel_rank())))
                phases.step_done()

    _run_guarded(rank, folder, main)


@pytest.mark.parametrize("hang_type", ["sleep", pytest.param("stop", marks=pytest.mark.slow)])
def test_all_ranks_name_action_of_rank_stuck_in_pipeline(hang_type: str, tmp_path: Path) -> None:
    """The run's watch takes the place of the engine's own."""
    codes, outputs = _run_stuck_ranks(tmp_path, _run_stuck_pipeline, hang_type)
    assert codes == [4, -signal.SIGKILL if hang_type == "stop" else 4, 4, 4], outputs
    name = "rank 1 (stage 0, tensor 0, data 1)"
    for rank in set(range(NUM_RANKS)) - {STUCK_RANK}:
        assert f"{name} is missing" in outputs[rank] and "last messages: " in outputs[rank]
        assert "tds watchdog" not in outputs[rank]
    assert "activation of micro-batch 2 from stage 0 (rank 1)" in outputs[3]
    if hang_type == "sleep":
        assert all(
            f"{name} is missing: it has been in its forward of micro-batch 2" in output for output in outputs.values()
        )


def _run_slow_ranks(rank: int) -> list[float]:
    """Be slower than a step may be, on one rank alone, in all that may take long; return the waits of the others."""
    world = make_world(rank, 2)
    phases = RunPhases(world, _make_config())
    waits_s = []

    def sleep_on(slow_rank: int) -> None:
        if rank == slow_rank:
            time.sleep(STEP_LIMIT_S + 0.6)

    with phases.during(OPENING_DATA):
        sleep_on(0)
    with phases.during(STEP):
        assert phases.phase == FIRST_STEP
        sleep_on(1)
        all_reduce(torch.ones(1), world.grid.data)
        phases.step_done()
        assert phases.phase == STEP
        for phase, slow_rank in ((EVALUATING, 1), (SAVING, 0)):
            start = time.monotonic()
            with phases.during(phase):
                sleep_on(slow_rank)
            assert phases.phase == STEP
            waits_s.append(time.monotonic() - start)
            all_reduce(torch.ones(1), world.grid.data)
            phases.step_done()
    phases.close()
    return waits_s


def test_slow_rank_in_long_phase_is_waited_for() -> None:
    for waits_s in run_ranks(2, _run_slow_ranks):
        assert len(waits_s) == 2 and min(waits_s) > STEP_LIMIT_S


def _run_stuck_rank_during_save(rank: int, folder: Path, hang_type: str) -> None:
    """One rank is stuck in a step while the others are about to save, which may take long."""
    world = make_world(rank, NUM_RANKS)
    phases = RunPhases(world, _make_config(phase_limit_s=120.0))

    def main() -> None:
        with phases.during(STEP):
            phases.step_done()
            if rank == STUCK_RANK:
                _record_lost_process(folder)
                _be_stuck(hang_type)
            with phases.during(SAVING):
                pass

    _run_guarded(rank, folder, main)


def test_step_limit_applies_to_stuck_rank_while_other_ranks_save(tmp_path: Path) -> None:
    codes, outputs = _run_stuck_ranks(tmp_path, _run_stuck_rank_during_save, "stop")
    assert codes == [4, -signal.SIGKILL, 4, 4], outputs
    assert "waiting for all ranks before saving" in outputs[0] and "rank 1 (stage 0, tensor 0, data 1)" in outputs[0]


def _stop_store_host(rank: int, folder: Path) -> None:
    """Rank 0 holds the store of the process group and is stopped."""
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        (folder / "port.tmp").write_text(str(store.port))
        (folder / "port.tmp").rename(folder / "port")
    else:
        while not (folder / "port").exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int((folder / "port").read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    world = make_world(rank, 2)
    phases = RunPhases(world, _make_config())

    def main() -> None:
        with phases.during(STEP):
            phases.step_done()
            if rank == 0:
                (folder / "lost").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            all_reduce(torch.ones(1), world.grid.data)

    _run_guarded(rank, folder, main)


def test_loss_of_process_group_store_host_times_out(tmp_path: Path) -> None:
    def kill_host() -> None:
        deadline = time.monotonic() + STEP_LIMIT_S + 2 * SLACK_S
        output_path = tmp_path / "lines-1"
        while time.monotonic() < deadline and not (output_path.exists() and "exiting" in output_path.read_text()):
            time.sleep(0.05)
        os.kill(int((tmp_path / "lost").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill_host, daemon=True)
    killer.start()
    codes, _, reports = fork_ranks(2, _stop_store_host, tmp_path, init=False, deadline_s=STEP_LIMIT_S + 3 * SLACK_S)
    killer.join(SLACK_S)
    assert codes == [-signal.SIGKILL, 4], reports
    assert watchdog.STORE_LOST in (tmp_path / "lines-1").read_text()


def _collect_limits(rank: int) -> list[Any]:
    """Return the limits of groups, of messages and of the watch, phase by phase; one group is no step's."""
    world = World("cpu", CPU, build_grid(Topology.from_world_size(2, 1, 2), rank, timedelta(seconds=60)), rank)
    other_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=77))
    phases = RunPhases(world, _make_config())
    engine = make_engine(Toy("chain"), 2)
    phases.attach_engine(SimpleNamespace(engine=engine))

    def current_limits() -> tuple[float, ...]:
        handles = world.grid.pipe.handle, engine.grid.get_pipe_parallel_group(), world.grid.host.handle, other_group
        group_limits = [handle._get_backend(CPU).options._timeout.total_seconds() for handle in handles]
        return *group_limits, engine._stage.communicator.links.timeout.total_seconds(), phases._watchdog.limit_s  # type: ignore[union-attr]

    limits = [current_limits()]
    with phases.during(STEP):
        limits.append(current_limits())
        phases.step_done()
        limits.append(current_limits())
        with phases.during(LOADING):
            limits.append(current_limits())
        limits.append(current_limits())
        with pytest.raises(ArithmeticError), phases.during(SAVING):
            raise ArithmeticError
        limits.append(current_limits())
    limits.append(current_limits())
    ending_threads = [
        phases.phase,
        sum(thread.name.startswith(("watch", "tds watchdog")) for thread in threading.enumerate()),
    ]
    phases.close()
    return [*limits, ending_threads, threading.active_count()]


def test_group_timeouts_follow_phase_and_skip_other_groups() -> None:
    long_limits = (
        PHASE_LIMIT_S + GROUP_TIMEOUT_MARGIN_S,
        PHASE_LIMIT_S + GROUP_TIMEOUT_MARGIN_S,
        PHASE_LIMIT_S + GROUP_TIMEOUT_MARGIN_S,
        77.0,
        PHASE_LIMIT_S + GROUP_TIMEOUT_MARGIN_S,
        PHASE_LIMIT_S,
    )
    step_limits = (
        STEP_LIMIT_S + GROUP_TIMEOUT_MARGIN_S,
        STEP_LIMIT_S + GROUP_TIMEOUT_MARGIN_S,
        PHASE_LIMIT_S + GROUP_TIMEOUT_MARGIN_S,
        77.0,
        STEP_LIMIT_S + GROUP_TIMEOUT_MARGIN_S,
        STEP_LIMIT_S,
    )
    for limits in run_ranks(2, _collect_limits):
        assert limits[:7] == [long_limits, long_limits, step_limits, long_limits, step_limits, step_limits, long_limits]
        assert limits[7] == [timeouts.ENDING, 2] and limits[8] == 1, (
            "no thread of the engine's, none of ours once closed"
        )


def _run_stuck_single_rank(rank: int, folder: Path) -> None:
    os.environ["MEGATRON_FAILURE_FILE"] = str(folder / "failure")
    phases = RunPhases(World("cpu", CPU, single_grid(), 0), _make_config())

    def main() -> None:
        with phases.during(STEP):
            for _ in range(3):
                phases.step_done()
            rank_status.write_operation("step 4, forward of micro-batch 1")
            _be_stuck("sleep")

    _run_guarded(rank, folder, main)


def test_stuck_single_rank_of_launcher_exits_with_stack(tmp_path: Path) -> None:
    """Row A19: with --max-restarts the launcher starts it again."""
    codes, _, reports = fork_ranks(1, _run_stuck_single_rank, tmp_path, deadline_s=STEP_LIMIT_S + 2 * SLACK_S)
    output = (tmp_path / "lines-0").read_text()
    assert codes == [4], reports
    assert "_be_stuck\n" in output and "time.sleep(" in output
    name = re.escape("rank 0 (stage 0, tensor 0, data 0)")
    assert re.search(rf"exiting.*, {name} is missing: it has been in step 4, forward of micro-batch 1 for ", output)
    assert "limit without progress is 1 s (--step-timeout; " in output


@pytest.mark.parametrize("has_launcher", [False, True])
def test_interactive_single_rank_run_is_not_watched(has_launcher: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger may hold it."""
    monkeypatch.delenv("MEGATRON_FAILURE_FILE", raising=False)
    if has_launcher:
        monkeypatch.setenv("MEGATRON_FAILURE_FILE", "nowhere")
        monkeypatch.setattr(timeouts.os, "isatty", lambda file: True)
    num_threads = threading.active_count()
    for phases in (RunPhases(), RunPhases(World("cpu", CPU, single_grid(), 0), _make_config())):
        with phases.during(STEP):
            phases.step_done()
        phases.attach_engine(SimpleNamespace(engine=None))
        assert threading.active_count() == num_threads
        phases.close()
    assert threading.active_count() == num_threads


def _collect_progress(rank: int) -> list[int]:
    phases = RunPhases(make_world(rank, 2), _make_config())
    progress = []
    with phases.during(STEP):
        for _ in range(3):
            phases.step_done()
            progress.append(phases._watchdog.progress)  # type: ignore[union-attr]
    phases.close()
    return progress


def test_step_done_counts_as_progress() -> None:
    for first, second, third in run_ranks(2, _collect_progress):
        assert first < second < third
