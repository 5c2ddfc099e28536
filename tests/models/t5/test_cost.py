"""Costs of a T5 against the formulas, against counting by hand and against the model that is built."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from megatron.config import Config, parse
from megatron.costs import decoder_cost
from megatron.costs.memory import Memory
from megatron.models import registry
from megatron.models.t5 import cost
from megatron.models.t5.cost import T5Costs
from megatron.ops import biased_attention

BASE_FLAGS = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --enc-seq-length 512 --vocab-size 32128"


def make_config(line: str = BASE_FLAGS, **parse_kwargs: Any) -> Config:
    return parse(line.split(), world_size=parse_kwargs.pop("world_size", 1), env={}, family="t5", **parse_kwargs)


def make_costs(line: str = BASE_FLAGS, **sides: Any) -> T5Costs:
    costs = registry.costs_of(make_config(line))
    assert isinstance(costs, T5Costs)
    return replace(costs, sides=replace(costs.sides, **sides))


def stage_units(costs: T5Costs, bounds: list[int]) -> list[list[str]]:
    return [costs.unit_names[start:stop] for start, stop in pairwise(bounds)]


@pytest.mark.parametrize(
    ("hidden", "ff", "lengths", "low", "high"),
    [
        (768, 3072, (512, 512), 1.4, 1.5),
        (512, 2048, (512, 512), 1.4, 1.5),
        (1024, 4096, (1024, 1024), 1.4, 1.5),
        (768, 3072, (512, 114), 0.38, 0.42),
        (512, 2048, (512, 114), 0.38, 0.42),
    ],
)
def test_decoder_layer_cost_is_in_expected_range(hidden, ff, lengths, low, high):
    line = f"--hidden-size {hidden} --num-attention-heads 8 --ff-hidden-size {ff} --vocab-size 99"
    costs = make_costs(f"{line} --enc-seq-length {lengths[0]}", dec_seq_length=lengths[1])
    cost_by_unit = dict(zip(costs.unit_names, costs.unit_costs, strict=True))
    assert cost_by_unit["encoder 0"] == 1.0
    assert low <= cost_by_unit["decoder 0"] <= high


def test_flops_are_three_times_forward_formula():
    costs = make_costs(BASE_FLAGS + " --kv-hidden-size 32 --ff-hidden-size 2048 --activation gated-gelu")
    h, width, f, enc, dec, v = 768, 12 * 32, 2048, 512, 114, 32128
    encoder = enc * (8 * h * width + 6 * h * f) + 4 * enc**2 * width
    decoder = dec * (8 * h * width + 6 * h * f) + 4 * dec**2 * width
    decoder += 4 * dec * h * width + 4 * enc * h * width + 4 * dec * enc * width
    assert costs.flops_per_sample == 3 * (12 * encoder + 12 * decoder + 2 * dec * h * v)
    assert costs.flops_per_step(7) == 7 * costs.flops_per_sample


def test_t5_small_matches_published_parameter_count():
    line = "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --ff-hidden-size 2048 --vocab-size 32128"
    assert registry.costs_of(make_config(line)).num_parameters == 60_506_624


@pytest.mark.parametrize(
    "line",
    [
        "--activation relu",
        "--activation gated-gelu --untie-embeddings-and-output-weights",
        "--position-embedding-type learned --hidden-bias",
        "--hidden-bias --activation gated-silu --relative-attention-num-buckets 8",
    ],
)
def test_parameter_count_matches_built_model(line):
    from megatron.models.t5.model import T5Model, t5_model_args_from

    model_flags = "--enc-layers 2 --dec-layers 3 --hidden-size 24 --num-attention-heads 2 --kv-hidden-size 5"
    config = make_config(f"{model_flags} --ff-hidden-size 50 --vocab-size 61 --enc-seq-length 20 {line}")
    model = T5Model(t5_model_args_from(config.model, config.family_config))
    assert registry.costs_of(config).num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_unit_names_follow_pipeline_order():
    costs = make_costs(enc_layers=1, dec_layers=2)
    assert costs.unit_names == [
        *("encoder embedding", "encoder 0", "encoder norm"),
        *("decoder embedding", "decoder 0", "decoder 1", "decoder norm", "head"),
    ]
    assert costs.num_units == len(costs.unit_costs) == len(costs.unit_parameters()) == 8


@pytest.mark.parametrize("layers", [(3, 3), (2, 4), (1, 5)])
@pytest.mark.parametrize("lengths", [(512, 114), (128, 128)])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
def test_stage_bounds_minimize_slowest_stage(layers, lengths, num_stages):
    costs = make_costs(
        "--hidden-size 256 --vocab-size 500",
        enc_layers=layers[0],
        dec_layers=layers[1],
        enc_seq_length=lengths[0],
        dec_seq_length=lengths[1],
    )
    bounds = costs.stage_bounds(num_stages)
    all_bounds = [
        [0, *candidate, costs.num_units] for candidate in combinations(layer_boundaries(costs), num_stages - 1)
    ]
    assert bounds in all_bounds
    assert max(costs.chunk_costs(bounds)) == pytest.approx(
        min(max(costs.chunk_costs(candidate)) for candidate in all_bounds)
    )


def layer_boundaries(costs: T5Costs) -> list[int]:
    """Return where a cut parts two layers: between two of a side, or at the seam, before the decoder's embedding."""
    names = costs.unit_names
    return [
        unit
        for unit in range(1, costs.num_units)
        if names[unit] == "decoder embedding" or (is_layer(names[unit]) and is_layer(names[unit - 1]))
    ]


