"""What ``--compile`` has cost is counted, said and written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import utils

from megatron.training import setup
from megatron.training.callbacks import compile_meter
from megatron.training.callbacks.compile_meter import (
    CompileCost,
    CompileMeter,
    compile_line,
    compile_metrics,
    process_compile_cost,
)
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.compile import compile_layers
from tests.helpers.recomputed import DROPOUT_RATES, loss_and_grads, make_model
from tests.helpers.runs import make_flags, train_ranks

METRIC_NAMES = ("compile_s", "graphs_compiled", "graphs_cached")


def use_aot_eager_backend(rank: int) -> None:
    """Have layers traced and differentiated, and no kernels made: the tracing takes a second, kernels half a minute."""
    original_compile_layers = compile_layers
    setup.compile_layers = lambda *args, **kwargs: original_compile_layers(*args, **kwargs, backend="aot_eager")  # type: ignore[assignment]


def test_meter_returns_cost_since_last_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = iter(
        [CompileCost(1.0, 1, 0), CompileCost(4.0, 3, 1), CompileCost(5.5, 3, 5), CompileCost()]
    )  # the first is of an earlier run
    monkeypatch.setattr(compile_meter, "process_compile_cost", lambda: next(costs))
    meter = CompileMeter()
    assert meter.drain() == (3.0, 2, 1)
    assert meter.drain() == (1.5, 0, 4)
    assert meter.drain() == (0.0, 0, 0), "where a program has had torch forget all"


def test_metrics_sum_graphs_and_use_slowest_rank_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/cache")
    metrics = compile_metrics([CompileCost(3.0, 2, 1), CompileCost(4.5, 0, 3)])
    assert metrics == {"compile_s": 4.5, "graphs_compiled": 2, "graphs_cached": 4}
    assert compile_line(metrics) == (
        "torch.compile took 4.5 s (the slowest rank); graphs of all ranks: 2 compiled, 4 loaded from /the/cache"
    )
    assert compile_line(compile_metrics([CompileCost(), CompileCost()])) is None


@pytest.mark.slow
def test_run_logs_and_records_compile_cost(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    extra = "--train-iters 2 --hidden-dropout 0 --attention-dropout 0 --pipe-parallel-size 2 --compile"
    assert train_ranks(2, make_flags(corpus, folder, extra), use_aot_eager_backend)[0] == [0, 0]
    first, second = read_metrics(folder / "metrics.jsonl")[:2]
    assert 0 < first.get("compile_s", 0.0) < first["step_s"]
    assert (first["graphs_compiled"], first["graphs_cached"]) == (2, 0), "one kind of layer on each of two stages"
    assert [second[name] for name in METRIC_NAMES] == [0, 0, 0]
    compile_lines = [line for line in capfd.readouterr().out.splitlines() if "torch.compile took" in line]
    assert (
        len(compile_lines) == 1
        and compile_lines[0].startswith("step 1 | ")
        and "2 compiled, 0 loaded from" in compile_lines[0]
    )


def test_uncompiled_run_records_no_compile_metrics(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train_ranks(1, make_flags(corpus, folder, "--train-iters 1"))
    assert not set(METRIC_NAMES) & set(read_metrics(folder / "metrics.jsonl")[0])


def test_compile_cost_reads_torch_counters() -> None:
    """The names are torch's own: a version that counts otherwise is to be seen here."""
    torch._dynamo.reset()  # which sets torch's clock to 0
    before = process_compile_cost()
    compiled_function = torch.compile(lambda x: (2 * x).sum(), backend="aot_eager")
    compiled_function(torch.ones(3, requires_grad=True)).backward()
    after = process_compile_cost()
    assert after.seconds > before.seconds
    assert (after.num_compiled - before.num_compiled, after.num_cached - before.num_cached) == (1, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_second_start_loads_cached_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def start() -> CompileCost:
        torch._dynamo.reset()
        utils.counters.clear()
        meter = CompileMeter()
        model: Any = make_model("gpt2", **dict.fromkeys(DROPOUT_RATES, 0.0))
        compile_layers(model, model.parallel.streams, torch.device("cpu"))
        loss_and_grads(model)
        cost: CompileCost = meter.drain()
        return cost

    first, second = start(), start()
    assert first[1:] == (1, 0) and second[1:] == (0, 1)
    assert 0 < second.seconds < first.seconds
