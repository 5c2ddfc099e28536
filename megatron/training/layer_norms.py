"""The norm of the gradients of each layer: --log-layer-norms.

A group is what a parameter's logical name says up to the number of its layer, ``layers.3`` or ``encoder.layers.3``, and
of other parameters the module that has them, ``embedding.word``. Squares are added up over the ranks as those of the
whole norm are, each parameter once, so the squares of all groups add up to the square of ``grad_norm``, and every
layout has the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from megatron.checkpoint import named_parameters
from megatron.mpu.grads import square_of_norm
from megatron.mpu.mappings import all_reduce
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.world import World


class LayerNorms:
    """Takes the norms of the groups ahead of an update, in the steps for which ``is_wanted`` is set.

    Making one is collective, and so is every wanted step: all ranks set it alike.

    Attributes:
        norms: of the last wanted step, without loss scale and before clipping; the same on every rank.
    """

    def __init__(self, module: torch.nn.Module, optimizer: MixedPrecisionOptimizer, world: World) -> None:
        self.is_wanted = False
        self.norms: dict[str, float] = {}
        self._optimizer, self._device = optimizer, world.device
        self._group_of = {parameter: group_of(name) for name, parameter in named_parameters(module)}
        self._groups = _of_all_ranks(self._group_of.values(), world)
        optimizer.register_step_pre_hook(self._take)

    def _take(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_wanted:
            self.norms = self._norms()

    @torch.no_grad()
    def _norms(self) -> dict[str, float]:
        optimizer, places = self._optimizer, {name: index for index, name in enumerate(self._groups)}
        optimizer.sum_partial_gradients()
        squares = torch.zeros(len(places), dtype=torch.float64, device=self._device)
        for parameter, gradient in optimizer.counted_gradients():
            squares[places[self._group_of[parameter]]] += square_of_norm(gradient).to(self._device)
        whole = all_reduce(all_reduce(squares, optimizer.gradient_holders), optimizer.model_group)
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
