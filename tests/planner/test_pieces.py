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
from megatron.planner.calibrate import MeasuredMachine, combine
from megatron.planner.estimate import Planner
from megatron.planner.layer_benchmarks import EventMarks, LayerTimings, Shape, slowest_timings, with_layer_timings
from megatron.planner.layout import Layout, layout_of
from megatron.planner.machine import (
    LAYER,
    SPLIT_SUFFIX,
    EfficiencyFactor,
    EfficiencyFactors,
    Link,
    Machine,
    Sample,
    fit_factors,
    gpu_machine,
    slowdown,
)
from megatron.planner.microbenchmarks import Rates
from megatron.planner.spawn_ranks import run_ranks
from megatron.planner.time_model import CommunicationModel

PLAIN_MACHINE = replace(gpu_machine("h100-80g"), is_cpu=True)
SHAPES = (Shape(128, 32, 128, 8), Shape(128, 32, 512, 2), Shape(320, 64, 256, 4), Shape(512, 64, 128, 8))
SLOW_FACTORS = EfficiencyFactors(EfficiencyFactor(1.5, 6.0, 2.0), EfficiencyFactor(1.25, 7.0, 3.0))
STEADY_REFERENCE: Any = SimpleNamespace(scale=lambda: 1.0)
SLOW_HEAD_FACTORS = EfficiencyFactors(EfficiencyFactor(3.0, 4.0), EfficiencyFactor(0.5, 0.25))


def slow_factors(family: str) -> dict[str, EfficiencyFactors]:
    layers = {"t5": ("t5 encoder", "t5 decoder")}.get(family, (f"{family} layer",))
    return dict.fromkeys(layers, SLOW_FACTORS) | {f"{family} head": SLOW_HEAD_FACTORS}


def simulate_timings(
    family: str, shape: Shape, machine: Machine = PLAIN_MACHINE, tensor: int = 1, slowdown_factor: float = 1.0
) -> LayerTimings:
    """Return what a machine whose layers are slow would time: of ranks that talk to each other their messages too.

    Args:
        slowdown_factor: than whole layers the work of cut ones takes.
    """
    factors = slow_factors(family)
    if tensor > 1:
        factors = {
            layer_type + SPLIT_SUFFIX: EfficiencyFactors(
                entry.forward.scaled(slowdown_factor), entry.backward.scaled(slowdown_factor)
            )
            for layer_type, entry in factors.items()
        }
    planner = Planner(
        layer_benchmarks.benchmark_config(family, "bf16", shape), replace(machine, tempos={"bf16": factors})
    )
    layout = replace(layout_of(planner.config, 1), tensor=tensor)
    units = planner.unit_seconds(layout)
    traffic = CommunicationModel(planner.costs, planner.machine).tensor_traffic_by_pass(layout, units)
    seconds_by_unit = {
        name: (unit.forward + forward_traffic.exposed_s, unit.backward + backward_traffic.exposed_s)
        for name, unit, (forward_traffic, backward_traffic) in zip(
            planner.costs.unit_names, units, traffic, strict=True
        )
    }
    seconds = {
        layer_type: seconds_by_unit.pop(f"{layer_type} 0") for layer_type in layer_benchmarks.layer_lists_of(family)
    }
    seconds["head"] = (
        sum(entry for entry, _ in seconds_by_unit.values()),
        sum(entry for _, entry in seconds_by_unit.values()),
    )
    return LayerTimings(family, "bf16", shape, seconds, planner.costs.num_parameters / 1e9, tensor)


@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
def test_fit_recovers_layer_factors(family: str) -> None:
    machine = with_layer_timings(PLAIN_MACHINE, [simulate_timings(family, shape) for shape in SHAPES])
    for layer_type, expected in slow_factors(family).items():
        factors = machine.tempos["bf16"][layer_type]
        for actual_factor, expected_factor in (
            (factors.forward, expected.forward),
            (factors.backward, expected.backward),
        ):
            assert vars(actual_factor) == pytest.approx(vars(expected_factor), rel=1e-6, abs=1e-9), layer_type
    state = State.for_optimizer("bf16", "adamw")
    bytes_per_param = 2 * (state.width + state.optimizer) + 2 * state.gradient
    assert machine.update_bandwidth == pytest.approx(bytes_per_param * 1e9)


