"""Every schedule ends where messages meet as NCCL has it, with few queues and with hosts that stall."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tds.schedule import Action, Backward, Forward
from tds.schedule.simulate import MANY_CHUNKS, ONE_CHUNK
from tests.cuda.rendezvous import Step, find_deadlock, trace

QUEUES = (1, 8, 32)
SHORT_SIZES = [(2, 1), (2, 5), (3, 4), (4, 8), (8, 16)]
ALL_SIZES = [(stages, micro) for stages in range(2, 9) for micro in (1, 2, 3, 4, 8, 16)]


def make_runs(layouts: list[tuple[int, int]], max_chunks: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield schedule, stages, micro-batches and chunks."""
    for stages, micro in layouts:
        for schedule in ONE_CHUNK:
            yield schedule, stages, micro, 1
        for schedule in MANY_CHUNKS:
            for chunks in range(2, max_chunks + 1):
                yield schedule, stages, micro, chunks


def check_run(run: tuple[str, int, int, int]) -> None:
    """Let messages meet where no host stalls, and where all do wherever they can, which is the hardest."""
    steps = trace(*run)
    assert sum(step.kind == "send" for stage_steps in steps for step in stage_steps) > 0
    for queues in QUEUES:
        assert not find_deadlock(steps, queues), f"{run} with {queues} queues"
        deadlock = find_deadlock(steps, queues, stalls=lambda stage, action_idx: True)
        assert not deadlock, f"{run} with {queues} queues and hosts that stall: {deadlock}"


@pytest.mark.parametrize("run", list(make_runs(SHORT_SIZES, 2)), ids=str)
def test_named_schedules_do_not_deadlock(run: tuple[str, int, int, int]) -> None:
    check_run(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", list(make_runs(ALL_SIZES, 4)), ids=str)
def test_named_schedules_of_all_sizes_do_not_deadlock(run: tuple[str, int, int, int]) -> None:
    check_run(run)


def random_schedule(num_stages: int, num_micro_batches: int, seed: int) -> list[list[Action]]:
    """Return a schedule that nobody would choose: at each turn a stage, drawn among all, does something that it can."""
    rng, stages = random.Random(seed), [list[Action]() for _ in range(num_stages)]
    forward_probability, last = rng.random(), num_stages - 1
    forwards, backwards = [0] * num_stages, [0] * num_stages
    while min(backwards) < num_micro_batches:
        stage_indices = range(num_stages)
        can_forward = [s for s in stage_indices if forwards[s] < (forwards[s - 1] if s else num_micro_batches)]
        can_backward = [
            s
            for s in stage_indices
            if backwards[s] < min(forwards[s], backwards[s + 1] if s < last else num_micro_batches)
        ]
        if can_forward and (not can_backward or rng.random() < forward_probability):
            stage = rng.choice(can_forward)
            stages[stage].append(Forward(forwards[stage]))
            forwards[stage] += 1
        else:
            stage = rng.choice(can_backward)
            stages[stage].append(Backward(backwards[stage]))
            backwards[stage] += 1
    return stages


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_do_not_deadlock(seed: int) -> None:
    schedule_args = 2 + seed % 4, 3 + seed % 5
    stages = random_schedule(*schedule_args, seed)
    steps = trace(lambda _stages, _micro_batches, stage: stages[stage], *schedule_args)
    for queues in QUEUES:
        deadlock = find_deadlock(steps, queues, stalls=lambda stage, action_idx: True)
        assert not deadlock, f"{stages} with {queues} queues and hosts that stall: {deadlock}"


def test_mutually_waiting_sends_are_detected() -> None:
    """What the model must see: a send is done with its receive, which is behind the other send's stall."""
    forward_route, backward_route, kernel = ("there",), ("back",), Step("kernel")
    first = [
        Step("send", forward_route, 0),
        kernel,
        Step("receive", backward_route, 0),
        Step("wait", backward_route, 0),
    ]
    second = [
        Step("send", backward_route, 0),
        kernel,
        Step("receive", forward_route, 0),
        Step("wait", forward_route, 0),
    ]
    assert not find_deadlock([first, second])
    assert "stage 0" in find_deadlock([first, second], stalls=lambda stage, action_idx: True)
    reordered = [second[2], second[0], kernel, second[3]]
    assert not find_deadlock([first, reordered], stalls=lambda stage, action_idx: True)


def test_host_stall_before_needed_send_is_detected() -> None:
    forward_route, backward_route = ("there",), ("back",)
    first = [
        Step("receive", backward_route, 0),
        Step("action"),
        Step("send", forward_route, 0),
        Step("wait", backward_route, 0),
    ]
    second = [
        Step("receive", forward_route, 0),
        Step("wait", forward_route, 0),
        Step("send", backward_route, 0),
        Step("wait", backward_route, 0),
    ]
    assert not find_deadlock([first, second])
    assert "stage 0 at Step(kind='action'" in find_deadlock(
        [first, second], stalls=lambda stage, action_idx: stage == 0
    )
