"""Schedules GPipe, 1F1B, interleaved 1F1B and ZB-H1, and all schedule names."""

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

# Interleaved 1F1B: each stage has several chunks of layers, so the pipeline fills and drains in smaller steps.
#
# Micro-batches are processed in rounds of g (Megatron's group size, by default p); the last round is short if g does
# not divide m. A larger g gives messages more time to arrive and increases the number of forwards in flight. All stages
# run forwards in the same sequence (round, chunk, micro-batch), and backwards in the same sequence (round, chunk from
# the last, micro-batch), so messages never overtake each other.
#
# The interleaving of both sequences is found by simulating the pipeline in ticks. Stage i may have
# 2 (p-i-1) + (c-1) g + 1 forwards in flight, as in Megatron. Below this limit it runs the next forward, otherwise the
# next backward. If all rounds are complete, a stage below the limit waits for its next forward, which results in
# Megatron's order. With a short round, such waits can deadlock, so a stage runs a backward instead of waiting.
#
# This variant cannot deadlock. If no backward can start, all stages have completed the same number k of backwards, and
# the last stage has not run the last chunk's forward for backward k. The last stage then has at most (c-1) g forwards
# in flight, so it is below its limit and runs its next forward as soon as the previous stage has completed it. The same
# holds for all other stages, up to the first.
#
# Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.

FORWARD_TICKS, BACKWARD_TICKS = 1, 2
ChunkKey = tuple[int, int]
"""(micro-batch, chunk)"""


def interleaved(
    num_stages: int, num_micro_batches: int, stage: int, num_chunks: int, group_size: int = 0
) -> list[Action]:
    """Generate interleaved 1F1B for ``stage``, with any number of micro-batches.

    Args:
        group_size: micro-batches that run through a chunk before the next chunk starts; 0: the number of stages.

    Raises:
        ValueError: the group is smaller than the number of stages, which would deadlock.
    """
    check_sizes(num_stages, num_micro_batches, stage, num_chunks)
    if group_size and group_size < num_stages:
        raise ValueError(
            f"a group of micro-batches must be at least as large as the number of stages, got {group_size} for "
            f"{num_stages} stages"
        )
    return list(_all_stages(num_stages, num_micro_batches, num_chunks, group_size or num_stages)[stage])


def forward_sequence(group_size: int, num_micro_batches: int, num_chunks: int) -> list[ChunkKey]:
    """Generate the forwards that all stages share, in rounds of ``group_size`` micro-batches."""
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
    return _InterleavedSimulator(num_stages, num_micro_batches, num_chunks, group_size).run()


class _InterleavedSimulator:
    """Simulates the pipeline in ticks and records the actions of each stage.

    All stages run the same sequence of forwards and the same sequence of backwards, so the progress of a stage is a
    pair of counts. Each action waits for the action with the same index on the neighbouring stage. At the ends of the
    pipeline, it waits for an action with a lower index at the other end.
    """

    def __init__(self, num_stages: int, num_micro_batches: int, num_chunks: int, group_size: int) -> None:
        self.last_stage = num_stages - 1
        self.has_full_rounds = num_micro_batches % group_size == 0
        self.forwards = forward_sequence(group_size, num_micro_batches, num_chunks)
        self.backwards = [(micro_batch, num_chunks - 1 - chunk) for micro_batch, chunk in self.forwards]
        forward_at = {key: i for i, key in enumerate(self.forwards)}
        backward_at = {key: i for i, key in enumerate(self.backwards)}
        # For each forward of stage 0: the number of forwards that the last stage must have completed before it.
        self.required_forwards = [forward_at[i, chunk - 1] + 1 if chunk else 0 for i, chunk in self.forwards]
        # For each backward of the last stage: the number of forwards that this stage must have completed before it, and
        # the number of backwards that stage 0 must have completed before it.
        last_chunk = num_chunks - 1
        self.required_counts = [
            (forward_at[i, last_chunk] + 1, backward_at[i, chunk + 1] + 1 if chunk < last_chunk else 0)
            for i, chunk in self.backwards
        ]
        self.limits = [2 * (self.last_stage - i) + last_chunk * group_size + 1 for i in range(num_stages)]
        self.forwards_done = [0] * num_stages
        self.backwards_done = [0] * num_stages
        self.running: list[type[Action] | None] = [None] * num_stages
        self.free_at = [0] * num_stages
        self.actions: list[list[Action]] = [[] for _ in range(num_stages)]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        tick = 0
        while True:
            self._finish_due_actions(tick)
            if self.backwards_done[0] == len(self.backwards):
                return tuple(map(tuple, self.actions))
            for stage, action_type in enumerate(self.running):
                if action_type is None:
                    self.running[stage] = action_type = self._start(stage)
                    self.free_at[stage] = tick + (FORWARD_TICKS if action_type is Forward else BACKWARD_TICKS)
            tick += 1

    def _finish_due_actions(self, tick: int) -> None:
        for stage, action_type in enumerate(self.running):
            if action_type is not None and self.free_at[stage] == tick:
                done = self.forwards_done if action_type is Forward else self.backwards_done
                done[stage] += 1
                self.running[stage] = None

    def _start(self, stage: int) -> type[Action] | None:
        """Start the next action of ``stage`` if possible; return its type, or None."""
        forwards, backwards = self.forwards_done[stage], self.backwards_done[stage]
        can_start_forward = forwards - backwards < self.limits[stage] and forwards < len(self.forwards)
        if can_start_forward and self._has_forward(stage):
            self.actions[stage].append(Forward(*self.forwards[forwards]))
            return Forward
        if not (can_start_forward and self.has_full_rounds) and self._has_backward(stage):
            self.actions[stage].append(Backward(*self.backwards[backwards]))
            return Backward
        return None

    def _has_forward(self, stage: int) -> bool:
        index = self.forwards_done[stage]
        if stage > 0:
            return self.forwards_done[stage - 1] > index
        return self.forwards_done[self.last_stage] >= self.required_forwards[index]

    def _has_backward(self, stage: int) -> bool:
        index = self.backwards_done[stage]
        if index == len(self.backwards):
            return False
        if stage < self.last_stage:
            return self.backwards_done[stage + 1] > index
        forwards, backwards = self.required_counts[index]
        return self.forwards_done[stage] >= forwards and self.backwards_done[0] >= backwards


