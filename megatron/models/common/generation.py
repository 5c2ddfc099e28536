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

from megatron.models.common.cache_slots import KVCacheSlots
from megatron.models.common.kv_cache import LayerKVCache
from megatron.models.common.language_model import Head, Logits, materialize_logits, tied_head_logits
from megatron.models.common.masks import Masks
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.mtp import MTPInput, num_units
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.parts import DecoderLayers
from megatron.models.registry import model_parts
from megatron.mpu.groups import SINGLE, Group
from tds.partition import chunks_on
from tds.schedule import Placement

# The part of a generating model on one rank.
#
# A model is a list of units that are split into pipeline stages. The units of a decoder are embedding, layers, norm and
# head; those of multi-token prediction are ignored. Each rank stores its units and the stage index of every unit.


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
    args: ModelArgs
    parallel: ParallelContext
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
    def evaluation_mode(self) -> Iterator[None]:
        """Disable dropout and gradients, and restore the training mode on exit."""
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train(was_training)


def get_model_stage(model: Any) -> ModelStage:
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
    if not has_units or not hasattr(module, "model_args") or not hasattr(module, "parallel"):
        raise TypeError(
            f"the model must be a model of megatron.models or its training engine, got {type(model).__name__}. "
            "A custom model needs the attributes model_args and parallel, and a method units."
        )
    return _pipeline_stage_model(engine, module) if hasattr(module, "forward_funcs") else _single_stage_model(module)


def _single_stage_model(module: Any) -> ModelStage:
    units = dict(enumerate(module.units()))
    biases = module.biases_by_unit() if hasattr(module, "biases_by_unit") else {}
    return ModelStage(module, module.model_args, module.parallel, units, [0] * len(units), biases=biases)


def _pipeline_stage_model(engine: Any, module: Any) -> ModelStage:
    grid, bounds, num_stages = engine.grid, module.parts, module.num_stages
    ranks = tuple(grid.stage_to_global(stage) for stage in range(num_stages))
    pipe = Group(ranks, module.stage_id, grid.get_pipe_parallel_group()) if num_stages > 1 else SINGLE
    chunk_ranges = chunks_on(bounds, num_stages, module.stage_id, module.placement)
    indices = [idx for start, stop in chunk_ranges for idx in range(start, stop)]
    modules = [
        unit if isinstance(unit, nn.Module) else module.tied_modules["embedding"] for unit in module.forward_funcs
    ]
    units = dict(zip(indices, modules, strict=True))
    chunks = range(len(bounds) - 1)
    placement = Placement(num_stages, module.chunks, module.placement)
    stages = [placement.stage_of(chunk) for chunk in chunks for _ in range(bounds[chunk], bounds[chunk + 1])]
    num_ignored, head = num_units(module.model_args), module.model_args.num_layers + 2
    units = {idx if idx < head else idx - num_ignored: unit for idx, unit in units.items()
             if not head <= idx < head + num_ignored}  # fmt: skip
    del stages[head : head + num_ignored]
    biases = {unit_idx: getattr(unit, "table", None) for unit_idx, unit in units.items()}
    return ModelStage(module, module.model_args, module.parallel, units, stages, pipe, biases)


# Communication between pipeline stages: hidden states to the next stage, chosen tokens from the last stage to all.

ApplyUnit = Callable[[int, torch.Tensor | None], torch.Tensor]


def forward_through_stages(
    model_stage: ModelStage,
    units: range,
    apply: ApplyUnit,
    shape: tuple[int, ...],
    x: torch.Tensor | None = None,
    *,
    source_stage: int | None = None,
) -> torch.Tensor | None:
    """Apply ``units`` to ``x``; return the output on the stage of the last unit, None elsewhere. Collective.

    All ranks of the pipe must call it.

    Args:
        apply: function from (index of a unit of this rank, output of the previous unit) to the unit's output.
        shape: shape of ``x`` and of all tensors sent between stages.
        x: input of the first unit.
        source_stage: the stage that has ``x``; None if the first unit has no input.
    """
    previous_stage = source_stage
    for stage, indices in _group_by_stage(model_stage, units):
        if previous_stage is not None and previous_stage != stage:
            x = _send_hidden_states(model_stage, x, shape, previous_stage, stage)
        if model_stage.pipe.rank == stage:
            for unit_idx in indices:
                x = apply(unit_idx, x)
        previous_stage = stage
    return x if model_stage.pipe.rank == previous_stage else None