def is_layer(name: str) -> bool:
    return name[-1].isdigit()


def test_norms_stay_with_their_side():
    line = "--hidden-size 64 --vocab-size 50 --enc-seq-length 64"
    costs = make_costs(line, dec_seq_length=64, enc_layers=3, dec_layers=2)
    first, second = stage_units(costs, costs.stage_bounds(2))
    assert first == ["encoder embedding", "encoder 0", "encoder 1", "encoder 2", "encoder norm"]
    assert second[0] == "decoder embedding"


@pytest.mark.parametrize(("split_rank", "num_stages"), [(1, 2), (1, 3), (2, 3), (1, 4), (3, 4)])
def test_split_rank_fixes_boundary_and_balances_sides(split_rank, num_stages):
    costs = make_costs(BASE_FLAGS, enc_layers=6, dec_layers=6, pipeline_split_rank=split_rank)
    units_by_stage = stage_units(costs, costs.stage_bounds(num_stages))
    assert [stage[0] == "decoder embedding" for stage in units_by_stage].index(True) == split_rank
    for stage_idx, stage in enumerate(units_by_stage):
        side = "encoder" if stage_idx < split_rank else "decoder"
        assert all(name.startswith(side) or name == "head" for name in stage)
    encoder = [sum(map(is_layer, stage)) for stage in units_by_stage[:split_rank]]
    assert max(encoder) - min(encoder) <= 1


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_every_chunk_has_a_layer_and_chunks_are_balanced(num_stages, num_chunks):
    costs = make_costs("--hidden-size 256 --vocab-size 500 --enc-seq-length 512", enc_layers=6, dec_layers=6)
    bounds = costs.stage_bounds(num_stages, num_chunks)
    assert len(bounds) == num_stages * num_chunks + 1
    assert all(any(map(is_layer, stage)) for stage in stage_units(costs, bounds))
    assert max(costs.chunk_costs(bounds)) <= max(costs.chunk_costs(costs.stage_bounds(num_stages * num_chunks))) + 1e-9


def test_stages_cover_all_parameters_and_replicate_shared_ones():
    costs = make_costs(BASE_FLAGS, enc_layers=2, dec_layers=2)
    table_size, bias_size = 32128 * 768, 32 * 12
    bounds = [0, 2, 4, 6, 9]  # encoder 0 | encoder 1, norm | decoder embedding, decoder 0 | decoder 1, norm, head
    assert sum(costs.stage_parameters(bounds)) == costs.num_parameters + 2 * table_size + 2 * bias_size
    assert costs.stage_parameters([0, 9]) == [costs.num_parameters]
    assert costs.stage_parameters(bounds)[1] < table_size
    two_stages = costs.stage_parameters([0, 5, 9])  # both embeddings on the first stage
    assert sum(two_stages) == costs.num_parameters + table_size