# GPipe and 1F1B: one chunk per stage, full backwards.
#
# Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", section 3.2.


def gpipe(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Generate GPipe for ``stage``: all forwards, then all backwards."""
    check_sizes(num_stages, num_micro_batches, stage)
    return [*map(Forward, range(num_micro_batches)), *map(Backward, range(num_micro_batches))]


def one_forward_one_backward(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Generate 1F1B for ``stage``: warm-up forwards, alternating forwards and backwards, then the last backwards."""
    check_sizes(num_stages, num_micro_batches, stage)
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    actions: list[Action] = [Forward(i) for i in range(warm_up)]
    for i in range(num_micro_batches - warm_up):
        actions += [Forward(warm_up + i), Backward(i)]
    actions += [Backward(i) for i in range(num_micro_batches - warm_up, num_micro_batches)]
    return actions


# ZB-H1: 1F1B whose weight halves of backwards fill idle time, with the same peak number of forwards in flight.
#
# The previous stage only waits for the gradient of its output, so the input half (``BackwardInput``) runs first. The
# weight half (``BackwardWeight``) is deferred: on stage i it trails by i micro-batches. This is the maximum that does
# not exceed the forwards in flight on the first stage of 1F1B. On stage 0, the weight half would follow immediately,
# and no stage waits for the input half. Backwards on stage 0 are therefore not split, which is cheaper.
#
# With several chunks per stage, the same is applied to interleaved 1F1B: on stage i, the weight half trails by i
# backwards of a chunk, and no stage exceeds the forwards in flight on the first stage of interleaved 1F1B. Stage 1
# splits only the backwards of the last round of micro-batches (of the last two rounds if the last one is short). With
# even stages, splitting earlier backwards would send their gradients to stage 0 no sooner than it needs them, and a
# split backward costs more than a full one. If the stages are very uneven, interleaved 1F1B may be faster; "auto"
# measures it.
#
# With even stages, each stage idles for (p-1)(F+B) - (min(p, m)-1) min(F, B, W). This is (p-1)(F+B-W) if m >= p and W
# is not longer than F and B. With c chunks, it is (p-1)(F+B-W)/c if p divides m.
#
# Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 2; the order with chunks is ours.


def zero_bubble_h1(
    num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1, group_size: int = 0
) -> list[Action]:
    """Generate ZB-H1 for ``stage``: 1F1B (with chunks interleaved 1F1B) with split backwards."""
    if num_chunks == 1:
        unsplit = one_forward_one_backward(num_stages, num_micro_batches, stage)
    else:
        unsplit = interleaved(num_stages, num_micro_batches, stage, num_chunks, group_size)
    if stage == 0:
        return unsplit
    group = group_size or num_stages
    last_rounds = group + num_micro_batches % group
    num_unsplit = max(num_micro_batches - last_rounds, 0) * num_chunks if stage == 1 and num_chunks > 1 else 0
    return _defer_weight_halves(unsplit, trail=stage, num_unsplit=num_unsplit)


def _defer_weight_halves(unsplit: Sequence[Action], trail: int, num_unsplit: int) -> list[Action]:
    """Split the backwards of the actions ``unsplit``, except the first ``num_unsplit`` backwards.

    Each weight half runs after the input halves of ``trail`` later backwards.
    """
    actions: list[Action] = []
    deferred: deque[Action] = deque()
    for action in unsplit:
        if not isinstance(action, Backward) or num_unsplit > 0:
            num_unsplit -= isinstance(action, Backward)
            actions.append(action)
            continue
        actions.append(BackwardInput(action.micro_batch, action.chunk))
        deferred.append(BackwardWeight(action.micro_batch, action.chunk))
        if len(deferred) > trail:
            actions.append(deferred.popleft())
    return [*actions, *deferred]


# All schedules by name.
#
# | name | in flight on stage i of p | idle time of a stage |
# |---|---|---|
# | gpipe | m | (p-1)(F+B+W) |
# | 1f1b | min(p-i, m) | (p-1)(F+B+W) |
# | zb-h1 | min(p, m) | (p-1)(F+B-W) |
# | interleaved, c chunks | 2(p-i-1) + (c-1)p + 1 chunks of 1/c | (p-1)(F+B+W)/c if p divides m |
# | zb-h1, c chunks | i more than interleaved | (p-1)(F+B-W)/c if p divides m |
# | zb-v, 2 chunks in a V | min(2p, i + 1 + m, 2m) chunks of 1/2 | (p-1)F/2 at F = B = W if m >= 2p-1 |
# | dualpipev, 2 chunks in a V | 1 more than zb-v | (p - 1) F/2 at F = B = W if m >= 2p |
#
# F, B and W are the times of a forward, a backward for the input and a backward for the weights. All schedules
# accumulate the gradients of each weight in the order of the micro-batches, so the results are bitwise equal. Sources
# are given next to each schedule.


def forward_only(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1) -> list[Action]:
    """Generate an evaluation's forwards; with chunks, in rounds of ``num_stages`` micro-batches."""
    check_sizes(num_stages, num_micro_batches, stage, num_chunks)
    if num_chunks == 1:
        return [Forward(i) for i in range(num_micro_batches)]
    return [Forward(*chunk_key) for chunk_key in forward_sequence(num_stages, num_micro_batches, num_chunks)]


ONE_CHUNK: dict[str, Order] = {"1f1b": one_forward_one_backward, "gpipe": gpipe, "zb-h1": zero_bubble_h1}
MANY_CHUNKS: dict[str, Callable[..., list[Action]]] = {"interleaved": interleaved, "zb-h1": zero_bubble_h1}
"""Schedules for several chunks per stage; they also take ``num_chunks`` and ``group_size``."""
V_SCHEDULES: dict[str, Callable[..., list[Action]]] = {"zb-v": zero_bubble_v, "dualpipev": dual_pipe_v}
"""Schedules for two chunks per stage with the placement "v"."""

SCHEDULE_NAMES = tuple(dict.fromkeys((*ONE_CHUNK, *MANY_CHUNKS, *V_SCHEDULES)))


def schedule_named(name: object, num_chunks: int = 1, placement: str = LOOP, group_size: int = 0) -> Order:
    """Look up a training schedule by its name in the JSON, ``"pipeline": {"schedule": name}``.

    Args:
        group_size: see ``interleaved``; other schedules ignore it.

    Raises:
        ValueError: the name is unknown, or the schedule does not support this number of chunks or placement.
    """
    key = name.lower() if isinstance(name, str) else name
    if key not in SCHEDULE_NAMES:
        raise ValueError(f'"pipeline": {{"schedule": ...}} must be one of {sorted(SCHEDULE_NAMES)}, got {name!r}')
    if (key in V_SCHEDULES) != (placement == V) or (key in V_SCHEDULES and num_chunks != 2):
        needed_style = V if key in V_SCHEDULES else LOOP
        alternatives = [name for name in SCHEDULE_NAMES if (name in V_SCHEDULES) == (placement == V)]
        raise ValueError(
            f'"pipeline": {{"schedule": {name!r}}} needs '
            f"{'2 chunks' if key in V_SCHEDULES else 'chunks'} of layers per stage with the placement "
            f"{needed_style}, got {num_chunks} with the placement {placement}. Build the model with "
            f'tds.PipelineModule(..., chunks=2, placement="{needed_style}"), or choose one of {alternatives}.'
        )
    if key in V_SCHEDULES:
        return V_SCHEDULES[key]
    if num_chunks == 1 and key not in ONE_CHUNK:
        raise ValueError(
            f'"pipeline": {{"schedule": {name!r}}} needs 2 or more chunks of layers per stage, got 1. '
            "Build the model with tds.PipelineModule(..., chunks=2), or choose another schedule."
        )
    if num_chunks != 1 and key not in MANY_CHUNKS:
        raise ValueError(
            f'"pipeline": {{"schedule": {name!r}}} needs one chunk of layers per stage, got {num_chunks}. '
            f"Build the model without chunks=, or choose one of {sorted(MANY_CHUNKS)}."
        )
    return ONE_CHUNK[key] if num_chunks == 1 else _bind_chunks(key, num_chunks, group_size)  # type: ignore[index, arg-type]


@functools.cache
def _bind_chunks(name: str, num_chunks: int, group_size: int) -> Order:
    """Bind the chunk arguments. The result is cached, so that it can be a key of other caches."""
    return functools.partial(MANY_CHUNKS[name], num_chunks=num_chunks, group_size=group_size)
