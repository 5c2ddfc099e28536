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

BASE = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --enc-seq-length 512 --vocab-size 32128"


def config_of(line: str = BASE, **others: Any) -> Config:
    return parse(line.split(), world_size=others.pop("world_size", 1), env={}, family="t5", **others)


def costs_of(line: str = BASE, **sides: Any) -> T5Costs:
    costs = registry.costs_of(config_of(line))
    assert isinstance(costs, T5Costs)
    return replace(costs, sides=replace(costs.sides, **sides))


def stages_of(costs: T5Costs, bounds: list[int]) -> list[list[str]]:
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
def test_a_decoder_layer_costs_what_it_should(hidden, ff, lengths, low, high):
    line = f"--hidden-size {hidden} --num-attention-heads 8 --ff-hidden-size {ff} --vocab-size 99"
    costs = costs_of(f"{line} --enc-seq-length {lengths[0]}", dec_seq_length=lengths[1])
    names = dict(zip(costs.unit_names, costs.unit_costs, strict=True))
    assert names["encoder 0"] == 1.0
    assert low <= names["decoder 0"] <= high


def test_flops_are_three_forwards_of_the_formula():
    costs = costs_of(BASE + " --kv-hidden-size 32 --ff-hidden-size 2048 --activation gated-gelu")
    h, width, f, enc, dec, v = 768, 12 * 32, 2048, 512, 114, 32128
    encoder = enc * (8 * h * width + 6 * h * f) + 4 * enc**2 * width
    decoder = dec * (8 * h * width + 6 * h * f) + 4 * dec**2 * width
    decoder += 4 * dec * h * width + 4 * enc * h * width + 4 * dec * enc * width
    assert costs.flops_per_sample == 3 * (12 * encoder + 12 * decoder + 2 * dec * h * v)
    assert costs.flops_per_step(7) == 7 * costs.flops_per_sample


def test_t5_small_has_its_published_number_of_parameters():
    line = "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --ff-hidden-size 2048 --vocab-size 32128"
    assert registry.costs_of(config_of(line)).num_parameters == 60_506_624


@pytest.mark.parametrize(
    "line",
    [
        "--activation relu",
        "--activation gated-gelu --untie-embeddings-and-output-weights",
        "--position-embedding-type learned --hidden-bias",
        "--hidden-bias --activation gated-silu --relative-attention-num-buckets 8",
    ],
)
def test_parameters_are_those_of_the_model_that_is_built(line):
    from megatron.models.t5.model import T5Model, t5_model_args_from

    sizes = "--enc-layers 2 --dec-layers 3 --hidden-size 24 --num-attention-heads 2 --kv-hidden-size 5"
    config = config_of(f"{sizes} --ff-hidden-size 50 --vocab-size 61 --enc-seq-length 20 {line}")
    built = T5Model(t5_model_args_from(config.model, config.own))
    assert registry.costs_of(config).num_parameters == sum(parameter.numel() for parameter in built.parameters())


def test_units_are_named_in_their_order():
    costs = costs_of(enc_layers=1, dec_layers=2)
    assert costs.unit_names == [
        *("encoder embedding", "encoder 0", "encoder norm"),
        *("decoder embedding", "decoder 0", "decoder 1", "decoder norm", "head"),
    ]
    assert costs.num_units == len(costs.unit_costs) == len(costs.unit_parameters()) == 8


@pytest.mark.parametrize("layers", [(3, 3), (2, 4), (1, 5)])
@pytest.mark.parametrize("lengths", [(512, 114), (128, 128)])
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_the_slowest_stage_is_as_fast_as_layers_allow(layers, lengths, stages):
    costs = costs_of(
        "--hidden-size 256 --vocab-size 500",
        enc_layers=layers[0],
        dec_layers=layers[1],
        enc_seq_length=lengths[0],
        dec_seq_length=lengths[1],
    )
    bounds = costs.stage_bounds(stages)
    cuts = [[0, *cut, costs.num_units] for cut in combinations(places_of(costs), stages - 1)]
    assert bounds in cuts
    assert max(costs.piece_costs(bounds)) == pytest.approx(min(max(costs.piece_costs(cut)) for cut in cuts))


def places_of(costs: T5Costs) -> list[int]:
    """Return where a cut parts two layers: between two of a side, or at the seam, before the decoder's embedding."""
    names = costs.unit_names
    return [
        unit
        for unit in range(1, costs.num_units)
        if names[unit] == "decoder embedding" or (is_layer(names[unit]) and is_layer(names[unit - 1]))
    ]


def is_layer(name: str) -> bool:
    return name[-1].isdigit()


