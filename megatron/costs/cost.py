"""Model cost interface (Costs) and work per unit (Work). Does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron.costs.memoize import memoized_list
from megatron.costs.memory import (
    BUCKET_BYTES,
    NO_ZERO,
    CommunicationBuffers,
    Memory,
    SavedActivations,
    State,
    Zero,
)
from megatron.costs.memory import SavedBytes as SavedBytes
from tds.partition import chunks_on
from tds.schedule import LOOP, Placement, V
from tds.schedule.simulate import candidate_schedules, has_split_backwards, in_flight

# One rank's work for one micro-batch in one unit (an embedding, layer, norm or head): matrix products, kernels, and
# all-reduces over the tensor ranks.

OPERATIONS = {"layer": 24, "experts": 30, "recurrent": 120, "decoder": 34, "embedding": 6, "norm": 2, "head": 10}
"""Approximate number of kernels in a unit's forward; backward has twice as many.

A layer with experts also has the kernels of ``experts``, a layer with a recurrent mixer those of ``recurrent``.
"""


@dataclass(frozen=True)
class Product:
    """``count`` matrix products [rows, inner] x [inner, columns].

    Args:
        is_column: the weight is column parallel, so the tensor ranks all-reduce the input gradient.
        is_distributed: the matrices belong to experts whose copies are not exactly those of the data x context ranks.
        is_quantizable: in a layer in FP8 (``Work.fp8_recipe``), output and input gradient are computed in FP8.
    """

    rows: int
    inner: int
    columns: int
    count: float = 1.0
    is_column: bool = False
    is_distributed: bool = False
    is_quantizable: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns * self.count

    @property
    def weights(self) -> int:
        """Number of elements in the matrices [inner, columns]."""
        return round(self.inner * self.columns * self.count)

    @property
    def side(self) -> float:
        """Geometric mean of rows, inner and columns; the planner uses it to look up a product's speed."""
        return float(self.rows * self.inner * self.columns) ** (1 / 3)


@dataclass(frozen=True)
class Work:
    """One rank's work in a unit's forward.

    Args:
        products: products with weights; backward computes two products for each.
        core: attention products without weights (scores and weighted sums), which selective recompute repeats.
        operations: kernel count.
        reduced_bytes: bytes per activation all-reduce over the tensor ranks in forward.
        backward_reduced_bytes: bytes per all-reduce in backward.
        fp8_recipe: recipe of the products that are ``is_quantizable``; "": they are not in FP8.
        maxima_bytes: with FP8, bytes of the row maxima that are all-reduced in addition to each tensor above.
    """

    products: tuple[Product, ...] = ()
    core: tuple[Product, ...] = ()
    operations: int = 0
    reduced_bytes: tuple[int, ...] = ()
    backward_reduced_bytes: tuple[int, ...] = ()
    fp8_recipe: str = ""
    maxima_bytes: int = 0

    @property
    def flops(self) -> float:
        return flops_of((*self.products, *self.core))

    @property
    def fp8_products(self) -> tuple[Product, ...]:
        """The products whose output and input gradient are computed in FP8."""
        return tuple(product for product in self.products if product.is_quantizable) if self.fp8_recipe else ()


def flops_of(products: Sequence[Product]) -> float:
    """Add up the FLOPs of ``products``."""
    return sum(product.flops for product in products)


def scores(queries: int, keys: int, head_size: int, value_size: int, num_heads: float) -> tuple[Product, Product]:
    """Build the two attention products without weights: query-key scores and weighted sums of values.

    Args:
        queries, keys: query and key counts per head.
        head_size, value_size: elements in one head's query or key, and in its value.
        num_heads: head count.
    """
    return Product(queries, head_size, keys, num_heads), Product(queries, keys, value_size, num_heads)


# Model cost interface. Lists have one item per unit, in the order embeddings, layers, norms, head.

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Shared:
    """An amount that counts once on a rank with any of ``units``, such as tied weights or the encoder's output.

    ``lookup_units``: the units that only look up rows of shared weights, so their backward does not read the weights.
    """

    amount: int
    units: tuple[int, ...]
    lookup_units: tuple[int, ...] = ()

    def is_held(self, unit_ranges: Sequence[tuple[int, int]]) -> bool:
        """Check if any range [start, stop) of units contains any of ``units``."""
        return any(start <= unit < stop for unit in self.units for start, stop in unit_ranges)


