"""Find the best layouts of a model, and the smallest changes that make a layout fit into memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

from megatron.config import Config
from megatron.config.layer_types import MAMBA2, has_attention, recurrent_mixers
from megatron.config.recurrent import DELTA_MIXERS
from megatron.costs.memory import BYTES, Memory
from megatron.planner.estimate import Estimate, Planner
from megatron.planner.layout import Layout, problems
from tds.schedule.simulate import MANY_CHUNKS, ONE_CHUNK, SPLIT_SCHEDULES, V_SCHEDULES, bubble, placement_for

# The best layouts of a model on a number of devices.
#
# The sizes of the axes are divisors of the number of devices, so there are hundreds or thousands of candidates. For
# each candidate, a lower bound of the step time is computed, with equal stages and no communication except
# expert-parallel. Candidates are estimated in the order of their lower bounds. The search stops when the next lower
# bound exceeds ``NEAR_TIE`` times the step time of the last layout to return. Candidates whose average stage
# does not fit into memory are skipped. Layouts that the training program rejects are never returned.
#
# One layout is returned per grid (tp, pp, dp). Layouts count as equally fast if the ratio of their step times is below
# ``NEAR_TIE``, since the estimates are not more accurate. Among equally fast layouts, a lower ZeRO stage is preferred,
# then a smaller memory. The same rule orders the grids. "gpipe" is only considered on request, since it is as fast as
# "1f1b" and needs more memory. Selective recomputation is only considered if attention saves activations.

Grid = tuple[int, int]
"""Sizes of the tensor and pipe axes."""
MAX_CHUNKS = 8
MAX_MICRO_BATCH_SIZE = 64
"""Largest micro-batch size that is tried."""
SPLIT_MARGIN = 0.01
"""Margin by which a schedule with split backward passes must be faster; ``"schedule": "auto"`` uses it as well."""
NEAR_TIE = 1.03
"""Ratio of step times up to which two layouts count as equally fast."""
SMALL_STATES = 0.05
"""ZeRO 2 and 3 are not tried if weights, gradients and optimizer need less than this share of a device's memory."""
NUM_SMALLEST_CANDIDATES = 50
"""Number of layouts to estimate for ``RankedLayouts.smallest`` if none fits."""


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """Search parameters.

    Args:
        num_layouts: number of layouts to return.
        fixed: ``Layout`` field -> its only permitted value.
        base_layout: layout with the fields that are not searched: dtype, optimizer, offload.
    """

    world_size: int
    global_batch_size: int
    num_layouts: int = 10
    fixed: Mapping[str, Any] = field(default_factory=dict)
    base_layout: Layout = Layout()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class RankedLayouts:
    """The best layouts, best first, and the number of layouts searched."""

    best: list[Estimate]
    num_candidates: int
    num_estimates: int
    smallest: Estimate | None = None  # the layout that needs least memory, if none fits


def search(planner: Planner, spec: SearchSpec) -> RankedLayouts:
    """Find the best layouts that fit into memory: at most one per grid and ``spec.num_layouts`` in total."""
    layouts = list(candidates(planner, spec))
    bounds = sorted(((lower_bound(planner, layout), idx) for idx, layout in enumerate(layouts)), key=lambda pair: pair)
    fastest: dict[Grid, Estimate] = {}
    fitting: dict[Grid, list[Estimate]] = defaultdict(list)
    usable, num_before = planner.machine.usable_bytes, planner.num_estimates
    for bound, idx in bounds:
        layout = layouts[idx]
        grid = layout.tensor, layout.pipe
        times = sorted(map(_ranked_s, fastest.values()))
        if len(times) >= spec.num_layouts and bound > NEAR_TIE * times[spec.num_layouts - 1]:
            break
        is_slower = grid in fastest and bound >= NEAR_TIE * _ranked_s(fastest[grid])
        if is_slower or min_bytes(planner, layout) > usable:
            continue
        if max(stage.total for stage in planner.memory(layout)) > usable:
            continue
        estimate = planner.estimate(layout)
        fitting[grid].append(estimate)
        is_faster = grid not in fastest or _ranked_s(estimate) < _ranked_s(fastest[grid])
        if is_faster and not problems(planner.config, layout):
            fastest[grid] = estimate
    chosen_by_grid = {grid: _choose(planner.config, fitting[grid], fastest[grid]) for grid in fastest}
    ranked = list(_rank(chosen_by_grid, fastest))[: spec.num_layouts]
    smallest = None if ranked else _smallest(planner, layouts)
    return RankedLayouts(ranked, len(layouts), planner.num_estimates - num_before, smallest)


