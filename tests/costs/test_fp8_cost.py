"""Costs of products in FP8: their share of the FLOPs, temporary memory, and time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron.config import Config, parse
from megatron.costs import memory
from megatron.costs.cost import Costs
from megatron.costs.memory import FP8_RATE_RATIO
from megatron.errors import ConfigError
from megatron.models.common.decoder import DecoderModel, model_args
from megatron.models.registry import costs_of
from megatron.planner.estimate import Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import Machine, gpu_machine
from megatron.planner.time_model import QUANTIZATION_BYTES, QUANTIZATION_KERNELS, ComputeModel
from tds.param_info import info_of

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ff-hidden-size 256 --seq-length 32 --vocab-size 64 "
    "--data-path none --bf16"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 16 --position-embedding-type rope --attention-output-gate"
)
EXPERTS = "--num-experts 4 --moe-router-topk 4 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32"


def make_config(extra: str, world_size: int = 1) -> Config:
    return parse(f"{FLAGS} {extra}".split(), world_size=world_size, env={}).with_vocab(64)


@pytest.mark.parametrize(
    "extra", ["", "--first-last-layers-bf16", LATENT, EXPERTS, "--mtp-num-layers 1", "--activation gated-silu"]
)
def test_share_of_flops_is_that_of_the_weights_with_products_in_fp8(extra: str) -> None:
    """Two of the three products of a weight are in FP8; all experts are used, so that each weight counts once."""
    config = make_config(f"--fp8-format e4m3 {extra}")
    model = DecoderModel(model_args(config, for_training=True))
    num_weights = sum(parameter.numel() for parameter in model.parameters() if info_of(parameter).products is not None)
    costs = costs_of(config)
    assert costs.fp8_share == pytest.approx(2 * 2 * num_weights * 32 / costs.flops_per_sample)
    assert 0.1 < costs.fp8_share < 2 / 3


@pytest.mark.parametrize("extra", ["", "--fp8-format e4m3 --fp8-recipe blockwise"])
def test_no_flops_are_in_fp8(extra: str) -> None:
    """Products of blocks are emulated in bf16."""
    assert costs_of(make_config(extra)).fp8_share == 0.0


def test_share_does_not_depend_on_the_layout() -> None:
    flags = f"--fp8-format e4m3 {EXPERTS} --activation gated-silu"
    costs = costs_of(make_config(flags))
    split = costs_of(make_config(f"{flags} --expert-model-parallel-size 2 --context-parallel-size 2", 2))
    assert split.fp8_share == pytest.approx(costs.fp8_share)


def stage_bytes(costs: Costs) -> int:
    (stage,) = costs.memory_per_stage([0, costs.num_units], micro_batch_size=8, dtype="bf16")
    return stage.activations


def test_memory_has_the_quantized_factors_of_the_largest_product() -> None:
    plain, quantized = (costs_of(make_config(extra)) for extra in ("", "--fp8-format e4m3"))
    (stage,) = plain.memory_per_stage([0, plain.num_units], micro_batch_size=8, dtype="bf16")
    factors = 8 * 32 * 256 + 64 * 256  # input of the second feed-forward product, and its weight
    assert quantized.fp8_scratch_bytes(8, 1) == factors
    assert stage_bytes(quantized) - stage_bytes(plain) == max(factors - stage.logits, 0)
    emulated = costs_of(make_config("--fp8-format e4m3"), is_on_cpu=True)
    assert emulated.fp8_scratch_bytes(8, 1) == 12 * factors


@pytest.mark.parametrize(("flags", "is_shared"), [("--gas 2", True), ("", False), ("--gas 2 --zero-stage 3", False)])
def test_memory_has_the_quantized_weights_that_micro_batches_share(flags: str, is_shared: bool) -> None:
    config = make_config(f"--fp8-format e4m3 {flags}", 2)
    planner, layout = Planner(config, gpu_machine("h100-80g")), layout_of(config, 2)
    plain = Planner(make_config(flags, 2), gpu_machine("h100-80g"))
    weight_bytes = 4 * (2 * 12 * 64 * 64 + 4 * (192 + 64 + 64 + 64 + 256 + 64 + 64 + 256))
    assert sum(planner.costs.fp8_weight_bytes(1)) == weight_bytes
    (memory,), (plain_memory,) = planner.memory(layout), plain.memory(layout)
    scratch = max(planner.costs.fp8_scratch_bytes(layout.micro_batch_size, 1) - memory.logits, 0)
    assert memory.activations - plain_memory.activations == scratch + is_shared * weight_bytes


@pytest.mark.parametrize("gas", [1, 4])
def test_time_has_the_rate_of_fp8_and_the_quantization(gas: int) -> None:
    """The micro-batches of a step share the quantized weights."""
    machine = gpu_machine("h100-80g")
    sizes = f"--hidden-size 4096 --num-attention-heads 32 --ff-hidden-size 16384 --seq-length 4096 --gas {gas}"
    times = {}
    for extra in ("", "--fp8-format e4m3"):
        config = make_config(f"{sizes} {extra}")
        layout = layout_of(config, 1)
        times[extra] = ComputeModel(costs_of(config), machine, config.family).operation_times(layout)[1]
    plain, quantized = times[""], times["--fp8-format e4m3"]
    assert plain.products == plain.weight_grads == quantized.weight_grads
    assert quantized.products == pytest.approx(plain.products / FP8_RATE_RATIO)
    tokens, h = layout.micro_batch_size * 4096, 4096
    weights = 12 * h * h / gas
    forward = QUANTIZATION_BYTES * (tokens * 7 * h + weights) / machine.memory_bandwidth
    backward = QUANTIZATION_BYTES * (tokens * 9 * h + weights) / machine.memory_bandwidth
    launches = 4 * QUANTIZATION_KERNELS * (1 + 1 / gas) * machine.overhead_s
    assert quantized.unscaled_forward == pytest.approx(forward + launches)
    assert quantized.unscaled_backward == pytest.approx(backward + launches)


def test_estimates_do_not_depend_on_their_order() -> None:
    """A layout with several micro-batches quantizes weights less often than those that were estimated before."""
    config = make_config("--fp8-format e4m3 --hidden-size 1024 --ff-hidden-size 4096", 2)
    one, shared = layout_of(config, 2), replace(layout_of(config, 2), num_micro_batches=16)
    layouts, planner = (one, shared, replace(shared, zero_stage=3)), Planner(config, gpu_machine("h100-80g"))
    for layout in layouts:
        alone = Planner(config, gpu_machine("h100-80g")).estimate(layout)
        assert planner.estimate(layout).step_s == alone.step_s


def test_measured_rate_of_fp8_replaces_the_assumption() -> None:
    machine = gpu_machine("h100-80g")
    measured = replace(machine, product_flops={**machine.product_flops, "fp8": ((1024.0, 1e15), (4096.0, 2e15))})
    assert machine.fp8_rate(4096) == FP8_RATE_RATIO * machine.product_rate("bf16", 4096)
    assert measured.fp8_rate(4096) == 2e15 and measured.fp8_rate(2048) == pytest.approx(1.5e15)
    assert measured.slowed(2.0).fp8_rate(4096) == 1e15
    assert Machine.from_json(measured.to_json()) == measured


@pytest.mark.parametrize("hidden_size", [1024, 4096, 8192])
def test_cost_of_a_layer_follows_the_planner(hidden_size: int) -> None:
    """Stages are balanced by machine-independent costs, whose ratio of FP8 and bf16 is near that of products' times."""
    flags = f"--hidden-size {hidden_size} --num-attention-heads 16 --ff-hidden-size {4 * hidden_size} --seq-length 2048"
    machine, seconds, relative = gpu_machine("h100-80g"), [], []
    for extra in ("", "--fp8-format e4m3"):
        config = make_config(f"{flags} --batch-size 16 {extra}")
        layout = layout_of(config, 1)
        times = ComputeModel(costs_of(config), replace(machine, overhead_s=0.0), config.family).operation_times(layout)[
            1
        ]
        products = 2 * times.products + times.weight_grads + times.core + 2 * times.core
        seconds.append(products + times.unscaled_forward + times.unscaled_backward)
        costs = costs_of(config).unit_costs
        relative.append(costs[1] / costs[-1])  # relative to the head, which has no products in FP8
    assert relative[1] / relative[0] == pytest.approx(seconds[1] / seconds[0], rel=0.1)