@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
@pytest.mark.parametrize("num_shapes", [1, 3])
def test_fit_recovers_sharded_layer_factors(family: str, num_shapes: int) -> None:
    sharded = [
        simulate_timings(family, shape, PLAIN_MACHINE, 2, slowdown_factor=1.3)
        for shape in (SHAPES[3], *SHAPES[:2])[:num_shapes]
    ]
    slow_updates = [replace(entry, update_s=1e6) for entry in sharded]
    machine = with_layer_timings(PLAIN_MACHINE, [*(simulate_timings(family, shape) for shape in SHAPES), *slow_updates])
    for layer_type, expected in slow_factors(family).items():
        factors = machine.tempos["bf16"][layer_type + SPLIT_SUFFIX]
        for entry, expected_entry in ((factors.forward, expected.forward), (factors.backward, expected.backward)):
            assert vars(entry) == pytest.approx(vars(expected_entry.scaled(1.3)), rel=1e-5, abs=1e-9), layer_type
    assert (
        machine.update_bandwidth
        == with_layer_timings(PLAIN_MACHINE, [simulate_timings(family, shape) for shape in SHAPES]).update_bandwidth
    )


def test_sharded_layer_is_no_faster_than_its_share() -> None:
    """Messages that took less than a model of the link says would else become work that takes less than nothing."""
    sharded = [simulate_timings("gpt2", shape, PLAIN_MACHINE, 2, slowdown_factor=0.5) for shape in SHAPES[:2]]
    machine = with_layer_timings(PLAIN_MACHINE, [*(simulate_timings("gpt2", shape) for shape in SHAPES), *sharded])
    for layer_type in slow_factors("gpt2"):
        assert machine.tempos["bf16"][layer_type + SPLIT_SUFFIX] == machine.tempos["bf16"][layer_type]
    assert slowdown([Sample((0.0, 0.0, 0.0), 1.0, 1.0)], LAYER.forward) == 1.0


def test_tensor_parallel_layouts_use_sharded_layer_factors() -> None:
    config = layer_benchmarks.benchmark_config("gpt2", "bf16", SHAPES[3])
    factors = slow_factors("gpt2")
    plain_planner, full_planner, sharded_planner = (
        Planner(config, replace(PLAIN_MACHINE, tempos={"bf16": tempos}))
        for tempos in ({}, factors, {layer_type + SPLIT_SUFFIX: value for layer_type, value in factors.items()})
    )
    single, tensor_parallel = Layout(), Layout(tensor=2)
    assert (
        sharded_planner.unit_seconds(single) == plain_planner.unit_seconds(single) != full_planner.unit_seconds(single)
    )
    assert (
        sharded_planner.unit_seconds(tensor_parallel)
        == full_planner.unit_seconds(tensor_parallel)
        != plain_planner.unit_seconds(tensor_parallel)
    )


def test_machine_without_timings_uses_closed_forms() -> None:
    assert with_layer_timings(PLAIN_MACHINE, []) == PLAIN_MACHINE
    assert PLAIN_MACHINE.efficiency("bf16", "gpt2 layer") == LAYER


def test_plans_use_factors_of_family_and_dtype() -> None:
    config = layer_benchmarks.benchmark_config("gpt2", "bf16", SHAPES[0])
    base_machine = replace(PLAIN_MACHINE, overhead_s=0.0)
    closed_form_units = Planner(config, base_machine).unit_seconds(Layout())
    for machine in (
        replace(base_machine, tempos={"fp32": slow_factors("gpt2")}),
        replace(base_machine, tempos={"bf16": slow_factors("llama")}),
    ):
        assert Planner(config, machine).unit_seconds(Layout()) == closed_form_units
    slow_planner = Planner(config, replace(base_machine, tempos={"bf16": slow_factors("gpt2")}))
    slow_units = slow_planner.unit_seconds(Layout())
    assert (
        slow_units[1].forward > 1.5 * closed_form_units[1].forward
        and slow_units[1].backward > 1.25 * closed_form_units[1].backward
    )
    assert (
        slow_units[0] == closed_form_units[0]
        and slow_units[2] == closed_form_units[2]
        and slow_units[3].forward > closed_form_units[3].forward
    )
    recompute_units = slow_planner.unit_seconds(Layout(recompute="full"))
    assert recompute_units[1].recompute == slow_units[1].forward and recompute_units[3].recompute == 0


