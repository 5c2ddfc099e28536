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
from tests.helpers.model_samples import make_parallel_context, small_model_args


def make_shards(shape, dim, size):
    """Return the weights of ``size`` ranks that together make up ``shape``."""
    weights = []
    for rank in range(size):
        group = Group(tuple(range(size)), rank)
        local_shape = list(shape)
        if dim == 0:
            local_shape[0], start, length = vocab_range(shape[0], group)
        else:
            local_shape[1] = length = shape[1] // size
            start = rank * length
        weights.append(empty_weight(tuple(local_shape), Shard(shape, dim, start, length)))
    return weights


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 30), st.integers(1, 5), st.sampled_from([1, 2, 3, 4]), st.sampled_from([0, 1]), st.integers(1, 12)
)
def test_any_sharding_initializes_same_global_values(rows, columns, size, dim, block):
    shape = (rows, columns * size)
    full = empty_weight(shape, Shard(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "ROWS_PER_BLOCK", block)
        for weight in (full, *(shards := make_shards(shape, dim, size))):
            initialize([("some.weight", weight)], seed=3, rule=gpt2_rule(0.5, 2))
    for local_weight in shards:
        shard = shard_of(local_weight)
        assert torch.equal(shard.unpadded(local_weight), shard.narrow(full))
        assert local_weight.narrow(dim, shard.length, local_weight.shape[dim] - shard.length).count_nonzero() == 0
    assert full.count_nonzero() == full.numel()


def test_table_of_several_blocks_matches_on_four_ranks():
    tables = [VocabParallelEmbedding(2501, 2, group=Group((0, 1, 2, 3), rank)).weight for rank in range(4)]
    full = VocabParallelEmbedding(2501, 2).weight
    for table in (full, *tables):
        initialize([("embedding.word.weight", table)], seed=1, rule=gpt2_rule(0.02, 1))
    assert torch.equal(torch.cat([shard_of(table).unpadded(table) for table in tables]), full)
    assert full.unique(dim=0).shape == full.shape, "no block repeats another"


@pytest.mark.parametrize("size", [2, 4])
def test_model_init_is_independent_of_tensor_ranks(size):
    args = small_model_args(untie_embeddings=True)

    def init_parameters(group):
        model = DecoderModel(args, make_parallel_context(group))
        initialize(model.named_parameters(), seed=1, rule=gpt2_rule(0.02, args.num_layers))
        return dict(model.named_parameters())

    full = init_parameters(Group((0,), 0))
    for rank in range(size):
        for name, parameter in init_parameters(Group(tuple(range(size)), rank)).items():
            shard = shard_of(parameter)
            assert torch.equal(shard.unpadded(parameter), shard.narrow(full[name])), name
            if shard.partition_dim == 0:
                assert parameter[shard.length :].count_nonzero() == 0


def make_large_model():
    num_layers = 4
    args = small_model_args(
        num_layers=num_layers, hidden_size=64, ff_hidden_size=256, kv_hidden_size=16, untie_embeddings=True
    )
    model = DecoderModel(args)
    initialize(model.named_parameters(), seed=1, rule=gpt2_rule(0.02, num_layers))
    return model, num_layers


def test_weights_are_normal_with_scaled_residual_projections():
    model, num_layers = make_large_model()
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            continue
        is_residual = name.endswith(("attention.dense.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(2 * num_layers) if is_residual else 0.02
        spread = 4 / math.sqrt(weight.numel())
        assert abs(weight.mean().item()) <= std * spread, name
        assert abs(weight.std().item() / std - 1) <= spread, name
        assert 0.6 <= (weight.abs() < std).float().mean().item() <= 0.76, name  # normal: 0.683


def test_biases_are_zero_and_norm_weights_are_one():
    for name, parameter in make_large_model()[0].named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, name.endswith("norm.weight"))), name


def test_initialize_sets_all_and_skips_initialized_parameters():
    model, _ = make_large_model()
    assert not any(is_uninitialized(parameter) for parameter in model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    initialize(model.named_parameters(), seed=2, rule=gpt2_rule(1.0, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_weights_and_seeds_draw_distinct_values():
    def init_weight(name, seed):
        weight = empty_weight((8, 8), Shard((8, 8)))
        initialize([(name, weight)], seed=seed, rule=gpt2_rule(1.0, 1))
        return weight.detach()

    weights = [
        init_weight("layers.0.mlp.up.weight", 1),
        init_weight("layers.1.mlp.up.weight", 1),
        init_weight("layers.0.mlp.up.weight", 2),
    ]
    assert len({tuple(weight.flatten().tolist()) for weight in weights}) == 3


def test_init_does_not_use_global_torch_rng():
    torch.manual_seed(0)
    expected = [p.detach().clone() for p in make_large_model()[0].parameters()]
    state = torch.get_rng_state()
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(expected, make_large_model()[0].parameters(), strict=True))
    torch.manual_seed(0)
    make_large_model()
    assert torch.equal(torch.get_rng_state(), state)
