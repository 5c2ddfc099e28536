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
from megatron.planner.machine import CUT, EfficiencyFactors, Machine, Sample, fitted, slowdown
from megatron.planner.microbenchmarks import TimingBudget
from megatron.planner.reference import Reference, waits
from megatron.planner.spawn_ranks import Rank
from megatron.planner.time_model import Clock, Messages, Parts, Traffic

# Small models of every family, built as in training, and a micro-batch for each.
#
# The models are complete, with embedding, layers, norm, head and loss, and with an optimizer that stores gradients.

VOCABULARY = 6144


@dataclass(frozen=True, order=True)
class Shape:
    """Hidden size, head size, sequence length, and micro-batch size."""

    hidden: int
    head: int
    length: int
    samples: int


def config_of(family: str, dtype: str, shape: Shape) -> Config:
    """Return the configuration of a model with one layer (T5: one encoder layer and one decoder layer)."""
    family_entry = FAMILIES[family]
    words = (
        f"--num-layers 1 --hidden-size {shape.hidden} --num-attention-heads {shape.hidden // shape.head} --{dtype} "
        f"--vocab-size {VOCABULARY} --batch-size {shape.samples} --dry-run "
        f"--{'enc-' * (family_entry.kind == 'encoder-decoder')}seq-length {shape.length} "
    )
    words += family_entry.benchmark_flags.format(length=shape.length)
    config = parse([*family_entry.recipe, *words.split()], world_size=1, env={}, family=family)
    return config.with_vocab(VOCABULARY)


def build(config: Config, place: torch.device, group: Group = SINGLE) -> torch.nn.Module:
    """Return the model with random weights, split over the ranks of ``group``."""
    built = build_model(config, ParallelContext(group))
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return built.to(place)


def optimizer_of(module: torch.nn.Module, dtype: str) -> MixedPrecisionOptimizer:
    """Return an AdamW optimizer for the model's weights, which are converted to ``dtype``."""
    return build_optimizer(module.parameters(), dtype=device.DTYPES[dtype], clip_grad=1.0)


