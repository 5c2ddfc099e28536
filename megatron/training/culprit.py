"""What a run says that ends for a number that is not finite: the step and its samples, and where the number is.

All ranks raise at the same place, ahead of the update. Those that hold the number say so themselves, rank 0 the rest.
"""

from __future__ import annotations

import torch

from megatron.checkpoint import named_parameters
from megatron.errors import NumericsError
from megatron.mpu.groups import Grid
from megatron.training.engines import StepEngine
from megatron.training.samples import StepSamples
from megatron.training.step_result import LossError, ModuleError

NAMED_AT_MOST = 3


def explained(error: NumericsError, engine: StepEngine, grid: Grid, samples: StepSamples) -> NumericsError:
    """Return ``error`` of the step that read ``samples``, with what this rank knows of it. Waits for the device."""
    if isinstance(error, ModuleError):
        found = error.found
    elif isinstance(error, LossError):
        found = bad_losses(engine, grid, samples)
    else:
        found = bad_gradients(engine, grid)
    told = f"step {samples.step} ({samples.text}): {error}"
    made = NumericsError(f"{told} Here {found}." if found else told)
    made.is_of_this_rank = bool(found)
    return made


def bad_losses(engine: StepEngine, grid: Grid, samples: StepSamples) -> str:
    """Say which micro-batches of this rank have a loss that is not finite; the first tensor rank speaks for all."""
    if grid.tensor.rank:
        return ""
    bad = [number for number, loss in engine.micro_losses.items() if not loss.isfinite().all()]
    each = [f"micro-batch {n} ({samples.of_micro_batch(grid.data.rank, n)})" for n in bad]
    return f"{_listed(each)} gave such a loss" if each else ""


@torch.no_grad()
def bad_gradients(engine: StepEngine, grid: Grid) -> str:
    """Say which parameters of this rank have a gradient that is not finite; the first replica speaks for all.

    From ZeRO 2 on each replica speaks for its parts.
    """
    if grid.data.rank and not engine.optimizer.cuts_gradients:
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