def test_stages_are_balanced_by_the_cost_of_fp8() -> None:
    """Layers in FP8 are cheaper than those in bf16 and relative to the head; emulated blocks are not."""
    sizes = "--num-layers 24 --hidden-size 4096 --num-attention-heads 32 --ff-hidden-size 16384 --seq-length 2048"

    def layers_by_stage(extra: str) -> list[int]:
        flags = f"{FLAGS} {sizes} --vocab-size 128000 {extra}"
        bounds = costs_of(parse(flags.split(), world_size=1, env={}).with_vocab(128000)).stage_bounds(2)
        return [min(stop, 25) - max(start, 1) for start, stop in itertools.pairwise(bounds)]

    plain, fp8 = layers_by_stage(""), layers_by_stage("--fp8-format e4m3")
    assert plain == [13, 11] and fp8 == [14, 10]
    assert layers_by_stage("--fp8-format e4m3 --fp8-recipe blockwise") == plain
    assert layers_by_stage("--fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-start-in-bf16 6") == [13, 11]


def test_tensor_ranks_exchange_row_maxima() -> None:
    traffic = []
    for extra in ("", "--fp8-format e4m3"):
        config = make_config(f"{extra} --model-parallel-size 2", 2)
        planner, layout = Planner(config, gpu_machine("h100-80g")), layout_of(config, 2)
        units = planner.unit_seconds(layout)
        traffic.append(planner.model(layout).communication.tensor_traffic(layout, units)[1].bytes)
    tokens = config.batch.micro_batch_size * 32
    assert traffic[1] - traffic[0] == 4 * 4 * (tokens + 64)  # 2 all-reduces each of output and input gradient


