"""Costs: what is asked of every model's costs; work of a unit. No torch."""

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

# What a rank does in a unit for one micro-batch: products, operations, and sums over the tensor ranks.

OPERATIONS = {"layer": 24, "experts": 30, "decoder": 34, "embedding": 6, "norm": 2, "head": 10}
"""Kernels of a unit's forward, about; a backward has twice as many. ``experts``: what they add to a layer's."""


@dataclass(frozen=True)
class Product:
    """``number`` products of [rows, inner] and [inner, columns].

    Args:
        is_column: with a weight whose columns are cut over the tensor ranks, so that they sum the input's gradient.
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
        """Numbers in the matrices [inner, columns]."""
        return round(self.inner * self.columns * self.number)

    @property
    def side(self) -> float:
        """The side of a cube with as many multiplications as one of them."""
        return float(self.rows * self.inner * self.columns) ** (1 / 3)


@dataclass(frozen=True)
class Work:
    """The forward of a unit on one rank.

    Args:
        products: with weights; backward has two for each.
        core: those of attention between queries, keys and values, which selective recompute runs again.
        operations: kernels that are started.
        sums: bytes of each sum of activations over the tensor ranks in forward, ``back`` of those in backward.
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
    """Return the FLOPs of all of them."""
    return sum(product.flops for product in products)


def scores(queries: int, keys: int, size: int, number: float) -> tuple[Product, Product]:
    """Return the two products of ``number`` heads: with keys of ``size``, and of the probabilities with values."""
    return Product(queries, size, keys, number), Product(queries, keys, size, number)


