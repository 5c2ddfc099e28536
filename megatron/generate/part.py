"""What one rank holds of a model that generates, whoever built it.

A model is a list of units, as it is cut into pipeline stages: a decoder is embedding, layers, norm, head. A rank has
some of them, and knows which stage has each of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron.model.sizes import Place, Sizes
from megatron.mpu.groups import SINGLE, Group
from megatron.stages import pieces_on


@dataclass(frozen=True)
class Part:
    """This rank's units and its neighbours.

    Args:
        module: holds the units; switched to evaluation while it generates.
        units: those of this rank, by number.
        stages: the stage that holds each unit of the model.
        pipe: the ranks of all stages.
        biases: relative biases of this rank's layers, by number of the unit.
    """

    module: nn.Module
    sizes: Sizes
    place: Place
    units: dict[int, Any]
    stages: list[int]
    pipe: Group = SINGLE
    biases: dict[int, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and hidden states."""
        return next(self.module.parameters()).dtype

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch dropout and gradients off, and put dropout back."""
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train(was_training)


def part_of(model: Any) -> Part:
    """Return what this rank holds of ``model``.

    Args:
        model: a ``Part``; a single-stage module (GPT2Model, T5Model); or the engine that trains a model, with a
            pipeline or without (``megatron.training``'s, or DeepSpeed's or ``tds``'s within it).

    Raises:
        TypeError: something else.
    """
    if isinstance(model, Part):
        return model
    engine = getattr(model, "engine", model)
    module = getattr(engine, "module", engine)
    has_units = hasattr(module, "forward_funcs") or hasattr(module, "units")
    if not has_units or not hasattr(module, "sizes") or not hasattr(module, "place"):
        raise TypeError(
            f"the model must be a GPT2Model, a T5Model, or the engine that trains one, got {type(model).__name__}. "
            "A model of your own needs the attributes sizes and place, and a method units."
        )
    return _of_pipeline(engine, module) if hasattr(module, "forward_funcs") else _of_whole(module)


def _of_whole(module: Any) -> Part:
    units = dict(enumerate(module.units()))
    biases = module.biases_by_unit() if hasattr(module, "biases_by_unit") else {}
    return Part(module, module.sizes, module.place, units, [0] * len(units), biases=biases)


def _of_pipeline(engine: Any, module: Any) -> Part:
    grid, bounds, num_stages = engine.grid, module.parts, module.num_stages
    ranks = tuple(grid.stage_to_global(stage) for stage in range(num_stages))
    pipe = Group(ranks, module.stage_id, grid.get_pipe_parallel_group()) if num_stages > 1 else SINGLE
    numbers = [n for first, stop in pieces_on(bounds, num_stages, module.stage_id) for n in range(first, stop)]
    held = [unit if isinstance(unit, nn.Module) else module.tied_modules["embedding"] for unit in module.forward_funcs]
    units = dict(zip(numbers, held, strict=True))
    sizes = range(len(bounds) - 1)
    stages = [piece % num_stages for piece in sizes for _ in range(bounds[piece], bounds[piece + 1])]
    biases = {number: getattr(unit, "table", None) for number, unit in units.items()}
    return Part(module, module.sizes, module.place, units, stages, pipe, biases)