def test_mfu_is_relative_to_the_peak_of_both_formats() -> None:
    config = make_config("--fp8-format e4m3")
    estimate = Planner(config, gpu_machine("h100-80g")).estimate(layout_of(config, 1))
    assert estimate.peak_flops == memory.peak_flops("H100", costs_of(config).fp8_share)
    assert estimate.peak_flops > memory.PEAK_TFLOPS["H100"] * 1e12


def test_gpus_without_fp8_are_rejected() -> None:
    config = make_config("--fp8-format e4m3")
    with pytest.raises(ConfigError, match="--fp8-format needs a GPU with products in FP8"):
        Planner(config, gpu_machine("a100-80g")).estimate(layout_of(config, 1))
    with_experts = make_config(f"--fp8-format e4m3 {EXPERTS}")
    with pytest.raises(ConfigError, match=r"grouped products in FP8 \(H100, H200, H20, GH200\), got b200"):
        Planner(with_experts, gpu_machine("b200")).estimate(layout_of(with_experts, 1))
    h200 = gpu_machine("h200")
    assert Planner(with_experts, h200).estimate(layout_of(with_experts, 1)).step_s > 0
    unknown = replace(h200, name="NVIDIA H800, 8 at once")
    measured = replace(unknown, product_flops={**h200.product_flops, "fp8": ((1024.0, 1e15),)})
    assert Planner(with_experts, measured).estimate(layout_of(with_experts, 1)).step_s > 0
    with pytest.raises(ConfigError, match="--fp8-format needs a GPU with products in FP8"):
        Planner(with_experts, unknown).estimate(layout_of(with_experts, 1))
    assert memory.peak_flops("NVIDIA A100-SXM4-80GB", 0.5) == 312e12
    assert memory.has_fp8("NVIDIA L40S") and not memory.has_fp8("AMD Instinct MI300X") and not memory.has_fp8("a CPU")
