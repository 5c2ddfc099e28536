"""Costs: the interface of every model's costs; Work: the work of a unit. Does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron.costs.memory import (
    BUCKET_BYTES,
    PLAIN,
    CommunicationBuffers,
    Memory,
    SavedActivations,
    State,
    Zero,
)
from megatron.costs.memory import Kept as Kept
from tds.partition import chunks_on
from tds.schedule import LOOP, Placement, V
from tds.schedule.simulate import candidates, in_flight, splits

# Work of a rank in a unit for one micro-batch: products, kernels, and all-reduces over the tensor ranks.

OPERATIONS = {"layer": 24, "experts": 30, "decoder": 34, "embedding": 6, "norm": 2, "head": 10}
"""Approximate number of kernels in a unit's forward; a backward has twice as many. ``experts`` add to ``layer``."""


@dataclass(frozen=True)
class Product:
    """``number`` matrix products of [rows, inner] and [inner, columns].

    Args:
        is_column: the weight is sharded by columns over the tensor ranks, which all-reduce the input's gradient.
    """

    rows: int
    inner: int
    columns: int
    number: float = 1.0
    is_column: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns * self.number

    @property
    def weights(self) -> int:
        """Number of elements of the matrices [inner, columns]."""
        return round(self.inner * self.columns * self.number)

    @property
    def side(self) -> float:
        """Geometric mean of rows, inner and columns, by which the planner looks up the speed of a product."""
        return float(self.rows * self.inner * self.columns) ** (1 / 3)


@dataclass(frozen=True)
class Work:
    """Work of the forward of a unit on one rank.

    Args:
        products: products with weights; backward has two products for each.
        core: products of attention between queries, keys and values, which selective recompute runs again.
        operations: number of kernels.
        sums: bytes of each all-reduce of activations over the tensor ranks in forward; ``back``: in backward.
    """

    products: tuple[Product, ...] = ()
    core: tuple[Product, ...] = ()
    operations: int = 0
    sums: tuple[int, ...] = ()
    back: tuple[int, ...] = ()

    @property
    def flops(self) -> float:
        return flops_of((*self.products, *self.core))


def flops_of(products: Sequence[Product]) -> float:
    """Return the FLOPs of all ``products``."""
    return sum(product.flops for product in products)


def scores(queries: int, keys: int, size: int, number: float) -> tuple[Product, Product]:
    """Return the two products of attention: queries with keys, and probabilities with values.

    Args:
        queries, keys: number of queries and of keys per head.
        size: elements of a query or key of one head.
        number: number of heads.
    """
    return Product(queries, size, keys, number), Product(queries, keys, size, number)


