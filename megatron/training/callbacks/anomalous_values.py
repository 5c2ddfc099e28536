"""Location of non-finite losses and gradients in a step, by rank.

Each rank describes the values that it holds itself.
"""

from __future__ import annotations

import torch

from megatron.checkpoint import named_parameters
from megatron.mpu.groups import Grid
from megatron.training.step_engine import StepEngine
from megatron.training.step_samples import StepSamples

MAX_NAMES = 3


def describe_nonfinite_losses(engine: StepEngine, grid: Grid, samples: StepSamples) -> str:
    """Describe this rank's micro-batches with a non-finite loss; "" on ranks other than the first tensor rank."""
    if grid.tensor.rank:
        return ""
    indices = [idx for idx, loss in engine.micro_losses.items() if not loss.isfinite().all()]
    micro_batches = [f"micro-batch {i} ({samples.micro_batch_text(grid.data.rank, i)})" for i in indices]
    return f"the loss of {_list_names(micro_batches)} is not finite" if micro_batches else ""


@torch.no_grad()
def describe_nonfinite_gradients(engine: StepEngine, grid: Grid, samples: StepSamples) -> str:
    """Describe this rank's parameters with a non-finite gradient.

    Only the first replica reports; with ZeRO 2 and 3 each replica reports its shards. Others return "".
    """
    if grid.data_context.rank and engine.optimizer.reducer.norm_group.size == 1:
        return ""
    names = []
    for name, parameter in named_parameters(engine.module):
        gradient = engine.optimizer.gradient_of(parameter) if parameter.requires_grad else None
        if gradient is not None and not gradient.isfinite().all():
            names.append(name)
    return f"the gradient of {_list_names(names)} is not finite" if names else ""


def _list_names(items: list[str]) -> str:
    suffix = f" and {len(items) - MAX_NAMES} more" if len(items) > MAX_NAMES else ""
    return ", ".join(items[:MAX_NAMES]) + suffix
