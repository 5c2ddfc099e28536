"""The orders of actions: GPipe, 1F1B, interleaved 1F1B, ZB-H1; the names of all schedules."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence

from tds.schedule.actions import (
    LOOP,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Order,
    V,
    check_sizes,
)
from tds.schedule.v_schedules import dual_pipe_v, zero_bubble_v

# Interleaved 1F1B: each stage has several chunks of layers, so the pipeline fills and drains in smaller pieces.
#
# Micro-batches go in rounds of g, p unless it is said (Megatron's group size), the last one short if g does not divide
# m. With a larger g messages have longer to arrive, and more is in flight. All stages take forwards in one sequence
# (round, chunk, micro-batch) and backwards in one (round, chunk from the last, micro-batch), so messages never cross.
# How the two are woven together is found by running the pipeline in ticks. A stage may hold 2 (p-i-1) + (c-1) g + 1
# forwards, as in Megatron: with fewer it takes the next forward, else a backward. With whole rounds it waits for that
# forward, which gives Megatron's order. With a short round such waiting can stop all stages for good, each waiting for
# what another has not started, so there a stage takes a backward meanwhile. This never stops: if no backward can start,
# all stages have done the same k, and the last has yet to do the last chunk's forward of that micro-batch; so it holds
# at most (c-1) g, takes its next forward as soon as the stage before has done it, and so do all the others, up to the
# first.
#
# Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.

FORWARD_TICKS, BACKWARD_TICKS = 1, 2
Place = tuple[int, int]
"""(micro-batch, chunk)"""


def interleaved(
    num_stages: int, num_micro_batches: int, stage: int, num_chunks: int, group_size: int = 0
) -> list[Action]:
    """Return the order of ``stage`` with ``num_chunks`` chunks of layers; any number of micro-batches.

    Args:
        group_size: micro-batches that go through one chunk before the next one's turn; 0: as many as stages.

    Raises:
        ValueError: a group smaller than the stages, which would wait for each other.
    """
    check_sizes(num_stages, num_micro_batches, stage, num_chunks)
    if group_size and group_size < num_stages:
        raise ValueError(
            f"a group of micro-batches must have one for each stage or more, got {group_size} for {num_stages} stages"
        )
    return list(_all_stages(num_stages, num_micro_batches, num_chunks, group_size or num_stages)[stage])


def in_rounds(group_size: int, num_micro_batches: int, num_chunks: int) -> list[Place]:
    """Return the sequence of forwards that all stages share, in rounds of ``group_size`` micro-batches."""
    return [
        (micro_batch, chunk)
        for start in range(0, num_micro_batches, group_size)
        for chunk in range(num_chunks)
        for micro_batch in range(start, min(start + group_size, num_micro_batches))
    ]


@functools.lru_cache(maxsize=16)
def _all_stages(
    num_stages: int, num_micro_batches: int, num_chunks: int, group_size: int
) -> tuple[tuple[Action, ...], ...]:
    return _Weaver(num_stages, num_micro_batches, num_chunks, group_size).run()


class _Weaver:
    """Runs the pipeline in ticks and notes what each stage does.

    All stages share the two sequences, so what is done is a pair of numbers for each stage, and what a step needs is
    the same step on the neighbour, or an earlier one at the other end of the pipeline.
    """

    def __init__(self, num_stages: int, num_micro_batches: int, num_chunks: int, group_size: int) -> None:
        self.last = num_stages - 1
        self.rounds_are_whole = num_micro_batches % group_size == 0
        self.forwards = in_rounds(group_size, num_micro_batches, num_chunks)
        self.backwards = [(micro_batch, num_chunks - 1 - chunk) for micro_batch, chunk in self.forwards]
        forward_at = {place: i for i, place in enumerate(self.forwards)}
        backward_at = {place: i for i, place in enumerate(self.backwards)}
        # How many forwards the last stage must have done ahead of each forward of stage 0 ...
        self.entry = [forward_at[i, chunk - 1] + 1 if chunk else 0 for i, chunk in self.forwards]
        # ... and how many (forwards of its own, backwards of stage 0) the last stage needs ahead of each backward.
        top = num_chunks - 1
        self.turn = [
            (forward_at[i, top] + 1, backward_at[i, chunk + 1] + 1 if chunk < top else 0) for i, chunk in self.backwards
        ]
        self.limits = [2 * (self.last - i) + top * group_size + 1 for i in range(num_stages)]
        self.forwards_done = [0] * num_stages
        self.backwards_done = [0] * num_stages
        self.running: list[type[Action] | None] = [None] * num_stages
        self.free_at = [0] * num_stages
        self.actions: list[list[Action]] = [[] for _ in range(num_stages)]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of each stage."""
        tick = 0
        while True:
            self._end_what_is_due(tick)
            if self.backwards_done[0] == len(self.backwards):
                return tuple(map(tuple, self.actions))
            for stage, kind in enumerate(self.running):
                if kind is None:
                    self.running[stage] = kind = self._start(stage)
                    self.free_at[stage] = tick + (FORWARD_TICKS if kind is Forward else BACKWARD_TICKS)
            tick += 1

    def _end_what_is_due(self, tick: int) -> None:
        for stage, kind in enumerate(self.running):
            if kind is not None and self.free_at[stage] == tick:
                done = self.forwards_done if kind is Forward else self.backwards_done
                done[stage] += 1
                self.running[stage] = None

    def _start(self, stage: int) -> type[Action] | None:
        """Begin what ``stage`` can do now; return which kind it is."""
        forwards, backwards = self.forwards_done[stage], self.backwards_done[stage]
        takes_forward = forwards - backwards < self.limits[stage] and forwards < len(self.forwards)
        if takes_forward and self._has_forward(stage):
            self.actions[stage].append(Forward(*self.forwards[forwards]))
            return Forward
        if not (takes_forward and self.rounds_are_whole) and self._has_backward(stage):
            self.actions[stage].append(Backward(*self.backwards[backwards]))
            return Backward
        return None

    def _has_forward(self, stage: int) -> bool:
        index = self.forwards_done[stage]
        if stage > 0:
            return self.forwards_done[stage - 1] > index
        return self.forwards_done[self.last] >= self.entry[index]

    def _has_backward(self, stage: int) -> bool:
        index = self.backwards_done[stage]
        if index == len(self.backwards):
            return False
        if stage < self.last:
            return self.backwards_done[stage + 1] > index
        forwards, backwards = self.turn[index]
        return self.forwards_done[stage] >= forwards and self.backwards_done[0] >= backwards


