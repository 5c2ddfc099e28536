"""Weights of Hugging Face's T5 and mT5 under our names and back."""

import pytest
import torch
from transformers import MT5Config, MT5ForConditionalGeneration, T5Config, T5ForConditionalGeneration

from megatron.errors import CheckpointError
from megatron.models.t5.huggingface import from_ours, model_fields, to_ours
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5Model

HEADS = 3
VARIANTS = {
    "T5": (T5Config, T5ForConditionalGeneration, {"feed_forward_proj": "relu", "num_decoder_layers": 1}),
    "T5 v1.1": (
        T5Config, T5ForConditionalGeneration, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mT5": (MT5Config, MT5ForConditionalGeneration, {"feed_forward_proj": "gated-gelu"}),
}  # fmt: skip


def hf_model(variant, seed=0):
    torch.manual_seed(seed)
    config_class, model_class, settings = VARIANTS[variant]
    built = model_class(
        config_class(
            vocab_size=29, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=HEADS, dropout_rate=0.0, **settings
        )
    )
    if variant != "T5":
        built.lm_head.weight = torch.nn.Parameter(torch.randn_like(built.lm_head.weight))
    return built


def convert_to_ours(model):
    return to_ours(model.state_dict(), HEADS, is_untied=model_fields(model.config)["untie_embeddings"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_round_trip_is_bitwise_and_loads_strictly(variant, dtype):
    model = hf_model(variant).to(dtype)
    state, our_weights = model.state_dict(), convert_to_ours(model)
    assert ("head.weight" in our_weights) == (variant != "T5")
    exported = from_ours(our_weights, HEADS)
    assert sorted(exported) == sorted(state)
    assert all(torch.equal(exported[name], tensor) and exported[name].dtype == dtype for name, tensor in state.items())
    hf_model(variant, seed=1).load_state_dict(exported, strict=True)
    reimported = to_ours(exported, HEADS, is_untied="head.weight" in our_weights)
    assert sorted(reimported) == sorted(our_weights) and all(
        torch.equal(reimported[name], our_weights[name]) for name in our_weights
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_shapes_match_our_model(variant):
    model = hf_model(variant)
    expected = {name: p.shape for name, p in T5Model(T5ModelArgs(**model_fields(model.config))).named_parameters()}
    assert {name: tensor.shape for name, tensor in convert_to_ours(model).items()} == expected


def test_rows_interleave_query_key_value_and_gate_value():
    model = hf_model("T5 v1.1")
    our_weights, state = convert_to_ours(model), model.state_dict()
    prefix = "decoder.block.1.layer."
    packed = our_weights["decoder.layers.1.attention.query_key_value.weight"].view(HEADS, 3, 6, 24)
    for idx, projection in enumerate("qkv"):
        assert torch.equal(packed[:, idx].flatten(0, 1), state[f"{prefix}0.SelfAttention.{projection}.weight"])
    cross_packed = our_weights["decoder.layers.1.cross_attention.key_value.weight"].view(HEADS, 2, 6, 24)
    for idx, projection in enumerate("kv"):
        assert torch.equal(cross_packed[:, idx].flatten(0, 1), state[f"{prefix}1.EncDecAttention.{projection}.weight"])
    for idx in (0, 1):
        up = our_weights["decoder.layers.1.mlp.up.weight"][idx::2]
        assert torch.equal(up, state[f"{prefix}2.DenseReluDense.wi_{idx}.weight"])
    assert torch.equal(our_weights["decoder.layers.1.cross_norm.weight"], state[f"{prefix}1.layer_norm.weight"])


def test_converted_weights_do_not_alias_source():
    state = hf_model("T5").state_dict()
    our_weights = to_ours(state, HEADS, is_untied=False)
    before = {name: tensor.clone() for name, tensor in our_weights.items()}
    for tensor in state.values():
        tensor.zero_()
    assert all(torch.equal(our_weights[name], tensor) for name, tensor in before.items())


def test_reads_files_without_copies_or_with_unused_bias():
    state = hf_model("T5").state_dict()
    expected = to_ours(state, HEADS, is_untied=False)
    copies = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    legacy = {name: tensor for name, tensor in state.items() if name not in copies}
    legacy["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(32, HEADS)
    actual = to_ours(legacy, HEADS, is_untied=False)
    assert sorted(actual) == sorted(expected) and all(torch.equal(actual[name], expected[name]) for name in actual)


def test_rejects_untied_head_of_tied_model():
    with pytest.raises(CheckpointError, match="lm_head.weight must equal shared.weight, of which it is a copy"):
        to_ours(hf_model("mT5").state_dict(), HEADS, is_untied=False)
    tied = hf_model("T5").state_dict()
    assert torch.equal(to_ours(tied, HEADS, is_untied=True)["head.weight"], tied["shared.weight"])


def test_rejects_and_lists_unknown_names():
    with pytest.raises(CheckpointError, match=r"T5ForCond.* has no .*: transformer.h.0.x, encoder.block.0.y"):
        to_ours({"transformer.h.0.x": torch.zeros(1), "encoder.block.0.y": torch.zeros(1)}, HEADS, is_untied=False)
    with pytest.raises(CheckpointError, match="our T5 with relative positions has no .*: embedding.position"):
        from_ours({"embedding.position.weight": torch.zeros(1)}, HEADS)
    with pytest.raises(
        CheckpointError, match="SelfAttention.v: the rows of each part .* got 18 rows, which is not a multiple of 4"
    ):
        to_ours(hf_model("T5").state_dict(), 4, is_untied=False)


def test_rejects_incomplete_gate_pair():
    state = hf_model("T5 v1.1").state_dict()
    del state["encoder.block.1.layer.1.DenseReluDense.wi_1.weight"]
    with pytest.raises(CheckpointError, match="encoder.block.1.layer.1.DenseReluDense.wi_0"):
        to_ours(state, HEADS, is_untied=True)


def test_config_maps_to_model_fields():
    config = hf_model("T5").config
    assert model_fields(config) == model_fields(config.to_dict()) == {
        "num_layers": 2, "enc_layers": 2, "dec_layers": 1, "hidden_size": 24, "num_attention_heads": 3,
        "kv_hidden_size": 6, "ff_hidden_size": 40, "activation": "relu", "hidden_bias": False,
        "layernorm_epsilon": 1e-6, "position_embedding_type": "relative", "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128, "max_position_embeddings": 0, "vocab_size": 29,
        "untie_embeddings": False,
    }  # fmt: skip
    assert model_fields(MT5Config())["untie_embeddings"] and model_fields(MT5Config().to_dict())["untie_embeddings"]
    assert model_fields(VARIANTS["T5 v1.1"][0](**VARIANTS["T5 v1.1"][2]))["untie_embeddings"]
    hub = {**config.to_dict(), "tie_word_embeddings": False}  # the files of T5 v1.1, written before transformers 5
    del hub["scale_decoder_outputs"]
    assert model_fields(hub)["untie_embeddings"]


def test_rejects_unsupported_feed_forward():
    with pytest.raises(CheckpointError, match=r"feed_forward_proj 'gated-tanh' \(supported: relu, "):
        model_fields(T5Config(feed_forward_proj="gated-tanh"))