def _group_by_stage(model_stage: ModelStage, units: range) -> Iterator[tuple[int, list[int]]]:
    """Yield (stage, unit indices) for each run of consecutive units on the same stage."""
    for stage, indices in groupby(units, lambda unit_idx: model_stage.stages[unit_idx]):
        yield stage, list(indices)


def _send_hidden_states(
    model_stage: ModelStage, x: torch.Tensor | None, shape: tuple[int, ...], source_stage: int, target_stage: int
) -> torch.Tensor | None:
    pipe = model_stage.pipe
    if pipe.rank == source_stage:
        assert x is not None
        dist.send(x.contiguous(), pipe.ranks[target_stage], group=pipe.handle)
    elif pipe.rank == target_stage:
        x = torch.empty(shape, dtype=model_stage.dtype, device=model_stage.device)
        dist.recv(x, pipe.ranks[source_stage], group=pipe.handle)
        return x
    return None


def broadcast_from_stage(
    model_stage: ModelStage, x: torch.Tensor | None, shape: tuple[int, ...], source_stage: int
) -> torch.Tensor:
    """Broadcast ``x`` from ``source_stage`` to every stage and return it. Collective over the pipe."""
    if x is None or model_stage.pipe.rank != source_stage:
        x = torch.empty(shape, dtype=model_stage.dtype, device=model_stage.device)
    if model_stage.pipe.size > 1:
        dist.broadcast(x.contiguous(), model_stage.pipe.ranks[source_stage], group=model_stage.pipe.handle)
    return x


