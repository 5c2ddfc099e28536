"""Time full layers of the real models."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from megatron import device
from megatron.arguments import parse
from megatron.config import Config
from megatron.costs.memory import State
from megatron.models import ParallelContext, registry
from megatron.models.registry import FAMILIES, build_model, model_parts
from megatron.mpu.groups import SINGLE, Group
from megatron.optim import MixedPrecisionOptimizer, build_optimizer
from megatron.planner.layout import layout_of
from megatron.planner.machine import SPLIT_SUFFIX, EfficiencyFactors, Machine, Sample, fit_factors, slowdown
from megatron.planner.microbenchmarks import TimingBudget
from megatron.planner.reference import Reference, queue_times
from megatron.planner.spawn_ranks import Rank
from megatron.planner.time_model import CommunicationModel, ComputeModel, OperationTimes, Traffic

# Small models of every family, built as in training, and a micro-batch for each.
#
# The models are complete, with embedding, layers, norm, head and loss, and with an optimizer that stores gradients.

VOCAB_SIZE = 6144


@dataclass(frozen=True, order=True)
class Shape:
    """Hidden size, head size, sequence length, and micro-batch size."""

    hidden: int
    head: int
    length: int
    samples: int


def benchmark_config(family: str, dtype: str, shape: Shape) -> Config:
    """Configure a model with one layer (T5: one encoder layer and one decoder layer)."""
    family_entry = FAMILIES[family]
    words = (
        f"--num-layers 1 --hidden-size {shape.hidden} --num-attention-heads {shape.hidden // shape.head} --{dtype} "
        f"--vocab-size {VOCAB_SIZE} --batch-size {shape.samples} --dry-run "
        f"--{'enc-' * (family_entry.model_type == 'encoder-decoder')}seq-length {shape.length} "
    )
    words += family_entry.benchmark_flags.format(length=shape.length)
    config = parse([*family_entry.recipe, *words.split()], world_size=1, env={}, family=family)
    return config.with_vocab(VOCAB_SIZE)


def build(config: Config, target_device: torch.device, group: Group = SINGLE) -> torch.nn.Module:
    """Build the model with random weights, split over ``group``."""
    built = build_model(config, ParallelContext(group))
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return built.to(target_device)


def build_adamw(module: torch.nn.Module, dtype: str) -> MixedPrecisionOptimizer:
    """Build an AdamW optimizer for the model's weights, which are converted to ``dtype``."""
    return build_optimizer(module.parameters(), dtype=device.DTYPES[dtype], clip_grad=1.0)


def make_micro_batch(config: Config, target_device: torch.device) -> dict[str, torch.Tensor]:
    """Make inputs for a forward pass with loss: random tokens without padding."""
    samples = config.batch.batch_size

    def random_tokens(length: int) -> torch.Tensor:
        return torch.randint(VOCAB_SIZE, (samples, length), device=target_device)

    inputs = model_parts(config.family).example_inputs(config, random_tokens)
    num_labels = config.loss_tokens_per_sample
    targets = {"labels": random_tokens(num_labels), "loss_mask": torch.ones(samples, num_labels, device=target_device)}
    return inputs | targets


def total_loss(output: Any) -> torch.Tensor:
    """Sum the losses, which a model returns as (sum, count) or as a dictionary of such pairs."""
    pairs = output.values() if isinstance(output, dict) else [output]
    total: torch.Tensor = sum(pair[0] for pair in pairs)
    return total


def layer_lists_of(family: str) -> Mapping[str, str]:
    """Map layer types to the attributes that hold the layers."""
    return FAMILIES[family].layer_lists


# Full layers, heads and updates of the real models, timed while the other ranks do the same.
#
# A model of one layer runs forward and backward as in training. Marks at the ends of its layers, set by module and
# gradient hooks, divide the time between the layers and the other units (embedding, norm, head, loss). For each type of
# unit, the ``EfficiencyFactors`` are fitted to the measured times and the predicted times of its operations.
#
# If there are several ranks with a core each, models split over all ranks are also timed, in the default dtype.
# Their matmuls are smaller, and the faster rank waits at each all-reduce. The factors of split layers are the
# factors of unsplit layers times the slowdown (measured time without communication / predicted time). Only the slowdown
# is fitted, because there are few split models and their time without communication is short.