def test_the_seam_keeps_each_norm_with_its_side():
    line = "--hidden-size 64 --vocab-size 50 --enc-seq-length 64"
    costs = costs_of(line, dec_seq_length=64, enc_layers=3, dec_layers=2)
    first, second = stages_of(costs, costs.stage_bounds(2))
    assert first == ["encoder embedding", "encoder 0", "encoder 1", "encoder 2", "encoder norm"]
    assert second[0] == "decoder embedding"


@pytest.mark.parametrize(("rank", "stages"), [(1, 2), (1, 3), (2, 3), (1, 4), (3, 4)])
def test_a_split_rank_fixes_the_seam_and_balances_each_side(rank, stages):
    costs = costs_of(BASE, enc_layers=6, dec_layers=6, pipeline_split_rank=rank)
    held = stages_of(costs, costs.stage_bounds(stages))
    assert [stage[0] == "decoder embedding" for stage in held].index(True) == rank
    for number, stage in enumerate(held):
        side = "encoder" if number < rank else "decoder"
        assert all(name.startswith(side) or name == "head" for name in stage)
    encoder = [sum(map(is_layer, stage)) for stage in held[:rank]]
    assert max(encoder) - min(encoder) <= 1


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_chunks_have_a_layer_each_and_no_piece_is_heavy(stages, chunks):
    costs = costs_of("--hidden-size 256 --vocab-size 500 --enc-seq-length 512", enc_layers=6, dec_layers=6)
    bounds = costs.stage_bounds(stages, chunks)
    assert len(bounds) == stages * chunks + 1
    assert all(any(map(is_layer, stage)) for stage in stages_of(costs, bounds))
    assert max(costs.piece_costs(bounds)) <= max(costs.piece_costs(costs.stage_bounds(stages * chunks))) + 1e-9


def test_stages_hold_all_parameters_and_shared_ones_once_each():
    costs = costs_of(BASE, enc_layers=2, dec_layers=2)
    table, bias = 32128 * 768, 32 * 12
    bounds = [0, 2, 4, 6, 9]  # encoder 0 | encoder 1, norm | decoder embedding, decoder 0 | decoder 1, norm, head
    assert sum(costs.stage_parameters(bounds)) == costs.num_parameters + 2 * table + 2 * bias
    assert costs.stage_parameters([0, 9]) == [costs.num_parameters]
    assert costs.stage_parameters(bounds)[1] < table
    both = costs.stage_parameters([0, 5, 9])  # both embeddings on the first stage
    assert sum(both) == costs.num_parameters + table


def states_of(memory: Memory) -> int:
    return memory.weights + memory.gradients + memory.optimizer


def test_memory_counts_the_encoder_output_of_decoder_stages_and_the_logits():
    line = "--hidden-size 64 --num-attention-heads 4 --vocab-size 300 --position-embedding-type learned"
    costs = costs_of(f"{line} --num-layers 4 --enc-seq-length 64 --dec-seq-length 32")
    bounds = [0, 4, 6, 10, 13]  # encoder 0-2 | encoder 3 | decoder 0-2 | decoder 3
    common = {"micro_batch_size": 2, "num_micro_batches": 8, "dtype": "bf16"}
    plain = costs.memory_per_stage(bounds, **common)
    assert [states_of(stage) for stage in plain] == [18 * held for held in costs.stage_parameters(bounds)]
    assert [stage.logits for stage in plain] == [0, 0, 0, 2 * 32 * 300 * 10]
    short = costs.memory_per_stage(bounds, checkpoint_activations=True, **common)
    encoder, decoder, output = (2 * length * 64 * 2 for length in (64, 32, 64))
    waits = (12 * encoder, 3 * encoder, 2 * (3 * decoder + output), decoder + output + 2 * decoder)
    once = [memory.activations - kept for memory, kept in zip(short, waits, strict=True)]
    assert once[0] == once[1] == 2 * 64 * (34 * 64)
    assert once[3] == once[2] - plain[3].logits > 0  # a layer runs again when the logits are gone
    assert all(a.activations > b.activations for a, b in zip(plain[:3], short[:3], strict=True))


def test_a_relative_bias_is_kept_for_each_sample_where_batches_have_segments():
    plain = costs_of(BASE)
    apart = registry.costs_of(config_of(BASE + " --reset-attention-mask"))
    common = {"micro_batch_size": 4, "dtype": "bf16"}
    (one,), (many,) = (costs.memory_per_stage([0, 29], **common) for costs in (plain, apart))
    assert many.activations - one.activations == 3 * 12 * 12 * (512**2 + 114**2) * 2


