"""T5's first weights: Hugging Face's factors, the same numbers in every layout."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.parameters import initialize
from megatron.models.t5.huggingface import from_ours, model_fields
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5Model, t5_rule
from megatron.mpu.groups import Group
from megatron.mpu.shard import is_uninitialized, shard_of
from tests.helpers.model_samples import place_of
from tests.helpers.t5_samples import KINDS, LEARNED, t5_sizes

LARGE = {"hidden_size": 64, "kv_hidden_size": 24, "ff_hidden_size": 160, "vocab_size": 500}


def started(sizes, group=None):
    model = T5Model(sizes, place_of(group or Group((0,), 0)))
    initialize(model.named_parameters(), seed=1, rule=t5_rule(sizes, 0.02))
    assert not any(is_uninitialized(parameter) for parameter in model.parameters())
    return dict(model.named_parameters())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_starts_from_the_same_values_on_any_number_of_tensor_ranks(kind, size):
    sizes = t5_sizes(**KINDS[kind])
    whole = started(sizes)
    for rank in range(size):
        for name, part in started(sizes, Group(tuple(range(size)), rank)).items():
            shard = shard_of(part)
            assert torch.equal(shard.unpadded(part), shard.cut(whole[name])), name


@pytest.mark.parametrize("gated", [False, True])
def test_the_spread_of_every_weight_is_hugging_faces(gated):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=500, d_model=64, d_kv=24, d_ff=160, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu" if gated else "relu",
    )  # fmt: skip
    reference = T5ForConditionalGeneration(config).state_dict()
    found = from_ours({name: p.detach() for name, p in started(T5ModelArgs(**model_fields(config))).items()}, 4)
    assert sorted(found) == sorted(reference)
    for name, theirs in reference.items():
        if theirs.dim() == 1:
            assert torch.equal(found[name], theirs), name
        else:
            assert abs(found[name].std() / theirs.std() - 1) <= 5 / theirs.numel() ** 0.5, name
            assert abs(found[name].mean()) <= 5 * theirs.std() / theirs.numel() ** 0.5, name


def test_a_head_of_its_own_starts_as_hugging_faces_does():
    head = started(t5_sizes(**LARGE, untie_embeddings=True))["head.weight"]
    assert abs(head.std() - 1) <= 0.02


def test_learned_positions_start_as_gpt2_does_with_the_layers_of_each_side():
    sizes = t5_sizes(**{**LEARNED, **LARGE, "enc_layers": 2, "dec_layers": 8})
    for name, weight in started(sizes).items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.full_like(weight, name.endswith("norm.weight"))), name
            continue
        layers = 8 if name.startswith("decoder") else 2
        scaled = name.endswith(("attention.dense.weight", "mlp.down.weight"))
        std = 0.02 / (2 * layers) ** 0.5 if scaled else 0.02
        assert abs(weight.std() / std - 1) <= 5 / weight.numel() ** 0.5, name
