"""Whole layers are timed between their ends, and what they take comes back as the pace of plans."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.costs.memory import State
from megatron.models import registry
from megatron.models.registry import FAMILIES
from megatron.planner import layer_benchmarks
from megatron.planner.calibrate import MeasuredMachine, joined
from megatron.planner.estimate import Planner
from megatron.planner.layer_benchmarks import EventMarks, LayerTimings, Shape, slowest, with_pieces
from megatron.planner.layout import Layout, layout_of
from megatron.planner.machine import (
    CUT,
    LAYER,
    EfficiencyFactor,
    EfficiencyFactors,
    Link,
    Machine,
    Sample,
    device,
    fitted,
    slowdown,
)
from megatron.planner.microbenchmarks import Rates
from megatron.planner.spawn_ranks import run_ranks
from megatron.planner.time_model import Messages

PLAIN = replace(device("h100-80g"), is_cpu=True)
SHAPES = (Shape(128, 32, 128, 8), Shape(128, 32, 512, 2), Shape(320, 64, 256, 4), Shape(512, 64, 128, 8))
SLOW = EfficiencyFactors(EfficiencyFactor(1.5, 6.0, 2.0), EfficiencyFactor(1.25, 7.0, 3.0))
STEADY: Any = SimpleNamespace(scale=lambda: 1.0)
SLOW_HEAD = EfficiencyFactors(EfficiencyFactor(3.0, 4.0), EfficiencyFactor(0.5, 0.25))


def kinds_of(family: str) -> dict[str, EfficiencyFactors]:
    layers = {"t5": ("t5 encoder", "t5 decoder")}.get(family, (f"{family} layer",))
    return dict.fromkeys(layers, SLOW) | {f"{family} head": SLOW_HEAD}


def as_timed(family: str, shape: Shape, machine: Machine = PLAIN, tensor: int = 1, longer: float = 1.0) -> LayerTimings:
    """Return what a machine whose layers are slow would time: of ranks that talk to each other their messages too.

    Args:
        longer: than whole layers the work of cut ones takes.
    """
    kinds = kinds_of(family)
    if tensor > 1:
        kinds = {
            kind + CUT: EfficiencyFactors(one.forward.times(longer), one.backward.times(longer))
            for kind, one in kinds.items()
        }
    planner = Planner(layer_benchmarks.config_of(family, "bf16", shape), replace(machine, tempos={"bf16": kinds}))
    layout = replace(layout_of(planner.config, 1), tensor=tensor)
    units = planner.units(layout)
    sent = Messages(planner.costs, planner.machine).ways(layout, units)
    taken = {
        name: (unit.forward + there.exposed_s, unit.backward + back.exposed_s)
        for name, unit, (there, back) in zip(planner.costs.unit_names, units, sent, strict=True)
    }
    seconds = {kind: taken.pop(f"{kind} 0") for kind in layer_benchmarks.rows_of(family)}
    seconds["head"] = sum(one for one, _ in taken.values()), sum(one for _, one in taken.values())
    return LayerTimings(family, "bf16", shape, seconds, planner.costs.num_parameters / 1e9, tensor)


@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
def test_what_layers_take_comes_back_as_their_tempos(family: str) -> None:
    machine = with_pieces(PLAIN, [as_timed(family, shape) for shape in SHAPES])
    for kind, wanted in kinds_of(family).items():
        found = machine.tempos["bf16"][kind]
        for one, other in ((found.forward, wanted.forward), (found.backward, wanted.backward)):
            assert vars(one) == pytest.approx(vars(other), rel=1e-6, abs=1e-9), kind
    state = State.of("bf16", "adamw")
    moved = 2 * (state.width + state.optimizer) + 2 * state.gradient
    assert machine.update_bandwidth == pytest.approx(moved * 1e9)


@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
@pytest.mark.parametrize("number", [1, 3])
def test_what_cut_layers_take_longer_beside_their_messages_comes_back(family: str, number: int) -> None:
    cut = [as_timed(family, shape, PLAIN, 2, longer=1.3) for shape in (SHAPES[3], *SHAPES[:2])[:number]]
    slow_updates = [replace(one, update_s=1e6) for one in cut]
    machine = with_pieces(PLAIN, [*(as_timed(family, shape) for shape in SHAPES), *slow_updates])
    for kind, whole in kinds_of(family).items():
        found = machine.tempos["bf16"][kind + CUT]
        for one, other in ((found.forward, whole.forward), (found.backward, whole.backward)):
            assert vars(one) == pytest.approx(vars(other.times(1.3)), rel=1e-5, abs=1e-9), kind
    assert (
        machine.update_bandwidth == with_pieces(PLAIN, [as_timed(family, shape) for shape in SHAPES]).update_bandwidth
    )


def test_a_cut_layer_is_no_faster_than_its_part_of_a_whole_one() -> None:
    """Messages that took less than a model of the link says would else become work that takes less than nothing."""
    cut = [as_timed("gpt2", shape, PLAIN, 2, longer=0.5) for shape in SHAPES[:2]]
    machine = with_pieces(PLAIN, [*(as_timed("gpt2", shape) for shape in SHAPES), *cut])
    for kind in kinds_of("gpt2"):
        assert machine.tempos["bf16"][kind + CUT] == machine.tempos["bf16"][kind]
    assert slowdown([Sample((0.0, 0.0, 0.0), 1.0, 1.0)], LAYER.forward) == 1.0


def test_layouts_with_tensor_ranks_take_the_tempos_of_cut_layers() -> None:
    config = layer_benchmarks.config_of("gpt2", "bf16", SHAPES[3])
    kinds = kinds_of("gpt2")
    plain, whole, cut = (
        Planner(config, replace(PLAIN, tempos={"bf16": tempos}))
        for tempos in ({}, kinds, {kind + CUT: own for kind, own in kinds.items()})
    )
    one, two = Layout(), Layout(tensor=2)
    assert cut.units(one) == plain.units(one) != whole.units(one)
    assert cut.units(two) == whole.units(two) != plain.units(two)


def test_a_machine_that_timed_nothing_keeps_its_closed_forms() -> None:
    assert with_pieces(PLAIN, []) == PLAIN
    assert PLAIN.efficiency("bf16", "gpt2 layer") == LAYER


def test_plans_take_the_tempo_of_their_family_and_format() -> None:
    config = layer_benchmarks.config_of("gpt2", "bf16", SHAPES[0])
    plain = replace(PLAIN, overhead_s=0.0)
    closed = Planner(config, plain).units(Layout())
    for machine in (
        replace(plain, tempos={"fp32": kinds_of("gpt2")}),
        replace(plain, tempos={"bf16": kinds_of("llama")}),
    ):
        assert Planner(config, machine).units(Layout()) == closed
    slow = Planner(config, replace(plain, tempos={"bf16": kinds_of("gpt2")}))
    one = slow.units(Layout())
    assert one[1].forward > 1.5 * closed[1].forward and one[1].backward > 1.25 * closed[1].backward
    assert one[0] == closed[0] and one[2] == closed[2] and one[3].forward > closed[3].forward
    again = slow.units(Layout(recompute="full"))
    assert again[1].again == one[1].forward and again[3].again == 0


def test_factors_come_back_and_none_is_below_zero() -> None:
    rows = [(1.0, 2.0, 0.5), (2.0, 1.0, 0.1), (4.0, 3.0, 2.0), (0.5, 3.0, 1.0)]

    def samples(*factors: float) -> list[Sample]:
        taken = [sum(f * part for f, part in zip(factors, row, strict=True)) for row in rows]
        return [Sample(row, seconds, scale=seconds) for row, seconds in zip(rows, taken, strict=True)]

    assert vars(fitted(samples(1.1, 5.0, 3.0))) == pytest.approx({"products": 1.1, "passes": 5.0, "scores": 3.0})
    below = fitted(samples(2.0, 1.0, -0.5))
    assert below.scores == 0 and min(below.products, below.passes) > 0
    assert fitted([Sample((0.0, 0.0, 0.0), 1.0, 1.0)]) == EfficiencyFactor(0.0, 0.0)


def test_relative_errors_count_so_that_large_layers_do_not_hide_small_ones() -> None:
    parts = [(1.0, 0.0, 0.0), (100.0, 0.0, 0.0)]
    found = fitted([Sample(parts[0], 2.0, 2.0), Sample(parts[1], 100.0, 100.0)])
    assert found.products == pytest.approx(1.2)  # by absolute errors it would be 1.0001


def test_the_slowest_rank_stands_for_a_model() -> None:
    fast = LayerTimings("gpt2", "fp32", SHAPES[0], {"layer": (1.0, 2.0), "head": (3.0, 1.0)}, 0.1)
    slow = replace(fast, seconds={"layer": (2.0, 2.0), "head": (1.0, 1.0)}, update_s=0.2)
    (one,) = slowest([[fast], [slow]])
    assert one.seconds == {"layer": (2.0, 2.0), "head": (3.0, 1.0)} and one.update_s == 0.2
    rates = Rates({"fp32": ((64.0, 1e9),)}, 1e9, 1e9, 0.0, 1e9)
    ranks = [MeasuredMachine(rates, None, 100, 10, 1e9, "CPU", (one,)) for one in (fast, slow)]
    machine = joined(ranks, Link.of(1e9, 1e-5), "cpu")
    assert set(machine.tempos["fp32"]) == {"gpt2 layer", "gpt2 head"}
    moved = registry.costs_of(layer_benchmarks.config_of("gpt2", "fp32", SHAPES[0])).num_parameters * 32
    assert machine.update_bandwidth == pytest.approx(moved / 0.2)


def test_marks_lie_around_the_layers_there_and_back() -> None:
    moments: list[str] = []
    now = iter(range(100))
    marks = EventMarks("cpu", lambda: float(next(now)))
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    marks.watch(layers, "layer")
    first, last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for number, module in enumerate([first, *layers, last]):
        module.register_full_backward_hook(lambda *_, number=number: moments.append(f"back {number} at {next(now)}"))
    x = first(torch.ones(1, 2, requires_grad=True))
    for layer in layers:
        x = layer(x)
    last(x).sum().backward()
    assert (marks.between("layer entered", "layer left")) == 1.0
    inner = [moment for moment in moments if moment.startswith(("back 1", "back 2"))]
    at = [int(moment.split()[-1]) for moment in inner]
    assert marks.at["layer entered back"] < min(at) < max(at)
    assert marks.at["layer left back"] >= max(at) - 1 and len(inner) == 2


@pytest.mark.parametrize("family", ["gpt2", "t5", "llama", "mpt", "bert"])
def test_models_are_those_that_are_reckoned_with(family: str) -> None:
    config = layer_benchmarks.config_of(family, "bf16", Shape(16, 8, 8, 2))
    module = layer_benchmarks.build(config, torch.device("cpu"))
    optimizer = layer_benchmarks.optimizer_of(module, "bf16")
    counted = registry.costs_of(config, is_on_cpu=True).num_parameters
    assert sum(p.numel() for p in module.parameters()) == counted
    assert not config.model.attention_dropout and not config.model.hidden_dropout
    loss = layer_benchmarks.loss_of(module(**layer_benchmarks.micro_batch(config, torch.device("cpu"))))
    loss.backward()
    optimizer.end_micro_batch()
    assert all(optimizer.gradient_of(p) is not None for p in module.parameters())


def test_ranks_that_take_turns_on_a_core_lose_less_by_waiting() -> None:
    assert PLAIN.idle(0.2) == pytest.approx(0.2)
    shared = replace(PLAIN, ranks_per_core=2.0)
    assert shared.idle(0.2) == 0.0 and shared.idle(0.75) == pytest.approx(0.5)


def test_on_a_cpu_nothing_hides_messages() -> None:
    config = layer_benchmarks.config_of("gpt2", "bf16", SHAPES[2])
    layout = Layout(tensor=2, data=2)
    for machine, is_hidden in ((PLAIN, False), (replace(PLAIN, is_cpu=False), True)):
        traffic = Planner(config, machine).estimate(layout).traffic
        assert all((one.hidden_s > 0) == is_hidden for name, one in traffic.items() if name != "pipeline")


def test_models_in_the_first_format_have_all_turns_and_those_in_others_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[str, int]] = set()
    monkeypatch.setattr(layer_benchmarks, "_touch_memory", lambda: None)
    monkeypatch.setattr(
        layer_benchmarks, "_timed", lambda rank, family, dtype, shape, pace, reference: asked.add((dtype, pace.turns))
    )
    layer_benchmarks.timed(
        layer_benchmarks.Rank(0, 1, "cpu", "", 1), ("fp32", "bf16"), layer_benchmarks.TimingBudget(turns=3), STEADY
    )
    assert asked == {("fp32", 3), ("bf16", 1)}


def test_wide_models_are_left_out_of_a_short_look(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(layer_benchmarks, "_touch_memory", lambda: None)
    monkeypatch.setattr(
        layer_benchmarks,
        "_timed",
        lambda rank, family, dtype, shape, pace, reference: asked.append((family, shape.hidden)),
    )
    layer_benchmarks.timed(
        layer_benchmarks.Rank(0, 1, "cpu", "", 1), ("fp32",), layer_benchmarks.TimingBudget(widest=320), STEADY
    )
    assert {family for family, _ in asked} == set(FAMILIES)
    assert {width for _, width in asked} == {128, 320}


def test_layers_and_updates_are_timed_at_the_speed_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in a second that is a thousand times as slow as the first, by the reference beside it."""
    rank, pace = layer_benchmarks.Rank(0, 1, "cpu", "", 1), layer_benchmarks.TimingBudget(turns=3)
    ticks = iter(range(10**6))
    monkeypatch.setattr(layer_benchmarks.TimingBudget, "now", lambda self: 1000.0 * next(ticks))
    slow: Any = SimpleNamespace(read=lambda: 1000.0, scale=lambda: 1 / 1000)
    found = layer_benchmarks._timed(rank, "gpt2", "fp32", Shape(16, 8, 8, 2), pace, slow)
    assert found.seconds["layer"] == (1.0, 1.0) and found.update_s == 1.0
    assert found.seconds["head"] == (2.0, 2.0)


def _cut_over_two(rank: layer_benchmarks.Rank) -> tuple[float, float]:
    """Return the seconds of a cut model's layer by the wall, and where other programs took three quarters of all."""
    everyone = layer_benchmarks.Group((0, 1), rank.number, torch.distributed.group.WORLD)
    ticks = iter(range(10**6))
    setattr(time, "perf_counter", lambda: float(next(ticks)))  # noqa: B010 - of this process alone
    found = []
    for share in (0.0, 0.75):
        beside: Any = SimpleNamespace(scale=lambda: 1.0, lost_s=lambda before, seconds, share=share: share * seconds)
        one = layer_benchmarks._timed(
            rank, "gpt2", "fp32", Shape(16, 8, 8, 2), layer_benchmarks.TimingBudget(turns=1), beside, everyone
        )
        found.append(sum(one.seconds["layer"]))
    return found[0], found[1]


def test_what_other_programs_took_is_no_time_of_a_cut_layer() -> None:
    assert run_ranks(2, _cut_over_two) == [(2.0, 0.5)] * 2
