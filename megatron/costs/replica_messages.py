"""Messages between replicas in a step: their number, and the bytes that a rank sends. Does not import torch.

| ZeRO | gradients | weights |
|---|---|---|
| 0 | an all-reduce of each bucket per step | |
| 1 | a reduce-scatter of each bucket per step | an all-gather of each bucket per step |
| 2 | a reduce-scatter of each bucket per micro-batch | an all-gather of each bucket per step |
| 3 | a reduce-scatter of each bucket per micro-batch | an all-gather of each unit, twice per micro-batch |

A ring reduce-scatter or all-gather of n bytes over d ranks sends n (d - 1) / d bytes, an all-reduce twice as many. On
gloo, which has no reduce-scatter, gradients are all-reduced with every stage. Experts on e of the replicas have
messages of their own, over the d / e ranks with the same experts, at the same times.

With ZeRO 3, a unit is the weights of a layer (``megatron.optim.zero.stage3``). Backward does not gather tables that it
only looks up, unless they are tied to the head. Without a pipeline, weights outside of layers are one unit, which is
gathered once per micro-batch because it is kept from forward to backward.

Not counted: one small message per forward and backward by which replicas compare the order of the gathers, messages of
the first micro-batch that agree on this order, sums over the copies of tied weights, the loss and the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.costs.cost import Costs
from megatron.costs.memory import BUCKET_BYTES, GRADIENT_SHARDING_STAGE

WEIGHT_SHARDING_STAGE = 3
"""Lowest ZeRO stage that gathers weights for each use."""


@dataclass(frozen=True)
class Messages:
    """Collectives of one rank: their number, and the bytes that the rank sends."""

    count: int = 0
    num_bytes: float = 0.0

    def __add__(self, other: Messages) -> Messages:
        return Messages(self.count + other.count, self.num_bytes + other.num_bytes)

    def repeated(self, times: int) -> Messages:
        """Return the messages of ``times`` repetitions."""
        return Messages(self.count * times, self.num_bytes * times)


@dataclass(frozen=True)
class UnitWeights:
    """Weights that ZeRO 3 gathers together.

    Args:
        numels: elements of each weight, in the order of the parameters.
        num_gathers: gathers per micro-batch: 2; 1 if only the forward reads the weights, or if they are kept.
        is_stored_in_other_chunk: another chunk of the stage stores the weights.
    """

    numels: tuple[int, ...]
    num_gathers: int = 2
    is_stored_in_other_chunk: bool = False


def bucket_sizes(numels: Sequence[int], width: int, max_numel: int | None = None) -> list[int]:
    """Return the elements of each bucket, packed as by ``tds.gradients.make_buckets``.

    Args:
        width: bytes per element.
        max_numel: maximum elements per bucket; None: limit its bytes by ``BUCKET_BYTES``.
    """
    limit = BUCKET_BYTES // width if max_numel is None else max_numel
    sizes: list[int] = []
    for numel in filter(None, numels):
        if sizes and sizes[-1] + numel <= limit:
            sizes[-1] += numel
        else:
            sizes.append(numel)
    return sizes


def messages_per_step(
    chunks: Sequence[Sequence[UnitWeights]],
    *,
    stage: int,
    replicas: int,
    num_micro_batches: int,
    width: int,
    gradient: int = 4,
    max_reduced: int | None = None,
    max_gathered: int | None = None,
    scatters: bool = True,
    numels: Sequence[int] | None = None,
) -> Messages:
    """Count the messages for the weights of one pipeline stage, or of a model without a pipeline.

    Args:
        chunks: weights of each chunk; a model without a pipeline is one chunk.
        stage: ZeRO stage.
        width, gradient: bytes per element of a weight and of a gradient.
        max_reduced, max_gathered: elements per bucket of gradients, and of updated weights with ZeRO 1 and 2; None:
            ``BUCKET_BYTES``. Buckets of the weights gathered by ZeRO 3 are always limited by ``BUCKET_BYTES``.
        scatters: gradients are reduce-scattered with ZeRO 1 to 3; False: all-reduced, as on gloo.
        numels: elements of each weight that the stage stores; None: those of ``chunks``, each weight in one chunk.
    """
    if replicas == 1:
        return Messages()
    sent = (replicas - 1) / replicas
    chunk_numels = [[numel for unit in units for numel in unit.numels] for units in chunks]
    gradient_buckets = [size for sizes in chunk_numels for size in bucket_sizes(sizes, gradient, max_reduced)]
    factor = sent if scatters and stage else 2 * sent
    reduced = Messages(len(gradient_buckets), factor * gradient * sum(gradient_buckets))
    if stage >= GRADIENT_SHARDING_STAGE:
        reduced = reduced.repeated(num_micro_batches)
    if stage == 0:
        return reduced
    if stage < WEIGHT_SHARDING_STAGE:
        stored_units = [unit for units in chunks for unit in units if not unit.is_stored_in_other_chunk]
        stored = [numel for unit in stored_units for numel in unit.numels] if numels is None else numels
        weight_buckets = bucket_sizes(stored, width, max_gathered)
        return reduced + Messages(len(weight_buckets), sent * width * sum(weight_buckets))
    gathered = Messages()
    for unit in (unit for units in chunks for unit in units):
        buckets = bucket_sizes(unit.numels, width)
        gathered += Messages(len(buckets), sent * width * sum(buckets)).repeated(unit.num_gathers * num_micro_batches)
    return reduced + gathered


def chunk_weights(
    costs: Costs,
    start: int,
    stop: int,
    tensor: int = 1,
    *,
    has_pipeline: bool,
    stage_ranges: Sequence[tuple[int, int]] = (),
) -> list[UnitWeights]:
    """List the weights of the units ``start ... stop`` of a model, as ZeRO 3 gathers them.

    Each matrix is one weight; the vectors of a unit count as one weight. Experts that are distributed over ranks are
    left out. On a pipeline stage, a shared weight is a unit of its own, unless the first of its units contains it. If
    that unit is on the same stage, in another chunk, its weights are gathered with the shared one.

    Args:
        stage_ranges: ranges of units of all chunks of the stage; empty: only this one.
    """
    parameters, experts = [*costs.unit_parameters(tensor)], costs.distributed_parameters(tensor)
    names, works = costs.unit_names, costs.unit_work(1, tensor, 2)
    units: list[UnitWeights] = []
    outside: list[int] = []
    for shared in costs.shared_parameters(tensor):
        users = [n for n in shared.units if start <= n < stop]
        if not users:
            continue
        if not has_pipeline:
            outside.append(shared.amount)
        elif users == [shared.units[0]] and costs.owns_shared:
            parameters[users[0]] += shared.amount
        else:
            is_lookup = all(n in shared.lookup_units for n in users)
            is_on_stage = costs.owns_shared and any(first <= shared.units[0] < end for first, end in stage_ranges)
            owner = parameters[shared.units[0]] if is_on_stage else 0
            numels = tuple(filter(None, (shared.amount, owner)))
            units.append(UnitWeights(numels, 1 if is_lookup else 2, is_stored_in_other_chunk=is_on_stage))
    for n in range(start, stop):
        matrices: list[int] = []
        for product in works[n].products if not experts[n] else ():
            matrices += [product.inner * product.columns] * round(product.count)
        total = parameters[n] - experts[n]
        matrices = matrices if sum(matrices) <= total else []  # a tied head has the table of the first unit
        numels = tuple(filter(None, (*matrices, total - sum(matrices))))
        if not has_pipeline and not names[n].split()[-1].isdigit():
            outside += numels
        elif numels:
            units.append(UnitWeights(numels, 1 if n == 0 else 2))
    return [*units, UnitWeights(tuple(outside), 1)] if outside else units