# What is asked of every model's costs, from lists over its units: embeddings, layers, norms, head, in their order.

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Shared:
    """An amount that all who hold any of ``units`` hold once: tied weights, the encoder's output."""

    amount: int
    units: tuple[int, ...]

    def is_held(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return whether one of the pieces (first, one past the last) has any of the units."""
        return any(start <= unit < stop for unit in self.units for start, stop in pieces)


class Costs(ABC):
    """Parameters, FLOPs, memory and stages of one model at the lengths in use; each family fills in the lists.

    ``bounds`` are always those of pieces, in units, as ``stage_bounds`` returns them; ``tds.schedule.Placement`` says
    where they lie.
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
        """Return the parameters of each unit on one of ``tensor`` ranks, without those that units share."""

    @abstractmethod
    def shared_parameters(self, tensor: int = 1) -> list[Shared]:
        """Return the parameters that units share."""

    @abstractmethod
    def unit_kept(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, is_joined: bool = False
    ) -> list[Kept]:
        """Return what each unit keeps of ``samples`` samples in numbers of ``width`` bytes.

        Args:
            sequence: over how many tensor ranks tokens are cut between the products: t with sequence parallelism.
            is_joined: the inputs of the products are kept whole nevertheless; see ``megatron.mpu.layers``.
        """

    def attention_work(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, is_joined: bool = False
    ) -> int:
        """Return the bytes that a backward through a layer's attention works in, above what the layer has let go."""
        return 0

    def context_messages(self, samples: int, tensor: int, width: int) -> tuple[int, ...]:
        """Return the bytes of each exchange of a layer's attention over the context ranks, of all of them together."""
        return ()

    def expert_messages(self, samples: int, tensor: int, width: int) -> list[tuple[int, ...]]:
        """Return for each unit the bytes that a rank gives to each all-to-all of a forward, of rows of experts."""
        return [()] * self.num_units

    def apart_parameters(self, tensor: int = 1) -> list[int]:
        """Return the parameters of each unit of which not all data x context ranks have replicas."""
        return [0] * self.num_units

    @property
    def expert_ranks(self) -> int:
        """Ranks that share these out; every so many-th has the same."""
        return 1

    def shared_out(self, ranks: int) -> Costs:
        """Return the same with experts shared out over so many ranks; without experts nothing changes."""
        return self

    @abstractmethod
    def unit_work(self, samples: int, tensor: int, width: int) -> list[Work]:
        """Return what each unit makes one of ``tensor`` ranks do of ``samples`` samples."""

    @abstractmethod
    def shared_kept(self, samples: int, tensor: int, width: int) -> list[Shared]:
        """Return the bytes that units of a piece keep together."""

    @abstractmethod
    def logit_bytes(self, samples: int, tensor: int, width: int) -> int:
        """Return the bytes of the logits and their fp32 softmax."""

    @abstractmethod
    def loss_bytes(self, samples: int, tensor: int, width: int, *, forwards: int = 1) -> int:
        """Return the bytes that the logits of micro-batches in flight take: all of them, or a chunk at a time."""

    @abstractmethod
    def stage_bounds(self, stages: int, chunks: int = 1, placement: str = LOOP) -> list[int]:
        """Return the bounds of ``stages * chunks`` pieces; each has a layer at least.

        With one chunk the slowest stage is as fast as contiguous layers allow; with more, no piece costs more than one
        must, then stages are as even as can be.

        Raises:
            ValueError: fewer layers than pieces.
        """

    def boundary_bytes(self, bound: int, samples: int, width: int) -> int:
        """Return the bytes that cross between the units ``bound - 1`` and ``bound``: a hidden state."""
        return max(unit.input for unit in self.unit_kept(samples, 1, width))

    @property
    def num_units(self) -> int:
        return len(self.unit_names)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once, padded rows of the vocabulary not at all."""
        return self.stage_parameters([0, self.num_units])[0]

    @property
    def num_active_parameters(self) -> int:
        """Those of them that a token goes through: of experts k of each layer, with router, embeddings and head."""
        return self.num_parameters

    def flops_per_step(self, global_batch_size: int) -> float:
        """Return the FLOPs of a step over that many samples."""
        return global_batch_size * self.flops_per_sample

    def piece_costs(self, bounds: Sequence[int]) -> list[float]:
        """Return the cost of each piece, in layers."""
        costs = self.unit_costs
        return [sum(costs[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]

    def stage_parameters(
        self, bounds: Sequence[int], tensor: int = 1, stages: int | None = None, placement: str = LOOP
    ) -> list[int]:
        """Return the parameters that one rank of each stage holds; None for ``stages``: one for each piece."""
        number = stages or len(bounds) - 1
        units, shared = self.unit_parameters(tensor), self.shared_parameters(tensor)
        return [_held(units, shared, chunks_on(bounds, number, stage, placement)) for stage in range(number)]

    def stage_apart(
        self, bounds: Sequence[int], tensor: int = 1, stages: int | None = None, placement: str = LOOP
    ) -> list[int]:
        """Return the parameters of each stage of which not all data x context ranks have replicas."""
        number, units = stages or len(bounds) - 1, self.apart_parameters(tensor)
        return [_held(units, [], chunks_on(bounds, number, stage, placement)) for stage in range(number)]

    def stage_matrices(
        self, bounds: Sequence[int], stages: int | None = None, tensor: int = 1, placement: str = LOOP
    ) -> list[list[Product]]:
        """Return the products with a layer's weights on each stage, of one of ``tensor`` ranks."""
        number = stages or len(bounds) - 1
        works, is_layer = self.unit_work(1, tensor, 4), [name.split()[-1].isdigit() for name in self.unit_names]
        return [
            [one for start, stop in chunks_on(bounds, number, stage, placement) for n in range(start, stop)
             if is_layer[n] for one in works[n].products]
            for stage in range(number)
        ]  # fmt: skip

    def gathered_parameters(self, pieces: Sequence[tuple[int, int]], tensor: int = 1, layers_at_once: int = 1) -> int:
        """Return what ZeRO 3 has gathered of the units of ``pieces`` at most: all but layers, and some of the largest.

        A unit whose name ends in a number is a layer.
        """
        units = self.unit_parameters(tensor)
        is_layer = [name.split()[-1].isdigit() for name in self.unit_names]
        layers = [units[n] for start, stop in pieces for n in range(start, stop) if is_layer[n]]
        in_all = _held(units, self.shared_parameters(tensor), pieces)
        return in_all - sum(layers) + layers_at_once * max(layers, default=0)

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
        """Return an estimate of what one rank of each stage holds, with the micro-batches that its schedule keeps.

        A stage's chunks count as alike. Allocator, kernels' work space and Python are not counted.

        Args:
            num_bf16_states: of AdamW's two.
            zero: how replicas share what they hold.
            group_size: micro-batches of a round of chunks; 0: as many as stages.
            is_selective: the core of each attention is recomputed.
            sequence: as of ``unit_kept``.
            waiting: of what is recomputed, with ``checkpoint_activations``.
            is_compiled: each layer; as under a schedule that splits the backward, products keep their inputs joined.
        """
        stages = (len(bounds) - 1) // chunks
        state = State.of(dtype, optimizer, num_bf16_states)
        sizes = (micro_batch_size, tensor, state.width)
        lie = Placement(stages, chunks, placement)
        names = candidates(schedule, chunks, placement)
        is_joined = is_compiled or any(map(splits, names))
        units, shared = self.unit_kept(*sizes, sequence, is_joined=is_joined), self.shared_kept(*sizes)
        room = self.attention_work(*sizes, sequence, is_joined=is_joined)
        core = max(unit.core for unit in units) if is_selective else 0
        units = [unit.without_core() for unit in units] if is_selective else units
        hidden = max(unit.input for unit in units)
        small = self.small_parameters(tensor, state.gradient)
        products = self.stage_matrices(bounds, stages, tensor, placement) if state.saved else [[]] * stages
        matrices = [sum(one.weights for one in own) for own in products]
        apart = self.stage_apart(bounds, tensor, stages, placement)
        estimates = []
        for stage, held in enumerate(self.stage_parameters(bounds, tensor, stages, placement)):
            pieces = chunks_on(bounds, stages, stage, placement)
            forwards = in_flight(stages, num_micro_batches, schedule, chunks, stage, placement, group_size)
            in_all = sum(_held([unit.full for unit in units], shared, [piece]) for piece in pieces)
            has_layers = any(units[n].input for start, stop in pieces for n in range(start, stop))
            at_work, work = (core, room) if has_layers else (0, 0)
            # The head is in one chunk, so of "auto" those count that may run here, each as with one chunk. In a V the
            # loss goes backward at once.
            losses = max(in_flight(stages, num_micro_batches, name, 1, stage) for name in names)
            losses = 1 if placement == V else losses
            logits = self.loss_bytes(*sizes, forwards=losses) if stage == lie.last_stage else 0
            gathered = self.gathered_parameters(pieces, tensor, zero.layers) if zero.stage == 3 else 0
            at_work += max(work - logits, 0)  # the logits are gone when attention goes backward
            kept = forwards * in_all // chunks + at_work
            memory = state.memory(held, kept, logits, zero, gathered, matrices[stage], apart[stage], self.expert_ranks)
            if checkpoint_activations:
                read = sum(_held([0] * len(units), shared, [piece]) for piece in pieces)
                parts = [units[start:stop] for start, stop in pieces]
                memory = waiting.placed(memory, parts, forwards / chunks, read, work)
            flying = CommunicationBuffers(
                small=sum(small[n] for start, stop in pieces for n in range(start, stop)),
                message=hidden if stages > 1 else 0,
                gathered=hidden * sequence if sequence > 1 else 0,
            )
            estimates.append(flying.placed(memory, state.gradient, zero))
        return estimates

    def small_parameters(self, tensor: int, width: int) -> list[int]:
        """Return the parameters of each unit, without shared ones, in weights that share a bucket of sums.

        Args:
            width: bytes of a gradient.
        """
        limit = BUCKET_BYTES // width
        works = self.unit_work(1, tensor, width)
        large = [sum(one.weights for one in own.products if one.inner * one.columns > limit) for own in works]
        return [max(own - big, 0) for own, big in zip(self.unit_parameters(tensor), large, strict=True)]


def _held(units: Sequence[int], shared: Sequence[Shared], pieces: Sequence[tuple[int, int]]) -> int:
    """Return the sum of ``units`` over the pieces, and of what is shared there."""
    own = sum(units[unit] for start, stop in pieces for unit in range(start, stop))
    return own + sum(one.amount for one in shared if one.is_held(pieces))


# What a model costs: parameters, FLOPs, memory; and how its units are shared out over stages. Arithmetic only.
#
# ``cost.of(config)`` returns the ``Costs`` of the model of a configuration, of any family.
#
# Letters as in docs/glossary.md: ``L`` layers, ``h`` hidden, ``a`` heads, ``d`` size of a head, ``f`` feed-forward,
# ``v`` vocabulary, ``s`` sequence, ``b`` micro-batch, ``t`` tensor size, ``p`` stages. Forward and backward: 3 x
# forward.
