"""Initial weights: the same numbers in every layout, with the standard deviations that the papers give."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.models.common import parameters
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.parameters import gpt2_rule, initialize
from megatron.mpu.groups import Group
from megatron.mpu.layers import VocabParallelEmbedding, vocab_range
from megatron.mpu.shard import Shard, empty_weight, is_uninitialized, shard_of
from tests.helpers.model_samples import place_of, small_sizes


def parts_of(shape, dim, size):
    """Return the weights of ``size`` ranks that together make up ``shape``."""
    weights = []
    for rank in range(size):
        group = Group(tuple(range(size)), rank)
        local = list(shape)
        if dim == 0:
            local[0], start, length = vocab_range(shape[0], group)
        else:
            local[1] = length = shape[1] // size
            start = rank * length
        weights.append(empty_weight(tuple(local), Shard(shape, dim, start, length)))
    return weights


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 30), st.integers(1, 5), st.sampled_from([1, 2, 3, 4]), st.sampled_from([0, 1]), st.integers(1, 12)
)
def test_any_cut_of_any_shape_holds_the_same_global_numbers(rows, columns, size, dim, block):
    shape = (rows, columns * size)
    whole = empty_weight(shape, Shard(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "ROWS_PER_BLOCK", block)
        for weight in (whole, *(parts := parts_of(shape, dim, size))):
            initialize([("some.weight", weight)], seed=3, rule=gpt2_rule(0.5, 2))
    for part in parts:
        shard = shard_of(part)
        assert torch.equal(shard.unpadded(part), shard.cut(whole))
        assert part.narrow(dim, shard.length, part.shape[dim] - shard.length).count_nonzero() == 0
    assert whole.count_nonzero() == whole.numel()


def test_a_table_of_several_blocks_is_the_same_on_four_ranks():
    tables = [VocabParallelEmbedding(2501, 2, group=Group((0, 1, 2, 3), rank)).weight for rank in range(4)]
    whole = VocabParallelEmbedding(2501, 2).weight
    for table in (whole, *tables):
        initialize([("embedding.word.weight", table)], seed=1, rule=gpt2_rule(0.02, 1))
    assert torch.equal(torch.cat([shard_of(table).unpadded(table) for table in tables]), whole)
    assert whole.unique(dim=0).shape == whole.shape, "no block repeats another"


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_starts_from_the_same_values_on_any_number_of_tensor_ranks(size):
    sizes = small_sizes(untie_embeddings=True)

    def started(group):
        model = DecoderModel(sizes, place_of(group))
        initialize(model.named_parameters(), seed=1, rule=gpt2_rule(0.02, sizes.num_layers))
        return dict(model.named_parameters())

    whole = started(Group((0,), 0))
    for rank in range(size):
        for name, part in started(Group(tuple(range(size)), rank)).items():
            shard = shard_of(part)
            assert torch.equal(shard.unpadded(part), shard.cut(whole[name])), name
            if shard.partition_dim == 0:
                assert part[shard.length :].count_nonzero() == 0


def large_model():
    layers = 4
    sizes = small_sizes(num_layers=layers, hidden_size=64, ff_hidden_size=256, kv_hidden_size=16, untie_embeddings=True)
    model = DecoderModel(sizes)
    initialize(model.named_parameters(), seed=1, rule=gpt2_rule(0.02, layers))
    return model, layers


def test_weights_are_normal_and_those_into_the_residual_stream_are_scaled_down():
    model, layers = large_model()
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            continue
        is_residual = name.endswith(("attention.dense.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(2 * layers) if is_residual else 0.02
        spread = 4 / math.sqrt(weight.numel())
        assert abs(weight.mean().item()) <= std * spread, name
        assert abs(weight.std().item() / std - 1) <= spread, name
        assert 0.6 <= (weight.abs() < std).float().mean().item() <= 0.76, name  # normal: 0.683


def test_biases_are_zero_and_norms_are_one():
    for name, parameter in large_model()[0].named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, name.endswith("norm.weight"))), name


def test_nothing_is_unset_after_and_what_is_set_stays():
    model, _ = large_model()
    assert not any(is_uninitialized(parameter) for parameter in model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    initialize(model.named_parameters(), seed=2, rule=gpt2_rule(1.0, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_every_weight_and_every_seed_draws_other_numbers():
    def drawn(name, seed):
        weight = empty_weight((8, 8), Shard((8, 8)))
        initialize([(name, weight)], seed=seed, rule=gpt2_rule(1.0, 1))
        return weight.detach()

    seen = [drawn("layers.0.mlp.up.weight", 1), drawn("layers.1.mlp.up.weight", 1), drawn("layers.0.mlp.up.weight", 2)]
    assert len({tuple(weight.flatten().tolist()) for weight in seen}) == 3


def test_torchs_own_generator_plays_no_part():
    torch.manual_seed(0)
    first = [p.detach().clone() for p in large_model()[0].parameters()]
    state = torch.get_rng_state()
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(first, large_model()[0].parameters(), strict=True))
    torch.manual_seed(0)
    large_model()
    assert torch.equal(torch.get_rng_state(), state)