def state_bytes(memory: Memory) -> int:
    return memory.weights + memory.gradients + memory.optimizer


def test_memory_counts_encoder_output_and_logits():
    line = "--hidden-size 64 --num-attention-heads 4 --vocab-size 300 --position-embedding-type learned"
    costs = make_costs(f"{line} --num-layers 4 --enc-seq-length 64 --dec-seq-length 32")
    bounds = [0, 4, 6, 10, 13]  # encoder 0-2 | encoder 3 | decoder 0-2 | decoder 3
    settings = {"micro_batch_size": 2, "num_micro_batches": 8, "dtype": "bf16"}
    plain = costs.memory_per_stage(bounds, **settings)
    assert [state_bytes(stage) for stage in plain] == [
        18 * num_parameters for num_parameters in costs.stage_parameters(bounds)
    ]
    assert [stage.logits for stage in plain] == [0, 0, 0, 2 * 32 * 300 * 4]
    recomputed = costs.memory_per_stage(bounds, checkpoint_activations=True, **settings)
    encoder, decoder, output = (2 * length * 64 * 2 for length in (64, 32, 64))
    stored_bytes = (12 * encoder, 3 * encoder, 2 * (3 * decoder + output), decoder + output + 2 * decoder)
    recompute_bytes = [memory.activations - stored for memory, stored in zip(recomputed, stored_bytes, strict=True)]
    assert recompute_bytes[0] == recompute_bytes[1] == 2 * 64 * (34 * 64)
    assert recompute_bytes[3] == recompute_bytes[2] - plain[3].logits > 0  # a layer runs again when the logits are gone
    assert all(a.activations > b.activations for a, b in zip(plain[:3], recomputed[:3], strict=True))


def test_relative_bias_is_saved_per_sample_with_segments():
    plain = make_costs(BASE_FLAGS)
    segmented = registry.costs_of(make_config(BASE_FLAGS + " --reset-attention-mask"))
    settings = {"micro_batch_size": 4, "dtype": "bf16"}
    (shared,), (per_sample,) = (costs.memory_per_stage([0, 29], **settings) for costs in (plain, segmented))
    assert per_sample.activations - shared.activations == 3 * 12 * 12 * (512**2 + 114**2) * 2


def saved_score_bytes(line: str, num_samples: int, score_shapes: set[tuple[int, int]]) -> int:
    """Return the bytes of all tensors [..., s, s_k] that a T5 keeps for backward on this CPU."""
    from megatron.models.t5.model import T5Model, t5_model_args_from

    config = make_config(line)
    model = T5Model(t5_model_args_from(config.model, config.family_config))
    lengths = config.sequence_lengths
    tokens = [torch.zeros(num_samples, length, dtype=torch.int64) for length in lengths]
    segments = [torch.zeros(num_samples, length, dtype=torch.int32) for length in lengths]
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 2 and tuple(tensor.shape[-2:]) in score_shapes:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(*tokens, *(segments if config.data.reset_attention_mask else ()))
    assert logits.requires_grad
    return sum(saved.values())


