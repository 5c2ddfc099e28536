"""Weights of Hugging Face's GPT-2, under our names, still make the same model."""

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from megatron.errors import CheckpointError
from megatron.models.gpt2.huggingface import from_ours, model_fields, to_ours

HEADS = 3


def hf_model(seed=0, **settings):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=29, n_positions=16, n_embd=24, n_layer=2, n_head=HEADS, n_inner=40,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", **settings,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():  # biases and norms away from 0 and 1, so that each name matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def plain_forward(our_weights, tokens, num_heads):
    """GPT-2 in plain torch from our names, cutting query, key and value per head."""
    s = tokens.shape[1]
    x = our_weights["embedding.word.weight"][tokens] + our_weights["embedding.position.weight"][:s]
    h = x.shape[-1]

    def norm(x, name):
        return F.layer_norm(x, (h,), our_weights[f"{name}.weight"], our_weights[f"{name}.bias"], 1e-5)

    def linear(x, name):
        return F.linear(x, our_weights[f"{name}.weight"], our_weights[f"{name}.bias"])

    for i in range(2):
        prefix = f"layers.{i}"
        qkv = linear(norm(x, f"{prefix}.input_norm"), f"{prefix}.attention.query_key_value")
        q, k, v = qkv.view(*tokens.shape, num_heads, 3, h // num_heads).permute(3, 0, 2, 1, 4)  # 3 x [b, a, s, d]
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(context.transpose(1, 2).flatten(2), f"{prefix}.attention.dense")  # [b, s, h]
        up = F.gelu(linear(norm(x, f"{prefix}.post_attention_norm"), f"{prefix}.mlp.up"), approximate="tanh")
        x = x + linear(up, f"{prefix}.mlp.down")
    return F.linear(norm(x, "final_norm"), our_weights.get("head.weight", our_weights["embedding.word.weight"]))


@pytest.mark.parametrize("is_tied", [True, False])
def test_plain_forward_with_our_weights_matches_hugging_face(is_tied):
    model = hf_model(tie_word_embeddings=is_tied)
    our_weights = {name: w.requires_grad_() for name, w in to_ours(model.state_dict(), HEADS).items()}
    assert ("head.weight" in our_weights) == (not is_tied)
    tokens = torch.randint(0, 29, (2, 16), generator=torch.Generator().manual_seed(1))
    hf_logits, our_logits = model(tokens).logits, plain_forward(our_weights, tokens, HEADS)
    assert (hf_logits - our_logits).abs().max() <= 1e-12 * hf_logits.abs().max()
    weights = torch.randn(hf_logits.shape, dtype=torch.float64)
    (hf_logits * weights).sum().backward()
    (our_logits * weights).sum().backward()
    expected = to_ours({name: p.grad for name, p in model.named_parameters()}, HEADS)
    scale = max(gradient.norm() for gradient in expected.values())
    assert sorted(expected) == sorted(our_weights)
    for name, gradient in expected.items():
        assert (our_weights[name].grad - gradient).norm() <= 1e-11 * max(gradient.norm(), 1e-6 * scale), name


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_round_trip_is_bitwise_and_loads_strictly(is_tied, dtype):
    model = hf_model(tie_word_embeddings=is_tied).to(dtype)
    state = model.state_dict()
    exported = from_ours(to_ours(state, HEADS), HEADS)
    assert sorted(exported) == sorted(state)
    assert all(torch.equal(exported[name], tensor) and exported[name].dtype == dtype for name, tensor in state.items())
    hf_model(seed=1, tie_word_embeddings=is_tied).load_state_dict(exported, strict=True)
    our_weights = to_ours(state, HEADS)
    reimported = to_ours(from_ours(our_weights, HEADS), HEADS)
    assert sorted(reimported) == sorted(our_weights) and all(
        torch.equal(reimported[name], our_weights[name]) for name in our_weights
    )


def test_reads_hub_names_without_prefix_and_with_masks():
    state = hf_model().state_dict()
    hub = {name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != "lm_head.weight"}
    hub["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    hub["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    expected, actual = to_ours(state, HEADS), to_ours(hub, HEADS)
    assert sorted(actual) == sorted(expected) and all(torch.equal(actual[name], expected[name]) for name in actual)


def test_converted_weights_do_not_alias_source():
    state = hf_model().state_dict()
    our_weights = to_ours(state, HEADS)
    before = {name: tensor.clone() for name, tensor in our_weights.items()}
    for tensor in state.values():
        tensor.zero_()
    assert all(torch.equal(our_weights[name], tensor) for name, tensor in before.items())


def test_rejects_and_lists_unknown_names():
    with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel has no .*: model.layers.0.x, h.0.attn.q_proj.weight"):
        to_ours({"model.layers.0.x": torch.zeros(1), "h.0.attn.q_proj.weight": torch.zeros(1)}, HEADS)
    with pytest.raises(CheckpointError, match="our GPT-2 has no .*: encoder.final_norm"):
        from_ours({"encoder.final_norm": torch.zeros(1)}, HEADS)
    with pytest.raises(CheckpointError, match="24 rows, which is not a multiple of 5"):
        to_ours(hf_model().state_dict(), 5)


def test_config_maps_to_model_fields():
    config = hf_model(tie_word_embeddings=False).config
    assert model_fields(config) == model_fields(config.to_dict()) == {
        "num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "ff_hidden_size": 40, "activation": "gelu-tanh",
        "hidden_bias": True, "layernorm_epsilon": 1e-5, "max_position_embeddings": 16, "vocab_size": 29,
        "untie_embeddings": True,
    }  # fmt: skip
    assert model_fields(GPT2Config(n_embd=24))["ff_hidden_size"] == 96
    assert model_fields(GPT2Config())["untie_embeddings"] is False


def test_rejects_unsupported_settings_together():
    config = GPT2Config(activation_function="relu", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(CheckpointError, match="scale_attn_by_inverse_layer_idx True; activation_function 'relu'"):
        model_fields(config)
