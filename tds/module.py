"""The layers of a pipeline and how they are cut into stages."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule as _DeepSpeedModule

from tds.chatter import without_prints
from tds.waiting import limit_waits


class PipelineModule(_DeepSpeedModule):
    """DeepSpeed's ``PipelineModule`` whose ``partition_method`` may also be a list of bounds.

    Args:
        partition_method: "parameters", "uniform", "type:REGEX", or bounds such as ``[0, 3, 5]``: stage ``i`` holds
            the layers ``bounds[i] ... bounds[i + 1]``. The same on every rank.

    Raises:
        ValueError: bounds that do not hold each layer exactly once, or a stage without layers.
    """

    parts: list[int]

    def __init__(self, layers: Any, *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized() and not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        with without_prints():
            super().__init__(layers, *args, **kwargs)

    def _synchronize_tied_weights(self) -> None:
        limit_waits(self)
        with torch.no_grad():  # else autograd takes the broadcast for a step that it would have to differentiate
            super()._synchronize_tied_weights()

    def _partition_layers(self, method: Any = "uniform") -> None:
        if isinstance(method, str):
            super()._partition_layers(method=method)
        else:
            self.parts = check_bounds(method, len(self._layer_specs), self.num_stages)
            self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])
        refuse_empty_stages(self.parts, len(self._layer_specs), method)


def check_bounds(bounds: Any, num_layers: int, num_stages: int) -> list[int]:
    """Return ``bounds`` as a list if they cut ``num_layers`` layers into ``num_stages`` stages."""
    told = f"got partition_method={bounds!r} for {num_layers} layers and {num_stages} stages"
    try:
        listed = [int(bound) for bound in bounds]
        exact = listed == list(bounds)
    except (TypeError, ValueError):
        exact = False
    if not exact:
        raise ValueError(f"partition_method must be a name or a list of whole numbers, {told}")
    if len(listed) != num_stages + 1 or listed[0] != 0 or listed[-1] != num_layers or listed != sorted(listed):
        raise ValueError(
            f"partition bounds must be {num_stages + 1} rising numbers from 0 to the number of layers, {told}. "
            f"Write [0, ..., {num_layers}] so that each layer lies on one stage."
        )
    return listed


def refuse_empty_stages(parts: list[int], num_layers: int, method: Any) -> None:
    """Raise if a stage holds no layer: it would only pass tensors on."""
    empty = [stage for stage in range(len(parts) - 1) if parts[stage] == parts[stage + 1]]
    if empty:
        raise ValueError(
            f"each stage must hold a layer, got none on stage {empty[0]}: {num_layers} layers, "
            f"{len(parts) - 1} stages, partition_method={method!r} gives bounds {parts}. "
            "Use fewer stages, more layers, or bounds of your own."
        )