def test_deferred_linears_save_gathered_inputs():
    costs = make_costs(BASE_FLAGS, enc_layers=2, dec_layers=2, dec_seq_length=128)
    sharded, gathered = (
        costs.unit_saved_bytes(3, 4, 2, 4, saves_gathered_inputs=is_gathered) for is_gathered in (False, True)
    )
    extra_bytes = dict(
        zip(costs.unit_names, (b.full - a.full for a, b in zip(sharded, gathered, strict=True)), strict=True)
    )
    expected = {"encoder": 2 * 3 * 512 * 768 * 2 * 3 // 4, "decoder": 3 * 3 * 128 * 768 * 2 * 3 // 4}
    assert extra_bytes == {name: expected[name.split()[0]] if is_layer(name) else 0 for name in extra_bytes}


SMALL_FLAGS = (
    "--enc-layers 2 --dec-layers 3 --hidden-size 24 --num-attention-heads 2 --ff-hidden-size 50 --vocab-size 61"
)


@pytest.mark.parametrize("line", ["", "--reset-attention-mask", "--position-embedding-type learned"])
@pytest.mark.parametrize("is_saved", [True, False])
def test_blocked_attention_scores_match_built_model(line, is_saved, monkeypatch):
    line = f"{SMALL_FLAGS} --enc-seq-length 40 --dec-seq-length 37 --attention-dropout 0 --hidden-dropout 0 {line}"
    for module in (biased_attention, cost):
        monkeypatch.setattr(module, "MAX_SAVED_PROBABILITIES", 3 * 2 * 40 * 37 if is_saved else 10)
    costs = registry.costs_of(make_config(line), is_on_cpu=True)
    # no other matrix has these numbers in its last two places
    saved_bytes = saved_score_bytes(line, 3, {(40, 40), (37, 37), (37, 40)})
    assert isinstance(costs, T5Costs)
    encoder = costs._scores_saved_bytes(3, 40, 40, 1, 4)
    decoder = costs._scores_saved_bytes(3, 37, 37, 1, 4) + costs._scores_saved_bytes(3, 37, 40, 1, 4, is_cross=True)
    assert saved_bytes == 2 * encoder + 3 * decoder
    assert costs.unit_saved_bytes(3, 1, 4)[1].full >= encoder
    assert (saved_bytes > 0) == (is_saved or "mask" in line)


def test_blocked_attention_affects_only_fp32_and_fp64_memory():
    assert decoder_cost.MAX_SAVED_PROBABILITIES == biased_attention.MAX_SAVED_PROBABILITIES
    line = f"{SMALL_FLAGS} --enc-seq-length 64 --dec-seq-length 32 --attention-dropout 0"
    config = make_config(line + " --hidden-dropout 0")
    blocked, plain = registry.costs_of(config, is_on_cpu=True), registry.costs_of(config)
    bias = 2 * (2 * 64**2 + 3 * 32**2)
    probabilities = 2 * (2 * 64**2 + 3 * (32**2 + 32 * 64))

    def activation_bytes(costs: Any, dtype: str) -> int:
        return costs.memory_per_stage([0, costs.num_units], micro_batch_size=5, dtype=dtype)[0].activations

    for dtype, width in (("fp32", 4), ("fp64", 8)):
        assert activation_bytes(blocked, dtype) - activation_bytes(plain, dtype) == (5 * probabilities - bias) * width
    assert activation_bytes(blocked, "bf16") == activation_bytes(plain, "bf16")
    dropped = make_config(line.replace("dropout 0", "dropout 0.1") + " --hidden-dropout 0")
    assert registry.costs_of(dropped, is_on_cpu=True) == registry.costs_of(dropped)


def test_unit_flops_match_model_flops() -> None:
    costs = registry.costs_of(make_config(BASE_FLAGS))
    assert 3 * sum(unit.flops for unit in costs.unit_work(2, 1, 4)) == pytest.approx(2 * costs.flops_per_sample)
    decoder = costs.unit_work(2, 2, 4)[costs._units.dec_layers[0]]
    assert len(decoder.reduced_bytes) == 3 and len(decoder.backward_reduced_bytes) == 4


def test_decoder_boundary_includes_encoder_output() -> None:
    costs = registry.costs_of(make_config(BASE_FLAGS))
    h, seam = costs.model.hidden_size, costs._units.dec_embedding
    assert costs.boundary_bytes(seam, 2, 4) == costs.boundary_bytes(2, 2, 4) == 2 * 512 * h * 4
    assert costs.boundary_bytes(seam + 2, 2, 4) == 2 * (512 + 114) * h * 4
