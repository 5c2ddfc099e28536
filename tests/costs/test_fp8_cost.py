"""Costs of products in FP8: their share of the FLOPs, temporary memory, and time."""

from __future__ import annotations

import pytest

from megatron.config import Config, parse
from megatron.costs import memory
from megatron.costs.cost import Costs
from megatron.errors import ConfigError
from megatron.models.common.decoder import DecoderModel, model_args
from megatron.models.registry import costs_of
from megatron.planner.estimate import Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import FP8_RATE_RATIO, gpu_machine
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


def test_time_has_the_rate_of_fp8_and_the_quantization() -> None:
    machine = gpu_machine("h100-80g")
    sizes = "--hidden-size 4096 --num-attention-heads 32 --ff-hidden-size 16384 --seq-length 4096"
    times = {}
    for extra in ("", "--fp8-format e4m3"):
        config = make_config(f"{sizes} {extra}")
        layout = layout_of(config, 1)
        times[extra] = ComputeModel(costs_of(config), machine, config.family).operation_times(layout)[1]
    plain, quantized = times[""], times["--fp8-format e4m3"]
    assert plain.products == plain.weight_grads == quantized.weight_grads
    assert quantized.products == pytest.approx(plain.products / FP8_RATE_RATIO)
    tokens, h = layout.micro_batch_size * 4096, 4096
    weights = 12 * h * h
    forward = QUANTIZATION_BYTES * (tokens * 7 * h + weights) / machine.memory_bandwidth
    backward = QUANTIZATION_BYTES * (tokens * 9 * h + weights) / machine.memory_bandwidth
    launches = 4 * QUANTIZATION_KERNELS * machine.overhead_s
    assert quantized.unscaled_forward == pytest.approx(forward + launches)
    assert quantized.unscaled_backward == pytest.approx(backward + launches)


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
    assert memory.peak_flops("NVIDIA A100-SXM4-80GB", 0.5) == 312e12
    assert memory.has_fp8("NVIDIA L40S") and not memory.has_fp8("AMD Instinct MI300X") and not memory.has_fp8("a CPU")