def square_bytes(line: str, samples: int, pairs: set[tuple[int, int]]) -> int:
    """Return the bytes of all tensors [..., s, s_k] that a T5 keeps for backward on this CPU."""
    from megatron.models.t5.model import T5Model, t5_model_args_from

    config = config_of(line)
    built = T5Model(t5_model_args_from(config.model, config.own))
    lengths = config.sequence_lengths
    tokens = [torch.zeros(samples, length, dtype=torch.int64) for length in lengths]
    segments = [torch.zeros(samples, length, dtype=torch.int32) for length in lengths]
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 2 and tuple(tensor.shape[-2:]) in pairs:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        whole = built(*tokens, *(segments if config.data.reset_attention_mask else ()))
    assert whole.requires_grad
    return sum(kept.values())


def test_products_that_are_put_off_keep_two_joined_inputs_in_an_encoder_layer_and_three_in_a_decoder_layer():
    costs = costs_of(BASE, enc_layers=2, dec_layers=2, dec_seq_length=128)
    cut, joined = (costs.unit_kept(3, 4, 2, 4, is_joined=is_joined) for is_joined in (False, True))
    more = dict(zip(costs.unit_names, (b.full - a.full for a, b in zip(cut, joined, strict=True)), strict=True))
    expected = {"encoder": 2 * 3 * 512 * 768 * 2 * 3 // 4, "decoder": 3 * 3 * 128 * 768 * 2 * 3 // 4}
    assert more == {name: expected[name.split()[0]] if is_layer(name) else 0 for name in more}


SHORT = "--enc-layers 2 --dec-layers 3 --hidden-size 24 --num-attention-heads 2 --ff-hidden-size 50 --vocab-size 61"


@pytest.mark.parametrize("line", ["", "--reset-attention-mask", "--position-embedding-type learned"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_scores_that_blocked_attention_keeps_are_those_of_the_model_that_is_built(line, is_kept, monkeypatch):
    line = f"{SHORT} --enc-seq-length 40 --dec-seq-length 37 --attention-dropout 0 --hidden-dropout 0 {line}"
    for module in (biased_attention, cost):
        monkeypatch.setattr(module, "KEPT", 3 * 2 * 40 * 37 if is_kept else 10)
    costs = registry.costs_of(config_of(line), is_on_cpu=True)
    # no other matrix has these numbers in its last two places
    found = square_bytes(line, 3, {(40, 40), (37, 37), (37, 40)})
    assert isinstance(costs, T5Costs)
    encoder = costs._scores_kept(3, 40, 40, 1, 4)
    decoder = costs._scores_kept(3, 37, 37, 1, 4) + costs._scores_kept(3, 37, 40, 1, 4, is_cross=True)
    assert found == 2 * encoder + 3 * decoder
    assert costs.unit_kept(3, 1, 4)[1].full >= encoder
    assert (found > 0) == (is_kept or "mask" in line)


def test_blocked_attention_counts_in_the_memory_of_cpus_in_32_bits_without_dropout_of_attention():
    assert decoder_cost.KEPT == biased_attention.KEPT
    line = f"{SHORT} --enc-seq-length 64 --dec-seq-length 32 --attention-dropout 0"
    config = config_of(line + " --hidden-dropout 0")
    blocked, plain = registry.costs_of(config, is_on_cpu=True), registry.costs_of(config)
    bias = 2 * (2 * 64**2 + 3 * 32**2)
    probabilities = 2 * (2 * 64**2 + 3 * (32**2 + 32 * 64))

    def activations(costs: Any, dtype: str) -> int:
        return costs.memory_per_stage([0, costs.num_units], micro_batch_size=5, dtype=dtype)[0].activations

    for dtype, width in (("fp32", 4), ("fp64", 8)):
        assert activations(blocked, dtype) - activations(plain, dtype) == (5 * probabilities - bias) * width
    assert activations(blocked, "bf16") == activations(plain, "bf16")
    dropped = config_of(line.replace("dropout 0", "dropout 0.1") + " --hidden-dropout 0")
    assert registry.costs_of(dropped, is_on_cpu=True) == registry.costs_of(dropped)


def test_products_have_the_flops_of_the_model() -> None:
    costs = registry.costs_of(config_of(BASE))
    assert 3 * sum(unit.flops for unit in costs.unit_work(2, 1, 4)) == pytest.approx(2 * costs.flops_per_sample)
    decoder = costs.unit_work(2, 2, 4)[costs._units.dec_layers[0]]
    assert len(decoder.sums) == 3 and len(decoder.back) == 4


def test_the_output_of_the_encoder_crosses_with_the_hidden_state_of_the_decoder() -> None:
    costs = registry.costs_of(config_of(BASE))
    h, seam = costs.sizes.hidden_size, costs._units.dec_embedding
    assert costs.boundary_bytes(seam, 2, 4) == costs.boundary_bytes(2, 2, 4) == 2 * 512 * h * 4
    assert costs.boundary_bytes(seam + 2, 2, 4) == 2 * (512 + 114) * h * 4