def _choose(config: Config, fitting: Iterable[Estimate], fastest: Estimate) -> Estimate:
    """Choose a grid's preferred layout that is as fast as ``fastest`` and passes the training program's checks."""
    limit = NEAR_TIE * _ranked_s(fastest)
    ties = sorted((candidate for candidate in fitting if _ranked_s(candidate) <= limit), key=_preference)
    return next(candidate for candidate in ties if candidate is fastest or not problems(config, candidate.layout))


def _rank(chosen: Mapping[Grid, Estimate], fastest: Mapping[Grid, Estimate]) -> Iterator[Estimate]:
    """Yield all grids' layouts, best first."""
    remaining = dict(chosen)
    while remaining:
        limit = NEAR_TIE * min(_ranked_s(fastest[grid]) for grid in remaining)
        ties = [grid for grid, estimate in remaining.items() if _ranked_s(estimate) <= limit]
        yield remaining.pop(min(ties, key=lambda grid: _preference(remaining[grid])))


def _ranked_s(estimate: Estimate) -> float:
    """Return the step time for comparing layouts, in seconds.

    ``SPLIT_MARGIN`` is added for schedules that split backward passes, because estimates include the cost of splitting
    only on CPUs.
    """
    return estimate.step_s * (1 + SPLIT_MARGIN * (estimate.layout.schedule in SPLIT_SCHEDULES))


def _preference(estimate: Estimate) -> tuple[int, int, float]:
    """Return the sort key of equally fast layouts: ZeRO stage, bytes on the fullest device, step time."""
    return estimate.layout.zero_stage, estimate.max_bytes, estimate.step_s


