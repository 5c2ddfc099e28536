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
from megatron.training.auto_placement import should_choose_placement, with_placement
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.dry_run import dry_run
from megatron.training.estimates import simulated_bubble, stage_memory
from tds.schedule import LOOP, Costs, V, schedule_named, simulate
from tests.helpers.runs import launch_script, make_flags

MODEL_ARGS = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 101 --gas 8"
LARGE_LAYERS = "--num-layers 8 --hidden-size 128"
"""Layers that outweigh the head over the corpus's vocabulary."""
PLACEMENTS = {
    "1f1b": (1, LOOP), "gpipe": (1, LOOP), "zb-h1": (1, LOOP), "interleaved": (2, LOOP),
    "zb-h1 with 2 chunks": (2, LOOP), "zb-v": (2, V), "dualpipev": (2, V),
}  # fmt: skip


def make_config(extra_args: str, num_stages: int = 2) -> Config:
    args = f"{MODEL_ARGS} --pipeline-schedule auto --pipe-parallel-size {num_stages} {extra_args}"
    return parse(args.split(), world_size=num_stages, env={}, family="gpt2").with_vocab(101)


def place_layers(extra_args: str = "", num_stages: int = 2, limit_bytes: int | None = None) -> Config:
    return with_placement(
        make_config(extra_args, num_stages), Topology.from_world_size(num_stages, 1, num_stages), "fp32", limit_bytes
    )


def chunks_and_placement(config: Config) -> tuple[int, str]:
    return config.parallel.chunks, config.parallel.placement


def peak_stage_bytes(schedule: str, num_stages: int = 2) -> int:
    """Return the bytes of the fullest stage under one schedule, as its own run plans them."""
    num_chunks, placement = PLACEMENTS[schedule]
    args = f"{MODEL_ARGS} --pipe-parallel-size {num_stages} --pipeline-schedule {schedule.split()[0]}"
    args += f" --pipeline-chunks {num_chunks} --pipeline-placement {placement}"
    config = parse(args.split(), world_size=num_stages, env={}, family="gpt2").with_vocab(101)
    bounds = registry.bounds_of(config, num_stages)
    return max(
        stage.total
        for stage in stage_memory(config, Topology.from_world_size(num_stages, 1, num_stages), bounds, "fp32")
    )


def test_fastest_simulated_schedule_determines_placement() -> None:
    config = place_layers()
    assert chunks_and_placement(config) == (2, V) and config.parallel.pipeline_schedule == "auto"
    assert {name: engine_dict(config, 2)["pipeline"][name] for name in ("schedule", "chunks", "placement")} == {
        "schedule": "auto", "chunks": 2, "placement": V,
    }  # fmt: skip
    ranked = dict(re.findall(r"([a-z0-9-]+(?: with 2 chunks)?) (\d\.\d{3})", config.notes[-1].split("fastest:")[1]))
    assert set(ranked) == set(PLACEMENTS) and min(ranked, key=lambda name: float(ranked[name])) == "dualpipev"


def test_schedule_times_equal_simulation_without_split_backward() -> None:
    note = place_layers().notes[-1]
    time_1f1b, time_interleaved = (float(re.findall(rf"{name} (\d\.\d+)", note)[0]) for name in ("1f1b", "interleaved"))
    bubbles = {}
    for name, num_chunks in (("1f1b", 1), ("interleaved", 2)):
        costs = registry.costs_of(make_config(""))
        chunk_costs = costs.chunk_costs(costs.stage_bounds(2, num_chunks))
        bubbles[name] = simulated_bubble(2, 8, name, num_chunks, chunk_costs)
    assert time_1f1b / time_interleaved == pytest.approx((1 - bubbles["interleaved"]) / (1 - bubbles["1f1b"]), abs=2e-3)


def test_split_backward_costs_more_than_full_backward_on_cpu() -> None:
    costs = registry.costs_of(make_config(""))
    chunk_costs = costs.chunk_costs(costs.stage_bounds(2, 2, V))
    half_costs, full_costs = tuple(1.1 * cost for cost in chunk_costs), tuple(2 * cost for cost in chunk_costs)
    times = {}
    for name in ("zb-v", "dualpipev"):
        order = schedule_named(name, 2, V)
        stages = [order(2, 8, stage) for stage in range(2)]
        times[name] = simulate(
            stages, Costs(tuple(chunk_costs), half_costs, half_costs, backward=full_costs), 2, V
        ).step_s
    split_time, mostly_full_time = (
        float(re.findall(rf"{name} (\d\.\d+)", place_layers().notes[-1])[0]) for name in times
    )
    assert split_time / mostly_full_time == pytest.approx(times["zb-v"] / times["dualpipev"], abs=2e-3)


