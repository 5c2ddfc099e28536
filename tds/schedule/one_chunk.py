"""The orders of work for one chunk of layers on each stage whose backwards stay whole: GPipe and 1F1B.

Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", section 3.2.
"""

from __future__ import annotations

from tds.schedule.actions import Action, Backward, Forward
from tds.schedule.sizes import check_sizes


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
