"""Costs of a GPT-2 against counting by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import BertConfig, Config, ModelConfig, parse
from megatron.costs.decoder_cost import DecoderCosts
from megatron.costs.memory import Memory, Zero
from megatron.models.bert.cost import BertCosts
from megatron.models.registry import costs_of
from tds.schedule.simulate import candidates

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
SMALL = DecoderCosts(GPT2_SMALL, 1024)


def test_gpt2_small_has_its_published_number_of_parameters():
    assert SMALL.num_parameters == 124_439_808


def test_the_costs_of_a_configuration_are_those_of_its_sizes_and_length():
    config: Config = parse(["--seq-length", "96", "--vocab-size", "101"], world_size=1, env={})
    assert costs_of(config) == DecoderCosts(config.model, 96)


def test_parameters_are_those_of_the_model_that_is_built():
    from megatron.models.common.decoder import DecoderModel
    from megatron.models.common.model_args import model_args_from

    for untied, bias, activation in (
        (False, False, "gelu"),
        (True, True, "gelu"),
        (False, True, "gated-gelu"),
        (True, False, "gated-silu"),
    ):
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
            activation=activation,
        )
        built = sum(parameter.numel() for parameter in DecoderModel(model_args_from(sizes)).parameters())
        costs = DecoderCosts(sizes, 8)
        assert costs.num_parameters == built
        assert costs.stage_parameters([0, 6]) == [built]


def test_units_have_names_and_costs():
    assert SMALL.num_units == len(SMALL.unit_costs) == len(SMALL.unit_parameters()) == 15
    assert SMALL.unit_names[:2] == ["embedding", "layer 0"] and SMALL.unit_names[-1] == "head"


def test_stages_hold_all_parameters_and_a_tied_table_twice():
    bounds = SMALL.stage_bounds(4)
    table = 50257 * 768
    assert sum(SMALL.stage_parameters(bounds)) == SMALL.num_parameters + table
    untied = DecoderCosts(replace(GPT2_SMALL, untie_embeddings=True), 1024)
    assert sum(untied.stage_parameters(bounds)) == untied.num_parameters


def test_tensor_ranks_cut_matrices_and_repeat_norms():
    whole, half = SMALL.layer_parameters(), SMALL.layer_parameters(2)
    assert 2 * half - whole == 4 * 768 + 2 * 768


def test_flops_are_six_per_parameter_and_the_attention_scores():
    products = 12 * (12 * 768**2 + 13 * 768) + 2 * 768 + 50257 * 768
    of_token = 6 * products + 6 * 12 * 768 * 1024
    assert SMALL.flops_per_token() == of_token
    assert SMALL.flops_per_token(causal=False) == 6 * products + 12 * 12 * 768 * 1024
    assert SMALL.flops_per_step(3) == 3 * 1024 * of_token


def test_a_gate_adds_a_third_matrix_to_parameters_and_products():
    gated = DecoderCosts(replace(GPT2_SMALL, activation="gated-gelu"), 1024)
    assert gated.layer_parameters() - SMALL.layer_parameters() == 4 * 768**2 + 4 * 768
    share = (8 * 768**2 + 24 * 768**2 + 2 * 1024 * 768) / (8 * 768**2 + 16 * 768**2 + 2 * 1024 * 768)
    assert SMALL.unit_costs[-1] / gated.unit_costs[-1] == pytest.approx(share)


def test_a_heavy_head_makes_the_last_stage_shorter():
    """Five and three layers were the fastest when measured."""
    costs = DecoderCosts(MEASURED, 256)
    assert costs.stage_bounds(2) == [0, 6, 11]
    assert 2.5 < costs.unit_costs[-1] < 3.1
    assert costs.piece_costs([0, 6, 11]) == [sum(costs.unit_costs[:6]), sum(costs.unit_costs[6:])]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_stage_has_a_layer_however_heavy_the_head(stages):
    bounds = DecoderCosts(replace(MEASURED, num_layers=4, vocab_size=10**6), 256).stage_bounds(stages)
    layers = [sum(1 <= unit <= 4 for unit in range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert sum(layers) == 4 and min(layers) >= 1
    assert (bounds[0], bounds[-1]) == (0, 7)


def states_of(memory: Memory) -> int:
    return memory.weights + memory.gradients + memory.optimizer


def test_memory_counts_states_activations_in_flight_and_logits():
    common = {"micro_batch_size": 2, "num_micro_batches": 8}
    bounds = SMALL.stage_bounds(2)
    first, last = SMALL.memory_per_stage(bounds, dtype="bf16", **common)
    assert states_of(first) == 18 * SMALL.stage_parameters(bounds)[0]
    layers = bounds[1] - 1
    assert first.activations == 2 * 1024 * 2 * 768 * (34 * layers + 1)  # and the mask of the embedding
    assert last.activations == 1024 * 2 * 768 * (34 * (12 - layers) + 4)  # and what norm and head read
    assert (first.logits, last.logits) == (0, SMALL.loss_bytes(2, 1, 2)) and last.logits > 0
    (single,) = SMALL.memory_per_stage([0, 15], dtype="fp32", **common)
    assert states_of(single) == 16 * SMALL.num_parameters
    (short,) = SMALL.memory_per_stage([0, 15], dtype="fp32", checkpoint_activations=True, **common)
    hidden = 2048 * 768 * 4
    assert short.activations == 12 * hidden + 2 * hidden + hidden // 4  # a layer runs again when the logits are gone
    few = DecoderCosts(replace(GPT2_SMALL, vocab_size=10), 1024)
    (short,) = few.memory_per_stage([0, 15], dtype="fp32", checkpoint_activations=True, **common)
    assert short.activations + short.logits == 14 * hidden + hidden // 4 + 2048 * 768 * (16 * 4 + 2)


@pytest.mark.parametrize(("optimizer", "of_parameter"), [("adamw", 12), ("adafactor", 4), ("sgd", 4), ("momentum", 8)])
def test_moments_are_counted_in_addition_to_the_masters(optimizer, of_parameter):
    (memory,) = SMALL.memory_per_stage([0, 15], micro_batch_size=1, dtype="bf16", optimizer=optimizer)
    assert memory.optimizer == of_parameter * SMALL.num_parameters


@pytest.mark.parametrize(("dtype", "whole", "shared"), [("bf16", 6, 12), ("fp32", 8, 8)])
def test_replicas_that_share_states_hold_their_part_of_them(dtype, whole, shared):
    (memory,) = SMALL.memory_per_stage([0, 15], micro_batch_size=1, dtype=dtype, zero=Zero(1, 4))
    assert states_of(memory) == whole * SMALL.num_parameters + shared * SMALL.num_parameters // 4


def test_chunks_share_the_forwards_in_flight():
    costs = DecoderCosts(MEASURED, 256)
    plain = costs.memory_per_stage(costs.stage_bounds(2), micro_batch_size=1, num_micro_batches=8)
    bounds = costs.stage_bounds(2, 2)
    chunked = costs.memory_per_stage(bounds, micro_batch_size=1, num_micro_batches=8, schedule="interleaved", chunks=2)
    layers = sum(stop - start for start, stop in ((1, bounds[1]), (bounds[2], bounds[3])))
    hidden = 256 * 256
    of_layer = (plain[1].activations - 2 * 4 * hidden) // 3  # units 6, 7 and 8, once in flight; norm and head
    assert chunked[0].activations == 5 * (layers * of_layer + hidden) // 2  # and the mask of the embedding
    assert chunked[1].logits == plain[1].logits  # those of one micro-batch


def test_sequence_parallelism_cuts_what_lies_between_the_products() -> None:
    """Korthikanti et al. 2022, table 2: s b h 34 / t with it, s b h (10 + 24 / t) without."""
    without, with_it = (SMALL.unit_kept(2, 4, 2, sequence)[1] for sequence in (1, 4))
    assert (without.full, with_it.full) == (2048 * 768 * (10 + 24 // 4), 2048 * 768 * 34 // 4)
    assert (without.input, with_it.input) == (2048 * 768 * 2, 2048 * 768 * 2 // 4)
    assert SMALL.unit_kept(2, 4, 2, 4)[-1].full == 2048 * 768 * 2  # the head reads all tokens


@pytest.mark.parametrize("costs", [SMALL, BertCosts(GPT2_SMALL, 1024, BertConfig())], ids=["gpt2", "bert"])
@pytest.mark.parametrize(("sequence", "parts"), [(1, 0), (4, 3)])
def test_products_that_are_put_off_or_compiled_keep_their_inputs_joined(
    costs: DecoderCosts, sequence: int, parts: int
) -> None:
    """Two inputs of s b h in a layer; ``tests/models/common/test_sequence_parallel.py`` counts them in one."""
    how = {"micro_batch_size": 2, "num_micro_batches": 8, "tensor": 4, "dtype": "bf16", "sequence": sequence}
    bounds = costs.stage_bounds(2)
    plain, split, compiled = (
        costs.memory_per_stage(bounds, **how, **more)[0].activations  # type: ignore[arg-type]
        for more in ({}, {"schedule": "zb-h1"}, {"is_compiled": True})
    )
    in_flight, layers = 2, bounds[1] - 1
    assert split - plain == compiled - plain == in_flight * layers * 2 * (2048 * 768 * 2) * parts // 4


@pytest.mark.parametrize("chunks", [1, 2])
def test_auto_keeps_what_the_worst_of_its_schedules_keeps(chunks: int) -> None:
    how = {"micro_batch_size": 2, "num_micro_batches": 8, "tensor": 4, "dtype": "bf16", "sequence": 4, "chunks": chunks}
    bounds = SMALL.stage_bounds(2, chunks)
    auto, *each = (
        SMALL.memory_per_stage(bounds, **how, schedule=name)  # type: ignore[arg-type]
        for name in ("auto", *candidates("auto", chunks))
    )
    for stage in range(2):
        assert auto[stage].activations >= max(one[stage].activations for one in each)
        assert auto[stage].logits == max(one[stage].logits for one in each)


def test_attention_that_is_not_fused_keeps_probabilities_that_selective_recompute_leaves_out() -> None:
    plain = replace(SMALL, is_fused=False)
    (kept,), (less,) = (
        plain.memory_per_stage([0, 15], micro_batch_size=2, dtype="bf16", is_selective=again) for again in (False, True)
    )
    (fused,) = SMALL.memory_per_stage([0, 15], micro_batch_size=2, dtype="bf16")
    core = 2 * 12 * 1024**2 * 5
    assert (kept.activations - fused.activations, less.activations - fused.activations) == (12 * core, core)


def test_products_have_the_flops_of_the_model() -> None:
    """Norms and biases are counted among the parameters, and are in no product."""
    work = SMALL.unit_work(3, 1, 4)
    norms = 6 * (12 * (13 * 768) + 2 * 768)
    assert 3 * sum(unit.flops for unit in work) == 3 * 1024 * (SMALL.flops_per_token() - norms)
    halves = SMALL.unit_work(3, 2, 4)
    assert 2 * halves[1].flops == work[1].flops and halves[1].sums == work[1].sums == (3 * 1024 * 768 * 4,) * 2


def test_whole_gradients_are_summed_where_they_lie_and_cut_ones_in_two_buckets() -> None:
    sizes = {"micro_batch_size": 1, "dtype": "fp32"}
    tiny = DecoderCosts(replace(GPT2_SMALL, vocab_size=64, max_position_embeddings=4), 4)
    for zero in (Zero(), Zero(0, 2), Zero(1, 2)):
        (memory,) = tiny.memory_per_stage([0, 15], zero=zero, **sizes)
        assert memory.buffers == 0
    (parts,) = tiny.memory_per_stage([0, 15], zero=Zero(2, 2), **sizes)
    assert parts.buffers == 2 * 32 * 2**20
    first, last = tiny.memory_per_stage(tiny.stage_bounds(2), **sizes)
    assert first.buffers == last.buffers == 3 * 4 * 768 * 4


def test_an_unknown_vocabulary_is_told():
    costs = DecoderCosts(replace(GPT2_SMALL, vocab_size=None), 8)
    with pytest.raises(ValueError, match="with_vocab"):
        costs.stage_parameters([0, 15])