def broadcast_tokens(model_stage: ModelStage, tokens: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
    """Broadcast ``tokens`` [num_tokens] from the last stage to all stages and return them. Collective over the pipe."""
    if tokens is None:
        tokens = torch.empty(num_tokens, dtype=torch.long, device=model_stage.device)
    if model_stage.pipe.size > 1:
        dist.broadcast(tokens, model_stage.pipe.ranks[model_stage.stages[-1]], group=model_stage.pipe.handle)
    return tokens


# Incremental forward passes with KV caches, for decoders and T5.


class CachedModel(ABC):
    """Model that processes rows of tokens in several passes and caches the keys and values of earlier passes.

    Args:
        capacity: maximum number of tokens in a row.
        body_units: indices of the units from the embedding to the last layer; norm and head follow.
    """

    def __init__(self, model_stage: ModelStage, capacity: int, body_units: range) -> None:
        self.model_stage, self.body_units = model_stage, body_units
        self.slots = KVCacheSlots(capacity)
        self.caches = {idx: LayerKVCache(self.slots) for idx in body_units[1:] if idx in model_stage.units}

    def read(self, tokens: torch.Tensor, positions: torch.Tensor, last_idx: torch.Tensor) -> torch.Tensor | None:
        """Run one pass; return the logits at token ``last_idx`` of each row on the last stage. Collective.

        Shapes:
            tokens, positions [b, s], the same on every rank of the replica; the first pass starts at position 0
            last_idx [b], indices along s
            output   [b, v/t]
        """
        lengths = None if bool((last_idx == tokens.shape[1] - 1).all()) else last_idx + 1
        x = self.hidden_states(tokens, positions, lengths)
        if x is not None:
            x = x[last_idx.to(x.device), torch.arange(len(last_idx), device=x.device)]  # [b, h]
        return self.logits(x, len(last_idx))

    def hidden_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the last layer's output for ``tokens`` on the stage of that layer, None elsewhere. Collective.

        Args:
            lengths: [b], number of tokens of each row, which is padded at the end; None: no row has padding, or there
                are no further passes.

        Shapes:
            tokens, positions [b, s]
            output [s, b, h], or with ``sequence_parallel`` this rank's shard, [s/t, b, h]
        """
        model_stage, (batch_size, length) = self.model_stage, tokens.shape
        self.tokens, self.positions = tokens.to(model_stage.device), positions.to(model_stage.device)
        self.slots.advance(self.positions, None if lengths is None else lengths.to(model_stage.device))
        num_shards = model_stage.parallel.group.size if model_stage.parallel.sequence_parallel else 1
        return forward_through_stages(
            model_stage,
            self.body_units,
            self._apply_unit,
            (length // num_shards, batch_size, model_stage.args.hidden_size),
        )

    def logits(self, x: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
        """Return the logits of hidden states on the last stage, None elsewhere. Collective.

        Shapes:
            x      [num_rows, h] on the stage of the last layer, None elsewhere; with ``sequence_parallel`` this rank's
                   shard, [num_rows/t, h]
            output [num_rows, v/t]
        """
        model_stage, output_units = self.model_stage, range(self.body_units.stop, self.body_units.stop + 2)
        num_shards = model_stage.parallel.group.size if model_stage.parallel.sequence_parallel else 1
        shape = (num_rows // num_shards, 1, model_stage.args.hidden_size)
        x = None if x is None else x.unsqueeze(1)
        logits = forward_through_stages(
            model_stage, output_units, self._apply_unit, shape, x, source_stage=model_stage.stages[self.body_units[-1]]
        )
        return None if logits is None else logits[:, 0]

    def keep(self, row_indices: list[int]) -> None:
        """Keep only the rows ``row_indices`` of the batch in the caches."""
        kept_rows = torch.tensor(row_indices, device=self.model_stage.device)
        for cache in self.caches.values():
            cache.keep(kept_rows)

    def _apply_unit(self, unit_idx: int, x: torch.Tensor | None) -> torch.Tensor:
        unit = self.model_stage.units[unit_idx]
        if unit_idx == self.body_units.start:
            return self.embed(unit)
        assert x is not None
        if unit_idx in self.body_units:
            return self.apply_layer(unit_idx, unit, x)
        if unit_idx == self.body_units.stop:
            normed = getattr(unit, "norm", unit)(x)
            return normed.x if isinstance(normed, MTPInput) else normed
        return materialize_logits(unit(x) if isinstance(unit, Head) else self.tied_logits(x, unit.word.weight))

    @abstractmethod
    def embed(self, unit: torch.nn.Module) -> torch.Tensor:
        """Return the hidden states [s, b, h] of ``self.tokens`` at ``self.positions``."""

    @abstractmethod
    def apply_layer(self, unit_idx: int, unit: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [s, b, h] after this layer."""

    @abstractmethod
    def tied_logits(self, x: torch.Tensor, weight: torch.Tensor) -> Logits:
        """Return the logits [s, b, v/t] of a head tied to the word embedding."""


# Generation with decoders.


def generation_layers(family: str) -> DecoderLayers:
    """Return the layer types with which decoders of ``family`` generate text.

    Raises:
        ValueError: the family does not support generation.
    """
    generation = model_parts(family).generation
    if generation is None:
        raise ValueError(f"the family {family} does not support text generation: its MODEL has no generation layers")
    return generation


TokenRows = Sequence[Sequence[int]]


def pad_rows(rows: TokenRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows at the end to one length with token 0; return the tokens and the index of each row's last token.

    Shapes:
        output [b, s], [b]
    """
    max_length = max(len(row) for row in rows)
    tokens = torch.tensor([[*row, *[0] * (max_length - len(row))] for row in rows])
    return tokens, torch.tensor([len(row) - 1 for row in rows])


class CachedDecoder(CachedModel):
    """Cached decoder. Rows are padded at the end, which does not affect earlier tokens because all mixers are causal.

    The caches of recurrent mixers exclude padding (``KVCacheSlots.lengths``).
    """

    def __init__(self, model_stage: ModelStage, capacity: int) -> None:
        super().__init__(model_stage, capacity, range(model_stage.args.num_layers + 1))
        self.decoder = generation_layers(model_stage.args.family)
        self.masks = Masks(model_stage.args, model_stage.parallel)

    def embed(self, unit: torch.nn.Module) -> torch.Tensor:
        # Called through the class, because pipeline embeddings override ``forward`` with a different signature.
        x: torch.Tensor = self.decoder.embedding.forward(unit, self.tokens, self.positions)
        return x

    def apply_layer(self, unit_idx: int, unit: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        mask = self.masks.get_cached_mask(self.slots, x.dtype, bool(unit.has_window))
        x = self.decoder.layer.forward(unit, x, mask, self.caches[unit_idx], None, mask)
        return x

    def tied_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return tied_head_logits(x, weight, self.model_stage.args, self.model_stage.parallel)
