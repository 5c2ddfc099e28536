"""Costs of a GPT-2 against counting by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import BertConfig, Config, ModelConfig, parse
from megatron.costs.decoder_cost import DecoderCosts
from megatron.costs.memory import Memory, Zero
from megatron.models.bert.cost import BertCosts
from megatron.models.registry import costs_of
from tds.schedule.simulate import candidate_schedules

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


def test_gpt2_small_matches_published_parameter_count():
    assert SMALL.num_parameters == 124_439_808


def test_costs_of_config_use_its_model_and_sequence_length():
    config: Config = parse(["--seq-length", "96", "--vocab-size", "101"], world_size=1, env={})
    assert costs_of(config) == DecoderCosts(config.model, 96)


def test_parameter_count_matches_built_model():
    from megatron.models.common.decoder import DecoderModel
    from megatron.models.common.model_args import model_args_from

    for is_untied, has_bias, activation in (
        (False, False, "gelu"),
        (True, True, "gelu"),
        (False, True, "gated-gelu"),
        (True, False, "gated-silu"),
    ):
        model_config = ModelConfig(
            num_layers=3,
            hidden_size=24,
            num_attention_heads=2,
            kv_hidden_size=5,
            ff_hidden_size=50,
            vocab_size=61,
            max_position_embeddings=9,
            hidden_bias=has_bias,
            untie_embeddings=is_untied,
            activation=activation,
        )
        num_built = sum(parameter.numel() for parameter in DecoderModel(model_args_from(model_config)).parameters())
        costs = DecoderCosts(model_config, 8)
        assert costs.num_parameters == num_built
        assert costs.stage_parameters([0, 6]) == [num_built]


def test_units_have_names_and_costs():
    assert SMALL.num_units == len(SMALL.unit_costs) == len(SMALL.unit_parameters()) == 15
    assert SMALL.unit_names[:2] == ["embedding", "layer 0"] and SMALL.unit_names[-1] == "head"


def test_stages_cover_all_parameters_and_tied_table_twice():
    bounds = SMALL.stage_bounds(4)
    table_size = 50257 * 768
    assert sum(SMALL.stage_parameters(bounds)) == SMALL.num_parameters + table_size
    untied = DecoderCosts(replace(GPT2_SMALL, untie_embeddings=True), 1024)
    assert sum(untied.stage_parameters(bounds)) == untied.num_parameters


def test_tensor_parallelism_shards_matrices_and_replicates_norms():
    full, half = SMALL.layer_parameters(), SMALL.layer_parameters(2)
    assert 2 * half - full == 4 * 768 + 2 * 768


def test_flops_are_six_per_parameter_plus_attention_scores():
    products = 12 * (12 * 768**2 + 13 * 768) + 2 * 768 + 50257 * 768
    per_token = 6 * products + 6 * 12 * 768 * 1024
    assert SMALL.flops_per_token() == per_token
    assert SMALL.flops_per_token(causal=False) == 6 * products + 12 * 12 * 768 * 1024
    assert SMALL.flops_per_step(3) == 3 * 1024 * per_token


def test_gate_adds_third_matrix_to_parameters_and_flops():
    gated = DecoderCosts(replace(GPT2_SMALL, activation="gated-gelu"), 1024)
    assert gated.layer_parameters() - SMALL.layer_parameters() == 4 * 768**2 + 4 * 768
    expected_ratio = (8 * 768**2 + 24 * 768**2 + 2 * 1024 * 768) / (8 * 768**2 + 16 * 768**2 + 2 * 1024 * 768)
    assert SMALL.unit_costs[-1] / gated.unit_costs[-1] == pytest.approx(expected_ratio)


def test_heavy_head_shortens_last_stage():
    """Five and three layers were the fastest when measured."""
    costs = DecoderCosts(MEASURED, 256)
    assert costs.stage_bounds(2) == [0, 6, 11]
    assert 2.5 < costs.unit_costs[-1] < 3.1
    assert costs.chunk_costs([0, 6, 11]) == [sum(costs.unit_costs[:6]), sum(costs.unit_costs[6:])]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_every_stage_has_a_layer_with_heavy_head(num_stages):
    bounds = DecoderCosts(replace(MEASURED, num_layers=4, vocab_size=10**6), 256).stage_bounds(num_stages)
    num_layers = [
        sum(1 <= unit <= 4 for unit in range(start, stop)) for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    assert sum(num_layers) == 4 and min(num_layers) >= 1
    assert (bounds[0], bounds[-1]) == (0, 7)


def state_bytes(memory: Memory) -> int:
    return memory.weights + memory.gradients + memory.optimizer


def test_memory_counts_states_activations_and_logits():
    settings = {"micro_batch_size": 2, "num_micro_batches": 8}
    bounds = SMALL.stage_bounds(2)
    first, last = SMALL.memory_per_stage(bounds, dtype="bf16", **settings)
    assert state_bytes(first) == 18 * SMALL.stage_parameters(bounds)[0]
    num_layers = bounds[1] - 1
    assert first.activations == 2 * 1024 * 2 * 768 * (34 * num_layers + 1)  # and the mask of the embedding
    assert last.activations == 1024 * 2 * 768 * (34 * (12 - num_layers) + 4)  # and what norm and head read
    assert (first.logits, last.logits) == (0, SMALL.loss_bytes(2, 1, 2)) and last.logits > 0
    (single,) = SMALL.memory_per_stage([0, 15], dtype="fp32", **settings)
    assert state_bytes(single) == 16 * SMALL.num_parameters
    (recomputed,) = SMALL.memory_per_stage([0, 15], dtype="fp32", checkpoint_activations=True, **settings)
    hidden = 2048 * 768 * 4
    assert (
        recomputed.activations == 12 * hidden + 2 * hidden + hidden // 4
    )  # a layer runs again when the logits are gone
    small_vocab = DecoderCosts(replace(GPT2_SMALL, vocab_size=10), 1024)
    (recomputed,) = small_vocab.memory_per_stage([0, 15], dtype="fp32", checkpoint_activations=True, **settings)
    assert recomputed.activations + recomputed.logits == 14 * hidden + hidden // 4 + 2048 * 768 * (16 * 4 + 2)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"), [("adamw", 12), ("adafactor", 4), ("sgd", 4), ("momentum", 8)]
)
def test_optimizer_moments_are_counted_with_main_params(optimizer, bytes_per_parameter):
    (memory,) = SMALL.memory_per_stage([0, 15], micro_batch_size=1, dtype="bf16", optimizer=optimizer)
    assert memory.optimizer == bytes_per_parameter * SMALL.num_parameters


@pytest.mark.parametrize(("dtype", "full_bytes", "sharded_bytes"), [("bf16", 6, 12), ("fp32", 8, 8)])
def test_zero_shards_optimizer_states_over_replicas(dtype, full_bytes, sharded_bytes):
    (memory,) = SMALL.memory_per_stage([0, 15], micro_batch_size=1, dtype=dtype, zero=Zero(1, 4))
    assert state_bytes(memory) == full_bytes * SMALL.num_parameters + sharded_bytes * SMALL.num_parameters // 4


def test_chunks_share_forwards_in_flight():
    costs = DecoderCosts(MEASURED, 256)
    plain = costs.memory_per_stage(costs.stage_bounds(2), micro_batch_size=1, num_micro_batches=8)
    bounds = costs.stage_bounds(2, 2)
    chunked = costs.memory_per_stage(bounds, micro_batch_size=1, num_micro_batches=8, schedule="interleaved", chunks=2)
    layers = sum(stop - start for start, stop in ((1, bounds[1]), (bounds[2], bounds[3])))
    hidden = 256 * 256
    per_layer = (plain[1].activations - 2 * 4 * hidden) // 3  # units 6, 7 and 8, once in flight; norm and head
    assert chunked[0].activations == 5 * (layers * per_layer + hidden) // 2  # and the mask of the embedding
    assert chunked[1].logits == plain[1].logits  # those of one micro-batch


def test_sequence_parallelism_shards_activations_between_linears() -> None:
    """Korthikanti et al. 2022, table 2: s b h 34 / t with it, s b h (10 + 24 / t) without."""
    plain, sharded = (SMALL.unit_saved_bytes(2, 4, 2, sequence)[1] for sequence in (1, 4))
    assert (plain.full, sharded.full) == (2048 * 768 * (10 + 24 // 4), 2048 * 768 * 34 // 4)
    assert (plain.input, sharded.input) == (2048 * 768 * 2, 2048 * 768 * 2 // 4)
    assert SMALL.unit_saved_bytes(2, 4, 2, 4)[-1].full == 2048 * 768 * 2  # the head reads all tokens


@pytest.mark.parametrize("costs", [SMALL, BertCosts(GPT2_SMALL, 1024, BertConfig())], ids=["gpt2", "bert"])
@pytest.mark.parametrize(("sequence", "num_gathered"), [(1, 0), (4, 3)])
def test_deferred_or_compiled_linears_save_gathered_inputs(
    costs: DecoderCosts, sequence: int, num_gathered: int
) -> None:
    """Two inputs of s b h in a layer; ``tests/models/common/test_sequence_parallel.py`` counts them in one."""
    settings = {"micro_batch_size": 2, "num_micro_batches": 8, "tensor": 4, "dtype": "bf16", "sequence": sequence}
    bounds = costs.stage_bounds(2)
    plain, split, compiled = (
        costs.memory_per_stage(bounds, **settings, **overrides)[0].activations  # type: ignore[arg-type]
        for overrides in ({}, {"schedule": "zb-h1"}, {"is_compiled": True})
    )
    in_flight, layers = 2, bounds[1] - 1
    assert split - plain == compiled - plain == in_flight * layers * 2 * (2048 * 768 * 2) * num_gathered // 4


@pytest.mark.parametrize("chunks", [1, 2])
def test_auto_schedule_memory_is_maximum_of_candidates(chunks: int) -> None:
    settings = {
        "micro_batch_size": 2,
        "num_micro_batches": 8,
        "tensor": 4,
        "dtype": "bf16",
        "sequence": 4,
        "chunks": chunks,
    }
    bounds = SMALL.stage_bounds(2, chunks)
    auto, *per_schedule = (
        SMALL.memory_per_stage(bounds, **settings, schedule=name)  # type: ignore[arg-type]
        for name in ("auto", *candidate_schedules("auto", chunks))
    )
    for stage in range(2):
        assert auto[stage].activations >= max(memory[stage].activations for memory in per_schedule)
        assert auto[stage].logits == max(memory[stage].logits for memory in per_schedule)


def test_unfused_attention_saves_probabilities_unless_recomputed() -> None:
    unfused = replace(SMALL, is_fused=False)
    (saved,), (recomputed,) = (
        unfused.memory_per_stage([0, 15], micro_batch_size=2, dtype="bf16", is_selective=is_selective)
        for is_selective in (False, True)
    )
    (fused,) = SMALL.memory_per_stage([0, 15], micro_batch_size=2, dtype="bf16")
    probability_bytes = 2 * 12 * 1024**2 * 5
    assert (saved.activations - fused.activations, recomputed.activations - fused.activations) == (
        12 * probability_bytes,
        probability_bytes,
    )


def test_unit_flops_match_model_flops() -> None:
    """Norms and biases are counted among the parameters, and are in no product."""
    work = SMALL.unit_work(3, 1, 4)
    norm_flops = 6 * (12 * (13 * 768) + 2 * 768)
    assert 3 * sum(unit.flops for unit in work) == 3 * 1024 * (SMALL.flops_per_token() - norm_flops)
    sharded_work = SMALL.unit_work(3, 2, 4)
    assert (
        2 * sharded_work[1].flops == work[1].flops
        and sharded_work[1].reduced_bytes == work[1].reduced_bytes == (3 * 1024 * 768 * 4,) * 2
    )


def test_full_grads_reduce_in_place_and_sharded_grads_in_two_buckets() -> None:
    settings = {"micro_batch_size": 1, "dtype": "fp32"}
    tiny = DecoderCosts(replace(GPT2_SMALL, vocab_size=64, max_position_embeddings=4), 4)
    for zero in (Zero(), Zero(0, 2), Zero(1, 2)):
        (memory,) = tiny.memory_per_stage([0, 15], zero=zero, **settings)
        assert memory.buffers == 0
    (sharded,) = tiny.memory_per_stage([0, 15], zero=Zero(2, 2), **settings)
    assert sharded.buffers == 2 * 32 * 2**20
    first, last = tiny.memory_per_stage(tiny.stage_bounds(2), **settings)
    assert first.buffers == last.buffers == 3 * 4 * 768 * 4


def test_unknown_vocabulary_raises():
    costs = DecoderCosts(replace(GPT2_SMALL, vocab_size=None), 8)
    with pytest.raises(ValueError, match="with_vocab"):
        costs.stage_parameters([0, 15])
