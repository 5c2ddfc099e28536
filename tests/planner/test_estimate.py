"""Step time, bubble and memory of a layout against the closed forms that they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import parse
from megatron.costs.memory import Zero
from megatron.planner.estimate import Estimate, Planner, estimate
from megatron.planner.layout import Layout, layout_of
from megatron.planner.machine import device
from tds.partition import chunks_on
from tds.schedule.simulate import bubble

H100 = device("h100-80g")
LINE = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 8192 --seq-length 512 --dry-run"
T5_LINE = "--enc-layers 6 --dec-layers 3 --hidden-size 512 --num-attention-heads 8 --vocab-size 1024 --dry-run"
CONFIG = parse(LINE.split(), world_size=1, env={})
T5 = parse([*T5_LINE.split(), "--enc-seq-length", "512"], world_size=1, env={}, family="t5")
PLANNER = Planner(CONFIG, H100)


def found(**how: object) -> Estimate:
    return PLANNER.estimate(Layout(**how))  # type: ignore[arg-type]


@pytest.mark.parametrize(("chunks", "shares"), [(1, (0.0, 1.0, 1.0, 1.0)), (2, (0.0, 0.5, 1.0, 1.0))])
def test_split_backwards_have_their_price_on_a_cpu(chunks: int, shares: tuple[float, ...]) -> None:
    """A tenth of what is split: nothing on stage 0, with chunks of stage 1 the last of two rounds."""
    layout = Layout(pipe=4, num_micro_batches=8, chunks=chunks, schedule="zb-h1", recompute="full")
    for machine, price in ((H100, 0.0), (replace(H100, is_cpu=True), 0.1)):
        planner = Planner(CONFIG, machine)
        units, bounds = planner.units(layout), planner.bounds(layout)
        seconds = sum(unit.whole for unit in units)
        for stage, share in enumerate(shares):
            own = [unit for start, stop in chunks_on(bounds, 4, stage) for unit in units[start:stop]]
            seconds += price * share * sum(unit.backward - unit.again for unit in own)
        parts = planner.estimate(layout).parts
        assert parts["bubble"] > 0 and parts["compute"] + parts["recompute"] == pytest.approx(8 * seconds / 4)


def test_one_device_takes_its_products_its_passes_its_kernels_and_its_update() -> None:
    one = replace(H100, product_flops={"bf16": ((1.0, 1e12),)}, overhead_s=0.0, memory_bandwidth=1e30)
    plain = estimate(CONFIG, Layout(micro_batch_size=2, num_micro_batches=3), replace(one, update_bandwidth=1e30))
    work = PLANNER.costs.unit_work(2, 1, 2)
    products = sum(unit.flops for unit in work)
    core = sum(product.flops for unit in work for product in unit.core)
    assert plain.step_s == pytest.approx(3 * (3 * products + 0.5 * core) / 1e12)
    assert plain.mfu == pytest.approx(plain.flops / plain.step_s / 989e12)
    assert plain.tokens_per_s == pytest.approx(2 * 3 * 512 / plain.step_s)
    assert plain.days(plain.tokens_per_s * 86400 * 7) == pytest.approx(7)
    slow = estimate(CONFIG, plain.layout, replace(one, update_bandwidth=1e9))
    assert slow.parts["update"] == pytest.approx(PLANNER.costs.num_parameters * (2 * 14 + 8) / 1e9)
    started = estimate(CONFIG, plain.layout, replace(one, update_bandwidth=1e30, overhead_s=1e-3))
    assert started.step_s - plain.step_s == pytest.approx(3 * 3 * 1e-3 * sum(unit.operations for unit in work))


def test_the_bubble_is_that_of_the_stages_in_the_machine_s_seconds() -> None:
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2)):
        layout = Layout(pipe=4, num_micro_batches=8, schedule=schedule, chunks=chunks)
        one = PLANNER.estimate(layout)
        seconds = PLANNER.units(layout)
        pieces = [sum(unit.whole for unit in seconds[a:b]) for a, b in zip(one.bounds, one.bounds[1:], strict=False)]
        idle = bubble(4, 8, schedule, chunks, pieces)
        running = one.parts["compute"] + one.parts["bubble"]
        assert one.parts["bubble"] / running == pytest.approx(idle)
        assert running == pytest.approx(8 * sum(pieces) / 4 / (1 - idle))
        assert one.bubble == pytest.approx(one.parts["bubble"] / one.step_s)


def test_recomputation_costs_a_forward_and_leaves_memory() -> None:
    plain, full = found(micro_batch_size=8), found(micro_batch_size=8, recompute="full")
    layers = [unit.forward for unit in PLANNER.units(plain.layout)[1:-2]]
    assert full.step_s - plain.step_s == pytest.approx(sum(layers)) == full.parts["recompute"]
    assert full.memory[0].activations < plain.memory[0].activations / 4
    dropping = parse(f"{LINE} --layout-independent-dropout".split(), world_size=1, env={})
    none, selective = (
        estimate(dropping, Layout(micro_batch_size=8, recompute=how), H100) for how in ("none", "selective")
    )
    assert 0 < selective.parts["recompute"] < full.parts["recompute"] and none.parts["recompute"] == 0
    assert selective.memory[0].activations < none.memory[0].activations


def test_memory_is_that_of_the_costs_with_what_the_layout_shares() -> None:
    layout = Layout(tensor=2, pipe=2, data=4, num_micro_batches=4, zero_stage=1, sequence_parallel=True, dtype="fp16")
    memory = PLANNER.costs.memory_per_stage(
        PLANNER.costs.stage_bounds(2), micro_batch_size=1, num_micro_batches=4, tensor=2, dtype="fp16",
        zero=Zero(1, 4), sequence=2,
    )  # fmt: skip
    one = PLANNER.estimate(layout)
    assert one.memory == memory and one.most_bytes == max(stage.total for stage in memory)
    whole = PLANNER.estimate(replace(layout, sequence_parallel=False))
    assert whole.memory[0].activations > one.memory[0].activations
    away = PLANNER.estimate(replace(layout, offload_optimizer=True))
    assert away.memory[0].optimizer == 0 < away.memory[0].host and away.parts["update"] > one.parts["update"]


def test_a_t5_has_uneven_stages() -> None:
    planner = Planner(T5, H100)
    one = planner.estimate(Layout(pipe=3, num_micro_batches=6))
    units = planner.units(one.layout)
    stages = [sum(unit.whole for a, b in chunks_on(one.bounds, 3, n) for unit in units[a:b]) for n in range(3)]
    assert max(stages) > 1.05 * min(stages) and len(one.memory) == 3
    assert one.bubble > 2 / (6 + 2) * 0.9
    assert one.tokens == 6 * (512 + 114)


def test_a_layout_of_a_configuration_has_what_its_flags_say() -> None:
    words = (
        "--model-parallel-size 2 --pipe-parallel-size 2 --pipeline-chunks 2 --batch-size 2 --gas 4 --zero-stage 1 "
        "--sequence-parallel --checkpoint-activations --fp16 --offload-optimizer --no-overlap-grad-reduce"
    )
    layout = layout_of(parse([*LINE.split(), *words.split()], world_size=8, env={}), 8)
    assert layout == Layout(
        tensor=2, pipe=2, data=2, chunks=2, schedule="interleaved", micro_batch_size=2, num_micro_batches=4,
        recompute="full", zero_stage=1, sequence_parallel=True, offload_optimizer=True, dtype="fp16",
        overlap_grad_reduce=False,
    )  # fmt: skip
    auto = parse(
        [*LINE.split(), *"--pipe-parallel-size 4 --pipeline-schedule auto --gas 8".split()], world_size=4, env={}
    )
    assert layout_of(auto, 4).schedule == "zb-h1"
    selective = parse([*LINE.split(), "--recompute-granularity", "selective"], world_size=1, env={})
    assert layout_of(selective, 1).recompute == "selective"


@pytest.mark.parametrize("family", ["gpt2", "t5", "llama", "mpt", "bert"])
def test_every_family_can_be_planned(family: str) -> None:
    words = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 1024 --dry-run".split()
    config = parse(words, world_size=1, env={}, family=family)
    one = estimate(config, Layout(pipe=2, tensor=2, data=2, num_micro_batches=4, zero_stage=1), H100)
    assert 0 < one.mfu < 0.7 and all(memory.total > 0 for memory in one.memory)
