"""--pipeline-schedule auto: the placement is that of the fastest schedule by simulation among those that fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.arguments.deepspeed_json import engine_dict
from megatron.config import Config, parse
from megatron.errors import ConfigError
from megatron.models import registry
from megatron.mpu.topology import Topology
from megatron.training.auto_placement import is_free, with_placement
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.dry_run import dry_run
from megatron.training.estimates import simulated_bubble, stage_memory
from tds.schedule import LOOP, Costs, V, schedule_named, simulate
from tests.helpers.runs import flags, start_script

SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 101 --gas 8"
ENOUGH = "--num-layers 8 --hidden-size 128"
"""Layers that outweigh the head over the corpus's vocabulary."""
EVERY = {
    "1f1b": (1, LOOP), "gpipe": (1, LOOP), "zb-h1": (1, LOOP), "interleaved": (2, LOOP),
    "zb-h1 with 2 chunks": (2, LOOP), "zb-v": (2, V), "dualpipev": (2, V),
}  # fmt: skip


def config_of(words: str, pipe: int = 2) -> Config:
    line = f"{SIZES} --pipeline-schedule auto --pipe-parallel-size {pipe} {words}"
    return parse(line.split(), world_size=pipe, env={}, family="gpt2").with_vocab(101)


def placed(words: str = "", pipe: int = 2, limit: int | None = None) -> Config:
    return with_placement(config_of(words, pipe), Topology.of_world(pipe, 1, pipe), "fp32", limit)


def lie(config: Config) -> tuple[int, str]:
    return config.parallel.chunks, config.parallel.placement


def needed(name: str, pipe: int = 2) -> int:
    """Return the bytes of the fullest stage under one schedule, as its own run plans them."""
    chunks, placement = EVERY[name]
    line = f"{SIZES} --pipe-parallel-size {pipe} --pipeline-schedule {name.split()[0]}"
    line += f" --pipeline-chunks {chunks} --pipeline-placement {placement}"
    config = parse(line.split(), world_size=pipe, env={}, family="gpt2").with_vocab(101)
    bounds = registry.bounds_of(config, pipe)
    return max(stage.total for stage in stage_memory(config, Topology.of_world(pipe, 1, pipe), bounds, "fp32"))


def test_the_fastest_by_simulation_says_how_layers_lie() -> None:
    found = placed()
    assert lie(found) == (2, V) and found.parallel.pipeline_schedule == "auto"
    assert {name: engine_dict(found, 2)["pipeline"][name] for name in ("schedule", "chunks", "placement")} == {
        "schedule": "auto", "chunks": 2, "placement": V,
    }  # fmt: skip
    ranked = dict(re.findall(r"([a-z0-9-]+(?: with 2 chunks)?) (\d\.\d{3})", found.notes[-1].split("fastest:")[1]))
    assert set(ranked) == set(EVERY) and min(ranked, key=lambda name: float(ranked[name])) == "dualpipev"


def test_times_are_those_of_the_simulation_where_nothing_is_split() -> None:
    note = placed().notes[-1]
    one, chunked = (float(re.findall(rf"{name} (\d\.\d+)", note)[0]) for name in ("1f1b", "interleaved"))
    idle = {}
    for name, chunks in (("1f1b", 1), ("interleaved", 2)):
        costs = registry.costs_of(config_of(""))
        pieces = costs.piece_costs(costs.stage_bounds(2, chunks))
        idle[name] = simulated_bubble(2, 8, name, chunks, pieces)
    assert one / chunked == pytest.approx((1 - idle["interleaved"]) / (1 - idle["1f1b"]), abs=2e-3)


def test_on_a_cpu_halves_of_a_backward_cost_more_than_a_whole_one() -> None:
    costs = registry.costs_of(config_of(""))
    pieces = costs.piece_costs(costs.stage_bounds(2, 2, V))
    halves, whole = tuple(1.1 * piece for piece in pieces), tuple(2 * piece for piece in pieces)
    times = {}
    for name in ("zb-v", "dualpipev"):
        order = schedule_named(name, 2, V)
        stages = [order(2, 8, stage) for stage in range(2)]
        times[name] = simulate(stages, Costs(tuple(pieces), halves, halves, backward=whole), 2, V).step_s
    split, mostly_whole = (float(re.findall(rf"{name} (\d\.\d+)", placed().notes[-1])[0]) for name in times)
    assert split / mostly_whole == pytest.approx(times["zb-v"] / times["dualpipev"], abs=2e-3)


@pytest.mark.parametrize(
    ("most", "wanted"),
    [
        ("1f1b", "auto:1f1b"),
        ("zb-v", "auto:zb-v"),
        ("dualpipev", "auto"),
    ],
)
def test_what_does_not_fit_is_left_out(most: str, wanted: str) -> None:
    found = placed(limit=needed(most))
    assert found.parallel.schedule == engine_dict(found, 2)["pipeline"]["schedule"] == wanted
    assert lie(found) == EVERY[most]
    large = {name for name in EVERY if needed(name) > needed(most)}
    listed = re.findall(r"([a-z0-9-]+(?: with 2 chunks)?) [\d.]+ [KM]iB", found.notes[-1].split("memory limit of ")[1])
    assert set(listed) == large and large


