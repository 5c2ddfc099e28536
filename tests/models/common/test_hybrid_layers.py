"""Layers with different mixers and with absent halves, around a minimal recurrent mixer; and their caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.config.layer_types import num_residual_additions
from megatron.config.recurrent import RecurrentLayers
from megatron.models.common.cache_slots import KVCacheSlots
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.generation import CachedDecoder, get_model_stage
from megatron.models.common.initial_values import Uniform
from megatron.models.common.masks import Masks
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import gpt2_rule, initialize
from megatron.models.common.pipeline import TransformerLayerPipe
from megatron.models.common.recurrent_cache import RecurrentCache
from megatron.models.common.transformer import TransformerLayer
from megatron.mpu.shard import Shard, empty_weight
from tests.helpers.cached_rows import LENGTHS, NUM_STEPS, check_cached_logits, random_rows
from tests.helpers.decay_mixer import every_recurrent_mixer_decays
from tests.helpers.model_samples import fill_weights, small_model_args
from tests.models.common.test_features import MODEL_FIELDS, ROPE, check_matches_formulas, make_batch

LINEAR: dict[str, Any] = {"experimental_attention_variant": "gated_delta_net"}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 6, "moe_router_topk": 2}
MODELS: dict[str, dict[str, Any]] = {
    "every second layer": {**LINEAR, "num_layers": 4, "linear_attention_freq": "2", **ROPE},
    "by list": {**LINEAR, "num_layers": 3, "linear_attention_freq": "[0,1,1]", "position_embedding_type": "none"},
    "all layers": {**LINEAR, "position_embedding_type": "none"},
    "kimi": {"experimental_attention_variant": "kimi_delta", "linear_attention_freq": "2"},
    "own norms": {**LINEAR, "linear_attention_freq": "2", "norm_placement": "after", "linear_norm_placement": "before"},
    "own norms after": {**LINEAR, "linear_attention_freq": "2", "linear_norm_placement": "both"},
    "window": {**LINEAR, "num_layers": 3, "linear_attention_freq": "[1,0,0]", "window_size": 2,
               "window_attn_skip_freq": "[1,1,0]"},
    "parallel residual": {**LINEAR, "linear_attention_freq": "2", "parallel_residual": "shared-norm"},
    "residual behind norms": {**LINEAR, "apply_residual_connection_post_layernorm": True, "residual_scale": 1.3},
    "parallel heads": {"experimental_attention_variant": "parallel_mamba2", **ROPE, "mamba_num_heads": 8},
    "pattern": {"num_layers": 5, "hybrid_layer_pattern": "G-*M-", "mamba_num_heads": 8, "norm_placement": "both"},
    "pattern, kimi": {"num_layers": 3, "hybrid_layer_pattern": "G*-", "experimental_attention_variant": "kimi_delta",
                      "linear_num_value_heads": 16, "apply_residual_connection_post_layernorm": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _decay_mixer() -> Iterator[None]:
    with every_recurrent_mixer_decays():
        yield


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_hybrid_model_matches_formulas(name: str, has_documents: bool) -> None:
    check_matches_formulas(MODELS[name], has_documents=has_documents)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_recomputed_layers_reset_states_at_documents(num_layers: int) -> None:
    switches = {"checkpoint_activations": True, "checkpoint_num_layers": num_layers}
    check_matches_formulas(MODELS["pattern"], has_documents=True, **switches)


def test_weights_of_absent_halves_do_not_exist() -> None:
    args = ModelArgs(**{**MODEL_FIELDS, "num_layers": 5, "hybrid_layer_pattern": "G-*E-", **EXPERTS})
    halves = [
        {name.split(".")[0] for name, _ in layer.named_parameters()} for layer in DecoderModel(args).layers.children()
    ]
    mixer_only, mlp_only = {"input_norm", "recurrent"}, {"post_attention_norm", "mlp"}
    assert halves == [mixer_only, mlp_only, {"input_norm", "attention"}, mlp_only, mlp_only]


def test_pipeline_layers_pass_documents_to_recurrent_mixers() -> None:
    args = ModelArgs(**{**MODEL_FIELDS, **MODELS["by list"]})
    model = fill_weights(DecoderModel(args).double())
    tokens, _, ids, _ = make_batch(True)
    masks = Masks(args, ParallelContext())
    inputs: Any = (model.embedding(tokens), ids.int())
    for idx, layer in enumerate(model.layers):
        pipe_layer = TransformerLayerPipe(args, ParallelContext(), idx, masks).double()
        pipe_layer.load_state_dict(layer.state_dict())
        inputs = pipe_layer(inputs)
    logits = model(tokens, segment_ids=ids)
    expected = torch.nn.functional.linear(model.final_norm(inputs[0]), model.embedding.word.weight)
    assert torch.equal(logits, expected) and inputs[1].equal(ids.int())


def test_recurrent_layers_get_starts_only_with_documents() -> None:
    masks = Masks(ModelArgs(**{**MODEL_FIELDS, **LINEAR}), ParallelContext())
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 4, 4, 4, 4, 4]])
    starts = masks.get_starts(ids)
    assert starts is not None and starts.tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 1, 1]]
    assert masks.get_starts(None) is None
    assert Masks(ModelArgs(**MODEL_FIELDS), ParallelContext()).get_starts(ids) is None


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_cache_of_padded_rows_matches_full_forward(name: str) -> None:
    changes = {"max_position_embeddings": 24, **MODELS[name]}
    model = fill_weights(DecoderModel(small_model_args(**changes)).double()).eval()
    rows = random_rows([length + NUM_STEPS for length in LENGTHS], seed=1)
    full_logits = [model(row[None])[:, 0] for row in rows]  # each [s, v]
    check_cached_logits(CachedDecoder(get_model_stage(model), max(LENGTHS) + NUM_STEPS), rows, full_logits)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_cache_of_convolution_has_last_inputs_of_each_row(kernel_size: int) -> None:
    slots, inputs = KVCacheSlots(9), torch.arange(1.0, 13.0).view(2, 6, 1)
    cache = RecurrentCache(slots)
    slots.advance(torch.arange(5).expand(2, 5), torch.tensor([5, 2]))
    assert not cache.update_conv(inputs[:, :5], kernel_size).any()
    expected = [torch.cat((torch.zeros(3), row[:length]))[-(kernel_size - 1) :] for row, length in
                zip(inputs[..., 0], (5, 2), strict=True)]  # fmt: skip
    assert cache.conv is not None and cache.conv.shape == (2, kernel_size - 1, 1)
    if kernel_size > 1:
        assert torch.equal(cache.conv[..., 0], torch.stack(expected))
    cache.keep(torch.tensor([1]))
    slots.advance(torch.tensor([[2]]))
    before = cache.conv.clone()
    assert torch.equal(cache.update_conv(inputs[1:, 5:], kernel_size), before)
    if kernel_size > 1:
        assert cache.conv[0, -1, 0] == 12.0


def test_layers_with_one_half_count_one_addition_to_the_residual_stream() -> None:
    args = [ModelArgs(**{**MODEL_FIELDS, **changes}) for changes in ({}, MODELS["pattern"], MODELS["by list"])]
    assert [num_residual_additions(model) for model in args] == [4, 5, 6]
    rule = gpt2_rule(0.1, 5 / 2)
    assert rule("layers.0.recurrent.dense.weight", (4, 4)) == rule("layers.1.mlp.down.weight", (4, 4)) == 0.1 / 5**0.5


def test_plain_layer_has_no_recurrent_part() -> None:
    layer = TransformerLayer(ModelArgs(**MODEL_FIELDS), ParallelContext(), 0)
    assert layer.recurrent is None and not any("recurrent" in name for name in layer.state_dict())


def test_initial_values_of_other_distributions_are_the_same_in_every_shard() -> None:
    full = empty_weight((3000,), Shard((3000,)), Uniform(-1.0, 3.0))
    shards = [empty_weight((1500,), Shard((3000,), 0, start, 1500), Uniform(-1.0, 3.0)) for start in (0, 1500)]
    for weight in (full, *shards):
        initialize([("layers.0.recurrent.convolution.value", weight)], seed=3, rule=gpt2_rule(0.1, 2))
    assert torch.equal(full, torch.cat(shards))
    assert full.min() >= -1.0 and full.max() <= 3.0
    quantiles = torch.quantile(full.detach(), torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quantiles, torch.tensor([0.0, 1.0, 2.0]), rtol=0, atol=0.15)


def test_sizes_of_absent_mixers_are_reset() -> None:
    default = RecurrentLayers()
    args = ModelArgs(**{**MODEL_FIELDS, "linear_num_key_heads": 2, "mamba_num_heads": 8})
    assert (args.linear_num_key_heads, args.mamba_num_heads) == (default.linear_num_key_heads, 0)
    args = ModelArgs(**{**MODEL_FIELDS, **LINEAR, "linear_num_key_heads": 2, "mamba_num_heads": 8})
    assert (args.linear_num_key_heads, args.mamba_num_heads) == (2, 0)
    assert args.linear_norm_epsilon == args.layernorm_epsilon
