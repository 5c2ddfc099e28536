"""ZB-H1: 1F1B whose weights' half of the backward fills what would be idle, with no more in flight.

The previous stage waits for the gradient of its output only, so that half (``BackwardInput``) runs first. The other
(``BackwardWeight``) may wait: on stage i it trails by i micro-batches, which is as far as it can without holding more
than the first stage of 1F1B does. On stage 0 it would follow at once, and nobody waits for the first half: there the
backward stays whole, which costs less.

With several chunks of layers on each stage the same is done to interleaved 1F1B: on stage i the weights' half trails by
i backwards of a chunk, and no stage holds more than the first of interleaved 1F1B. Stage 1 splits the backwards of the
last round of micro-batches alone (with a short one, of the one before it too): ahead of that, with even stages, the
first half would reach stage 0 no sooner than it is wanted there, and a backward that is split costs more than a whole
one. Where stages are far from even, interleaved 1F1B may be faster; "auto" tells.

With even stages each is idle for (p-1)(F+B) - (min(p, m)-1) min(F, B, W), which is (p-1)(F+B-W) for p micro-batches or
more and a W that is no longer than F and B; with c chunks for (p-1)(F+B-W)/c if p divides m.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 2; the order with chunks is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tds.schedule.actions import Action, Backward, BackwardInput, BackwardWeight
from tds.schedule.interleaved import interleaved
from tds.schedule.one_chunk import one_forward_one_backward


def zero_bubble_h1(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1) -> list[Action]:
    """Return 1F1B, or interleaved 1F1B, of ``stage`` with the weights' half of each backward put off."""
    if num_chunks == 1:
        whole = one_forward_one_backward(num_stages, num_micro_batches, stage)
    else:
        whole = interleaved(num_stages, num_micro_batches, stage, num_chunks)
    if stage == 0:
        return whole
    last_rounds = num_stages + num_micro_batches % num_stages
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
