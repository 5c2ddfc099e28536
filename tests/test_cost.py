"""Costs against counting by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron import cost
from megatron.config import ModelConfig

GPT2_SMALL = ModelConfig(
    num_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    vocab_size=50257,
    max_position_embeddings=1024,
    hidden_bias=True,
)
MEASURED = ModelConfig(
    num_layers=8,
    hidden_size=256,
    num_attention_heads=8,
    vocab_size=8192,
    max_position_embeddings=256,
    untie_embeddings=True,
)


def test_gpt2_small_has_its_published_number_of_parameters():
    assert cost.num_parameters(GPT2_SMALL) == 124_439_808


def test_parameters_are_those_of_the_model_that_is_built():
    from megatron.model.gpt2 import GPT2Model
    from megatron.model.sizes import sizes_from

    for untied in (False, True):
        for bias in (False, True):
            sizes = ModelConfig(
                num_layers=3,
                hidden_size=24,
                num_attention_heads=2,
                kv_hidden_size=5,
                ff_hidden_size=50,
                vocab_size=61,
                max_position_embeddings=9,
                hidden_bias=bias,
                untie_embeddings=untied,
            )
            built = sum(parameter.numel() for parameter in GPT2Model(sizes_from(sizes)).parameters())
            assert cost.num_parameters(sizes) == built
            assert cost.stage_parameters(sizes, [0, 6]) == [built]


def test_stages_hold_all_parameters_and_a_tied_table_twice():
    bounds = cost.stage_bounds(GPT2_SMALL, 1024, 4)
    table = 50257 * 768
    assert sum(cost.stage_parameters(GPT2_SMALL, bounds)) == cost.num_parameters(GPT2_SMALL) + table
    untied = replace(GPT2_SMALL, untie_embeddings=True)
    assert sum(cost.stage_parameters(untied, bounds)) == cost.num_parameters(untied)


def test_tensor_ranks_cut_matrices_and_repeat_norms():
    whole, half = cost.layer_parameters(GPT2_SMALL), cost.layer_parameters(GPT2_SMALL, 2)
    assert 2 * half - whole == 4 * 768 + 2 * 768


def test_flops_are_six_per_parameter_and_the_attention_scores():
    products = 12 * (12 * 768**2 + 13 * 768) + 2 * 768 + 50257 * 768
    assert cost.flops_per_token(GPT2_SMALL, 1024) == 6 * products + 6 * 12 * 768 * 1024
    assert cost.flops_per_token(GPT2_SMALL, 1024, causal=False) == 6 * products + 12 * 12 * 768 * 1024


def test_a_heavy_head_makes_the_last_stage_shorter():
    """Five and three layers were the fastest when measured."""
    assert cost.stage_bounds(MEASURED, 256, 2) == [0, 6, 11]
    assert 2.5 < cost.unit_costs(MEASURED, 256)[-1] < 3.1


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_stage_has_a_layer_however_heavy_the_head(stages):
    sizes = replace(MEASURED, num_layers=4, vocab_size=10**6)
    bounds = cost.stage_bounds(sizes, 256, stages)
    layers = [sum(1 <= unit <= 4 for unit in range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert sum(layers) == 4 and min(layers) >= 1
    assert (bounds[0], bounds[-1]) == (0, 7)


def test_memory_counts_states_activations_in_flight_and_logits():
    common = {"seq_length": 1024, "micro_batch_size": 2, "num_micro_batches": 8}
    bounds = cost.stage_bounds(GPT2_SMALL, 1024, 2)
    first, last = cost.memory_per_stage(GPT2_SMALL, bounds, dtype="bf16", **common)
    held = cost.stage_parameters(GPT2_SMALL, bounds)
    assert first.weights + first.gradients + first.optimizer == 18 * held[0]
    layers = bounds[1] - 1
    assert first.activations == 2 * layers * 1024 * 2 * 34 * 768
    assert (first.logits, last.logits) == (0, 1024 * 2 * 50257 * 6)
    single = cost.memory_per_stage(GPT2_SMALL, [0, 15], dtype="fp32", **common)[0]
    assert single.weights + single.gradients + single.optimizer == 16 * cost.num_parameters(GPT2_SMALL)
    short = cost.memory_per_stage(GPT2_SMALL, [0, 15], dtype="fp32", checkpoint_activations=True, **common)[0]
    assert short.activations == 12 * 2048 * 768 * 4 + single.activations // 12
    assert short.total < single.total


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI300X", 1300),
    ],
)
def test_known_gpus_have_their_dense_peak(name, tflops):
    assert cost.peak_flops(name) == tflops * 1e12


def test_an_unknown_device_has_no_peak_and_an_unknown_vocabulary_is_told():
    assert cost.peak_flops("Some CPU") is None
    with pytest.raises(ValueError, match="with_vocab"):
        cost.num_parameters(replace(GPT2_SMALL, vocab_size=None))