def micro_batch(config: Config, place: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of a forward pass with loss: random tokens without padding."""
    samples = config.batch.batch_size

    def words(length: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (samples, length), device=place)

    inputs = model_parts(config.family).example_inputs(config, words)
    num_labels = config.loss_tokens_per_sample
    targets = {"labels": words(num_labels), "loss_mask": torch.ones(samples, num_labels, device=place)}
    return inputs | targets


def loss_of(output: Any) -> torch.Tensor:
    """Return the sum of the losses, which a model returns as (sum, count) or as a dictionary of such pairs."""
    pairs = output.values() if isinstance(output, dict) else [output]
    total: torch.Tensor = sum(pair[0] for pair in pairs)
    return total


def rows_of(family: str) -> Mapping[str, str]:
    """Return type of layer -> the attribute that holds the layers."""
    return FAMILIES[family].layer_lists


# Full layers, heads and updates of the real models, timed while the other ranks do the same.
#
# A model of one layer runs forward and backward as in training. Marks at the ends of its layers, set by module and
# gradient hooks, divide the time between the layers and the other units (embedding, norm, head, loss). For each type of
# unit, the ``EfficiencyFactors`` are fitted to the measured times and the predicted times of its operations.
#
# If there are several ranks with a core each, models that are split over all ranks are also timed, in the first format.
# Their matmuls are smaller, and the faster rank waits at each all-reduce. The factors of split layers are the
# factors of unsplit layers times the slowdown (measured time without communication / predicted time). Only the slowdown
# is fitted, because there are few split models and their time without communication is short.

HEAD = "head"
SHAPES = {
    True: (Shape(128, 32, 128, 8), Shape(128, 32, 512, 2), Shape(320, 64, 256, 4), Shape(384, 96, 128, 8)),
    False: (Shape(1024, 64, 1024, 8), Shape(1024, 64, 4096, 2), Shape(2560, 128, 2048, 4), Shape(4096, 128, 1024, 8)),
}
"""True for a CPU -> shapes of the models that are timed."""
TOUCHED = 2**29
"""Bytes of memory to touch before the measurements; more than any of the models needs."""


@dataclass(frozen=True)
class LayerTimings:
    """Times of a model with one layer.

    Args:
        seconds: type of unit -> seconds of (forward, backward); "head" includes embedding, norm and loss.
        update_s: seconds of an optimizer update.
        tensor: number of ranks over which the model was split.
    """

    family: str
    dtype: str
    shape: Shape
    seconds: dict[str, tuple[float, float]]
    update_s: float
    tensor: int = 1


class EventMarks:
    """Times between named points of a forward and a backward pass; the device is synchronized at each point."""

    def __init__(self, kind: str, now: Callable[[], float]) -> None:
        self._kind, self._now = kind, now
        self.at: dict[str, float] = {}

    def set(self, name: str) -> None:
        device.synchronize(self._kind)
        self.at[name] = self._now()

    def between(self, first: str, last: str) -> float:
        return self.at[last] - self.at[first]

    def watch(self, layers: torch.nn.ModuleList, name: str) -> None:
        """Register hooks that set a mark when the forward and backward passes enter and leave ``layers``."""

        def enter(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            inputs[0].register_hook(lambda _: self.set(f"{name} left back"))
            self.set(f"{name} entered")

        def leave(_: Any, inputs: Any, output: torch.Tensor) -> None:
            self.set(f"{name} left")
            output.register_hook(lambda _: self.set(f"{name} entered back"))

        layers[0].register_forward_pre_hook(enter)
        layers[-1].register_forward_hook(leave)


def timed(rank: Rank, dtypes: Sequence[str], pace: TimingBudget, reference: Reference) -> list[LayerTimings]:
    """Return the times of every family's model in each shape, scaled to the speed of ``reference``. Collective.

    The ranks start each measurement together.

    Args:
        dtypes: number formats, the default of runs first; models in the other formats are timed once.
    """
    timings = []
    if rank.kind == "cpu":
        _touch_memory()
    shapes = [shape for shape in SHAPES[rank.kind == "cpu"] if shape.hidden <= pace.widest]
    for dtype in dtypes:
        rank.report(f"layers of every family in {dtype}")
        # timing every format three times would take over half a minute
        budget = pace if dtype == dtypes[0] else replace(pace, turns=1)
        timings += [_timed(rank, family, dtype, shape, budget, reference) for shape in shapes for family in FAMILIES]
    can_cut = [shape for shape in shapes if shape.hidden // shape.head % rank.size == 0]
    if rank.backend and pace.ranks_per_core == 1 and can_cut:
        rank.report(f"layers of every family in {dtypes[0]}, split over the ranks")
        everyone = Group(tuple(range(rank.size)), rank.number, dist.group.WORLD)
        timings += [
            _timed(rank, family, dtypes[0], shape, pace, reference, everyone)
            for shape in can_cut
            for family in FAMILIES
        ]
    return timings


def _touch_memory() -> None:
    """Allocate and touch memory, so that the measurements do not include the page faults of a first step."""
    pieces = [torch.ones(2**22) for _ in range(TOUCHED // 2**24)]
    del pieces


def _timed(
    rank: Rank,
    family: str,
    dtype: str,
    shape: Shape,
    pace: TimingBudget,
    reference: Reference,
    group: Group = SINGLE,
) -> LayerTimings:
    config = config_of(family, dtype, shape)
    module = build(config, rank.place, group)
    optimizer = optimizer_of(module, dtype)
    inputs = micro_batch(config, rank.place)
    marks = EventMarks(rank.kind, pace.now if group.size == 1 else time.perf_counter)  # split model: include waits
    rows = rows_of(family)
    for unit_type, where in rows.items():
        marks.watch(attrgetter(where)(module), unit_type)
    turns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for turn in range(pace.turns + 1):
        rank.meet()
        waited = waits()
        marks.set("began")
        loss = loss_of(module(**inputs))
        marks.set("turned")
        loss.backward()
        optimizer.end_micro_batch()
        marks.set("ended")
        spent = {unit_type: _spent(marks, unit_type) for unit_type in rows}
        total = marks.between("began", "turned"), marks.between("turned", "ended")
        lost_s = reference.lost_s(waited, sum(total)) if group.size > 1 else 0.0
        spent[HEAD] = (
            total[0] - sum(seconds for seconds, _ in spent.values()),
            total[1] - sum(seconds for _, seconds in spent.values()),
        )
        if turn in (0, pace.turns):  # the first update creates the optimizer's states
            marks.set("ended")
            optimizer.step()
            marks.set("updated")
        scale = reference.scale()
        at_work = scale * max(0.0, 1 - lost_s / sum(total))
        if turn:
            for unit_type, (forward, backward) in spent.items():
                turns[unit_type].append((forward * at_work, backward * at_work))
    medians = {unit_type: _median(unit_turns) for unit_type, unit_turns in turns.items()}
    return LayerTimings(family, dtype, shape, medians, marks.between("ended", "updated") * scale, group.size)


def _spent(marks: EventMarks, kind: str) -> tuple[float, float]:
    return marks.between(f"{kind} entered", f"{kind} left"), marks.between(f"{kind} entered back", f"{kind} left back")


def _median(turns: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (forward, backward) of the turn with the median total time."""
    return sorted(turns, key=sum)[len(turns) // 2]


def slowest(ranks: Sequence[Sequence[LayerTimings]]) -> list[LayerTimings]:
    """Return the times of the slowest rank for each model."""

    def most(each: Sequence[LayerTimings]) -> LayerTimings:
        unit_types = each[0].seconds
        worst = {unit_type: max((timing.seconds[unit_type] for timing in each), key=sum) for unit_type in unit_types}
        return replace(each[0], seconds=worst, update_s=max(timing.update_s for timing in each))

    return [most(each) for each in zip(*ranks, strict=True)]


def with_pieces(machine: Machine, found: Sequence[LayerTimings]) -> Machine:
    """Return ``machine`` with factors fitted to the timed layers, and with the measured bandwidth of updates."""
    unsplit, split = ([timing for timing in found if (timing.tensor > 1) == is_cut] for is_cut in (False, True))
    samples = _by_kind(machine, unsplit)
    tempos: dict[str, dict[str, EfficiencyFactors]] = defaultdict(dict)
    for (dtype, unit_type), pairs in samples.items():
        tempos[dtype][unit_type] = EfficiencyFactors(
            fitted([sample for sample, _ in pairs]), fitted([sample for _, sample in pairs])
        )
    timed = replace(machine, tempos=tempos, update_bandwidth=_update_bandwidth(unsplit) or machine.update_bandwidth)
    slowed: dict[str, dict[str, EfficiencyFactors]] = {
        dtype: dict(factors_by_type) for dtype, factors_by_type in tempos.items()
    }
    for (dtype, unit_type), pairs in _by_kind(timed, split).items():
        factors = tempos[dtype][unit_type]
        slowed[dtype][unit_type + CUT] = EfficiencyFactors(
            factors.forward.times(slowdown([sample for sample, _ in pairs], factors.forward)),
            factors.backward.times(slowdown([sample for _, sample in pairs], factors.backward)),
        )
    return replace(timed, tempos=slowed)


def _by_kind(machine: Machine, found: Sequence[LayerTimings]) -> dict[tuple[str, str], list[tuple[Sample, Sample]]]:
    """Return (format, type of unit) -> pairs of samples, for forward and backward."""
    samples: dict[tuple[str, str], list[tuple[Sample, Sample]]] = defaultdict(list)
    for timing in found:
        for unit_type, pair in _samples(machine, timing):
            samples[timing.dtype, f"{timing.family} {unit_type}"].append(pair)
    return samples


def _samples(machine: Machine, one: LayerTimings) -> Iterable[tuple[str, tuple[Sample, Sample]]]:
    """Yield (type of unit, (forward sample, backward sample))."""
    config = config_of(one.family, one.dtype, one.shape)
    costs = registry.costs_of(config, is_on_cpu=machine.is_cpu)
    clock, layout = Clock(costs, machine, one.family), replace(layout_of(config, 1), tensor=one.tensor)
    parts = dict(zip(costs.unit_names, clock.parts(layout), strict=True))
    units = clock.units(layout)
    sent = dict(zip(costs.unit_names, Messages(costs, machine).ways(layout, units), strict=True))
    for unit_type in rows_of(one.family):
        yield unit_type, _pair(parts.pop(f"{unit_type} 0"), one.seconds[unit_type], sent.pop(f"{unit_type} 0"))
    head = parts.pop(HEAD)
    # The time of the remaining units outside the layers is computed from closed forms and subtracted.
    closed = dict(zip(costs.unit_names, units, strict=True))
    forward, backward = one.seconds[HEAD]
    other_units = [closed[name] for name in parts]
    head_seconds = forward - sum(u.forward for u in other_units), backward - sum(u.backward for u in other_units)
    yield HEAD, _pair(head, head_seconds, tuple(sum(ways, Traffic()) for ways in zip(*sent.values(), strict=True)))


def _pair(parts: Parts, seconds: tuple[float, float], sent: Sequence[Traffic]) -> tuple[Sample, Sample]:
    """Return the samples of forward and backward; exposed communication is subtracted from the measured times."""
    rests = parts.forward_rest + sent[0].exposed_s, parts.backward_rest + sent[1].exposed_s
    forward, backward = (max(measured - rest, 0.0) for measured, rest in zip(seconds, rests, strict=True))
    scale = sum(seconds)
    return Sample(parts.forward_parts, forward, scale), Sample(parts.backward_parts, backward, scale)


def _update_bandwidth(found: Sequence[LayerTimings]) -> float:
    """Return the median bytes/s of the updates of the widest models in the first format; 0 if nothing was timed."""
    if not found:
        return 0.0
    first, widest = found[0].dtype, max(timing.shape for timing in found)
    state = State.of(first, "adamw")
    rates = []
    for timing in found:
        if timing.dtype == first and timing.shape == widest:
            costs = registry.costs_of(config_of(timing.family, first, widest))
            num_bytes = costs.num_parameters * (2 * (state.width + state.optimizer) + 2 * state.gradient)
            rates.append(num_bytes / timing.update_s)
    return statistics.median(rates)