# Interface of every model's costs, with lists over its units in order: embeddings, layers, norms, head.

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Shared:
    """An amount that a rank holds once if it holds any of ``units``: tied weights, the encoder's output."""

    amount: int
    units: tuple[int, ...]

    def is_held(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return True if one of the pieces (first unit, one past the last) contains any of the units."""
        return any(start <= unit < stop for unit in self.units for start, stop in pieces)


class Costs(ABC):
    """Parameters, FLOPs, memory and stages of one model for given sequence lengths.

    Each model family implements the abstract methods, most of which return a list over the units. A piece is a range of
    consecutive units: a stage, or a chunk of one. ``bounds`` are the bounds of all pieces, in units, as returned by
    ``stage_bounds``. ``tds.schedule.Placement`` assigns pieces to stages.
    """

    @property
    @abstractmethod
    def unit_names(self) -> list[str]:
        """Name of each unit."""

    @property
    @abstractmethod
    def unit_costs(self) -> list[float]:
        """Cost of each unit, with one layer (T5: of the encoder) as 1.0."""

    @property
    @abstractmethod
    def flops_per_sample(self) -> float:
        """FLOPs of forward and backward for one sample; recompute is not counted."""

    @abstractmethod
    def unit_parameters(self, tensor: int = 1) -> list[int]:
        """Return the parameters of each unit on one of ``tensor`` ranks, excluding ``shared_parameters``."""

    @abstractmethod
    def shared_parameters(self, tensor: int = 1) -> list[Shared]:
        """Return the parameters that several units share."""

    @abstractmethod
    def unit_kept(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, is_joined: bool = False
    ) -> list[Kept]:
        """Return the bytes that each unit saves for backward of one micro-batch, on one of ``tensor`` ranks.

        Args:
            samples: samples of a micro-batch.
            width: bytes per element.
            sequence: number of tensor ranks over which tokens are sharded between products: t with sequence
                parallelism.
            is_joined: products nevertheless save their gathered inputs; see ``megatron.mpu.layers``.
        """

    def attention_work(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, is_joined: bool = False
    ) -> int:
        """Return the scratch bytes of attention in backward, less the memory that its layer has freed by then."""
        return 0

    def context_messages(self, samples: int, tensor: int, width: int) -> tuple[int, ...]:
        """Return the bytes of each exchange of a layer's attention over the context ranks, summed over these ranks."""
        return ()

    def expert_messages(self, samples: int, tensor: int, width: int) -> list[tuple[int, ...]]:
        """Return the bytes that a rank passes to each all-to-all of expert rows in a forward, for each unit."""
        return [()] * self.num_units

    def apart_parameters(self, tensor: int = 1) -> list[int]:
        """Return the parameters of each unit that are not replicated on all data x context ranks."""
        return [0] * self.num_units

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which the experts of a layer are distributed."""
        return 1

    def shared_out(self, ranks: int) -> Costs:
        """Return the costs with experts distributed over ``ranks`` ranks; unchanged if there are no experts."""
        return self

    @abstractmethod
    def unit_work(self, samples: int, tensor: int, width: int) -> list[Work]:
        """Return the work of each unit on one of ``tensor`` ranks for ``samples`` samples."""

    @abstractmethod
    def shared_kept(self, samples: int, tensor: int, width: int) -> list[Shared]:
        """Return the bytes that the units of a piece save only once for all of them, such as the encoder's output."""

    @abstractmethod
    def logit_bytes(self, samples: int, tensor: int, width: int) -> int:
        """Return the bytes of the logits and of their fp32 softmax."""

    @abstractmethod
    def loss_bytes(self, samples: int, tensor: int, width: int, *, forwards: int = 1) -> int:
        """Return the bytes of the logits of all micro-batches in flight, in full or one chunk at a time."""

    @abstractmethod
    def stage_bounds(self, stages: int, chunks: int = 1, placement: str = LOOP) -> list[int]:
        """Return the bounds of ``stages * chunks`` pieces, each with at least one layer.

        With one chunk per stage, the cost of the slowest stage is minimal. With more chunks, the largest cost of a
        piece is minimal, and under this condition the costs of stages are as even as possible.

        Raises:
            ValueError: there are fewer layers than pieces.
        """

    def boundary_bytes(self, bound: int, samples: int, width: int) -> int:
        """Return the bytes of the hidden state that is sent from unit ``bound - 1`` to unit ``bound``."""
        return max(unit.input for unit in self.unit_kept(samples, 1, width))

    @property
    def num_units(self) -> int:
        return len(self.unit_names)

    @property
    def num_parameters(self) -> int:
        """Parameters of the full model. A tied head counts once; padded rows of the vocabulary do not count."""
        return self.stage_parameters([0, self.num_units])[0]

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token uses: k experts of each layer, and the router, embeddings and head."""
        return self.num_parameters

    def flops_per_step(self, global_batch_size: int) -> float:
        """Return the FLOPs of a step over ``global_batch_size`` samples."""
        return global_batch_size * self.flops_per_sample

    def piece_costs(self, bounds: Sequence[int]) -> list[float]:
        """Return the cost of each piece, in units of one layer."""
        costs = self.unit_costs
        return [sum(costs[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]

    def stage_parameters(
        self, bounds: Sequence[int], tensor: int = 1, stages: int | None = None, placement: str = LOOP
    ) -> list[int]:
        """Return the parameters that one rank of each stage holds; ``stages`` None: one stage per piece."""
        num_stages = stages or len(bounds) - 1
        units, shared = self.unit_parameters(tensor), self.shared_parameters(tensor)
        return [_held(units, shared, chunks_on(bounds, num_stages, stage, placement)) for stage in range(num_stages)]

    def stage_apart(
        self, bounds: Sequence[int], tensor: int = 1, stages: int | None = None, placement: str = LOOP
    ) -> list[int]:
        """Return the parameters of each stage that are not replicated on all data x context ranks."""
        num_stages, units = stages or len(bounds) - 1, self.apart_parameters(tensor)
        return [_held(units, [], chunks_on(bounds, num_stages, stage, placement)) for stage in range(num_stages)]

    def stage_matrices(
        self, bounds: Sequence[int], stages: int | None = None, tensor: int = 1, placement: str = LOOP
    ) -> list[list[Product]]:
        """Return the products with weights of layers on each stage, for one of ``tensor`` ranks."""
        num_stages = stages or len(bounds) - 1
        works, is_layer = self.unit_work(1, tensor, 4), [name.split()[-1].isdigit() for name in self.unit_names]
        return [
            [product for start, stop in chunks_on(bounds, num_stages, stage, placement) for n in range(start, stop)
             if is_layer[n] for product in works[n].products]
            for stage in range(num_stages)
        ]  # fmt: skip

    def gathered_parameters(self, pieces: Sequence[tuple[int, int]], tensor: int = 1, layers_at_once: int = 1) -> int:
        """Return the maximum number of parameters of the units of ``pieces`` that ZeRO 3 gathers at the same time.

        This is the number of parameters outside of layers plus ``layers_at_once`` times the number of parameters of the
        largest layer. A unit whose name ends in a number is a layer.
        """
        units = self.unit_parameters(tensor)
        is_layer = [name.split()[-1].isdigit() for name in self.unit_names]
        layers = [units[n] for start, stop in pieces for n in range(start, stop) if is_layer[n]]
        total = _held(units, self.shared_parameters(tensor), pieces)
        return total - sum(layers) + layers_at_once * max(layers, default=0)

    def memory_per_stage(
        self,
        bounds: Sequence[int],
        *,
        micro_batch_size: int,
        num_micro_batches: int = 1,
        tensor: int = 1,
        dtype: str = "fp32",
        optimizer: str = "adamw",
        num_bf16_states: int = 0,
        zero: Zero = PLAIN,
        checkpoint_activations: bool = False,
        is_selective: bool = False,
        sequence: int = 1,
        waiting: SavedActivations = SavedActivations(),  # noqa: B008 - frozen
        schedule: str = "1f1b",
        chunks: int = 1,
        placement: str = LOOP,
        group_size: int = 0,
        is_compiled: bool = False,
    ) -> list[Memory]:
        """Return an estimate of the memory of one rank of each stage, with the micro-batches in flight of its schedule.

        Each forward in flight counts the mean activations of the stage's chunks. Overheads of the allocator, of kernels
        and of Python are not counted.

        Args:
            num_bf16_states: number of AdamW's two states that are in bf16.
            zero: sharding and offload of the state.
            group_size: micro-batches of a round of chunks; 0: the number of stages.
            is_selective: the core of each attention is recomputed.
            sequence: see ``unit_kept``.
            waiting: storage of the inputs of recomputed layers, with ``checkpoint_activations``.
            is_compiled: layers are compiled, so that products save their gathered inputs. They also do so under a
                schedule that splits the backward.
        """
        stages = (len(bounds) - 1) // chunks
        state = State.of(dtype, optimizer, num_bf16_states)
        sizes = (micro_batch_size, tensor, state.width)
        stage_placement = Placement(stages, chunks, placement)
        names = candidates(schedule, chunks, placement)
        is_joined = is_compiled or any(map(splits, names))
        units, shared = self.unit_kept(*sizes, sequence, is_joined=is_joined), self.shared_kept(*sizes)
        attention_scratch = self.attention_work(*sizes, sequence, is_joined=is_joined)
        core = max(unit.core for unit in units) if is_selective else 0
        units = [unit.without_core() for unit in units] if is_selective else units
        hidden = max(unit.input for unit in units)
        small_parameters = self.small_parameters(tensor, state.gradient)
        products = self.stage_matrices(bounds, stages, tensor, placement) if state.saved else [[]] * stages
        matrices = [sum(product.weights for product in stage_products) for stage_products in products]
        num_apart = self.stage_apart(bounds, tensor, stages, placement)
        estimates = []
        for stage, num_held in enumerate(self.stage_parameters(bounds, tensor, stages, placement)):
            pieces = chunks_on(bounds, stages, stage, placement)
            forwards = in_flight(stages, num_micro_batches, schedule, chunks, stage, placement, group_size)
            saved_per_micro_batch = sum(_held([unit.full for unit in units], shared, [piece]) for piece in pieces)
            has_layers = any(units[n].input for start, stop in pieces for n in range(start, stop))
            scratch, stage_attention_scratch = (core, attention_scratch) if has_layers else (0, 0)
            # Only one chunk has the head, so the losses in flight are those of a schedule with one chunk: the maximum
            # over the schedules that "auto" may choose. With the placement V the backward of the loss follows
            # immediately, so only one loss is in flight.
            losses = max(in_flight(stages, num_micro_batches, name, 1, stage) for name in names)
            losses = 1 if placement == V else losses
            logits = self.loss_bytes(*sizes, forwards=losses) if stage == stage_placement.last_stage else 0
            gathered = self.gathered_parameters(pieces, tensor, zero.layers) if zero.stage == 3 else 0
            scratch += max(stage_attention_scratch - logits, 0)  # the logits are freed before the backward of attention
            activations = forwards * saved_per_micro_batch // chunks + scratch
            memory = state.memory(
                num_held, activations, logits, zero, gathered, matrices[stage], num_apart[stage], self.expert_ranks
            )
            if checkpoint_activations:
                read = sum(_held([0] * len(units), shared, [piece]) for piece in pieces)
                units_of_pieces = [units[start:stop] for start, stop in pieces]
                memory = waiting.placed(memory, units_of_pieces, forwards / chunks, read, stage_attention_scratch)
            buffers = CommunicationBuffers(
                small=sum(small_parameters[n] for start, stop in pieces for n in range(start, stop)),
                message=hidden if stages > 1 else 0,
                gathered=hidden * sequence if sequence > 1 else 0,
            )
            estimates.append(buffers.placed(memory, state.gradient, zero))
        return estimates

    def small_parameters(self, tensor: int, width: int) -> list[int]:
        """Return the number of parameters of each unit in weights smaller than a bucket of gradients.

        Parameters that units share are excluded.

        Args:
            width: bytes per element of a gradient.
        """
        limit = BUCKET_BYTES // width
        works = self.unit_work(1, tensor, width)
        large = [
            sum(product.weights for product in unit.products if product.inner * product.columns > limit)
            for unit in works
        ]
        return [max(unit - num_large, 0) for unit, num_large in zip(self.unit_parameters(tensor), large, strict=True)]


def _held(units: Sequence[int], shared: Sequence[Shared], pieces: Sequence[tuple[int, int]]) -> int:
    """Return the sum of ``units`` over the pieces, plus the shared amounts that the pieces hold."""
    total = sum(units[unit] for start, stop in pieces for unit in range(start, stop))
    return total + sum(item.amount for item in shared if item.is_held(pieces))


# ``megatron.models.registry.costs_of(config)`` returns the ``Costs`` of the model of a configuration, of any family.
#
# Letters are those of docs/glossary.md: ``L`` layers, ``h`` hidden, ``a`` heads, ``d`` size of a head, ``f``
# feed-forward, ``v`` vocabulary, ``s`` sequence, ``b`` micro-batch, ``t`` tensor size, ``p`` stages. Forward and
# backward together cost 3 x forward.