def test_fit_recovers_factors_and_clips_at_zero() -> None:
    rows = [(1.0, 2.0, 0.5), (2.0, 1.0, 0.1), (4.0, 3.0, 2.0), (0.5, 3.0, 1.0)]

    def samples(*factors: float) -> list[Sample]:
        seconds_per_row = [sum(factor * feature for factor, feature in zip(factors, row, strict=True)) for row in rows]
        return [Sample(row, seconds, scale=seconds) for row, seconds in zip(rows, seconds_per_row, strict=True)]

    assert vars(fit_factors(samples(1.1, 5.0, 3.0))) == pytest.approx({"products": 1.1, "passes": 5.0, "scores": 3.0})
    clipped = fit_factors(samples(2.0, 1.0, -0.5))
    assert clipped.scores == 0 and min(clipped.products, clipped.passes) > 0
    assert fit_factors([Sample((0.0, 0.0, 0.0), 1.0, 1.0)]) == EfficiencyFactor(0.0, 0.0)


def test_fit_minimizes_relative_error() -> None:
    feature_rows = [(1.0, 0.0, 0.0), (100.0, 0.0, 0.0)]
    factor = fit_factors([Sample(feature_rows[0], 2.0, 2.0), Sample(feature_rows[1], 100.0, 100.0)])
    assert factor.products == pytest.approx(1.2)  # by absolute errors it would be 1.0001


def test_slowest_rank_timings_are_used() -> None:
    fast = LayerTimings("gpt2", "fp32", SHAPES[0], {"layer": (1.0, 2.0), "head": (3.0, 1.0)}, 0.1)
    slow = replace(fast, seconds={"layer": (2.0, 2.0), "head": (1.0, 1.0)}, update_s=0.2)
    (timings,) = slowest_timings([[fast], [slow]])
    assert timings.seconds == {"layer": (2.0, 2.0), "head": (3.0, 1.0)} and timings.update_s == 0.2
    rates = Rates({"fp32": ((64.0, 1e9),)}, 1e9, 1e9, 0.0, 1e9)
    ranks = [MeasuredMachine(rates, None, 100, 10, 1e9, "CPU", (timings,)) for timings in (fast, slow)]
    machine = combine(ranks, Link.uniform(1e9, 1e-5), "cpu")
    assert set(machine.tempos["fp32"]) == {"gpt2 layer", "gpt2 head"}
    num_bytes = registry.costs_of(layer_benchmarks.benchmark_config("gpt2", "fp32", SHAPES[0])).num_parameters * 32
    assert machine.update_bandwidth == pytest.approx(num_bytes / 0.2)


def test_event_marks_enclose_layers_in_both_passes() -> None:
    moments: list[str] = []
    now = iter(range(100))
    marks = EventMarks("cpu", lambda: float(next(now)))
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    marks.add_hooks(layers, "layer")
    first, last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for module_idx, module in enumerate([first, *layers, last]):
        module.register_full_backward_hook(
            lambda *_, module_idx=module_idx: moments.append(f"back {module_idx} at {next(now)}")
        )
    x = first(torch.ones(1, 2, requires_grad=True))
    for layer in layers:
        x = layer(x)
    last(x).sum().backward()
    assert (marks.elapsed("layer entered", "layer left")) == 1.0
    inner_moments = [moment for moment in moments if moment.startswith(("back 1", "back 2"))]
    inner_times = [int(moment.split()[-1]) for moment in inner_moments]
    assert marks.times["layer entered back"] < min(inner_times) < max(inner_times)
    assert marks.times["layer left back"] >= max(inner_times) - 1 and len(inner_moments) == 2


@pytest.mark.parametrize("family", ["gpt2", "t5", "llama", "mpt", "bert"])
def test_benchmark_models_match_cost_model(family: str) -> None:
    config = layer_benchmarks.benchmark_config(family, "bf16", Shape(16, 8, 8, 2))
    module = layer_benchmarks.build(config, torch.device("cpu"))
    optimizer = layer_benchmarks.build_adamw(module, "bf16")
    num_params = registry.costs_of(config, is_on_cpu=True).num_parameters
    assert sum(p.numel() for p in module.parameters()) == num_params
    assert not config.model.attention_dropout and not config.model.hidden_dropout
    loss = layer_benchmarks.total_loss(module(**layer_benchmarks.make_micro_batch(config, torch.device("cpu"))))
    loss.backward()
    optimizer.end_micro_batch()
    assert all(optimizer.gradient_of(p) is not None for p in module.parameters())


