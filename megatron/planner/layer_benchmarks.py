"""Whole layers of the real models, timed."""

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

# Small models of every family as their trainings build them, and a micro-batch for each, to be timed.
#
# They are whole: embedding, layers, norm, head and loss, with the optimizer that keeps their gradients.

VOCABULARY = 6144


@dataclass(frozen=True, order=True)
class Shape:
    """Width of the layers and of a head, tokens of a sample, samples of a micro-batch."""

    hidden: int
    head: int
    length: int
    samples: int


def config_of(family: str, dtype: str, shape: Shape) -> Config:
    """Return the configuration of a model of one layer (T5: one on each side)."""
    known = FAMILIES[family]
    words = (
        f"--num-layers 1 --hidden-size {shape.hidden} --num-attention-heads {shape.hidden // shape.head} --{dtype} "
        f"--vocab-size {VOCABULARY} --batch-size {shape.samples} --dry-run "
        f"--{'enc-' * (known.kind == 'encoder-decoder')}seq-length {shape.length} "
    )
    words += known.benchmark_flags.format(length=shape.length)
    config = parse([*known.recipe, *words.split()], world_size=1, env={}, family=family)
    return config.with_vocab(VOCABULARY)


def build(config: Config, place: torch.device, group: Group = SINGLE) -> torch.nn.Module:
    """Return the model with random weights, cut over the ranks of ``group``."""
    built = build_model(config, ParallelContext(group))
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return built.to(place)


def optimizer_of(module: torch.nn.Module, dtype: str) -> MixedPrecisionOptimizer:
    """Return an AdamW over the model's weights, which take ``dtype``."""
    return build_optimizer(module.parameters(), dtype=device.DTYPES[dtype], clip_grad=1.0)


def micro_batch(config: Config, place: torch.device) -> dict[str, torch.Tensor]:
    """Return what the model takes to give its loss: random tokens that fill their rows."""
    samples = config.batch.batch_size

    def words(length: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (samples, length), device=place)

    inputs = model_parts(config.family).example_inputs(config, words)
    written = config.loss_tokens_per_sample
    ends = {"labels": words(written), "loss_mask": torch.ones(samples, written, device=place)}
    return inputs | ends


def loss_of(output: Any) -> torch.Tensor:
    """Return the sum of the losses that a model gives as (sum, count), or by name."""
    pairs = output.values() if isinstance(output, dict) else [output]
    total: torch.Tensor = sum(pair[0] for pair in pairs)
    return total


def rows_of(family: str) -> Mapping[str, str]:
    """Return kind of unit -> the attribute that holds its layers."""
    return FAMILIES[family].layer_lists


# Whole layers, heads and updates of the real models, timed while the other ranks do the same.
#
# A model of one layer makes forwards and backwards as a training does. Marks at the ends of its layers, set by hooks of
# modules and of gradients, share the time out among the layers and what lies around them: embedding, norm, head, loss.
# What was timed beside what its operations add up to gives the ``EfficiencyFactors`` of each kind of unit.
#
# Where there are several ranks, each with a core of its own, models are timed that are cut over all of them, too, in
# the first format: their products are smaller, and at each sum the faster rank waits. How many times as long that takes
# as what the tempos of whole layers say, messages apart, makes the tempos of cut ones: one number, for so few models
# and what is left of them after the messages bear no more.

HEAD = "head"
SHAPES = {
    True: (Shape(128, 32, 128, 8), Shape(128, 32, 512, 2), Shape(320, 64, 256, 4), Shape(384, 96, 128, 8)),
    False: (Shape(1024, 64, 1024, 8), Shape(1024, 64, 4096, 2), Shape(2560, 128, 2048, 4), Shape(4096, 128, 1024, 8)),
}
"""Whether it is a CPU -> the models that are timed."""
TOUCHED = 2**29
"""Bytes of memory: more than one of the models takes."""


@dataclass(frozen=True)
class LayerTimings:
    """A model of one layer: what it was, and the seconds of a forward and a backward by kind of unit; "head": ends.

    Args:
        tensor: ranks that it was cut over.
    """

    family: str
    dtype: str
    shape: Shape
    seconds: dict[str, tuple[float, float]]
    update_s: float
    tensor: int = 1


