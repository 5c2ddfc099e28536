"""Layers are timed one by one, and the probe leaves no trace in the model."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tds
from tds.deepspeed.layer_profiler import profile_layers, profile_partition, smooth_times
from tds.engine.stage_table import LayerCost, StageChunk, format_layers, format_table
from tds.pipe import LayerSpec, PipelineModule
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine

CPU = torch.device("cpu")
NAP_S = 0.03


class Nap(nn.Module):
    """Sleeps; its weights come from the global generator."""

    def __init__(self, units: int, wide: int = 6) -> None:
        super().__init__()
        self.units = units
        self.inner = nn.Linear(wide, wide)
        self.scale = nn.Parameter(torch.tensor([random.random(), np.random.random()]))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.units * NAP_S)
        self.calls += 1
        return self.inner(nn.functional.dropout(x, 0.1))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(3, 6), torch.zeros(3, 6)


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((output - labels) ** 2).mean()


def test_profiled_partition_isolates_slow_layer() -> None:
    specs = [LayerSpec(Nap, units) for units in (0, 0, 3, 0)]
    partition = profile_partition(specs, num_stages=2, batch=_batch(), loss_fn=loss, device=CPU)
    assert partition.bounds in ([0, 2, 4], [0, 3, 4])
    slow_layer = partition.layers[2]
    assert (
        slow_layer.name == "Nap" and slow_layer.num_parameters == 44 and 3 * NAP_S <= slow_layer.forward_s < 30 * NAP_S
    )
    assert all(0 < layer.backward_s < NAP_S * 30 and layer.activation_bytes > 0 for layer in partition.layers)


def test_recompute_adds_forward_to_backward_time() -> None:
    specs = [LayerSpec(Nap, 1), LayerSpec(Nap, 0)]
    partition = profile_partition(specs, num_stages=1, batch=_batch(), loss_fn=loss, device=CPU, recomputes=True)
    assert partition.layers[0].backward_s > NAP_S


def test_profiler_times_all_layer_types_and_leaves_module_unchanged() -> None:
    module = Nap(0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    toy = Toy("many")
    for specs, batch, loss_fn in (
        ([module, torch.tanh, LayerSpec(Nap, 0)], _batch(), loss),
        ([module, lambda x: {"loss": x.mean(), "more": x.sum()}], _batch(), None),
        ([module], _batch(), lambda x, _: tds.Weighted(x.sum(), 3)),
        (toy.layer_specs(), toy.make_batch(0), toy.loss_fn),
        (Toy("tied").layer_specs(), Toy("tied").make_batch(0), Toy("tied").loss_fn),
    ):
        costs = profile_layers(specs, batch, loss_fn, CPU)
        assert len(costs) == len(specs) and all(cost.forward_s > 0 for cost in costs)
    assert module.calls == 0 and all(p.grad is None for p in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_similar_layers_get_median_time_except_last_and_slow() -> None:
    layers = [LayerCost("Block", 5, seconds, 2 * seconds, 0, "x") for seconds in (1.9, 2.0, 2.1, 2.2, 9.0, 7.0)]
    layers.insert(1, LayerCost("Other", 5, 4.0, 4.0, 0, "x"))
    assert [cost.forward_s for cost in smooth_times(layers)] == [2.1, 4.0, 2.1, 2.1, 2.1, 9.0, 7.0]


@pytest.mark.parametrize("batch", [None, torch.ones(2), (1, 2, 3)])
def test_profiling_rejects_missing_or_invalid_batch(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"profile_batch=\(inputs, labels\)"):
        profile_partition([LayerSpec(Nap, 0)], num_stages=1, batch=batch, loss_fn=loss, device=CPU)


class TogetherNap(Nap):
    """A layer with a collective in it, as under tensor parallelism."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(torch.zeros(1))
        return super().forward(x)


class _LogCapture(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _build(rank: int) -> list[Any]:
    tds.init_distributed("gloo", verbose=False)
    capture = _LogCapture()
    logging.getLogger("tds").addHandler(capture)
    results = []
    bounds: Any = "profile"
    for _ in range(2):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        specs = [LayerSpec(TogetherNap, units) for units in (5 + rank, 1, 1, 1)]
        kwargs = {"profile_batch": _batch()} if bounds == "profile" else {}
        module = PipelineModule(specs, num_stages=2, loss_fn=loss, partition_method=bounds, **kwargs)
        results.append((module.parts, {name: p.detach().clone() for name, p in module.named_parameters()}))
        make_engine(Toy(dtype=torch.float32), 2, module=module)
        bounds = module.parts
    return [results, capture.lines]


def test_profiled_module_equals_manual_partition_and_logs_table_once() -> None:
    (first, lines), (second, other_lines) = run_ranks(2, _build)
    for (bounds, weights), (manual_parts, manual_weights) in (first, second):
        assert bounds == manual_parts == first[0][0] and bounds[1] == 1
        assert all(torch.equal(weights[name], manual_weights[name]) for name in manual_weights)
    tables = [line for line in lines if line.startswith("stages by measured time")]
    assert len(tables) == 1 and "0-0" not in tables[0] and "1-3 TogetherNap x 3" in tables[0]
    assert not any(line.startswith("stages") for line in other_lines)


def test_stage_table_columns_are_aligned() -> None:
    costs = (LayerCost("A", 5, 0.001, 0.002, 2**20), LayerCost("B", 5, 0.001, 0.002, 2**20))
    rows = [StageChunk(0, 0, "0-1 A, B", 1234567, 3 * 2**20, costs), StageChunk(1, 1, "2 C", 5, 0, costs[:1])]
    assert format_table(rows).splitlines() == [
        "stage  layers    parameters  weights MiB  forward ms  backward ms  activations MiB",
        "    0  0-1 A, B   1,234,567          3.0        2.00         4.00              2.0",
        "  1.1  2 C                5          0.0        1.00         2.00              1.0",
    ]
    assert format_layers(["A", "B", "B", "A"], 3) == "3-6 A, B x 2, A" and format_layers(["A"], 0) == "0 A"
