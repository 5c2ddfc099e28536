"""LayerNorms: the norm of the gradients of each layer (--log-layer-norms)."""

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
    """Logs the gradient norms of groups of parameters, without loss scale and before clipping.

    A group is what a parameter's logical name says up to the number of its layer, ``layers.3`` or ``encoder.layers.3``,
    and of other parameters the module that has them, ``embedding.word``. Squares are added up over the ranks as those
    of the whole norm are, each parameter once, so the squares of all groups add up to the square of ``grad_norm``, and
    every layout has the same numbers.
    """

    def on_train_start(self) -> None:
        named = named_parameters(self.trainer.engine.module)
        self._group_of = {parameter: group_of(name) for name, parameter in named}
        self._groups = _of_all_ranks(self._group_of.values(), self.trainer.world)
        self._norms: dict[str, float] = {}

    def on_before_update(self, loss: float) -> None:
        if self.trainer.is_log_step:
            self._norms = self._taken()

    def on_after_update(self, result: StepResult) -> None:
        if not math.isfinite(result.loss) and result.is_refused:
            self._norms = {}  # of gradients that were thrown away ahead of them

    def on_log(self, metrics: dict[str, Any]) -> None:
        if self._norms:
            metrics["layer_norms"] = self._norms

    @torch.no_grad()
    def _taken(self) -> dict[str, float]:
        optimizer, places = self.trainer.engine.optimizer, {name: index for index, name in enumerate(self._groups)}
        device = self.trainer.world.device
        optimizer.reducer.sum_over_groups()
        squares = torch.zeros(len(places), dtype=torch.float64, device=device)
        for parameter, gradient in optimizer.reducer.counted_grads():
            squares[places[self._group_of[parameter]]] += square_of_norm(gradient).to(device)
        whole = all_reduce(all_reduce(squares, optimizer.reducer.norm_group), optimizer.reducer.model_group)
        factor = optimizer.gradient_factor / optimizer.loss_scale
        return dict(zip(self._groups, (whole.sqrt() * factor).tolist(), strict=True))


def group_of(name: str) -> str:
    """Return the group of a parameter by its logical name: its layer, or else its module."""
    layer = re.match(r"(?:.*?\.)??\d+(?=\.)", name)
    return layer.group() if layer else name.rpartition(".")[0] or name


def _of_all_ranks(names: Iterable[str], world: World) -> list[str]:
    """Return the groups that any rank has, layers by number. Collective."""
    every = world.grid.host.gather_objects(sorted(set(names)))
    return sorted({name for each in every for name in each}, key=_by_number)


def _by_number(name: str) -> list[str]:
    return [part.zfill(9) if part.isdigit() else part for part in name.split(".")]