# The orders of work for one chunk of layers on each stage whose backwards stay whole: GPipe and 1F1B.
#
# Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", section 3.2.


def gpipe(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Return all forwards, then all backwards."""
    check_sizes(num_stages, num_micro_batches, stage)
    return [*map(Forward, range(num_micro_batches)), *map(Backward, range(num_micro_batches))]


def one_forward_one_backward(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Return a warm-up of forwards, then forward and backward in turn, then the backwards that are left."""
    check_sizes(num_stages, num_micro_batches, stage)
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    actions: list[Action] = [Forward(i) for i in range(warm_up)]
    for i in range(num_micro_batches - warm_up):
        actions += [Forward(warm_up + i), Backward(i)]
    actions += [Backward(i) for i in range(num_micro_batches - warm_up, num_micro_batches)]
    return actions


# ZB-H1: 1F1B whose weights' half of the backward fills what would be idle, with no more in flight.
#
# The previous stage waits for the gradient of its output only, so that half (``BackwardInput``) runs first. The other
# (``BackwardWeight``) may wait: on stage i it trails by i micro-batches, which is as far as it can without holding more
# than the first stage of 1F1B does. On stage 0 it would follow at once, and nobody waits for the first half: there the
# backward stays whole, which costs less.
#
# With several chunks of layers on each stage the same is done to interleaved 1F1B: on stage i the weights' half trails
# by i backwards of a chunk, and no stage holds more than the first of interleaved 1F1B. Stage 1 splits the backwards of
# the last round of micro-batches alone (with a short one, of the one before it too): ahead of that, with even stages,
# the first half would reach stage 0 no sooner than it is wanted there, and a backward that is split costs more than a
# whole one. Where stages are far from even, interleaved 1F1B may be faster; "auto" tells.
#
# With even stages each is idle for (p-1)(F+B) - (min(p, m)-1) min(F, B, W), which is (p-1)(F+B-W) for p micro-batches
# or more and a W that is no longer than F and B; with c chunks for (p-1)(F+B-W)/c if p divides m.
#
# Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 2; the order with chunks is ours.


def zero_bubble_h1(
    num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1, group_size: int = 0
) -> list[Action]:
    """Return 1F1B, or interleaved 1F1B, of ``stage`` with the weights' half of each backward put off."""
    if num_chunks == 1:
        whole = one_forward_one_backward(num_stages, num_micro_batches, stage)
    else:
        whole = interleaved(num_stages, num_micro_batches, stage, num_chunks, group_size)
    if stage == 0:
        return whole
    group = group_size or num_stages
    last_rounds = group + num_micro_batches % group
    stay_whole = max(num_micro_batches - last_rounds, 0) * num_chunks if stage == 1 and num_chunks > 1 else 0
    return _put_off(whole, trail=stage, stay_whole=stay_whole)


def _put_off(whole: Sequence[Action], trail: int, stay_whole: int) -> list[Action]:
    """Return ``whole`` with backwards split, the second half of each behind the first halves of ``trail`` later ones.

    The first ``stay_whole`` backwards stay as they are.
    """
    actions: list[Action] = []
    waiting: deque[Action] = deque()
    for action in whole:
        if not isinstance(action, Backward) or stay_whole > 0:
            stay_whole -= isinstance(action, Backward)
            actions.append(action)
            continue
        actions.append(BackwardInput(action.micro_batch, action.chunk))
        waiting.append(BackwardWeight(action.micro_batch, action.chunk))
        if len(waiting) > trail:
            actions.append(waiting.popleft())
    return [*actions, *waiting]


# The orders of work, each a function of (stages, micro-batches, stage) to a list of actions.
#
# | name | in flight on stage i of p | idle time of a stage |
# |---|---|---|
# | gpipe | m | (p-1)(F+B+W) |
# | 1f1b | min(p-i, m) | (p-1)(F+B+W) |
# | zb-h1 | min(p, m) | (p-1)(F+B-W) |
# | interleaved, c chunks | 2(p-i-1) + (c-1)p + 1 chunks of 1/c | (p-1)(F+B+W)/c if p divides m |
# | zb-h1, c chunks | i more than interleaved | (p-1)(F+B-W)/c if p divides m |
# | zb-v, 2 chunks in a V | min(2p, i + 1 + m, 2m) chunks of 1/2 | (p-1)F/2 at F = B = W if m >= 2p-1 |
# | dualpipev, 2 chunks in a V | 1 more | (p - 1) F/2 at F = B = W if m >= 2p |
#
# F, B and W are the times of a forward, a backward for the input and one for the weights. All add up the gradients of
# each weight by rising micro-batch: the results are the same to the bit. Sources are in the files of the orders.


def forward_only(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1) -> list[Action]:
    """Return the order of an evaluation: every forward, with chunks in rounds of ``num_stages`` micro-batches."""
    check_sizes(num_stages, num_micro_batches, stage, num_chunks)
    if num_chunks == 1:
        return [Forward(i) for i in range(num_micro_batches)]
    return [Forward(*place) for place in in_rounds(num_stages, num_micro_batches, num_chunks)]


ONE_CHUNK: dict[str, Order] = {"1f1b": one_forward_one_backward, "gpipe": gpipe, "zb-h1": zero_bubble_h1}
MANY_CHUNKS: dict[str, Callable[..., list[Action]]] = {"interleaved": interleaved, "zb-h1": zero_bubble_h1}
"""Orders for several chunks of layers on each stage; they take the number of chunks as a last argument."""
IN_A_V: dict[str, Callable[..., list[Action]]] = {"zb-v": zero_bubble_v, "dualpipev": dual_pipe_v}
"""Orders for two chunks whose pieces lie in a V."""

SCHEDULE_NAMES = tuple(dict.fromkeys((*ONE_CHUNK, *MANY_CHUNKS, *IN_A_V)))


def schedule_named(name: object, num_chunks: int = 1, placement: str = LOOP, group_size: int = 0) -> Order:
    """Return the training order that the JSON's ``"pipeline": {"schedule": name}`` asks for.

    Args:
        group_size: of ``interleaved``; others have none.

    Raises:
        ValueError: no such order, or none for so many chunks of layers on each stage, placed so.
    """
    key = name.lower() if isinstance(name, str) else name
    if key not in SCHEDULE_NAMES:
        raise ValueError(f'"pipeline": {{"schedule": ...}} must be one of {sorted(SCHEDULE_NAMES)}, got {name!r}')
    if (key in IN_A_V) != (placement == V) or (key in IN_A_V and num_chunks != 2):
        needs = V if key in IN_A_V else LOOP
        instead = [name for name in SCHEDULE_NAMES if (name in IN_A_V) == (placement == V)]
        raise ValueError(
            f'"pipeline": {{"schedule": {name!r}}} needs '
            f"{'2 chunks' if key in IN_A_V else 'chunks'} of layers on each stage, placed in a "
            f"{needs}, got {num_chunks} in a {placement}. Build the model with "
            f'tds.PipelineModule(..., chunks=2, placement="{needs}"), or choose one of {instead}.'
        )
    if key in IN_A_V:
        return IN_A_V[key]
    if num_chunks == 1 and key not in ONE_CHUNK:
        raise ValueError(
            f'"pipeline": {{"schedule": {name!r}}} needs 2 or more chunks of layers on each stage, got 1. '
            "Build the model with tds.PipelineModule(..., chunks=2), or choose another schedule."
        )
    if num_chunks != 1 and key not in MANY_CHUNKS:
        raise ValueError(
            f'"pipeline": {{"schedule": {name!r}}} needs one chunk of layers on each stage, got {num_chunks}. '
            f"Build the model without chunks=, or choose one of {sorted(MANY_CHUNKS)}."
        )
    return ONE_CHUNK[key] if num_chunks == 1 else _of_chunks(key, num_chunks, group_size)  # type: ignore[index, arg-type]


@functools.cache
def _of_chunks(name: str, num_chunks: int, group_size: int) -> Order:
    """Return the very same function each time, so that what is known of it can be kept by it."""
    return functools.partial(MANY_CHUNKS[name], num_chunks=num_chunks, group_size=group_size)
