"""CachedModel: a stage's layers with KV caches, hidden states relayed through stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.models.common.kv_cache import KVCacheSlots, LayerKVCache
from megatron.models.common.language_model import Head, Logits, logits_of, materialize_logits
from megatron.models.common.masks import Masks
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.parts import DecoderLayers
from megatron.models.registry import model_parts
from megatron.mpu.groups import SINGLE, Group
from tds.partition import chunks_on
from tds.schedule import Placement

# What one rank holds of a model that generates, whoever built it.
#
# A model is a list of units, as it is cut into pipeline stages: a decoder is embedding, layers, norm, head. A rank has
# some of them, and knows which stage has each of the others.


@dataclass(frozen=True)
class ModelStage:
    """This rank's units and its neighbours.

    Args:
        module: holds the units; switched to evaluation while it generates.
        units: those of this rank, by number.
        stages: the stage that holds each unit of the model.
        pipe: the ranks of all stages.
        biases: relative biases of this rank's layers, by number of the unit.
    """

    module: nn.Module
    sizes: ModelArgs
    place: ParallelContext
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


def stage_of(model: Any) -> ModelStage:
    """Return what this rank holds of ``model``.

    Args:
        model: a ``ModelStage``; a module of one stage, as of every family; or the engine that trains a model, with a
            pipeline or without (``megatron.training``'s, or DeepSpeed's or ``tds``'s within it).

    Raises:
        TypeError: something else.
    """
    if isinstance(model, ModelStage):
        return model
    engine = getattr(model, "engine", model)
    module = getattr(engine, "module", engine)
    has_units = hasattr(module, "forward_funcs") or hasattr(module, "units")
    if not has_units or not hasattr(module, "sizes") or not hasattr(module, "place"):
        raise TypeError(
            f"the model must be one of megatron.models, or the engine that trains one, got {type(model).__name__}. "
            "A model of your own needs the attributes sizes and place, and a method units."
        )
    return _of_pipeline(engine, module) if hasattr(module, "forward_funcs") else _of_whole(module)


def _of_whole(module: Any) -> ModelStage:
    units = dict(enumerate(module.units()))
    biases = module.biases_by_unit() if hasattr(module, "biases_by_unit") else {}
    return ModelStage(module, module.sizes, module.place, units, [0] * len(units), biases=biases)


def _of_pipeline(engine: Any, module: Any) -> ModelStage:
    grid, bounds, num_stages = engine.grid, module.parts, module.num_stages
    ranks = tuple(grid.stage_to_global(stage) for stage in range(num_stages))
    pipe = Group(ranks, module.stage_id, grid.get_pipe_parallel_group()) if num_stages > 1 else SINGLE
    runs = chunks_on(bounds, num_stages, module.stage_id, module.placement)
    numbers = [n for first, stop in runs for n in range(first, stop)]
    held = [unit if isinstance(unit, nn.Module) else module.tied_modules["embedding"] for unit in module.forward_funcs]
    units = dict(zip(numbers, held, strict=True))
    sizes = range(len(bounds) - 1)
    lie = Placement(num_stages, module.chunks, module.placement)
    stages = [lie.stage_of(piece) for piece in sizes for _ in range(bounds[piece], bounds[piece + 1])]
    biases = {number: getattr(unit, "table", None) for number, unit in units.items()}
    return ModelStage(module, module.sizes, module.place, units, stages, pipe, biases)


# Through the stages of a pipeline: hidden states from one to the next, and what the last one chose to all.

Apply = Callable[[int, torch.Tensor | None], torch.Tensor]


def forward_through_stages(
    part: ModelStage,
    units: range,
    apply: Apply,
    shape: tuple[int, ...],
    x: torch.Tensor | None = None,
    *,
    held_by: int | None = None,
) -> torch.Tensor | None:
    """Return what ``units`` make of ``x`` on the stage of the last of them, None elsewhere. Collective over the pipe.

    Args:
        apply: from (number of a unit of this rank, what the unit before returned) to what the unit returns.
        shape: of ``x``, and of all that crosses from stage to stage.
        x: what the first unit takes.
        held_by: the stage that has it; None where the first unit takes nothing.
    """
    before = held_by
    for stage, run in _runs(part, units):
        if before is not None and before != stage:
            x = _hand_over(part, x, shape, before, stage)
        if part.pipe.rank == stage:
            for number in run:
                x = apply(number, x)
        before = stage
    return x if part.pipe.rank == before else None


def _runs(part: ModelStage, units: range) -> Iterator[tuple[int, list[int]]]:
    """Yield (stage, numbers) of neighbouring units that lie on one stage."""
    for stage, numbers in groupby(units, lambda number: part.stages[number]):
        yield stage, list(numbers)


def _hand_over(
    part: ModelStage, x: torch.Tensor | None, shape: tuple[int, ...], source: int, target: int
) -> torch.Tensor | None:
    pipe = part.pipe
    if pipe.rank == source:
        assert x is not None
        dist.send(x.contiguous(), pipe.ranks[target], group=pipe.handle)
    elif pipe.rank == target:
        x = torch.empty(shape, dtype=part.dtype, device=part.device)
        dist.recv(x, pipe.ranks[source], group=pipe.handle)
        return x
    return None


def to_all_stages(part: ModelStage, x: torch.Tensor | None, shape: tuple[int, ...], stage: int) -> torch.Tensor:
    """Return the ``x`` of ``stage`` on every stage. Collective over the pipe."""
    if x is None or part.pipe.rank != stage:
        x = torch.empty(shape, dtype=part.dtype, device=part.device)
    if part.pipe.size > 1:
        dist.broadcast(x.contiguous(), part.pipe.ranks[stage], group=part.pipe.handle)
    return x


def tokens_to_all_stages(part: ModelStage, tokens: torch.Tensor | None, size: int) -> torch.Tensor:
    """Return the last stage's ``tokens`` [size] on every stage. Collective over the pipe."""
    if tokens is None:
        tokens = torch.empty(size, dtype=torch.long, device=part.device)
    if part.pipe.size > 1:
        dist.broadcast(tokens, part.pipe.ranks[part.stages[-1]], group=part.pipe.handle)
    return tokens


# A model that reads tokens and remembers them: what the two families share.


class CachedModel(ABC):
    """Reads rows of tokens, a pass at a time, and keeps keys and values of what it has read.

    Args:
        capacity: tokens that the longest row will have.
        body: numbers of the units from embedding to last layer; norm and head follow.
    """

    def __init__(self, part: ModelStage, capacity: int, body: range) -> None:
        self.part, self.body = part, body
        self.slots = KVCacheSlots(capacity)
        self.caches = {number: LayerKVCache(self.slots) for number in body[1:] if number in part.units}

    def read(self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor | None:
        """Return the logits behind token ``last`` of each row on the last stage, None elsewhere. Collective.

        Shapes:
            tokens, positions [b, s], the same on every rank of the replica; the first pass starts at position 0
            last   [b] indices into ``tokens``
            output [b, v/t]
        """
        x = self.hidden(tokens, positions)
        if x is not None:
            x = x[last.to(x.device), torch.arange(len(last), device=x.device)]  # [b, h]
        return self.logits(x, len(last))

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Return what the last layer makes of ``tokens`` on its stage, None elsewhere. Collective.

        Shapes:
            tokens, positions [b, s]
            output [s, b, h], or with ``sequence_parallel`` this rank's part, [s/t, b, h]
        """
        part, (b, s) = self.part, tokens.shape
        self.tokens, self.positions = tokens.to(part.device), positions.to(part.device)
        self.slots.advance(self.positions)
        parts = part.place.group.size if part.place.sequence_parallel else 1
        return forward_through_stages(part, self.body, self._apply, (s // parts, b, part.sizes.hidden_size))

    def logits(self, x: torch.Tensor | None, number: int) -> torch.Tensor | None:
        """Return the logits of hidden states on the last stage, None elsewhere. Collective.

        Shapes:
            x      [number, h] on the stage of the last layer, None elsewhere; with ``sequence_parallel`` this rank's
                   part, [number/t, h]
            output [number, v/t]
        """
        part, tail = self.part, range(self.body.stop, self.body.stop + 2)
        parts = part.place.group.size if part.place.sequence_parallel else 1
        shape = (number // parts, 1, part.sizes.hidden_size)
        x = None if x is None else x.unsqueeze(1)
        logits = forward_through_stages(part, tail, self._apply, shape, x, held_by=part.stages[self.body[-1]])
        return None if logits is None else logits[:, 0]

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        chosen = torch.tensor(rows, device=self.part.device)
        for cache in self.caches.values():
            cache.keep(chosen)

    def _apply(self, number: int, x: torch.Tensor | None) -> torch.Tensor:
        unit = self.part.units[number]
        if number == self.body.start:
            return self.embedded(unit)
        assert x is not None
        if number in self.body:
            return self.layer(number, unit, x)
        if number == self.body.stop:
            return getattr(unit, "norm", unit)(x)
        return materialize_logits(unit(x) if isinstance(unit, Head) else self.tied_logits(x, unit.word.weight))

    @abstractmethod
    def embedded(self, unit: torch.nn.Module) -> torch.Tensor:
        """Return the hidden states [s, b, h] of ``self.tokens`` at ``self.positions``."""

    @abstractmethod
    def layer(self, number: int, unit: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [s, b, h] after this layer."""

    @abstractmethod
    def tied_logits(self, x: torch.Tensor, weight: torch.Tensor) -> Logits:
        """Return the logits [s, b, v/t] of a head that is the word table."""


# Generation with a decoder.


def generation_of(family: str) -> DecoderLayers:
    """Return the layers with which a family of decoders generates.

    Raises:
        ValueError: the family has none.
    """
    generation = model_parts(family).generation
    if generation is None:
        raise ValueError(f"the family {family} is no decoder that generates: its MODEL has no generation")
    return generation


Rows = Sequence[Sequence[int]]


def filled_up(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows filled up at their end to one length with token 0, index of each row's last token).

    Shapes:
        output [b, s], [b]
    """
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    return tokens, torch.tensor([len(row) - 1 for row in rows])


class DecoderReader(CachedModel):
    """Attention looks back only, so what fills a row up at its end acts on nothing before it."""

    def __init__(self, part: ModelStage, capacity: int) -> None:
        super().__init__(part, capacity, range(part.sizes.num_layers + 1))
        self.decoder = generation_of(part.sizes.family)
        self.masks = Masks(part.sizes, part.place)

    def embedded(self, unit: torch.nn.Module) -> torch.Tensor:
        """The parts of a pipeline have a ``forward`` of their own, so the family's are called by their classes."""
        x: torch.Tensor = self.decoder.embedding.forward(unit, self.tokens, self.positions)
        return x

    def layer(self, number: int, unit: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        mask = self.masks.for_slots(self.slots, x.dtype, bool(unit.has_window))
        x = self.decoder.layer.forward(unit, x, mask, self.caches[number], None, mask)
        return x

    def tied_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return logits_of(x, weight, self.part.sizes, self.part.place)