class EventMarks:
    """Tells the seconds between moments of a forward and a backward, by the device's own end of work."""

    def __init__(self, kind: str, now: Callable[[], float]) -> None:
        self._kind, self._now = kind, now
        self.at: dict[str, float] = {}

    def set(self, name: str) -> None:
        device.synchronize(self._kind)
        self.at[name] = self._now()

    def between(self, first: str, last: str) -> float:
        return self.at[last] - self.at[first]

    def watch(self, layers: torch.nn.ModuleList, name: str) -> None:
        """Mark where forwards enter and leave the layers, and where backwards do."""

        def enter(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            inputs[0].register_hook(lambda _: self.set(f"{name} left back"))
            self.set(f"{name} entered")

        def leave(_: Any, inputs: Any, output: torch.Tensor) -> None:
            self.set(f"{name} left")
            output.register_hook(lambda _: self.set(f"{name} entered back"))

        layers[0].register_forward_pre_hook(enter)
        layers[-1].register_forward_hook(leave)


def timed(rank: Rank, dtypes: Sequence[str], pace: TimingBudget, reference: Reference) -> list[LayerTimings]:
    """Return what every family's model takes at each size. Collective: ranks begin each together.

    All of it at the speed of ``reference``.

    Args:
        dtypes: formats, first the one that runs take by default; models in the others have one turn each.
    """
    found = []
    if rank.kind == "cpu":
        _touch_memory()
    shapes = [shape for shape in SHAPES[rank.kind == "cpu"] if shape.hidden <= pace.widest]
    for dtype in dtypes:
        rank.report(f"layers of every family in {dtype}")
        own = pace if dtype == dtypes[0] else replace(pace, turns=1)  # half a minute is not enough for three of all
        found += [_timed(rank, family, dtype, shape, own, reference) for shape in shapes for family in FAMILIES]
    can_cut = [shape for shape in shapes if shape.hidden // shape.head % rank.size == 0]
    if rank.backend and pace.ranks_per_core == 1 and can_cut:
        rank.report(f"layers of every family in {dtypes[0]}, cut over the ranks")
        everyone = Group(tuple(range(rank.size)), rank.number, dist.group.WORLD)
        found += [
            _timed(rank, family, dtypes[0], shape, pace, reference, everyone)
            for shape in can_cut
            for family in FAMILIES
        ]
    return found


def _touch_memory() -> None:
    """Have the system's pages ahead of the first turn: a training has them from its second step on."""
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
    marks = EventMarks(rank.kind, pace.now if group.size == 1 else time.perf_counter)  # cut: others are waited for
    rows = rows_of(family)
    for kind, where in rows.items():
        marks.watch(attrgetter(where)(module), kind)
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
        own = {kind: _spent(marks, kind) for kind in rows}
        whole = marks.between("began", "turned"), marks.between("turned", "ended")
        lost_s = reference.lost_s(waited, sum(whole)) if group.size > 1 else 0.0
        own[HEAD] = (whole[0] - sum(one for one, _ in own.values()), whole[1] - sum(one for _, one in own.values()))
        if turn in (0, pace.turns):  # the first makes the optimizer's states
            marks.set("ended")
            optimizer.step()
            marks.set("updated")
        scale = reference.scale()
        at_work = scale * max(0.0, 1 - lost_s / sum(whole))
        if turn:
            for kind, (forward, backward) in own.items():
                turns[kind].append((forward * at_work, backward * at_work))
    middle = {kind: _median(each) for kind, each in turns.items()}
    return LayerTimings(family, dtype, shape, middle, marks.between("ended", "updated") * scale, group.size)


def _spent(marks: EventMarks, kind: str) -> tuple[float, float]:
    return marks.between(f"{kind} entered", f"{kind} left"), marks.between(f"{kind} entered back", f"{kind} left back")


def _median(turns: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return forward and backward of the turn whose whole is the median."""
    return sorted(turns, key=sum)[len(turns) // 2]


def slowest(ranks: Sequence[Sequence[LayerTimings]]) -> list[LayerTimings]:
    """Return of each model what the slowest rank took."""

    def most(each: Sequence[LayerTimings]) -> LayerTimings:
        kinds = each[0].seconds
        worst = {kind: max((one.seconds[kind] for one in each), key=sum) for kind in kinds}
        return replace(each[0], seconds=worst, update_s=max(one.update_s for one in each))

    return [most(each) for each in zip(*ranks, strict=True)]


def with_pieces(machine: Machine, found: Sequence[LayerTimings]) -> Machine:
    """Return ``machine`` with the tempos that make its layers take what was timed, and the pace of its updates."""
    whole, cut = ([one for one in found if (one.tensor > 1) == is_cut] for is_cut in (False, True))
    samples = _by_kind(machine, whole)
    tempos: dict[str, dict[str, EfficiencyFactors]] = defaultdict(dict)
    for (dtype, kind), pairs in samples.items():
        tempos[dtype][kind] = EfficiencyFactors(
            fitted([each for each, _ in pairs]), fitted([each for _, each in pairs])
        )
    timed = replace(machine, tempos=tempos, update_bandwidth=_update_bandwidth(whole) or machine.update_bandwidth)
    slowed: dict[str, dict[str, EfficiencyFactors]] = {dtype: dict(kinds) for dtype, kinds in tempos.items()}
    for (dtype, kind), pairs in _by_kind(timed, cut).items():
        own = tempos[dtype][kind]
        slowed[dtype][kind + CUT] = EfficiencyFactors(
            own.forward.times(slowdown([each for each, _ in pairs], own.forward)),
            own.backward.times(slowdown([each for _, each in pairs], own.backward)),
        )
    return replace(timed, tempos=slowed)


def _by_kind(machine: Machine, found: Sequence[LayerTimings]) -> dict[tuple[str, str], list[tuple[Sample, Sample]]]:
    """Return format and kind of unit -> what forwards and backwards add up to on ``machine`` and took."""
    samples: dict[tuple[str, str], list[tuple[Sample, Sample]]] = defaultdict(list)
    for one in found:
        for kind, pair in _samples(machine, one):
            samples[one.dtype, f"{one.family} {kind}"].append(pair)
    return samples


def _samples(machine: Machine, one: LayerTimings) -> Iterable[tuple[str, tuple[Sample, Sample]]]:
    """Yield each kind of unit with what its forward and its backward add up to and took."""
    config = config_of(one.family, one.dtype, one.shape)
    costs = registry.costs_of(config, is_on_cpu=machine.is_cpu)
    clock, layout = Clock(costs, machine, one.family), replace(layout_of(config, 1), tensor=one.tensor)
    parts = dict(zip(costs.unit_names, clock.parts(layout), strict=True))
    units = clock.units(layout)
    sent = dict(zip(costs.unit_names, Messages(costs, machine).ways(layout, units), strict=True))
    for kind in rows_of(one.family):
        yield kind, _pair(parts.pop(f"{kind} 0"), one.seconds[kind], sent.pop(f"{kind} 0"))
    head = parts.pop(HEAD)
    # What is left lies around the layers too, and keeps its closed forms.
    closed = dict(zip(costs.unit_names, units, strict=True))
    forward, backward = one.seconds[HEAD]
    beside = [closed[name] for name in parts]
    own = forward - sum(u.forward for u in beside), backward - sum(u.backward for u in beside)
    yield HEAD, _pair(head, own, tuple(sum(ways, Traffic()) for ways in zip(*sent.values(), strict=True)))


def _pair(parts: Parts, seconds: tuple[float, float], sent: Sequence[Traffic]) -> tuple[Sample, Sample]:
    """Return what the two ways add up to and took, without the messages that were waited for."""
    rests = parts.forward_rest + sent[0].exposed_s, parts.backward_rest + sent[1].exposed_s
    forward, backward = (max(own - rest, 0.0) for own, rest in zip(seconds, rests, strict=True))
    scale = sum(seconds)
    return Sample(parts.forward_parts, forward, scale), Sample(parts.backward_parts, backward, scale)


def _update_bandwidth(found: Sequence[LayerTimings]) -> float:
    """Return the bytes/s of the update of the widest models in the first format; 0 where nothing was timed."""
    if not found:
        return 0.0
    first, widest = found[0].dtype, max(one.shape for one in found)
    state = State.of(first, "adamw")
    rates = []
    for one in found:
        if one.dtype == first and one.shape == widest:
            costs = registry.costs_of(config_of(one.family, first, widest))
            moved = costs.num_parameters * (2 * (state.width + state.optimizer) + 2 * state.gradient)
            rates.append(moved / one.update_s)
    return statistics.median(rates)
