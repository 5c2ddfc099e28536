"""Every schedule ends where messages meet as NCCL has it, with few queues and with hosts that stall."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tds.schedule import Action, Backward, Forward
from tds.schedule.simulate import MANY_CHUNKS, ONE_CHUNK
from tests.cuda.rendezvous import Step, stuck, trace

QUEUES = (1, 8, 32)
SHORT = [(2, 1), (2, 5), (3, 4), (4, 8), (8, 16)]
EVERY = [(stages, micro) for stages in range(2, 9) for micro in (1, 2, 3, 4, 8, 16)]


def runs(sizes: list[tuple[int, int]], most_chunks: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield schedule, stages, micro-batches and chunks."""
    for stages, micro in sizes:
        for schedule in ONE_CHUNK:
            yield schedule, stages, micro, 1
        for schedule in MANY_CHUNKS:
            for chunks in range(2, most_chunks + 1):
                yield schedule, stages, micro, chunks


def check(run: tuple[str, int, int, int]) -> None:
    """Let messages meet where no host stalls, and where all do wherever they can, which is the hardest."""
    steps = trace(*run)
    assert sum(step.kind == "send" for each in steps for step in each) > 0
    for queues in QUEUES:
        assert not stuck(steps, queues), f"{run} with {queues} queues"
        found = stuck(steps, queues, stalls=lambda stage, place: True)
        assert not found, f"{run} with {queues} queues and hosts that stall: {found}"


@pytest.mark.parametrize("run", list(runs(SHORT, 2)), ids=str)
def test_messages_meet_in_every_schedule(run: tuple[str, int, int, int]) -> None:
    check(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", list(runs(EVERY, 4)), ids=str)
def test_messages_meet_in_every_schedule_of_every_size(run: tuple[str, int, int, int]) -> None:
    check(run)


def made_up(num_stages: int, num_micro_batches: int, seed: int) -> list[list[Action]]:
    """Return a schedule that nobody would choose: at each turn a stage, drawn among all, does something that it can."""
    drawn, stages = random.Random(seed), [list[Action]() for _ in range(num_stages)]
    eager, last = drawn.random(), num_stages - 1
    forwards, backwards = [0] * num_stages, [0] * num_stages
    while min(backwards) < num_micro_batches:
        ways = range(num_stages)
        ahead = [s for s in ways if forwards[s] < (forwards[s - 1] if s else num_micro_batches)]
        back = [s for s in ways if backwards[s] < min(forwards[s], backwards[s + 1] if s < last else num_micro_batches)]
        if ahead and (not back or drawn.random() < eager):
            stage = drawn.choice(ahead)
            stages[stage].append(Forward(forwards[stage]))
            forwards[stage] += 1
        else:
            stage = drawn.choice(back)
            stages[stage].append(Backward(backwards[stage]))
            backwards[stage] += 1
    return stages


@pytest.mark.parametrize("seed", range(6))
def test_messages_meet_in_schedules_of_users(seed: int) -> None:
    sizes = 2 + seed % 4, 3 + seed % 5
    stages = made_up(*sizes, seed)
    steps = trace(lambda _stages, _micro_batches, stage: stages[stage], *sizes)
    for queues in QUEUES:
        found = stuck(steps, queues, stalls=lambda stage, place: True)
        assert not found, f"{stages} with {queues} queues and hosts that stall: {found}"


def test_two_sends_that_wait_for_each_other_are_stuck() -> None:
    """What the model must see: a send is done with its receive, which is behind the other send's stall."""
    there, back, kernel = ("there",), ("back",), Step("kernel")
    first = [Step("send", there, 0), kernel, Step("receive", back, 0), Step("wait", back, 0)]
    other = [Step("send", back, 0), kernel, Step("receive", there, 0), Step("wait", there, 0)]
    assert not stuck([first, other])
    assert "stage 0" in stuck([first, other], stalls=lambda stage, place: True)
    ahead = [other[2], other[0], kernel, other[3]]
    assert not stuck([first, ahead], stalls=lambda stage, place: True)


def test_a_host_that_stalls_behind_a_receive_that_needs_it_is_stuck() -> None:
    there, back = ("there",), ("back",)
    first = [Step("receive", back, 0), Step("action"), Step("send", there, 0), Step("wait", back, 0)]
    other = [Step("receive", there, 0), Step("wait", there, 0), Step("send", back, 0), Step("wait", back, 0)]
    assert not stuck([first, other])
    assert "stage 0 at Step(kind='action'" in stuck([first, other], stalls=lambda stage, place: stage == 0)