def test_shared_cores_reduce_idle_time() -> None:
    assert PLAIN_MACHINE.idle(0.2) == pytest.approx(0.2)
    shared = replace(PLAIN_MACHINE, ranks_per_core=2.0)
    assert shared.idle(0.2) == 0.0 and shared.idle(0.75) == pytest.approx(0.5)


def test_cpu_does_not_overlap_messages() -> None:
    config = layer_benchmarks.benchmark_config("gpt2", "bf16", SHAPES[2])
    layout = Layout(tensor=2, data=2)
    for machine, is_hidden in ((PLAIN_MACHINE, False), (replace(PLAIN_MACHINE, is_cpu=False), True)):
        traffic = Planner(config, machine).estimate(layout).traffic
        assert all((entry.hidden_s > 0) == is_hidden for name, entry in traffic.items() if name != "pipeline")


def test_first_dtype_gets_all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_cases: set[tuple[str, int]] = set()
    monkeypatch.setattr(layer_benchmarks, "_touch_memory", lambda: None)
    monkeypatch.setattr(
        layer_benchmarks,
        "_time_model",
        lambda rank, family, dtype, shape, pace, reference: timed_cases.add((dtype, pace.num_repetitions)),
    )
    layer_benchmarks.time_layers(
        layer_benchmarks.Rank(0, 1, "cpu", "", 1),
        ("fp32", "bf16"),
        layer_benchmarks.TimingBudget(num_repetitions=3),
        STEADY_REFERENCE,
    )
    assert timed_cases == {("fp32", 3), ("bf16", 1)}


def test_budget_limits_width_of_timed_models(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_cases: list[tuple[str, int]] = []
    monkeypatch.setattr(layer_benchmarks, "_touch_memory", lambda: None)
    monkeypatch.setattr(
        layer_benchmarks,
        "_time_model",
        lambda rank, family, dtype, shape, pace, reference: timed_cases.append((family, shape.hidden)),
    )
    layer_benchmarks.time_layers(
        layer_benchmarks.Rank(0, 1, "cpu", "", 1),
        ("fp32",),
        layer_benchmarks.TimingBudget(max_hidden_size=320),
        STEADY_REFERENCE,
    )
    assert {family for family, _ in timed_cases} == set(FAMILIES)
    assert {width for _, width in timed_cases} == {128, 320}


def test_timings_are_scaled_to_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in a second that is a thousand times as slow as the first, by the reference beside it."""
    rank, budget = layer_benchmarks.Rank(0, 1, "cpu", "", 1), layer_benchmarks.TimingBudget(num_repetitions=3)
    ticks = iter(range(10**6))
    monkeypatch.setattr(layer_benchmarks.TimingBudget, "now", lambda self: 1000.0 * next(ticks))
    slow_reference: Any = SimpleNamespace(read=lambda: 1000.0, scale=lambda: 1 / 1000)
    timings = layer_benchmarks._time_model(rank, "gpt2", "fp32", Shape(16, 8, 8, 2), budget, slow_reference)
    assert timings.seconds["layer"] == (1.0, 1.0) and timings.update_s == 1.0
    assert timings.seconds["head"] == (2.0, 2.0)


def _time_sharded_layer(rank: layer_benchmarks.Rank) -> tuple[float, float]:
    """Return the seconds of a cut model's layer by the wall, and where other programs took three quarters of all."""
    group = layer_benchmarks.Group((0, 1), rank.idx, torch.distributed.group.WORLD)
    ticks = iter(range(10**6))
    setattr(time, "perf_counter", lambda: float(next(ticks)))  # noqa: B010 - of this process alone
    layer_seconds = []
    for share in (0.0, 0.75):
        reference: Any = SimpleNamespace(scale=lambda: 1.0, lost_s=lambda before, seconds, share=share: share * seconds)
        timings = layer_benchmarks._time_model(
            rank, "gpt2", "fp32", Shape(16, 8, 8, 2), layer_benchmarks.TimingBudget(num_repetitions=1), reference, group
        )
        layer_seconds.append(sum(timings.seconds["layer"]))
    return layer_seconds[0], layer_seconds[1]


def test_sharded_layer_time_excludes_lost_time() -> None:
    assert run_ranks(2, _time_sharded_layer) == [(2.0, 0.5)] * 2
