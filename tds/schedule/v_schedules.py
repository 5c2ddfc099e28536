"""Schedules for the placement "v" with two chunks per stage and the loss on stage 0: ZB-V and DualPipeV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tds.schedule.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Placement,
    V,
    check_sizes,
    sent_message,
)

# A micro-batch goes down the stages in chunk 0 and up again in chunk 1; its gradient takes the same path back. An
# output that stage i sends down returns after 2(p-i-1) chunks, and forwards of chunk 0 fill that time.
#
# Each order is generated for at least 2p - 1 (ZB-V) or 2p (DualPipeV) micro-batches. The actions of surplus
# micro-batches are then removed, which is valid because no other action depends on them.

DOWN, UP = 0, 1
"""A stage's chunks 0 and 1."""


class _OrderBuilder:
    """Builds one stage's order; each action gets the next micro-batch for its type and chunk."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[type[Action], int]] = Counter()

    def add(self, action_type: type[Action], chunk: int) -> None:
        self.actions.append(action_type(self.done[action_type, chunk], chunk))
        self.done[action_type, chunk] += 1

    def add_halves(self, chunk: int) -> None:
        """Add a split backward whose weight half follows immediately."""
        self.add(BackwardInput, chunk)
        self.add(BackwardWeight, chunk)

    def add_full(self, chunk: int) -> None:
        """Add a full backward."""
        self.actions.append(Backward(self.done[BackwardInput, chunk], chunk))
        self.done.update({(BackwardInput, chunk): 1, (BackwardWeight, chunk): 1})

    def add_remaining_weights(self) -> None:
        """Add all deferred weight halves: first chunk ``UP``, whose backwards run first, then chunk ``DOWN``."""
        for chunk in (UP, DOWN):
            while self.done[BackwardWeight, chunk] < self.done[BackwardInput, chunk]:
                self.add(BackwardWeight, chunk)

    def build(self, num_micro_batches: int, num_stages: int, stage: int) -> list[Action]:
        """Build the order for ``num_micro_batches``. A backward is not split if no other stage waits for it."""
        actions = [action for action in self.actions if action.micro_batch < num_micro_batches]
        return _join_halves(actions, stage, Placement(num_stages, 2, V))


def _join_halves(actions: Sequence[Action], stage: int, placement: Placement) -> list[Action]:
    joined: list[Action] = []
    for action in actions:
        key = action.micro_batch, action.chunk
        if isinstance(action, BackwardWeight) and joined and joined[-1] == BackwardInput(*key):
            message = sent_message(joined[-1], stage, placement)
            if message is None or message.peer == stage:
                joined[-1] = Backward(*key)
                continue
        joined.append(action)
    return joined


# ZB-V: the memory of 1F1B, with an idle time that is hardly longer than the time to fill the pipeline.
#
# Stage i starts with 2(p-i) - 1 forwards of chunk 0, until the first micro-batch returns from the last stage. Forwards
# of both chunks then alternate until 2p forwards are in flight, each of half a stage; this is as much memory as in
# 1F1B. After that, backwards and forwards alternate. At the end, no stage computes weight gradients while another stage
# waits for an input gradient.
#
# Source: Qi et al. 2024, "Pipeline parallelism with controllable memory", section 4; Qi et al. 2023, "Zero bubble
# pipeline parallelism".


def zero_bubble_v(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 2) -> list[Action]:
    """Generate ZB-V for ``stage``, with any number of micro-batches."""
    check_v(num_stages, num_micro_batches, stage, num_chunks)
    num_generated, num_below = max(num_micro_batches, 2 * num_stages - 1), num_stages - stage
    order = _OrderBuilder()
    for _ in range(2 * num_below - 1):
        order.add(Forward, DOWN)
    for _ in range(stage):
        order.add(Forward, UP)
        order.add(Forward, DOWN)
    for _ in range(num_below):
        order.add(Forward, UP)
        order.add_halves(UP)
    while order.done[Forward, UP] < num_generated:
        if order.done[Forward, DOWN] < num_generated:
            order.add(Forward, DOWN)
        order.add_halves(DOWN)
        order.add(Forward, UP)
        order.add_halves(UP)
    for _ in range(stage):
        order.add(BackwardInput, DOWN)
        order.add(BackwardInput, UP)
    for _ in range(num_below):
        order.add_halves(DOWN)
    order.add_remaining_weights()
    return order.build(num_micro_batches, num_stages, stage)


# DualPipeV: one half of DualPipe, with the two directions as the two chunks.
#
# In the middle, a forward of one chunk is next to a backward of the other. DeepSeek's kernels run them at the same
# time; tds runs them one after the other. A stage has one more chunk in flight than in ZB-V.
#
# Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1; Qi 2025, "DualPipe could be better without
# the dual".


def dual_pipe_v(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 2) -> list[Action]:
    """Generate DualPipeV for ``stage``, with any number of micro-batches."""
    check_v(num_stages, num_micro_batches, stage, num_chunks)
    num_generated, num_below = max(num_micro_batches, 2 * num_stages), num_stages - stage - 1
    order = _OrderBuilder()
    for _ in range(2 * num_below):
        order.add(Forward, DOWN)
    for _ in range(stage + 1):
        order.add(Forward, DOWN)
        order.add(Forward, UP)
    for _ in range(num_below):
        order.add_halves(UP)
        order.add(Forward, UP)
    for _ in range(num_generated - 2 * num_stages + stage + 1):
        order.add(Forward, DOWN)
        order.add_full(UP)
        order.add(Forward, UP)
        order.add_full(DOWN)
    for _ in range(num_below):
        order.add_full(UP)
        order.add(Forward, UP)
        order.add_full(DOWN)
    # The last ``stage + 1`` of these ``2 (stage + 1)`` backwards are split.
    for turn in range(stage + 1):
        for chunk in (UP, DOWN):
            if 2 * turn + (chunk == DOWN) > stage:
                order.add(BackwardInput, chunk)
            else:
                order.add_full(chunk)
    for _ in range(num_below):
        _add_oldest_weights(order)
        order.add(BackwardInput, DOWN)
    order.add_remaining_weights()
    return order.build(num_micro_batches, num_stages, stage)


def _add_oldest_weights(order: _OrderBuilder) -> None:
    """Add the oldest deferred weight half, if there is one."""
    for chunk in (UP, DOWN):
        if order.done[BackwardWeight, chunk] < order.done[BackwardInput, chunk]:
            order.add(BackwardWeight, chunk)
            return


def check_v(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int) -> None:
    """Raise ValueError if ``check_sizes`` does, or if there are not 2 chunks."""
    check_sizes(num_stages, num_micro_batches, stage, num_chunks)
    if num_chunks != 2:
        raise ValueError(
            f"the placement v needs 2 chunks of layers per stage, got num_chunks={num_chunks}. Use chunks=2"
        )
