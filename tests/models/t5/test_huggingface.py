"""Weights of Hugging Face's T5 and mT5 under our names and back."""

import pytest
import torch
from transformers import MT5Config, MT5ForConditionalGeneration, T5Config, T5ForConditionalGeneration

from megatron.errors import CheckpointError
from megatron.models.t5.huggingface import from_ours, model_fields, to_ours
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5Model

HEADS = 3
KINDS = {
    "T5": (T5Config, T5ForConditionalGeneration, {"feed_forward_proj": "relu", "num_decoder_layers": 1}),
    "T5 v1.1": (
        T5Config, T5ForConditionalGeneration, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mT5": (MT5Config, MT5ForConditionalGeneration, {"feed_forward_proj": "gated-gelu"}),
}  # fmt: skip


def hf_model(kind, seed=0):
    torch.manual_seed(seed)
    config, model, settings = KINDS[kind]
    made = model(
        config(vocab_size=29, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=HEADS, dropout_rate=0.0, **settings)
    )
    if kind != "T5":
        made.lm_head.weight = torch.nn.Parameter(torch.randn_like(made.lm_head.weight))
    return made


def ours_of(model):
    return to_ours(model.state_dict(), HEADS, is_untied=model_fields(model.config)["untie_embeddings"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_bitwise_and_loads_strictly(kind, dtype):
    model = hf_model(kind).to(dtype)
    state, ours = model.state_dict(), ours_of(model)
    assert ("head.weight" in ours) == (kind != "T5")
    back = from_ours(ours, HEADS)
    assert sorted(back) == sorted(state)
    assert all(torch.equal(back[name], tensor) and back[name].dtype == dtype for name, tensor in state.items())
    hf_model(kind, seed=1).load_state_dict(back, strict=True)
    again = to_ours(back, HEADS, is_untied="head.weight" in ours)
    assert sorted(again) == sorted(ours) and all(torch.equal(again[name], ours[name]) for name in ours)


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_are_those_of_our_model(kind):
    model = hf_model(kind)
    own = {name: p.shape for name, p in T5Model(T5ModelArgs(**model_fields(model.config))).named_parameters()}
    assert {name: tensor.shape for name, tensor in ours_of(model).items()} == own


def test_rows_are_query_key_value_of_each_head_and_gate_and_value_in_turn():
    model = hf_model("T5 v1.1")
    ours, state = ours_of(model), model.state_dict()
    at = "decoder.block.1.layer."
    packed = ours["decoder.layers.1.attention.query_key_value.weight"].view(HEADS, 3, 6, 24)
    for place, part in enumerate("qkv"):
        assert torch.equal(packed[:, place].flatten(0, 1), state[f"{at}0.SelfAttention.{part}.weight"])
    both = ours["decoder.layers.1.cross_attention.key_value.weight"].view(HEADS, 2, 6, 24)
    for place, part in enumerate("kv"):
        assert torch.equal(both[:, place].flatten(0, 1), state[f"{at}1.EncDecAttention.{part}.weight"])
    for place in (0, 1):
        up = ours["decoder.layers.1.mlp.up.weight"][place::2]
        assert torch.equal(up, state[f"{at}2.DenseReluDense.wi_{place}.weight"])
    assert torch.equal(ours["decoder.layers.1.cross_norm.weight"], state[f"{at}1.layer_norm.weight"])


def test_our_copy_shares_nothing_with_theirs():
    state = hf_model("T5").state_dict()
    ours = to_ours(state, HEADS, is_untied=False)
    before = {name: tensor.clone() for name, tensor in ours.items()}
    for tensor in state.values():
        tensor.zero_()
    assert all(torch.equal(ours[name], tensor) for name, tensor in before.items())


def test_files_without_copies_or_with_a_bias_that_nobody_reads_are_read():
    state = hf_model("T5").state_dict()
    expected = to_ours(state, HEADS, is_untied=False)
    copies = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    old = {name: tensor for name, tensor in state.items() if name not in copies}
    old["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(32, HEADS)
    found = to_ours(old, HEADS, is_untied=False)
    assert sorted(found) == sorted(expected) and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_head_of_its_own_is_not_lost():
    with pytest.raises(CheckpointError, match="lm_head.weight must equal shared.weight, of which it is a copy"):
        to_ours(hf_model("mT5").state_dict(), HEADS, is_untied=False)
    tied = hf_model("T5").state_dict()
    assert torch.equal(to_ours(tied, HEADS, is_untied=True)["head.weight"], tied["shared.weight"])


def test_names_of_another_model_are_listed():
    with pytest.raises(CheckpointError, match=r"T5ForCond.* has no .*: transformer.h.0.x, encoder.block.0.y"):
        to_ours({"transformer.h.0.x": torch.zeros(1), "encoder.block.0.y": torch.zeros(1)}, HEADS, is_untied=False)
    with pytest.raises(CheckpointError, match="our T5 with relative positions has no .*: embedding.position"):
        from_ours({"embedding.position.weight": torch.zeros(1)}, HEADS)
    with pytest.raises(
        CheckpointError, match="SelfAttention.v: the rows of each part .* got 18 rows, which is not a multiple of 4"
    ):
        to_ours(hf_model("T5").state_dict(), 4, is_untied=False)


def test_half_a_pair_is_an_unknown_name():
    state = hf_model("T5 v1.1").state_dict()
    del state["encoder.block.1.layer.1.DenseReluDense.wi_1.weight"]
    with pytest.raises(CheckpointError, match="encoder.block.1.layer.1.DenseReluDense.wi_0"):
        to_ours(state, HEADS, is_untied=True)


def test_the_configuration_becomes_our_fields():
    config = hf_model("T5").config
    assert model_fields(config) == model_fields(config.to_dict()) == {
        "num_layers": 2, "enc_layers": 2, "dec_layers": 1, "hidden_size": 24, "num_attention_heads": 3,
        "kv_hidden_size": 6, "ff_hidden_size": 40, "activation": "relu", "hidden_bias": False,
        "layernorm_epsilon": 1e-6, "position_embedding_type": "relative", "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128, "max_position_embeddings": 0, "vocab_size": 29,
        "untie_embeddings": False,
    }  # fmt: skip
    assert model_fields(MT5Config())["untie_embeddings"] and model_fields(MT5Config().to_dict())["untie_embeddings"]
    assert model_fields(KINDS["T5 v1.1"][0](**KINDS["T5 v1.1"][2]))["untie_embeddings"]
    hub = {**config.to_dict(), "tie_word_embeddings": False}  # the files of T5 v1.1, written before transformers 5
    del hub["scale_decoder_outputs"]
    assert model_fields(hub)["untie_embeddings"]


def test_a_feed_forward_without_a_counterpart_is_refused():
    with pytest.raises(CheckpointError, match=r"feed_forward_proj 'gated-tanh' \(supported: relu, "):
        model_fields(T5Config(feed_forward_proj="gated-tanh"))