class Costs(ABC):
    """Parameters, FLOPs, memory and stages for one model with given sequence lengths.

    Each model family implements the abstract methods, most of which return one value per unit. ``tensor`` is
    the tensor size, and results apply to one rank.

    A virtual stage is a range of consecutive units: a pipeline stage, or one of its chunks. ``bounds``, as returned by
    ``stage_bounds``, are the unit indices that delimit the virtual stages. ``tds.schedule.Placement`` assigns virtual
    stages to stages.
    """

    @property
    @abstractmethod
    def unit_names(self) -> list[str]:
        """Unit names."""

    @property
    @abstractmethod
    def unit_costs(self) -> list[float]:
        """Cost per unit relative to one layer (T5: one encoder layer)."""

    @property
    @abstractmethod
    def flops_per_sample(self) -> float:
        """Forward and backward FLOPs per sample, without recompute."""

    @property
    def fp8_share(self) -> float:
        """Share of ``flops_per_sample`` that is computed in FP8."""
        return 0.0

    def fp8_scratch_bytes(self, samples: int, tensor: int) -> int:
        """Return the bytes of temporary tensors of the largest product in FP8."""
        return 0

    def fp8_weight_bytes(self, tensor: int) -> list[int]:
        """Return the bytes of the quantized weights per unit, which the micro-batches of a step share."""
        return [0] * self.num_units

    @abstractmethod
    def unit_parameters(self, tensor: int = 1) -> list[int]:
        """Count the parameters per unit, excluding ``shared_parameters``."""

    @abstractmethod
    def shared_parameters(self, tensor: int = 1) -> list[Shared]:
        """Count the parameters in weights that several units share."""

    @abstractmethod
    def unit_saved_bytes(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, saves_gathered_inputs: bool = False
    ) -> list[SavedBytes]:
        """Compute the bytes that each unit saves for one micro-batch's backward.

        Args:
            samples: samples per micro-batch.
            width: bytes per element.
            sequence: ranks over which sequence parallelism shards the activations between products by token:
                ``tensor``, or 1 without sequence parallelism.
            saves_gathered_inputs: products save their all-gathered inputs instead of gathering them again in
                backward; see ``megatron.mpu.layers``.
        """

    def attention_scratch_bytes(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, saves_gathered_inputs: bool = False
    ) -> int:
        """Compute attention's scratch bytes in backward, minus the memory that its layer has freed before."""
        return 0

    @property
    def saves_context_messages(self) -> bool:
        """True if tensors gathered over the context ranks are saved for backward instead of being gathered again."""
        return False

    def context_messages(self, samples: int, tensor: int, width: int, unit: int = 1) -> tuple[int, ...]:
        """Return the bytes of each all-gather in the attention of ``unit``, over all ranks of the group.

        The group is all context ranks if ``gathers_over_all_context_ranks``, otherwise those with different queries:
        one of each group of ``context_head_ranks``.
        """
        return ()

    def head_messages(self, samples: int, tensor: int, width: int, unit: int = 1) -> tuple[int, ...]:
        """Return the bytes of each all-to-all of heads in the attention of ``unit``, over all context ranks."""
        return ()

    def context_head_ranks(self, unit: int = 1) -> int:
        """Return the number of consecutive context ranks over which the attention of ``unit`` distributes heads."""
        return 1

    @property
    def gathers_over_all_context_ranks(self) -> bool:
        """True if ``context_messages`` are gathered over all context ranks, for any ``context_head_ranks``."""
        return False

    def state_messages(self, samples: int, tensor: int, width: int, unit: int) -> tuple[int, ...]:
        """Return the bytes of each all-gather over the context ranks in the recurrent mixer of ``unit``."""
        return ()

    def expert_messages(self, samples: int, tensor: int, width: int) -> list[tuple[int, ...]]:
        """Return, for each unit, a rank's input size in bytes for each all-to-all of expert rows in forward."""
        return [()] * self.num_units

    def distributed_parameters(self, tensor: int = 1) -> list[int]:
        """Count the parameters per unit whose copies are not exactly those of the data x context ranks: experts."""
        return [0] * self.num_units

    def expert_copies(self, replicas: int, tensor: int = 1) -> int:
        """Return the number of ranks that hold the same shard of the same experts, with ``replicas`` replicas."""
        return replicas

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which a layer's experts are distributed."""
        return 1

    def with_expert_ranks(self, ranks: int) -> Costs:
        """Return the costs with experts distributed over ``ranks`` ranks; unchanged if there are no experts."""
        return self

    @abstractmethod
    def unit_work(self, samples: int, tensor: int, width: int) -> list[Work]:
        """Compute the work per unit for a micro-batch with ``samples`` samples."""

    @abstractmethod
    def shared_saved_bytes(self, samples: int, tensor: int, width: int) -> list[Shared]:
        """Compute the bytes that all units in a virtual stage share and save once, such as the encoder's output."""

    @abstractmethod
    def logit_bytes(self, samples: int, tensor: int, width: int) -> int:
        """Compute the bytes for the logits and their fp32 softmax."""

    @abstractmethod
    def loss_bytes(self, samples: int, tensor: int, width: int, *, forwards: int = 1) -> int:
        """Compute logit and loss bytes for ``forwards`` micro-batches in flight, with or without chunking."""

    @abstractmethod
    def stage_bounds(self, stages: int, chunks: int = 1, placement: str = LOOP) -> list[int]:
        """Choose the bounds for ``stages * chunks`` virtual stages, each with at least one layer.

        With one chunk per stage, the bounds minimize the slowest stage's cost. With more chunks, they minimize the
        largest virtual stage cost first and the differences between stages second.

        Raises:
            ValueError: there are fewer layers than virtual stages.
        """

    def boundary_bytes(self, bound: int, samples: int, width: int) -> int:
        """Return the size of the hidden state sent from unit ``bound - 1`` to unit ``bound``, in bytes."""
        return max(unit.input for unit in self.unit_saved_bytes(samples, 1, width))

    @property
    def num_units(self) -> int:
        return len(self.unit_names)

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the full model. A tied head counts once; vocabulary padding is not counted."""
        return self.stage_parameters([0, self.num_units])[0]

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token uses: all except the experts to which it is not routed."""
        return self.num_parameters

    def flops_per_step(self, global_batch_size: int) -> float:
        """Return the FLOPs per step over ``global_batch_size`` samples."""
        return global_batch_size * self.flops_per_sample

    def chunk_costs(self, bounds: Sequence[int]) -> list[float]:
        """Compute each virtual stage's cost relative to one layer."""
        costs = self.unit_costs
        return [sum(costs[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]

    def stage_parameters(
        self, bounds: Sequence[int], tensor: int = 1, stages: int | None = None, placement: str = LOOP
    ) -> list[int]:
        """Count the parameters on one rank per stage; ``stages`` None: one stage per virtual stage."""
        num_stages = stages or len(bounds) - 1
        units, shared = self.unit_parameters(tensor), self.shared_parameters(tensor)
        return [
            _sum_over_ranges(units, shared, chunks_on(bounds, num_stages, stage, placement))
            for stage in range(num_stages)
        ]

    def stage_distributed_parameters(
        self, bounds: Sequence[int], tensor: int = 1, stages: int | None = None, placement: str = LOOP
    ) -> list[int]:
        """Count ``distributed_parameters`` per stage."""
        num_stages, units = stages or len(bounds) - 1, self.distributed_parameters(tensor)
        return [
            _sum_over_ranges(units, [], chunks_on(bounds, num_stages, stage, placement)) for stage in range(num_stages)
        ]

    def stage_matrices(
        self, bounds: Sequence[int], stages: int | None = None, tensor: int = 1, placement: str = LOOP
    ) -> list[list[Product]]:
        """List the products with weights in each stage's layers."""
        num_stages = stages or len(bounds) - 1
        works, is_layer = self.unit_work(1, tensor, 4), [name.split()[-1].isdigit() for name in self.unit_names]
        return [
            [product for start, stop in chunks_on(bounds, num_stages, stage, placement) for n in range(start, stop)
             if is_layer[n] for product in works[n].products]
            for stage in range(num_stages)
        ]  # fmt: skip

    def gathered_parameters(
        self,
        unit_ranges: Sequence[tuple[int, int]],
        tensor: int = 1,
        layers_at_once: int = 1,
        *,
        has_experts: bool = True,
    ) -> int:
        """Find the maximum parameter count that ZeRO 3 gathers at the same time without a pipeline.

        This is the parameter count outside of layers plus that of the ``layers_at_once`` successive layers with the
        most parameters. Units whose names end in a number are layers. For ``has_experts``, see
        ``stage_gathered_parameters``.
        """
        experts = [0] * len(self.unit_names) if has_experts else self.distributed_parameters(tensor)
        units = [size - other for size, other in zip(self.unit_parameters(tensor), experts, strict=True)]
        is_layer = [name.split()[-1].isdigit() for name in self.unit_names]
        layers = [units[n] for start, stop in unit_ranges for n in range(start, stop) if is_layer[n]]
        total = _sum_over_ranges(units, self.shared_parameters(tensor), unit_ranges)
        windows = [sum(layers[n : n + layers_at_once]) for n in range(len(layers))]
        return total - sum(layers) + max(windows, default=0)

    def stage_gathered_parameters(
        self,
        unit_ranges: Sequence[tuple[int, int]],
        tensor: int = 1,
        layers_at_once: int = 1,
        *,
        has_experts: bool = True,
    ) -> int:
        """Find the maximum parameter count that ZeRO 3 gathers at the same time on a stage of a pipeline.

        A chunk gathers its layers in turn, ``layers_at_once`` at a time; embeddings, norms and heads are layers, too.
        Shared parameters are gathered during the full action, except those of a layer that contains them
        (``owns_shared``). The head is not freed before the loss, which runs the layers of multi-token prediction.

        Args:
            unit_ranges: unit ranges of the stage's chunks.
            has_experts: experts that are distributed over ranks are gathered; otherwise each rank stores them in full.
        """
        experts = [0] * len(self.unit_names) if has_experts else self.distributed_parameters(tensor)
        sizes = [size - other for size, other in zip(self.unit_parameters(tensor), experts, strict=True)]
        largest = 0
        for start, stop in unit_ranges:
            chunk_sizes, kept = dict(zip(range(start, stop), sizes[start:stop], strict=True)), 0
            for shared in self.shared_parameters(tensor):
                users = [n for n in shared.units if start <= n < stop]
                if users == [shared.units[0]] and self.owns_shared:
                    chunk_sizes[users[0]] += shared.amount
                elif users:
                    kept += shared.amount
                    if self.owns_shared and any(first <= shared.units[0] < end for first, end in unit_ranges):
                        kept += sizes[shared.units[0]]  # the layer with the table is on this stage, too
            in_turn = [size for n, size in chunk_sizes.items() if size and n not in self.loss_units]
            windows = [sum(in_turn[n : n + layers_at_once]) for n in range(len(in_turn))]
            if loss_sizes := [chunk_sizes[n] for n in self.loss_units if n in chunk_sizes]:
                head = chunk_sizes[len(sizes) - 1]
                windows += [head + sum(loss_sizes[n : n + layers_at_once]) for n in range(len(loss_sizes))]
            largest = max(largest, kept + max(windows, default=0))
        return largest

    owns_shared = False
    """True if the first unit that uses shared parameters contains them; otherwise it reads them from another module."""

    @property
    def loss_units(self) -> Sequence[int]:
        """Units that the loss function runs after the head."""
        return ()

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
        num_8bit_states: int = 0,
        zero: Zero = NO_ZERO,
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
        """Estimate one rank's memory for each stage, given the micro-batches that its schedule keeps in flight.

        Each forward in flight counts as the mean activations over the stage's chunks. Allocator, kernel and Python
        overheads are not counted.

        Args:
            num_bf16_states, num_8bit_states: how many of AdamW's two states are stored in bf16 and in 8 bits.
            zero: sharding and offload for weights, gradients and optimizer states.
            is_selective: only the attention cores are recomputed.
            sequence: see ``unit_saved_bytes``.
            waiting: storage for recomputed layers' inputs, with ``checkpoint_activations``.
            group_size: micro-batches that run through a chunk before the next chunk; 0: stage count.
            is_compiled: layers are compiled, so products save their gathered inputs, as with schedules that split
                backward.
        """
        stages = (len(bounds) - 1) // chunks
        state = State.for_optimizer(dtype, optimizer, num_bf16_states, num_8bit_states)
        size_args = (micro_batch_size, tensor, state.width)
        stage_placement = Placement(stages, chunks, placement)
        names = candidate_schedules(schedule, chunks, placement)
        saves_gathered_inputs = is_compiled or any(map(has_split_backwards, names))
        units, shared = (
            self.unit_saved_bytes(*size_args, sequence, saves_gathered_inputs=saves_gathered_inputs),
            self.shared_saved_bytes(*size_args),
        )
        attention_scratch = self.attention_scratch_bytes(
            *size_args, sequence, saves_gathered_inputs=saves_gathered_inputs
        )
        fp8_scratch = self.fp8_scratch_bytes(micro_batch_size, tensor)
        shares_weights = num_micro_batches > 1 and not zero.shards_weights
        quantized_weights = self.fp8_weight_bytes(tensor) if shares_weights else [0] * self.num_units
        core = max(unit.core for unit in units) if is_selective else 0
        units = [unit.without_core() for unit in units] if is_selective else units
        hidden = max(unit.input for unit in units)
        small_parameters = self.small_parameters(tensor, state.gradient)
        products = self.stage_matrices(bounds, stages, tensor, placement) if state.saved else [[]] * stages
        matrices = [sum(product.weights for product in stage_products) for stage_products in products]
        distributed_matrices = [
            sum(product.weights for product in stage_products if product.is_distributed) for stage_products in products
        ]
        num_distributed = self.stage_distributed_parameters(bounds, tensor, stages, placement)
        estimates = []
        for stage, num_parameters in enumerate(self.stage_parameters(bounds, tensor, stages, placement)):
            unit_ranges = chunks_on(bounds, stages, stage, placement)
            forwards = in_flight(stages, num_micro_batches, schedule, chunks, stage, placement, group_size)
            saved_per_micro_batch = sum(
                _sum_over_ranges([unit.full for unit in units], shared, [unit_range]) for unit_range in unit_ranges
            )
            has_layers = any(units[n].input for start, stop in unit_ranges for n in range(start, stop))
            scratch, stage_attention_scratch = (core, attention_scratch) if has_layers else (0, 0)
            # Only one chunk has the head, so the losses in flight are as many as the forwards in flight in
            # a schedule with one chunk. For "auto", the maximum over its candidate schedules counts. With placement V,
            # the backward of the loss immediately follows its forward, so only one loss is in flight.
            num_losses = max(in_flight(stages, num_micro_batches, name, 1, stage) for name in names)
            num_losses = 1 if placement == V else num_losses
            logits = self.loss_bytes(*size_args, forwards=num_losses) if stage == stage_placement.last_stage else 0
            gathered = self._gathered_parameters(unit_ranges, tensor, zero, stages) if zero.stage == 3 else 0
            scratch += max(stage_attention_scratch - logits, 0)  # the logits are freed before the backward of attention
            quantized = max(fp8_scratch - logits, 0) if has_layers else 0
            quantized += _sum_over_ranges(quantized_weights, [], unit_ranges)
            activations = forwards * saved_per_micro_batch // chunks + scratch
            memory = state.memory(
                num_parameters,
                activations,
                logits,
                zero,
                gathered,
                matrices[stage],
                num_distributed[stage],
                distributed_matrices[stage],
                self.expert_copies(zero.replicas, tensor),
            )
            if checkpoint_activations:
                shared_bytes = sum(
                    _sum_over_ranges([0] * len(units), shared, [unit_range]) for unit_range in unit_ranges
                )
                units_by_chunk = [units[start:stop] for start, stop in unit_ranges]
                memory = waiting.apply_to(
                    memory, units_by_chunk, forwards / chunks, shared_bytes, stage_attention_scratch
                )
            buffers = CommunicationBuffers(
                small=sum(small_parameters[n] for start, stop in unit_ranges for n in range(start, stop)),
                message=hidden if stages > 1 else 0,
                gathered=hidden * sequence if sequence > 1 else 0,
            )
            memory = replace(memory, activations=memory.activations + quantized)
            estimates.append(buffers.apply_to(memory, state.gradient, zero))
        return estimates

    def _gathered_parameters(self, unit_ranges: Sequence[tuple[int, int]], tensor: int, zero: Zero, stages: int) -> int:
        has_experts = self.expert_copies(zero.replicas, tensor) > 1 or zero.offload_parameters
        if stages > 1:
            return self.stage_gathered_parameters(
                unit_ranges, tensor, zero.num_gathered_layers, has_experts=has_experts
            )
        return self.gathered_parameters(unit_ranges, tensor, zero.num_gathered_layers, has_experts=has_experts)

    @memoized_list
    def small_parameters(self, tensor: int, width: int) -> list[int]:
        """Count the parameters per unit in weights that are smaller than a gradient bucket.

        Shared parameters are excluded.

        Args:
            width: bytes per gradient element.
        """
        limit = BUCKET_BYTES // width
        works = self.unit_work(1, tensor, width)
        large = [
            sum(product.weights for product in unit.products if product.inner * product.columns > limit)
            for unit in works
        ]
        return [max(unit - num_large, 0) for unit, num_large in zip(self.unit_parameters(tensor), large, strict=True)]


def _sum_over_ranges(units: Sequence[int], shared: Sequence[Shared], unit_ranges: Sequence[tuple[int, int]]) -> int:
    """Add up ``units`` over the ranges, plus the shared amounts that the ranges hold."""
    total = sum(units[unit] for start, stop in unit_ranges for unit in range(start, stop))
    return total + sum(item.amount for item in shared if item.is_held(unit_ranges))


# ``megatron.models.registry.costs_of(config)`` returns the ``Costs`` of a configuration's model, for every family.
#
# Letters as in docs/glossary.md: ``L`` layers, ``h`` hidden, ``a`` heads, ``d`` size of a head, ``f``
# feed-forward, ``v`` vocabulary, ``s`` sequence, ``b`` micro-batch, ``t`` tensor size, ``p`` stages. Forward and
# backward together cost three times as much as forward.
