"""The pipeline benchmark cuts every engine's model at the best cut, and its contenders train the same model."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.utils import partition_balanced

from benchmarks import pipeline
from benchmarks.contenders import GPTSizes
from benchmarks.pipe.model import Case
from benchmarks.pipeline import all_splits, best_chunks, deepspeed_splits, format_split, make_contenders
from tds.schedule import Costs, schedule_named, simulate
from tds.schedule.simulate import SCHEDULES, placement_for

SIZES = GPTSizes(num_layers=8, hidden_size=16, num_attention_heads=2, vocab_size=32, seq_length=8)
CASE = Case(name="toy", sizes=SIZES, bar=0.9)
LAYERS_S = [5.0, *[30.0, 45.0] * 8, 2.0, 210.0]


def run_benchmark(folder: Path, *flags: str) -> dict[str, Any]:
    return pipeline.main(["--smoke", "--out", str(folder), "--start-method", "fork", *flags])


def test_all_partitions_have_each_layer_once_and_no_empty_chunk() -> None:
    partitions = all_splits(5, 3)
    assert len(partitions) == len(set(partitions)) == 6
    assert all(bounds[0] == 0 and bounds[-1] == 5 and list(bounds) == sorted(set(bounds)) for bounds in partitions)


def test_deepspeed_partitions_match_partition_methods() -> None:
    specs = CASE.specs()
    names = [spec.typename.__name__ for spec in specs]
    partitions = deepspeed_splits(specs, 2)
    assert {format_split(bounds, specs) for bounds in partitions} >= {"4+4", "4.5+3.5", "5+3", "5.5+2.5"}
    for bounds, method in partitions.items():
        if method.startswith("type:"):
            pattern = re.compile(method.removeprefix("type:").lower(), re.IGNORECASE)  # as DeepSpeed reads it
            weights = [int(bool(pattern.search(name))) for name in names]
            assert tuple(partition_balanced(weights=weights, num_parts=2)) == bounds


def test_best_chunks_have_shortest_simulated_step() -> None:
    layers_s = [1.0] * 7 + [4.0]
    case = Case(name="toy", sizes=SIZES, num_micro_batches=6)
    for schedule in ("interleaved", "zb-h1", "zb-v"):
        placement = placement_for(schedule)
        order = schedule_named(schedule, 2, placement)
        actions = [order(2, 6, stage) for stage in range(2)]
        steps = {}
        for bounds in all_splits(8, 4):
            thirds = tuple(sum(layers_s[a:b]) / 3 for a, b in itertools.pairwise(bounds))
            steps[bounds] = simulate(actions, Costs(thirds, thirds, thirds), 2, placement).step_s
        assert steps[best_chunks(case, layers_s, 2, schedule)] == min(steps.values())


@pytest.mark.slow
def test_contenders_cover_all_schedules_and_torch_partitions() -> None:
    contenders = make_contenders(CASE, LAYERS_S)
    partitions = {
        prefix: {contender.split_text for contender in contenders if contender.name.startswith(prefix)}
        for prefix in ("torch", "ours 1f1b")
    }
    assert partitions["torch"] == partitions["ours 1f1b"] >= {"5.5+2.5"}
    assert {contender.schedule for contender in contenders if contender.kind == "ours"} == set(SCHEDULES)
    assert len({contender.name for contender in contenders}) == len(contenders)
    assert {contender.kind for contender in contenders if contender.should_keep_freed} == {"alone", "side by side"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_contenders_have_equal_losses(tmp_path: Path) -> None:
    result = run_benchmark(tmp_path, "--micro-batches", "8")
    rows = {row["contender"]: row for row in result["cases"]["m=8"]["rows"]}
    assert {name.split()[0] for name in rows} == {"one", "side", "stock", "torch", "ours"}
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["side by side"]["losses"], abs=1e-5)
        assert row["tokens_per_s"] > 0 and bool(row["first_stage_bytes"]) == (row["contender"] != "one process")
    texts = " ".join(bar["name"] for bar in result["cases"]["m=8"]["bars"])
    assert "to side by side" in texts and "to torch's" in texts
    assert (tmp_path / "table.txt").read_text().count("ours 1f1b") >= 1


@pytest.mark.slow
def test_benchmark_writes_results_of_two_contenders(tmp_path: Path) -> None:
    result = run_benchmark(tmp_path, "--micro-batches", "4", "--only", "side", "ours zb-h1")
    rows = result["cases"]["m=4"]["rows"]
    assert {row["contender"].split()[0] for row in rows} == {"side", "ours"} and not result["cases"]["m=4"]["bars"]
    assert (tmp_path / "table.txt").is_file() and (tmp_path / "result.json").is_file()