HEAD = "head"
SHAPES = {
    True: (Shape(128, 32, 128, 8), Shape(128, 32, 512, 2), Shape(320, 64, 256, 4), Shape(384, 96, 128, 8)),
    False: (Shape(1024, 64, 1024, 8), Shape(1024, 64, 4096, 2), Shape(2560, 128, 2048, 4), Shape(4096, 128, 1024, 8)),
}
"""True for a CPU -> shapes of the models that are timed."""
TOUCHED_BYTES = 2**29
"""Bytes of memory to touch before the measurements; more than any of the models needs."""


@dataclass(frozen=True)
class LayerTimings:
    """Measured times for a model with one layer.

    Args:
        seconds: unit type -> (forward, backward) seconds; "head" includes embedding, norm and loss.
        update_s: seconds per optimizer update.
        tensor: number of ranks that the model was split over.
    """

    family: str
    dtype: str
    shape: Shape
    seconds: dict[str, tuple[float, float]]
    update_s: float
    tensor: int = 1


class EventMarks:
    """Times between named points of a forward and a backward pass; the device is synchronized at each point."""

    def __init__(self, device_type: str, now: Callable[[], float]) -> None:
        self._device_type, self._now = device_type, now
        self.times: dict[str, float] = {}

    def record(self, name: str) -> None:
        device.synchronize(self._device_type)
        self.times[name] = self._now()

    def elapsed(self, first: str, last: str) -> float:
        return self.times[last] - self.times[first]

    def add_hooks(self, layers: torch.nn.ModuleList, name: str) -> None:
        """Register hooks that set a mark when the forward and backward passes enter and leave ``layers``."""

        def enter(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            inputs[0].register_hook(lambda _: self.record(f"{name} left back"))
            self.record(f"{name} entered")

        def leave(_: Any, inputs: Any, output: torch.Tensor) -> None:
            self.record(f"{name} left")
            output.register_hook(lambda _: self.record(f"{name} entered back"))

        layers[0].register_forward_pre_hook(enter)
        layers[-1].register_forward_hook(leave)


def time_layers(
    rank: Rank, dtypes: Sequence[str], timing_budget: TimingBudget, reference: Reference
) -> list[LayerTimings]:
    """Time every family's model in each shape, scaled to the speed of ``reference``. Collective.

    The ranks start each measurement together.

    Args:
        dtypes: the runs' default dtype first; models in other dtypes are timed once.
    """
    timings = []
    if rank.device_type == "cpu":
        _touch_memory()
    shapes = [shape for shape in SHAPES[rank.device_type == "cpu"] if shape.hidden <= timing_budget.max_hidden_size]
    for dtype in dtypes:
        rank.report(f"layers of every family in {dtype}")
        # timing every dtype three times would take over half a minute
        budget = timing_budget if dtype == dtypes[0] else replace(timing_budget, num_repetitions=1)
        timings += [
            _time_model(rank, family, dtype, shape, budget, reference) for shape in shapes for family in FAMILIES
        ]
    splittable_shapes = [shape for shape in shapes if shape.hidden // shape.head % rank.size == 0]
    if rank.backend and timing_budget.ranks_per_core == 1 and splittable_shapes:
        rank.report(f"layers of every family in {dtypes[0]}, split over the ranks")
        all_ranks = Group(tuple(range(rank.size)), rank.idx, dist.group.WORLD)
        timings += [
            _time_model(rank, family, dtypes[0], shape, timing_budget, reference, all_ranks)
            for shape in splittable_shapes
            for family in FAMILIES
        ]
    return timings


def _touch_memory() -> None:
    """Allocate and touch memory, so that the measurements do not include the page faults of a first step."""
    buffers = [torch.ones(2**22) for _ in range(TOUCHED_BYTES // 2**24)]
    del buffers


def _time_model(
    rank: Rank,
    family: str,
    dtype: str,
    shape: Shape,
    timing_budget: TimingBudget,
    reference: Reference,
    group: Group = SINGLE,
) -> LayerTimings:
    config = benchmark_config(family, dtype, shape)
    module = build(config, rank.device, group)
    optimizer = build_adamw(module, dtype)
    inputs = make_micro_batch(config, rank.device)
    marks = EventMarks(
        rank.device_type, timing_budget.now if group.size == 1 else time.perf_counter
    )  # split model: include waits
    layer_lists = layer_lists_of(family)
    for unit_type, list_path in layer_lists.items():
        marks.add_hooks(attrgetter(list_path)(module), unit_type)
    repetitions: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for repetition in range(timing_budget.num_repetitions + 1):
        rank.barrier()
        waited = queue_times()
        marks.record("began")
        loss = total_loss(module(**inputs))
        marks.record("turned")
        loss.backward()
        optimizer.end_micro_batch()
        marks.record("ended")
        unit_times = {unit_type: _spent(marks, unit_type) for unit_type in layer_lists}
        total = marks.elapsed("began", "turned"), marks.elapsed("turned", "ended")
        lost_s = reference.lost_s(waited, sum(total)) if group.size > 1 else 0.0
        unit_times[HEAD] = (
            total[0] - sum(seconds for seconds, _ in unit_times.values()),
            total[1] - sum(seconds for _, seconds in unit_times.values()),
        )
        if repetition in (0, timing_budget.num_repetitions):  # the first update creates the optimizer's states
            marks.record("ended")
            optimizer.step()
            marks.record("updated")
        scale = reference.scale()
        work_scale = scale * max(0.0, 1 - lost_s / sum(total))
        if repetition:
            for unit_type, (forward, backward) in unit_times.items():
                repetitions[unit_type].append((forward * work_scale, backward * work_scale))
    medians = {unit_type: _median(unit_turns) for unit_type, unit_turns in repetitions.items()}
    return LayerTimings(family, dtype, shape, medians, marks.elapsed("ended", "updated") * scale, group.size)


def _spent(marks: EventMarks, unit_type: str) -> tuple[float, float]:
    return marks.elapsed(f"{unit_type} entered", f"{unit_type} left"), marks.elapsed(
        f"{unit_type} entered back", f"{unit_type} left back"
    )


def _median(repetitions: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the (forward, backward) repetition with the median total time."""
    return sorted(repetitions, key=sum)[len(repetitions) // 2]


def slowest_timings(timings_by_rank: Sequence[Sequence[LayerTimings]]) -> list[LayerTimings]:
    """Select the slowest rank's times for each model."""

    def slowest_of(model_timings: Sequence[LayerTimings]) -> LayerTimings:
        unit_types = model_timings[0].seconds
        worst = {
            unit_type: max((timing.seconds[unit_type] for timing in model_timings), key=sum) for unit_type in unit_types
        }
        return replace(model_timings[0], seconds=worst, update_s=max(timing.update_s for timing in model_timings))

    return [slowest_of(model_timings) for model_timings in zip(*timings_by_rank, strict=True)]


def with_layer_timings(machine: Machine, timings: Sequence[LayerTimings]) -> Machine:
    """Copy ``machine`` with factors fitted to the timed layers and the measured update bandwidth."""
    unsplit, split = ([timing for timing in timings if (timing.tensor > 1) == is_cut] for is_cut in (False, True))
    samples = _samples_by_unit_type(machine, unsplit)
    factors_by_dtype: dict[str, dict[str, EfficiencyFactors]] = defaultdict(dict)
    for (dtype, unit_type), pairs in samples.items():
        factors_by_dtype[dtype][unit_type] = EfficiencyFactors(
            fit_factors([sample for sample, _ in pairs]), fit_factors([sample for _, sample in pairs])
        )
    timed_machine = replace(
        machine, tempos=factors_by_dtype, update_bandwidth=_update_bandwidth(unsplit) or machine.update_bandwidth
    )
    slowed: dict[str, dict[str, EfficiencyFactors]] = {
        dtype: dict(factors_by_type) for dtype, factors_by_type in factors_by_dtype.items()
    }
    for (dtype, unit_type), pairs in _samples_by_unit_type(timed_machine, split).items():
        factors = factors_by_dtype[dtype][unit_type]
        slowed[dtype][unit_type + SPLIT_SUFFIX] = EfficiencyFactors(
            factors.forward.scaled(slowdown([sample for sample, _ in pairs], factors.forward)),
            factors.backward.scaled(slowdown([sample for _, sample in pairs], factors.backward)),
        )
    return replace(timed_machine, tempos=slowed)


def _samples_by_unit_type(
    machine: Machine, timings: Sequence[LayerTimings]
) -> dict[tuple[str, str], list[tuple[Sample, Sample]]]:
    """Group (forward, backward) samples by (dtype, unit type)."""
    samples: dict[tuple[str, str], list[tuple[Sample, Sample]]] = defaultdict(list)
    for timing in timings:
        for unit_type, pair in _samples(machine, timing):
            samples[timing.dtype, f"{timing.family} {unit_type}"].append(pair)
    return samples


def _samples(machine: Machine, timing: LayerTimings) -> Iterable[tuple[str, tuple[Sample, Sample]]]:
    """Yield (unit type, (forward sample, backward sample))."""
    config = benchmark_config(timing.family, timing.dtype, timing.shape)
    costs = registry.costs_of(config, is_on_cpu=machine.is_cpu)
    clock, layout = ComputeModel(costs, machine, timing.family), replace(layout_of(config, 1), tensor=timing.tensor)
    operations = dict(zip(costs.unit_names, clock.operation_times(layout), strict=True))
    units = clock.units(layout)
    traffic = dict(
        zip(costs.unit_names, CommunicationModel(costs, machine).tensor_traffic_by_pass(layout, units), strict=True)
    )
    for unit_type in layer_lists_of(timing.family):
        yield (
            unit_type,
            _sample_pair(operations.pop(f"{unit_type} 0"), timing.seconds[unit_type], traffic.pop(f"{unit_type} 0")),
        )
    head = operations.pop(HEAD)
    # The time of the remaining units outside the layers is computed from closed forms and subtracted.
    unit_times = dict(zip(costs.unit_names, units, strict=True))
    forward, backward = timing.seconds[HEAD]
    other_units = [unit_times[name] for name in operations]
    head_seconds = forward - sum(u.forward for u in other_units), backward - sum(u.backward for u in other_units)
    yield (
        HEAD,
        _sample_pair(
            head, head_seconds, tuple(sum(passes, Traffic()) for passes in zip(*traffic.values(), strict=True))
        ),
    )


def _sample_pair(
    operations: OperationTimes, seconds: tuple[float, float], traffic: Sequence[Traffic]
) -> tuple[Sample, Sample]:
    """Make (forward, backward) samples; exposed communication is subtracted from the measured times."""
    fixed_times = operations.forward_fixed_s + traffic[0].exposed_s, operations.backward_fixed_s + traffic[1].exposed_s
    forward, backward = (max(measured - fixed_s, 0.0) for measured, fixed_s in zip(seconds, fixed_times, strict=True))
    scale = sum(seconds)
    return Sample(operations.forward_terms, forward, scale), Sample(operations.backward_terms, backward, scale)


def _update_bandwidth(timings: Sequence[LayerTimings]) -> float:
    """Return the median update rate of the widest models in the first dtype, in bytes/s; 0 if nothing was timed."""
    if not timings:
        return 0.0
    first, widest = timings[0].dtype, max(timing.shape for timing in timings)
    state = State.for_optimizer(first, "adamw")
    rates = []
    for timing in timings:
        if timing.dtype == first and timing.shape == widest:
            costs = registry.costs_of(benchmark_config(timing.family, first, widest))
            num_bytes = costs.num_parameters * (2 * (state.width + state.optimizer) + 2 * state.gradient)
            rates.append(num_bytes / timing.update_s)
    return statistics.median(rates)