@pytest.mark.parametrize(
    ("limiting_schedule", "expected"),
    [
        ("1f1b", "auto:1f1b"),
        ("zb-v", "auto:zb-v"),
        ("dualpipev", "auto"),
    ],
)
def test_schedules_exceeding_memory_limit_are_excluded(limiting_schedule: str, expected: str) -> None:
    config = place_layers(limit_bytes=peak_stage_bytes(limiting_schedule))
    assert config.parallel.schedule == engine_dict(config, 2)["pipeline"]["schedule"] == expected
    assert chunks_and_placement(config) == PLACEMENTS[limiting_schedule]
    oversized = {name for name in PLACEMENTS if peak_stage_bytes(name) > peak_stage_bytes(limiting_schedule)}
    listed = re.findall(r"([a-z0-9-]+(?: with 2 chunks)?) [\d.]+ [KM]iB", config.notes[-1].split("memory limit of ")[1])
    assert set(listed) == oversized and oversized


def test_memory_limit_applies_to_fullest_stage() -> None:
    extra_args = "--vocab-size 20000"  # logits on the last stage of a loop
    args = f"{MODEL_ARGS} --pipe-parallel-size 2 --pipeline-schedule 1f1b {extra_args}"
    config = parse(args.split(), world_size=2, env={}, family="gpt2")
    topology = Topology.from_world_size(2, 1, 2)
    first_bytes, last_bytes = (
        stage.total for stage in stage_memory(config, topology, registry.bounds_of(config, 2), "fp32")
    )
    assert first_bytes < last_bytes
    auto_config = parse(f"{args} --pipeline-schedule auto".split(), world_size=2, env={}, family="gpt2")
    assert re.search(
        r"memory limit of .*1f1b [\d.]+ ",
        with_placement(auto_config, topology, "fp32", (first_bytes + last_bytes) // 2).notes[-1],
    )


def test_smallest_schedule_is_chosen_when_none_fits() -> None:
    config = place_layers(limit_bytes=1000)
    assert config.parallel.schedule == "auto:1f1b" and "no schedule fits" in config.notes[-1]


@pytest.mark.parametrize(
    "extra_args",
    [
        "--pipeline-chunks 1",
        "--pipeline-placement loop",
        "--pipeline-placement v",
        "--pipeline-chunks 2 --microbatch-group-size-per-virtual-pipeline-stage 4",
        "--partition-method uniform",
        "--pipeline-model-parallel-layout Ettt|tttttL",
    ],
)
def test_explicit_placement_flag_disables_auto_placement(extra_args: str) -> None:
    config = make_config(extra_args)
    assert not should_choose_placement(config)
    assert with_placement(config, Topology.from_world_size(2, 1, 2), "fp32", None) is config


def test_auto_schedules_flag_restricts_candidates() -> None:
    config = place_layers("--pipeline-auto-schedules 1f1b,interleaved")
    assert (chunks_and_placement(config), config.parallel.schedule) == ((2, LOOP), "auto:interleaved")
    assert set(re.findall(r"([a-z0-9-]+) \d\.\d{3}", config.notes[-1])) == {"1f1b", "interleaved"}
    assert chunks_and_placement(make_config("--pipeline-auto-schedules zb-v")) == (2, V)


@pytest.mark.parametrize(
    ("extra_args", "message"),
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
def test_invalid_auto_schedules_are_rejected(extra_args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(extra_args)


def test_few_layers_or_micro_batches_use_one_chunk() -> None:
    assert chunks_and_placement(place_layers("--gas 2", num_stages=4)) == (1, LOOP)
    assert chunks_and_placement(place_layers("--num-layers 3")) == (1, LOOP)


def test_named_v_schedule_is_used_with_few_micro_batches() -> None:
    config = place_layers("--gas 1 --pipeline-auto-schedules zb-v")
    assert (chunks_and_placement(config), config.parallel.schedule) == ((2, V), "auto:zb-v")


def test_dry_run_for_absent_device_excludes_no_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    args = f"{MODEL_ARGS} --pipeline-schedule auto --pipe-parallel-size 2 --device cuda --mock-data"
    dry_run(parse(args.split(), world_size=2, env={}, family="gpt2"), 2)
    output = capsys.readouterr().out
    assert "schedule auto of zb-v, dualpipev, 2 chunks on each stage" in output


def test_explicit_schedule_disables_auto_placement() -> None:
    assert not should_choose_placement(make_config("--pipeline-schedule zb-h1"))


@pytest.mark.slow  # the choice, above, and the schedules of a V in tests/parity are in the short run
def test_auto_placement_run_equals_single_process_losses(corpus: Path, tmp_path: Path) -> None:
    losses = {}
    for run_name, extra_args, num_ranks in (
        ("one", "", 1),
        ("auto", "--pipe-parallel-size 2 --pipeline-schedule auto", 2),
    ):
        log, run_dir = tmp_path / f"{run_name}.log", tmp_path / run_name
        argv = make_flags(
            corpus, run_dir, f"{LARGE_LAYERS} --fp64 --train-iters 6 --log-interval 1 --gas 8 {extra_args}"
        )
        assert launch_script(num_ranks, argv, log) == [0] * num_ranks, log.read_text()
        records = [record for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "train"]
        losses[run_name] = [record["loss"] for record in records]
    assert "2 chunks on each stage in a V" in log.read_text()
    assert json.loads((run_dir / "config.json").read_text())["parallel"]["pipeline_placement"] == V
    assert len(losses["one"]) == 6 and losses["auto"] == pytest.approx(losses["one"], rel=1e-12, abs=1e-12)
