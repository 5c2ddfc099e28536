"""The orders of a V, in which each stage holds two chunks and the loss comes back to the first: ZB-V, DualPipeV."""

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
    sent,
)

# A micro-batch goes down the stages in chunk 0 and up again in chunk 1; its gradient goes the same way back. So what
# stage i sends down comes back 2(p-i-1) chunks later, and forwards of chunk 0 fill that time.
#
# An order is written for micro-batches enough, 2p - 1 or 2p, and those that are not there are left out: what is left
# waits for none of them.

DOWN, UP = 0, 1
"""The chunks of a stage."""


class _Writer:
    """Writes one stage's order: of each kind and chunk the next micro-batch."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[type[Action], int]] = Counter()

    def add(self, kind: type[Action], chunk: int) -> None:
        self.actions.append(kind(self.done[kind, chunk], chunk))
        self.done[kind, chunk] += 1

    def add_halves(self, chunk: int) -> None:
        """Add a backward whose weights' half follows the other at once."""
        self.add(BackwardInput, chunk)
        self.add(BackwardWeight, chunk)

    def add_whole(self, chunk: int) -> None:
        """Add a whole backward."""
        self.actions.append(Backward(self.done[BackwardInput, chunk], chunk))
        self.done.update({(BackwardInput, chunk): 1, (BackwardWeight, chunk): 1})

    def add_weights_left(self) -> None:
        """Add the weights' halves that are put off, of the chunk that was backward first ahead of the other."""
        for chunk in (UP, DOWN):
            while self.done[BackwardWeight, chunk] < self.done[BackwardInput, chunk]:
                self.add(BackwardWeight, chunk)

    def written(self, num_micro_batches: int, num_stages: int, stage: int) -> list[Action]:
        """Return the order for so many micro-batches; backwards are whole where no other stage waits for a half."""
        there = [action for action in self.actions if action.micro_batch < num_micro_batches]
        return _joined(there, stage, Placement(num_stages, 2, V))


def _joined(actions: Sequence[Action], stage: int, placement: Placement) -> list[Action]:
    found: list[Action] = []
    for action in actions:
        place = action.micro_batch, action.chunk
        if isinstance(action, BackwardWeight) and found and found[-1] == BackwardInput(*place):
            message = sent(found[-1], stage, placement)
            if message is None or message.peer == stage:
                found[-1] = Backward(*place)
                continue
        found.append(action)
    return found


# ZB-V: the memory of 1F1B, and idle for hardly more than it takes to fill the pipeline.
#
# Stage i begins with 2(p-i) - 1 forwards of chunk 0, by when the first micro-batch is back from the last stage. Then
# forwards of both chunks in turn, until 2p are in flight, as in 1F1B, of half a stage each. From then on backward and
# forward alternate. At the end no stage adds up gradients of weights while another waits for one of an input.
#
# Source: Qi et al. 2024, "Pipeline parallelism with controllable memory", section 4; Qi et al. 2023, "Zero bubble
# pipeline parallelism".


def zero_bubble_v(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 2) -> list[Action]:
    """Return the order of ``stage`` in ZB-V; any number of micro-batches."""
    check_v(num_stages, num_micro_batches, stage, num_chunks)
    number, behind = max(num_micro_batches, 2 * num_stages - 1), num_stages - stage
    order = _Writer()
    for _ in range(2 * behind - 1):
        order.add(Forward, DOWN)
    for _ in range(stage):
        order.add(Forward, UP)
        order.add(Forward, DOWN)
    for _ in range(behind):
        order.add(Forward, UP)
        order.add_halves(UP)
    while order.done[Forward, UP] < number:
        if order.done[Forward, DOWN] < number:
            order.add(Forward, DOWN)
        order.add_halves(DOWN)
        order.add(Forward, UP)
        order.add_halves(UP)
    for _ in range(stage):
        order.add(BackwardInput, DOWN)
        order.add(BackwardInput, UP)
    for _ in range(behind):
        order.add_halves(DOWN)
    order.add_weights_left()
    return order.written(num_micro_batches, num_stages, stage)


# DualPipeV: half of DualPipe, whose two directions become the two chunks.
#
# In the middle a forward of one chunk stands beside a backward of the other, which DeepSeek's kernels run at the same
# time; here they follow each other. A stage holds one chunk more than in ZB-V.
#
# Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1; Qi 2025, "DualPipe could be better without
# the dual".


def dual_pipe_v(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 2) -> list[Action]:
    """Return the order of ``stage`` in DualPipeV; any number of micro-batches."""
    check_v(num_stages, num_micro_batches, stage, num_chunks)
    number, behind = max(num_micro_batches, 2 * num_stages), num_stages - stage - 1
    order = _Writer()
    for _ in range(2 * behind):
        order.add(Forward, DOWN)
    for _ in range(stage + 1):
        order.add(Forward, DOWN)
        order.add(Forward, UP)
    for _ in range(behind):
        order.add_halves(UP)
        order.add(Forward, UP)
    for _ in range(number - 2 * num_stages + stage + 1):
        order.add(Forward, DOWN)
        order.add_whole(UP)
        order.add(Forward, UP)
        order.add_whole(DOWN)
    for _ in range(behind):
        order.add_whole(UP)
        order.add(Forward, UP)
        order.add_whole(DOWN)
    for turn in range(stage + 1):  # from the middle on backwards are split; on an even stage that is between the chunks
        for chunk in (UP, DOWN):
            if 2 * turn + (chunk == DOWN) > stage:
                order.add(BackwardInput, chunk)
            else:
                order.add_whole(chunk)
    for _ in range(behind):
        _add_oldest_weights(order)
        order.add(BackwardInput, DOWN)
    order.add_weights_left()
    return order.written(num_micro_batches, num_stages, stage)


def _add_oldest_weights(order: _Writer) -> None:
    """Add one of the weights' halves that are put off, if any."""
    for chunk in (UP, DOWN):
        if order.done[BackwardWeight, chunk] < order.done[BackwardInput, chunk]:
            order.add(BackwardWeight, chunk)
            return


def check_v(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int) -> None:
    """Raise ValueError unless there is such a stage with work to do, and two chunks on it."""
    check_sizes(num_stages, num_micro_batches, stage, num_chunks)
    if num_chunks != 2:
        raise ValueError(
            f"a V has 2 chunks of layers on each stage, got num_chunks={num_chunks}. Build it with chunks=2"
        )