def test_the_fullest_stage_must_fit_wherever_it_is() -> None:
    words = "--vocab-size 20000"  # logits on the last stage of a loop
    line = f"{SIZES} --pipe-parallel-size 2 --pipeline-schedule 1f1b {words}"
    config = parse(line.split(), world_size=2, env={}, family="gpt2")
    topology = Topology.of_world(2, 1, 2)
    first, last = (each.total for each in stage_memory(config, topology, registry.bounds_of(config, 2), "fp32"))
    assert first < last
    free = parse(f"{line} --pipeline-schedule auto".split(), world_size=2, env={}, family="gpt2")
    assert re.search(
        r"memory limit of .*1f1b [\d.]+ ", with_placement(free, topology, "fp32", (first + last) // 2).notes[-1]
    )


def test_where_nothing_fits_the_smallest_runs() -> None:
    found = placed(limit=1000)
    assert found.parallel.schedule == "auto:1f1b" and "no schedule fits" in found.notes[-1]


@pytest.mark.parametrize(
    "words",
    [
        "--pipeline-chunks 1",
        "--pipeline-placement loop",
        "--pipeline-placement v",
        "--pipeline-chunks 2 --microbatch-group-size-per-virtual-pipeline-stage 4",
        "--partition-method uniform",
        "--pipeline-model-parallel-layout Ettt|tttttL",
    ],
)
def test_layers_lie_as_a_flag_says(words: str) -> None:
    config = config_of(words)
    assert not is_free(config)
    assert with_placement(config, Topology.of_world(2, 1, 2), "fp32", None) is config


def test_among_the_schedules_that_are_named() -> None:
    found = placed("--pipeline-auto-schedules 1f1b,interleaved")
    assert (lie(found), found.parallel.schedule) == ((2, LOOP), "auto:interleaved")
    assert set(re.findall(r"([a-z0-9-]+) \d\.\d{3}", found.notes[-1])) == {"1f1b", "interleaved"}
    assert lie(config_of("--pipeline-auto-schedules zb-v")) == (2, V)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pipeline-auto-schedules zb-v --pipeline-schedule 1f1b", "needs --pipeline-schedule auto, got .* and 1f1b"),
        (
            "--pipeline-auto-schedules fastest",
            "must be a comma-separated list of 1f1b, gpipe, zb-h1, interleaved, zb-v, dualpipev, got .*fastest",
        ),
        ("--pipeline-auto-schedules interleaved", "Name others, or change --pipeline-chunks"),
        ("--pipeline-auto-schedules 1f1b --pipeline-chunks 2", "must name at least one of interleaved, zb-h1, which"),
        ("--pipeline-auto-schedules ,", "must be a comma-separated list of 1f1b"),
    ],
)
def test_schedules_that_auto_cannot_choose_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(words)


def test_few_layers_or_micro_batches_take_one_chunk() -> None:
    assert lie(placed("--gas 2", pipe=4)) == (1, LOOP)
    assert lie(placed("--num-layers 3")) == (1, LOOP)


def test_named_schedules_of_a_v_lie_in_one_however_few_the_micro_batches() -> None:
    found = placed("--gas 1 --pipeline-auto-schedules zb-v")
    assert (lie(found), found.parallel.schedule) == ((2, V), "auto:zb-v")


def test_a_plan_for_a_device_that_is_not_here_leaves_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SIZES} --pipeline-schedule auto --pipe-parallel-size 2 --device cuda --mock-data"
    dry_run(parse(line.split(), world_size=2, env={}, family="gpt2"), 2)
    shown = capsys.readouterr().out
    assert "schedule auto of zb-v, dualpipev, 2 chunks on each stage" in shown


def test_other_schedules_stay_as_they_are() -> None:
    assert not is_free(config_of("--pipeline-schedule zb-h1"))


@pytest.mark.slow  # the choice, above, and the schedules of a V in tests/parity are in the short run
def test_a_run_begins_with_the_placement_and_trains_as_one_process_does(corpus: Path, tmp_path: Path) -> None:
    found = {}
    for name, words, ranks in (("one", "", 1), ("auto", "--pipe-parallel-size 2 --pipeline-schedule auto", 2)):
        log, run = tmp_path / f"{name}.log", tmp_path / name
        argv = flags(corpus, run, f"{ENOUGH} --fp64 --train-iters 6 --log-interval 1 --gas 8 {words}")
        assert start_script(ranks, argv, log) == [0] * ranks, log.read_text()
        records = [each for each in read_metrics(run / "metrics.jsonl") if each["kind"] == "train"]
        found[name] = [each["loss"] for each in records]
    assert "2 chunks on each stage in a V" in log.read_text()
    assert json.loads((run / "config.json").read_text())["parallel"]["pipeline_placement"] == V
    assert len(found["one"]) == 6 and found["auto"] == pytest.approx(found["one"], rel=1e-12, abs=1e-12)
