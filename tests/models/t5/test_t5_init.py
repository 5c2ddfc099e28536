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
from tests.helpers.model_samples import make_parallel_context
from tests.helpers.t5_samples import LEARNED, MODEL_VARIANTS, t5_model_args

LARGE_FIELDS = {"hidden_size": 64, "kv_hidden_size": 24, "ff_hidden_size": 160, "vocab_size": 500}


def init_parameters(args, group=None):
    model = T5Model(args, make_parallel_context(group or Group((0,), 0)))
    initialize(model.named_parameters(), seed=1, rule=t5_rule(args, 0.02))
    assert not any(is_uninitialized(parameter) for parameter in model.parameters())
    return dict(model.named_parameters())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", MODEL_VARIANTS)
def test_model_init_is_independent_of_tensor_ranks(variant, size):
    args = t5_model_args(**MODEL_VARIANTS[variant])
    full = init_parameters(args)
    for rank in range(size):
        for name, parameter in init_parameters(args, Group(tuple(range(size)), rank)).items():
            shard = shard_of(parameter)
            assert torch.equal(shard.unpadded(parameter), shard.narrow(full[name])), name


@pytest.mark.parametrize("is_gated", [False, True])
def test_init_spread_matches_hugging_face(is_gated):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=500, d_model=64, d_kv=24, d_ff=160, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu" if is_gated else "relu",
    )  # fmt: skip
    reference = T5ForConditionalGeneration(config).state_dict()
    actual = from_ours(
        {name: p.detach() for name, p in init_parameters(T5ModelArgs(**model_fields(config))).items()}, 4
    )
    assert sorted(actual) == sorted(reference)
    for name, expected in reference.items():
        if expected.dim() == 1:
            assert torch.equal(actual[name], expected), name
        else:
            assert abs(actual[name].std() / expected.std() - 1) <= 5 / expected.numel() ** 0.5, name
            assert abs(actual[name].mean()) <= 5 * expected.std() / expected.numel() ** 0.5, name


def test_untied_head_init_matches_hugging_face():
    head = init_parameters(t5_model_args(**LARGE_FIELDS, untie_embeddings=True))["head.weight"]
    assert abs(head.std() - 1) <= 0.02


def test_learned_positions_init_matches_gpt2_per_side():
    args = t5_model_args(**{**LEARNED, **LARGE_FIELDS, "enc_layers": 2, "dec_layers": 8})
    for name, weight in init_parameters(args).items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.full_like(weight, name.endswith("norm.weight"))), name
            continue
        num_layers = 8 if name.startswith("decoder") else 2
        is_scaled = name.endswith(("attention.dense.weight", "mlp.down.weight"))
        std = 0.02 / (2 * num_layers) ** 0.5 if is_scaled else 0.02
        assert abs(weight.std() / std - 1) <= 5 / weight.numel() ** 0.5, name
