"""Which losses and gradients of a step are not finite, and on which ranks.

Those that
hold the number say so themselves, rank 0 the rest.
"""

from __future__ import annotations

import torch

from megatron.checkpoint import named_parameters
from megatron.mpu.groups import Grid
from megatron.training.step_engine import StepEngine
from megatron.training.step_samples import StepSamples

NAMED_AT_MOST = 3


def bad_losses(engine: StepEngine, grid: Grid, samples: StepSamples) -> str:
    """Say which micro-batches of this rank have a loss that is not finite; the first tensor rank speaks for all."""
    if grid.tensor.rank:
        return ""
    bad = [number for number, loss in engine.micro_losses.items() if not loss.isfinite().all()]
    each = [f"micro-batch {n} ({samples.of_micro_batch(grid.data.rank, n)})" for n in bad]
    return f"{_listed(each)} gave such a loss" if each else ""


@torch.no_grad()
def bad_gradients(engine: StepEngine, grid: Grid, samples: StepSamples) -> str:
    """Say which parameters of this rank have a gradient that is not finite; the first replica speaks for all.

    From ZeRO 2 on each replica speaks for its parts.
    """
    if grid.data_context.rank and engine.optimizer.reducer.norm_group.size == 1:
        return ""
    bad = []
    for name, parameter in named_parameters(engine.module):
        gradient = engine.optimizer.gradient_of(parameter) if parameter.requires_grad else None
        if gradient is not None and not gradient.isfinite().all():
            bad.append(name)
    return f"the gradient of {_listed(bad)} is not finite" if bad else ""


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - NAMED_AT_MOST} more" if len(items) > NAMED_AT_MOST else ""
    return ", ".join(items[:NAMED_AT_MOST]) + more
