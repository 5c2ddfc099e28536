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
    Compiled,
    CompileMeter,
    compile_line,
    compile_metrics,
    compiled_here,
)
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.compile import compile_layers
from tests.helpers.recomputed import RATES, bits, make
from tests.helpers.runs import flags, train_ranks

NAMES = ("compile_s", "graphs_compiled", "graphs_cached")


def without_kernels(rank: int) -> None:
    """Have layers traced and differentiated, and no kernels made: the tracing takes a second, kernels half a minute."""
    built = compile_layers
    setup.compile_layers = lambda *args, **how: built(*args, **how, backend="aot_eager")  # type: ignore[assignment]


def test_a_meter_tells_what_came_since_it_was_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(
        [Compiled(1.0, 1, 0), Compiled(4.0, 3, 1), Compiled(5.5, 3, 5), Compiled()]
    )  # the first is of an earlier run
    monkeypatch.setattr(compile_meter, "compiled_here", lambda: next(counts))
    meter = CompileMeter()
    assert meter.drain() == (3.0, 2, 1)
    assert meter.drain() == (1.5, 0, 4)
    assert meter.drain() == (0.0, 0, 0), "where a program has had torch forget all"


def test_graphs_of_all_ranks_count_and_the_longest_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/cache")
    metrics = compile_metrics([Compiled(3.0, 2, 1), Compiled(4.5, 0, 3)])
    assert metrics == {"compile_s": 4.5, "graphs_compiled": 2, "graphs_cached": 4}
    assert compile_line(metrics) == (
        "torch.compile took 4.5 s (the slowest rank); graphs of all ranks: 2 compiled, 4 loaded from /the/cache"
    )
    assert compile_line(compile_metrics([Compiled(), Compiled()])) is None


@pytest.mark.slow
def test_a_run_says_and_writes_down_what_was_compiled(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    extra = "--train-iters 2 --hidden-dropout 0 --attention-dropout 0 --pipe-parallel-size 2 --compile"
    assert train_ranks(2, flags(corpus, folder, extra), without_kernels)[0] == [0, 0]
    first, second = read_metrics(folder / "metrics.jsonl")[:2]
    assert 0 < first.get("compile_s", 0.0) < first["step_s"]
    assert (first["graphs_compiled"], first["graphs_cached"]) == (2, 0), "one kind of layer on each of two stages"
    assert [second[name] for name in NAMES] == [0, 0, 0]
    said = [line for line in capfd.readouterr().out.splitlines() if "torch.compile took" in line]
    assert len(said) == 1 and said[0].startswith("step 1 | ") and "2 compiled, 0 loaded from" in said[0]


def test_a_run_that_is_not_compiled_has_no_such_numbers(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train_ranks(1, flags(corpus, folder, "--train-iters 1"))
    assert not set(NAMES) & set(read_metrics(folder / "metrics.jsonl")[0])


def test_what_is_read_of_torch_is_there() -> None:
    """The names are torch's own: a version that counts otherwise is to be seen here."""
    torch._dynamo.reset()  # which sets torch's clock to 0
    before = compiled_here()
    twice = torch.compile(lambda x: (2 * x).sum(), backend="aot_eager")
    twice(torch.ones(3, requires_grad=True)).backward()
    now = compiled_here()
    assert now.seconds > before.seconds
    assert (now.made - before.made, now.found - before.found) == (1, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_start_finds_its_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def start() -> Compiled:
        torch._dynamo.reset()
        utils.counters.clear()
        meter = CompileMeter()
        model: Any = make("gpt2", **dict.fromkeys(RATES, 0.0))
        compile_layers(model, model.place.streams, torch.device("cpu"))
        bits(model)
        compiled: Compiled = meter.drain()
        return compiled

    first, second = start(), start()
    assert first[1:] == (1, 0) and second[1:] == (0, 1)
    assert 0 < second.seconds < first.seconds
