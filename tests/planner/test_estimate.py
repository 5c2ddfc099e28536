"""Step time, bubble and memory of a layout against the closed forms that they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import parse
from megatron.costs.memory import Zero
from megatron.planner.estimate import Estimate, Planner, estimate
from megatron.planner.layout import Layout, layout_of
from megatron.planner.machine import gpu_machine
from tds.partition import chunks_on
from tds.schedule.simulate import bubble

H100 = gpu_machine("h100-80g")
BASE_FLAGS = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 8192 --seq-length 512 --dry-run"
T5_FLAGS = "--enc-layers 6 --dec-layers 3 --hidden-size 512 --num-attention-heads 8 --vocab-size 1024 --dry-run"
CONFIG = parse(BASE_FLAGS.split(), world_size=1, env={})
T5_CONFIG = parse([*T5_FLAGS.split(), "--enc-seq-length", "512"], world_size=1, env={}, family="t5")
PLANNER = Planner(CONFIG, H100)


def estimate_layout(**kwargs: object) -> Estimate:
    return PLANNER.estimate(Layout(**kwargs))  # type: ignore[arg-type]


@pytest.mark.parametrize(("chunks", "shares"), [(1, (0.0, 1.0, 1.0, 1.0)), (2, (0.0, 0.5, 1.0, 1.0))])
def test_split_backward_costs_extra_on_cpu(chunks: int, shares: tuple[float, ...]) -> None:
    """A tenth of what is split: nothing on stage 0, with chunks of stage 1 the last of two rounds."""
    layout = Layout(pipe=4, num_micro_batches=8, chunks=chunks, schedule="zb-h1", recompute="full")
    for machine, extra_cost in ((H100, 0.0), (replace(H100, is_cpu=True), 0.1)):
        planner = Planner(CONFIG, machine)
        units, bounds = planner.unit_seconds(layout), planner.bounds(layout)
        seconds = sum(unit.total for unit in units)
        for stage, share in enumerate(shares):
            stage_units = [unit for start, stop in chunks_on(bounds, 4, stage) for unit in units[start:stop]]
            seconds += extra_cost * share * sum(unit.backward - unit.recompute for unit in stage_units)
        breakdown = planner.estimate(layout).seconds_by_activity
        assert breakdown["bubble"] > 0 and breakdown["compute"] + breakdown["recompute"] == pytest.approx(
            8 * seconds / 4
        )


def test_single_device_time_is_products_passes_kernels_update() -> None:
    machine = replace(H100, product_flops={"bf16": ((1.0, 1e12),)}, overhead_s=0.0, memory_bandwidth=1e30)
    plain = estimate(CONFIG, Layout(micro_batch_size=2, num_micro_batches=3), replace(machine, update_bandwidth=1e30))
    work = PLANNER.costs.unit_work(2, 1, 2)
    forward_flops = sum(unit.flops for unit in work)
    core_flops = sum(product.flops for unit in work for product in unit.core)
    assert plain.step_s == pytest.approx(3 * (3 * forward_flops + 0.5 * core_flops) / 1e12)
    assert plain.mfu == pytest.approx(plain.flops / plain.step_s / 989e12)
    assert plain.tokens_per_s == pytest.approx(2 * 3 * 512 / plain.step_s)
    assert plain.days(plain.tokens_per_s * 86400 * 7) == pytest.approx(7)
    slow_update = estimate(CONFIG, plain.layout, replace(machine, update_bandwidth=1e9))
    assert slow_update.seconds_by_activity["update"] == pytest.approx(PLANNER.costs.num_parameters * (2 * 14 + 8) / 1e9)
    with_overhead = estimate(CONFIG, plain.layout, replace(machine, update_bandwidth=1e30, overhead_s=1e-3))
    assert with_overhead.step_s - plain.step_s == pytest.approx(3 * 3 * 1e-3 * sum(unit.operations for unit in work))


def test_bubble_matches_simulated_schedule() -> None:
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2)):
        layout = Layout(pipe=4, num_micro_batches=8, schedule=schedule, chunks=chunks)
        result = PLANNER.estimate(layout)
        units = PLANNER.unit_seconds(layout)
        chunk_seconds = [
            sum(unit.total for unit in units[a:b]) for a, b in zip(result.bounds, result.bounds[1:], strict=False)
        ]
        idle_fraction = bubble(4, 8, schedule, chunks, chunk_seconds)
        pipeline_s = result.seconds_by_activity["compute"] + result.seconds_by_activity["bubble"]
        assert result.seconds_by_activity["bubble"] / pipeline_s == pytest.approx(idle_fraction)
        assert pipeline_s == pytest.approx(8 * sum(chunk_seconds) / 4 / (1 - idle_fraction))
        assert result.bubble == pytest.approx(result.seconds_by_activity["bubble"] / result.step_s)


def test_recomputation_costs_forward_and_saves_memory() -> None:
    plain, full = estimate_layout(micro_batch_size=8), estimate_layout(micro_batch_size=8, recompute="full")
    layer_forward_s = [unit.forward for unit in PLANNER.unit_seconds(plain.layout)[1:-2]]
    assert full.step_s - plain.step_s == pytest.approx(sum(layer_forward_s)) == full.seconds_by_activity["recompute"]
    assert full.memory[0].activations < plain.memory[0].activations / 4
    dropout_config = parse(f"{BASE_FLAGS} --layout-independent-dropout".split(), world_size=1, env={})
    none, selective = (
        estimate(dropout_config, Layout(micro_batch_size=8, recompute=recompute), H100)
        for recompute in ("none", "selective")
    )
    assert (
        0 < selective.seconds_by_activity["recompute"] < full.seconds_by_activity["recompute"]
        and none.seconds_by_activity["recompute"] == 0
    )
    assert selective.memory[0].activations < none.memory[0].activations


def test_memory_matches_cost_model() -> None:
    layout = Layout(tensor=2, pipe=2, data=4, num_micro_batches=4, zero_stage=1, sequence_parallel=True, dtype="fp16")
    memory = PLANNER.costs.memory_per_stage(
        PLANNER.costs.stage_bounds(2), micro_batch_size=1, num_micro_batches=4, tensor=2, dtype="fp16",
        zero=Zero(1, 4), sequence=2,
    )  # fmt: skip
    result = PLANNER.estimate(layout)
    assert result.memory == memory and result.max_bytes == max(stage.total for stage in memory)
    unsharded = PLANNER.estimate(replace(layout, sequence_parallel=False))
    assert unsharded.memory[0].activations > result.memory[0].activations
    offloaded = PLANNER.estimate(replace(layout, offload_optimizer=True))
    assert (
        offloaded.memory[0].optimizer == 0 < offloaded.memory[0].host
        and offloaded.seconds_by_activity["update"] > result.seconds_by_activity["update"]
    )


def test_t5_stages_are_uneven() -> None:
    planner = Planner(T5_CONFIG, H100)
    result = planner.estimate(Layout(pipe=3, num_micro_batches=6))
    units = planner.unit_seconds(result.layout)
    stage_seconds = [
        sum(unit.total for a, b in chunks_on(result.bounds, 3, stage) for unit in units[a:b]) for stage in range(3)
    ]
    assert max(stage_seconds) > 1.05 * min(stage_seconds) and len(result.memory) == 3
    assert result.bubble > 2 / (6 + 2) * 0.9
    assert result.tokens == 6 * (512 + 114)


def test_layout_of_config_matches_flags() -> None:
    words = (
        "--model-parallel-size 2 --pipe-parallel-size 2 --pipeline-chunks 2 --batch-size 2 --gas 4 --zero-stage 1 "
        "--sequence-parallel --checkpoint-activations --fp16 --offload-optimizer --no-overlap-grad-reduce"
    )
    layout = layout_of(parse([*BASE_FLAGS.split(), *words.split()], world_size=8, env={}), 8)
    assert layout == Layout(
        tensor=2, pipe=2, data=2, chunks=2, schedule="interleaved", micro_batch_size=2, num_micro_batches=4,
        recompute="full", zero_stage=1, sequence_parallel=True, offload_optimizer=True, dtype="fp16",
        overlap_grad_reduce=False,
    )  # fmt: skip
    auto = parse(
        [*BASE_FLAGS.split(), *"--pipe-parallel-size 4 --pipeline-schedule auto --gas 8".split()], world_size=4, env={}
    )
    assert layout_of(auto, 4).schedule == "zb-h1"
    selective = parse([*BASE_FLAGS.split(), "--recompute-granularity", "selective"], world_size=1, env={})
    assert layout_of(selective, 1).recompute == "selective"


@pytest.mark.parametrize("family", ["gpt2", "t5", "llama", "mpt", "bert"])
def test_every_family_can_be_planned(family: str) -> None:
    words = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 1024 --dry-run".split()
    config = parse(words, world_size=1, env={}, family=family)
    result = estimate(config, Layout(pipe=2, tensor=2, data=2, num_micro_batches=4, zero_stage=1), H100)
    assert 0 < result.mfu < 0.7 and all(memory.total > 0 for memory in result.memory)
