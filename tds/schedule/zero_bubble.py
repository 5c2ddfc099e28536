"""ZB-H1: 1F1B whose weights' half of the backward fills what would be idle, with no more in flight.

The previous stage waits for the gradient of its output only, so that half (``BackwardInput``) runs first. The other
(``BackwardWeight``) may wait: on stage i it trails by i micro-batches, which is as far as it can without holding more
than the first stage of 1F1B does. On stage 0 it would follow at once, and nobody waits for the first half: there the
backward stays whole, which costs less.

With even stages each is idle for (p-1)(F+B) - (min(p, m)-1) min(F, B, W), which is (p-1)(F+B-W) for p micro-batches or
more and a W that is no longer than F and B.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.
"""

from __future__ import annotations

from tds.schedule.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from tds.schedule.sizes import check_sizes


def zero_bubble_h1(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Return a warm-up of forwards, then forward, backward for the input, and for the weights of ``stage`` before."""
    check_sizes(num_stages, num_micro_batches, stage)
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    actions: list[Action] = [Forward(i) for i in range(warm_up)]
    for i in range(num_micro_batches):
        if warm_up + i < num_micro_batches:
            actions.append(Forward(warm_up + i))
        actions.append(BackwardInput(i) if stage else Backward(i))
        if i >= stage > 0:
            actions.append(BackwardWeight(i - stage))
    if stage:
        actions += [BackwardWeight(i) for i in range(max(num_micro_batches - stage, 0), num_micro_batches)]
    return actions
