"""CachedModel: the layers of a stage with KV caches; hidden states are sent from stage to stage."""

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

# The part of a generating model on one rank.
#
# A model is a list of units that are split into pipeline stages. The units of a decoder are embedding, layers, norm and
# head. Each rank stores its units and the stage index of every unit.


@dataclass(frozen=True)
class ModelStage:
    """The units of this rank and the stages of all units.

    Args:
        module: the module with the units; in evaluation mode during generation.
        units: this rank's units, by index.
        stages: stage index of each unit of the model.
        pipe: pipeline-parallel group.
        biases: relative position biases (T5) of this rank's layers, by unit index.
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
        """Dtype of weights and hidden states."""
        return next(self.module.parameters()).dtype

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Disable dropout and gradients, and restore the training mode on exit."""
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train(was_training)


def stage_of(model: Any) -> ModelStage:
    """Return the ``ModelStage`` of ``model`` on this rank.

    Args:
        model: a ``ModelStage``; a module of any family, without pipeline stages; or a training engine, with or without
            a pipeline: the engine of ``megatron.training``, DeepSpeed or ``tds``.

    Raises:
        TypeError: ``model`` has none of these types.
    """
    if isinstance(model, ModelStage):
        return model
    engine = getattr(model, "engine", model)
    module = getattr(engine, "module", engine)
    has_units = hasattr(module, "forward_funcs") or hasattr(module, "units")
    if not has_units or not hasattr(module, "sizes") or not hasattr(module, "place"):
        raise TypeError(
            f"the model must be a model of megatron.models or its training engine, got {type(model).__name__}. "
            "A custom model needs the attributes model_args and parallel, and a method units."
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
    indices = [idx for first, stop in runs for idx in range(first, stop)]
    modules = [
        unit if isinstance(unit, nn.Module) else module.tied_modules["embedding"] for unit in module.forward_funcs
    ]
    units = dict(zip(indices, modules, strict=True))
    chunks = range(len(bounds) - 1)
    placement = Placement(num_stages, module.chunks, module.placement)
    stages = [placement.stage_of(chunk) for chunk in chunks for _ in range(bounds[chunk], bounds[chunk + 1])]
    biases = {unit_idx: getattr(unit, "table", None) for unit_idx, unit in units.items()}
    return ModelStage(module, module.sizes, module.place, units, stages, pipe, biases)


# Communication between pipeline stages: hidden states to the next stage, chosen tokens from the last stage to all.

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
    """Apply ``units`` to ``x``; return the output on the stage of the last unit, None elsewhere. Collective.

    All ranks of the pipe must call it.

    Args:
        apply: function from (index of a unit of this rank, output of the previous unit) to the unit's output.
        shape: shape of ``x`` and of all tensors sent between stages.
        x: input of the first unit.
        held_by: the stage that has ``x``; None if the first unit has no input.
    """
    previous = held_by
    for stage, indices in _runs(part, units):
        if previous is not None and previous != stage:
            x = _hand_over(part, x, shape, previous, stage)
        if part.pipe.rank == stage:
            for unit_idx in indices:
                x = apply(unit_idx, x)
        previous = stage
    return x if part.pipe.rank == previous else None


def _runs(part: ModelStage, units: range) -> Iterator[tuple[int, list[int]]]:
    """Yield (stage, unit indices) for each run of consecutive units on the same stage."""
    for stage, indices in groupby(units, lambda number: part.stages[number]):
        yield stage, list(indices)


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
    """Broadcast ``x`` from ``stage`` to every stage and return it. Collective over the pipe."""
    if x is None or part.pipe.rank != stage:
        x = torch.empty(shape, dtype=part.dtype, device=part.device)
    if part.pipe.size > 1:
        dist.broadcast(x.contiguous(), part.pipe.ranks[stage], group=part.pipe.handle)
    return x


def tokens_to_all_stages(part: ModelStage, tokens: torch.Tensor | None, size: int) -> torch.Tensor:
    """Broadcast ``tokens`` [size] from the last stage to every stage and return them. Collective over the pipe."""
    if tokens is None:
        tokens = torch.empty(size, dtype=torch.long, device=part.device)
    if part.pipe.size > 1:
        dist.broadcast(tokens, part.pipe.ranks[part.stages[-1]], group=part.pipe.handle)
    return tokens


# Incremental forward passes with KV caches, for decoders and T5.


class CachedModel(ABC):
    """Model that processes rows of tokens in several passes and caches the keys and values of earlier passes.

    Args:
        capacity: maximum number of tokens in a row.
        body: indices of the units from the embedding to the last layer; norm and head follow.
    """

    def __init__(self, part: ModelStage, capacity: int, body: range) -> None:
        self.part, self.body = part, body
        self.slots = KVCacheSlots(capacity)
        self.caches = {idx: LayerKVCache(self.slots) for idx in body[1:] if idx in part.units}

    def read(self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor | None:
        """Run one pass; return the logits at token ``last`` of each row on the last stage, None elsewhere. Collective.

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
        """Return the last layer's output for ``tokens`` on the stage of that layer, None elsewhere. Collective.

        Shapes:
            tokens, positions [b, s]
            output [s, b, h], or with ``sequence_parallel`` this rank's shard, [s/t, b, h]
        """
        stage, (b, s) = self.part, tokens.shape
        self.tokens, self.positions = tokens.to(stage.device), positions.to(stage.device)
        self.slots.advance(self.positions)
        num_shards = stage.place.group.size if stage.place.sequence_parallel else 1
        return forward_through_stages(stage, self.body, self._apply, (s // num_shards, b, stage.sizes.hidden_size))

    def logits(self, x: torch.Tensor | None, number: int) -> torch.Tensor | None:
        """Return the logits of hidden states on the last stage, None elsewhere. Collective.

        Shapes:
            x      [number, h] on the stage of the last layer, None elsewhere; with ``sequence_parallel`` this rank's
                   shard, [number/t, h]
            output [number, v/t]
        """
        stage, output_units = self.part, range(self.body.stop, self.body.stop + 2)
        num_shards = stage.place.group.size if stage.place.sequence_parallel else 1
        shape = (number // num_shards, 1, stage.sizes.hidden_size)
        x = None if x is None else x.unsqueeze(1)
        logits = forward_through_stages(stage, output_units, self._apply, shape, x, held_by=stage.stages[self.body[-1]])
        return None if logits is None else logits[:, 0]

    def keep(self, rows: list[int]) -> None:
        """Keep only ``rows`` (indices) of the batch in the caches."""
        indices = torch.tensor(rows, device=self.part.device)
        for cache in self.caches.values():
            cache.keep(indices)

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
        """Return the logits [s, b, v/t] of a head tied to the word embedding."""


# Generation with decoders.


def generation_of(family: str) -> DecoderLayers:
    """Return the layer types with which decoders of ``family`` generate text.

    Raises:
        ValueError: the family does not support generation.
    """
    generation = model_parts(family).generation
    if generation is None:
        raise ValueError(f"the family {family} does not support text generation: its MODEL has no generation layers")
    return generation


Rows = Sequence[Sequence[int]]


def filled_up(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows at the end to one length with token 0; return the tokens and the index of each row's last token.

    Shapes:
        output [b, s], [b]
    """
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    return tokens, torch.tensor([len(row) - 1 for row in rows])


class DecoderReader(CachedModel):
    """Cached decoder. Rows are padded at the end, which does not affect earlier tokens because attention is causal."""

    def __init__(self, part: ModelStage, capacity: int) -> None:
        super().__init__(part, capacity, range(part.sizes.num_layers + 1))
        self.decoder = generation_of(part.sizes.family)
        self.masks = Masks(part.sizes, part.place)

    def embedded(self, unit: torch.nn.Module) -> torch.Tensor:
        # Called through the class, because pipeline embeddings override ``forward`` with a different signature.
        x: torch.Tensor = self.decoder.embedding.forward(unit, self.tokens, self.positions)
        return x

    def layer(self, number: int, unit: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        mask = self.masks.for_slots(self.slots, x.dtype, bool(unit.has_window))
        x = self.decoder.layer.forward(unit, x, mask, self.caches[number], None, mask)
        return x

    def tied_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return logits_of(x, weight, self.part.sizes, self.part.place)
