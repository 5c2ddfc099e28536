"""LayerNorms: gradient norms by layer (--log-layer-norms)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch

from megatron.checkpoint import named_parameters
from megatron.mpu.mappings import all_reduce
from megatron.training.step_result import StepResult
from megatron.training.trainer import Callback
from megatron.training.world import World
from tds.grad_norm import square_of_norm


class LayerNorms(Callback):
    """Logs gradient norms by parameter group, unscaled and before clipping.

    A parameter's group is its logical name up to the layer index (``layers.3`` or ``encoder.layers.3``), or otherwise
    its module (``embedding.word``). As in the total norm, squares are summed over the ranks, and each parameter counts
    once. So the squares of all groups add up to the square of ``grad_norm``, and the norms are the same in every
    layout.
    """

    def on_train_start(self) -> None:
        named_params = named_parameters(self.trainer.engine.module)
        self._group_by_parameter = {parameter: group_of(name) for name, parameter in named_params}
        self._groups = _gather_groups(self._group_by_parameter.values(), self.trainer.world)
        self._norms: dict[str, float] = {}

    def on_before_update(self, loss: float) -> None:
        if self.trainer.is_log_step:
            self._norms = self._compute_norms()

    def on_after_update(self, result: StepResult) -> None:
        if not math.isfinite(result.loss) and result.is_rejected:
            self._norms = {}  # the gradients were discarded before their norm was computed

    def on_log(self, metrics: dict[str, Any]) -> None:
        if self._norms:
            metrics["layer_norms"] = self._norms

    @torch.no_grad()
    def _compute_norms(self) -> dict[str, float]:
        """Compute gradient norms by group. Collective."""
        optimizer, group_idx = self.trainer.engine.optimizer, {name: index for index, name in enumerate(self._groups)}
        device = self.trainer.world.device
        optimizer.reducer.sum_over_groups()
        squares = torch.zeros(len(group_idx), dtype=torch.float64, device=device)
        for parameter, gradient in optimizer.reducer.counted_grads():
            squares[group_idx[self._group_by_parameter[parameter]]] += square_of_norm(gradient).to(device)
        total = all_reduce(all_reduce(squares, optimizer.reducer.norm_group), optimizer.reducer.model_group)
        factor = optimizer.gradient_factor / optimizer.loss_scale
        return dict(zip(self._groups, (total.sqrt() * factor).tolist(), strict=True))


def group_of(name: str) -> str:
    """Return a parameter's group from its logical name: the layer, or otherwise the module."""
    layer = re.match(r"(?:.*?\.)??\d+(?=\.)", name)
    return layer.group() if layer else name.rpartition(".")[0] or name


def _gather_groups(names: Iterable[str], world: World) -> list[str]:
    """Gather all ranks' groups, layers sorted by index. Collective."""
    names_of_ranks = world.grid.host.gather_objects(sorted(set(names)))
    return sorted({name for rank_names in names_of_ranks for name in rank_names}, key=_sort_key)


def _sort_key(name: str) -> list[str]:
    return [component.zfill(9) if component.isdigit() else component for component in name.split(".")]