def candidates(planner: Planner, spec: SearchSpec) -> Iterator[Layout]:
    """Yield every layout in the search space, including those that do not fit."""
    fixed, batch, context = spec.fixed, spec.global_batch_size, spec.base_layout.context
    world = spec.world_size // context if spec.world_size % context == 0 else 0
    for tensor in _tensor_sizes(planner, spec):
        for pipe in _allowed(divisors(world // tensor), fixed, "pipe"):
            data = world // tensor // pipe
            if pipe > planner.config.total_layers or batch % data:
                continue
            expert_tensor = planner.config.expert_sizes[1]
            grid = replace(spec.base_layout, tensor=tensor, pipe=pipe, data=data, expert_tensor=expert_tensor)
            for micro in _allowed(_micro_batches(batch // data), fixed, "micro_batch_size"):
                num_micro = batch // data // micro
                if batch // data % micro == 0 and num_micro == fixed.get("num_micro_batches", num_micro):
                    yield from _variants(
                        planner, replace(grid, micro_batch_size=micro, num_micro_batches=num_micro), fixed
                    )


def lower_bound(planner: Planner, layout: Layout) -> float:
    """Return a lower bound on the step time, in seconds."""
    waits = sum(sent.seconds for sent in planner.expert_traffic(layout)) if layout.expert > 1 else 0.0
    busy = layout.num_micro_batches * (sum(unit.total for unit in planner.unit_seconds(layout)) + waits) / layout.pipe
    idle = bubble(layout.pipe, layout.num_micro_batches, layout.schedule, layout.chunks)
    return busy / (1 - planner.machine.idle(idle))


def min_bytes(planner: Planner, layout: Layout) -> float:
    """Return a lower bound on the bytes of the fullest stage.

    The bound is the average memory per stage for weights, gradients and optimizer states. It includes saved activations
    for "1f1b" without full recomputation.
    """
    state, zero = layout.state_bytes, layout.zero
    params, experts = (count / layout.pipe for count in planner.parameters(layout))
    expert_share = max(layout.expert_replicas, 1) if zero.share(1) > 1 else 1
    sharded = (params - experts) / zero.share(1) + experts / expert_share
    optimizer = 0 if layout.offload_optimizer else sharded * (state.optimizer - state.saved)
    weights = 0 if layout.offload_parameters else state.width / zero.share(3)
    saved_bytes = 0.0
    if layout.recompute != "full" and layout.schedule == ONE_CHUNK[0]:  # 1f1b
        units = planner.model(layout).costs.unit_saved_bytes(
            layout.micro_batch_size, layout.tensor, BYTES[layout.dtype], layout.sequence
        )
        forwards = min((layout.pipe + 1) / 2, layout.num_micro_batches)
        in_flight = 1.0 if layout.num_micro_batches < layout.pipe else forwards
        saved_bytes = in_flight * sum(unit.full - unit.core for unit in units) / layout.pipe
    return params * (weights + state.gradient / zero.share(2)) + optimizer + saved_bytes


def divisors(value: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [n for n in range(1, int(value**0.5) + 1) if value % n == 0]
    return sorted({*small, *(value // n for n in small)})


def _tensor_sizes(planner: Planner, spec: SearchSpec) -> list[int]:
    """Return the tensor axis sizes that divide all heads and widths and fit into a node."""
    split_sizes = _tensor_split_sizes(planner)
    tensor_sizes = [
        t for t in divisors(spec.world_size // spec.base_layout.context) if all(size % t == 0 for size in split_sizes)
    ]
    if spec.base_layout.optimizer == "adafactor":  # needs unsharded matrices
        tensor_sizes = [1]
    if "tensor" in spec.fixed:
        return _allowed(tensor_sizes, spec.fixed, "tensor")
    node = min(planner.machine.devices_per_node, spec.world_size)
    return [t for t in tensor_sizes if t <= node and node % t == 0]


def _tensor_split_sizes(planner: Planner) -> list[int]:
    """Return the head counts and widths that the tensor axis must divide; 0 for unused features."""
    model = planner.config.model
    sizes = [model.hidden_size, model.ff_hidden_size]
    if has_attention(model):
        sizes += [model.num_attention_heads, model.num_query_groups, model.window_num_query_groups]
    mixers = recurrent_mixers(model)
    sizes += [model.linear_num_key_heads] if mixers & DELTA_MIXERS else []
    sizes += [model.mamba_num_heads] if MAMBA2 in mixers else []
    if not planner.config.expert_sizes[1]:  # otherwise the tensor axis does not split experts, or only partly
        sizes.append(model.moe_ffn_hidden_size)
    return [*sizes, model.moe_shared_expert_intermediate_size]


def _micro_batches(samples: int) -> list[int]:
    return [n for n in divisors(samples) if n <= MAX_MICRO_BATCH_SIZE and (n <= 4 or n & (n - 1) == 0)]


def _variants(planner: Planner, base_layout: Layout, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Yield layouts for a grid and micro-batch size, by schedule, recomputation, ZeRO and sequence parallelism."""
    stages = [fixed["zero_stage"]] if "zero_stage" in fixed else _worthwhile_zero_stages(planner, base_layout)
    stages = [stage for stage in stages if stage in _zero_stages(planner, base_layout)]
    experts = _allowed(expert_sizes(planner, base_layout), fixed, "expert")
    recompute = _allowed(_recomputations(planner), fixed, "recompute")
    sequence_options = _allowed(_sequence_parallel_options(planner, base_layout.tensor), fixed, "sequence_parallel")
    orders = [
        (schedule, chunks)
        for schedule, chunks in _schedules(planner, base_layout, fixed)
        if planner.can_split(replace(base_layout, schedule=schedule, chunks=chunks))
    ]
    for (schedule, chunks), recompute_choice, zero, sequence_parallel, ranks in product(
        orders, recompute, stages, sequence_options, experts
    ):
        yield replace(
            base_layout,
            schedule=schedule,
            chunks=chunks,
            recompute=recompute_choice,
            zero_stage=zero,
            sequence_parallel=sequence_parallel,
            expert=ranks,
        )


def expert_sizes(planner: Planner, layout: Layout) -> list[int]:
    """Return the possible expert-parallel sizes."""
    num_experts = planner.config.model.num_experts
    num_ranks = layout.data * layout.context * layout.tensor // layout.expert_shards
    return [n for n in divisors(num_ranks) if num_experts % n == 0] if num_experts else [1]


def _zero_stages(planner: Planner, base_layout: Layout) -> list[int]:
    if base_layout.zero.replicas == 1 or base_layout.optimizer == "adafactor":
        return [0]
    if not base_layout.overlap_grad_reduce:
        return [0, 1]
    return [0, 1, 2] if planner.config.parallel.compile else [0, 1, 2, 3]


def _worthwhile_zero_stages(planner: Planner, base_layout: Layout) -> list[int]:
    """Return the ZeRO stages worth trying: 2 and 3 only if weights and states need much memory."""
    state = base_layout.state_bytes
    states = planner.parameters(base_layout)[0] * (state.width + state.gradient + state.optimizer)
    last = 1 if states < SMALL_STATES * planner.machine.usable_bytes else 3
    return [stage for stage in _zero_stages(planner, base_layout) if stage <= last]


def _schedules(planner: Planner, base_layout: Layout, fixed: Mapping[str, Any]) -> list[tuple[str, int]]:
    if base_layout.pipe == 1:
        is_free = fixed.get("schedule", ONE_CHUNK[0]) == ONE_CHUNK[0] and fixed.get("chunks", 1) == 1
        return [(ONE_CHUNK[0], 1)] if is_free else []
    max_chunks = min(MAX_CHUNKS, planner.config.total_layers // base_layout.pipe)
    excluded = {"gpipe"} - {fixed.get("schedule")} | (
        set(SPLIT_SCHEDULES) if planner.config.parallel.compile else set()
    )
    options = [(name, 1) for name in ONE_CHUNK if name not in excluded]
    if base_layout.num_micro_batches >= base_layout.pipe:
        options += [
            (name, chunks) for name in MANY_CHUNKS if name not in excluded for chunks in range(2, max_chunks + 1)
        ]
        options += [(name, 2) for name in V_SCHEDULES if name not in excluded and max_chunks >= 2]
    return [
        (name, chunks)
        for name, chunks in options
        if fixed.get("schedule", name) == name
        and fixed.get("chunks", chunks) == chunks
        and fixed.get("lies", placement_for(name)) == placement_for(name)
    ]


def _recomputations(planner: Planner) -> list[str]:
    has_core = any(unit.core for unit in planner.costs.unit_saved_bytes(1, 1, 2))
    return ["none", "selective", "full"] if has_core else ["none", "full"]


def _sequence_parallel_options(planner: Planner, tensor: int) -> list[bool]:
    is_divisible = tensor > 1 and all(length % tensor == 0 for length in planner.config.sequence_lengths)
    is_needed = 0 < planner.config.expert_sizes[1] < tensor
    return [False] * (not is_needed) + [True] * is_divisible


def _allowed(values: list[Any], fixed: Mapping[str, Any], name: str) -> list[Any]:
    return [value for value in values if value == fixed.get(name, value)]


def _smallest(planner: Planner, layouts: list[Layout]) -> Estimate | None:
    """Estimate the layouts with the lowest ``min_bytes``; return the estimate with the smallest peak memory."""
    rising = sorted(layouts, key=lambda layout: min_bytes(planner, layout))
    candidate_layouts = islice(
        (layout for layout in rising if not problems(planner.config, layout)), NUM_SMALLEST_CANDIDATES
    )
    return min(map(planner.estimate, candidate_layouts), key=lambda estimate: estimate.max_bytes, default=None)


# Overflow: the largest part of a layout that does not fit, and the changes that make the layout fit.
#
# Possible changes are fewer saved activations, a smaller micro-batch, a higher ZeRO stage, experts on more ranks, an
# axis of twice the size (with half the replicas), sequence parallelism, and optimizer or weights on the host. The
# samples per step stay the same. Changes that fit and pass the training's checks are sorted by the resulting step time.
# If no single change is sufficient, pairs of changes are tried.

DEVICE_PARTS = ("weights", "gathered", "gradients", "optimizer", "activations", "logits", "buffers")
"""Fields of ``Memory`` that are on the device during a step."""
AXIS_FACTOR = 2
FULL_SHARDING_STAGE = 3
"""ZeRO stage that also shards the weights."""


@dataclass(frozen=True)
class LayoutChange:
    """One or several changes, and the resulting layout's estimate."""

    changes: tuple[str, ...]
    estimate: Estimate


@dataclass(frozen=True)
class Overflow:
    """The fullest stage of a layout that does not fit.

    Args:
        largest_part: the largest part in ``DEVICE_PARTS``.
        excess_bytes: bytes above the limit.
    """

    stage: int
    largest_part: str
    part_bytes: int
    needed_bytes: int
    excess_bytes: int


def overflow(estimate: Estimate, usable: int) -> Overflow | None:
    """Return the overflow beyond ``usable`` bytes, or None if the estimate fits."""
    stage = max(range(len(estimate.memory)), key=lambda n: estimate.memory[n].total)
    memory = estimate.memory[stage]
    if memory.total <= usable:
        return None
    largest_part = max(DEVICE_PARTS, key=lambda name: int(getattr(memory, name)))
    return Overflow(stage, largest_part, int(getattr(memory, largest_part)), memory.total, memory.total - usable)


def remedies(planner: Planner, layout: Layout) -> list[LayoutChange]:
    """Find changes that make ``layout`` fit, shortest step first.

    Pairs of changes are only tried if no single change is sufficient.
    """
    singles = list(changes(planner, layout))
    fitting = list(_fitting_changes(planner, [((flags,), changed) for flags, changed in singles]))
    if not fitting:
        pairs: list[tuple[tuple[str, ...], Layout]] = [
            ((first, second), changed)
            for first, changed_once in singles
            for second, changed in changes(planner, changed_once)
            if changed != layout
        ]
        fitting = list(_fitting_changes(planner, pairs))
    return sorted(fitting, key=lambda change: change.estimate.step_s)


def changes(planner: Planner, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield (command-line flags, resulting layout) for each single change."""
    if layout.recompute != "full":
        yield "--checkpoint-activations", replace(layout, recompute="full")
    if layout.recompute == "none" and any(unit.core for unit in planner.costs.unit_saved_bytes(1, 1, 2)):
        yield "--recompute-granularity selective", replace(layout, recompute="selective")
    for micro in divisors(layout.micro_batch_size)[:-1]:
        num_micro_batches = layout.num_micro_batches * layout.micro_batch_size // micro
        yield (
            f"--batch-size {micro} --gas {num_micro_batches}",
            replace(layout, micro_batch_size=micro, num_micro_batches=num_micro_batches),
        )
    if layout.data > 1 and layout.optimizer != "adafactor":
        for stage in range(layout.zero_stage + 1, FULL_SHARDING_STAGE + 1):
            yield f"--zero-stage {stage}", replace(layout, zero_stage=stage)
    for ranks in expert_sizes(planner, layout):
        if ranks > layout.expert:
            yield f"--expert-model-parallel-size {ranks}", replace(layout, expert=ranks)
    yield from _doubled_axes(planner, layout)
    lengths = planner.config.sequence_lengths
    if layout.tensor > 1 and not layout.sequence_parallel and all(n % layout.tensor == 0 for n in lengths):
        yield "--sequence-parallel", replace(layout, sequence_parallel=True)
    if not layout.offload_optimizer:
        yield "--offload-optimizer", replace(layout, offload_optimizer=True)
    if layout.zero_stage == 3 and not layout.offload_parameters:
        yield "--offload-parameters", replace(layout, offload_parameters=True)


def _doubled_axes(planner: Planner, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield layouts with one axis doubled, half the replicas, and twice the micro-batches per replica."""
    if layout.data % AXIS_FACTOR:
        return
    fewer = replace(layout, data=layout.data // AXIS_FACTOR, num_micro_batches=layout.num_micro_batches * AXIS_FACTOR)
    if fewer.data == 1:
        fewer = _with_zero_stage(fewer, 0)
    fewer = replace(fewer, expert=max(n for n in expert_sizes(planner, fewer) if layout.expert % n == 0))
    split_sizes = [*_tensor_split_sizes(planner), planner.machine.devices_per_node]
    tensor = layout.tensor * AXIS_FACTOR
    is_divisible = all(size % tensor == 0 for size in split_sizes)
    if is_divisible and layout.optimizer != "adafactor":
        flags = f"--model-parallel-size {tensor} --gas {fewer.num_micro_batches}"
        yield flags + _lowering_flags(layout, fewer), replace(fewer, tensor=tensor)
    pipe = layout.pipe * AXIS_FACTOR
    if pipe * layout.chunks <= planner.config.total_layers:
        schedule = ONE_CHUNK[0] if layout.pipe == 1 and layout.chunks == 1 else layout.schedule
        flags = f"--pipe-parallel-size {pipe} --gas {fewer.num_micro_batches}"
        yield flags + _lowering_flags(layout, fewer), replace(fewer, pipe=pipe, schedule=schedule)


def _with_zero_stage(layout: Layout, stage: int) -> Layout:
    """Copy ``layout`` with ZeRO stage ``stage``; below stage 3, weights are not offloaded to the host."""
    return replace(
        layout, zero_stage=stage, offload_parameters=layout.offload_parameters and stage == FULL_SHARDING_STAGE
    )


def _lowering_flags(layout: Layout, changed: Layout) -> str:
    """Format the flags that lower the ZeRO stage or the expert ranks as in ``changed``."""
    flags = f" --zero-stage {changed.zero_stage}" if changed.zero_stage != layout.zero_stage else ""
    flags += f" --expert-model-parallel-size {changed.expert}" if changed.expert < layout.expert else ""
    return flags + " without --offload-parameters" * (layout.offload_parameters and not changed.offload_parameters)


def _fitting_changes(planner: Planner, attempts: list[tuple[tuple[str, ...], Layout]]) -> Iterator[LayoutChange]:
    seen = set()
    for flags, layout in attempts:
        is_new = layout not in seen
        seen.add(layout)
        fits = (
            is_new
            and planner.can_split(layout)
            and overflow_of(planner.memory(layout), planner.machine.usable_bytes) <= 0
        )
        if fits and not problems(planner.config, layout):
            yield LayoutChange(flags, planner.estimate(layout))


def overflow_of(memory: list[Memory], usable: int) -> int:
    """Return the fullest stage's bytes above ``usable``; negative if it fits."""
    return max(stage.total for stage in memory) - usable
