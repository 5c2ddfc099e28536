"""Every feature of a decoder, and every pair of them, against plain formulas in fp64: logits and all gradients."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.ops.attention import positions_in_segments
from tests.helpers.model_samples import fill_weights
from tests.helpers.plain_decoder import reference_logits

VOCAB, SEQ, BATCH = 23, 7, 2
MODEL_FIELDS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 16,
    "kv_hidden_size": 6, "ff_hidden_size": 10, "hidden_bias": False, "layernorm_epsilon": 1e-3,
}  # fmt: skip
ROPE: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": 50.0}
YARN: dict[str, Any] = {
    "rotary_scaling": "yarn", "rotary_scaling_factor": 3.0, "rotary_original_positions": 40, "rotary_beta_fast": 3.0,
    "rotary_beta_slow": 0.25,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rotary_scaling": "llama3", "rotary_scaling_factor": 4.0, "rotary_original_positions": 40,
    "rotary_high_frequency_factor": 6.0,
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "rotary_scaling": "longrope", "rotary_scaling_factor": 4.0, "rotary_short_factors": "[1.0,1.5,3.0]",
    "rotary_long_factors": "[2.0,5.0,9.5]",
}  # fmt: skip
LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "q_lora_rank": 7, "kv_lora_rank": 5, "qk_head_dim": 3, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 2, "latent_norm_epsilon": 1e-2,
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "groups": {"num_query_groups": 2},
    "one group": {"num_query_groups": 1},
    "rope": ROPE,
    "rope, linear": {**ROPE, "rotary_scaling": "linear", "rotary_scaling_factor": 3.0},
    "rope, llama3": {**ROPE, **LLAMA3},
    "rope, yarn": {**ROPE, **YARN},
    "rope, yarn by a factor": {**ROPE, **YARN, "rotary_attention_factor": 1.5},
    "rope of a part": {**ROPE, "rotary_percent": 0.67},
    "rope, local base": {**ROPE, "rotary_local_base": 20.0, "window_size": 2, "rotary_scaling": "linear"},
    "alibi": {"position_embedding_type": "alibi", "alibi_bias_max": 5},
    "alibi and a window": {"position_embedding_type": "alibi", "window_size": 3},
    "no positions": {"position_embedding_type": "none"},
    "rms": {"normalization": "RMSNorm"},
    "norms without bias": {"norm_bias": False},
    "1 + weight": {"layernorm_1p": True},
    "norms after": {"norm_placement": "after"},
    "norms on both sides": {"norm_placement": "both"},
    "residual behind norms": {"apply_residual_connection_post_layernorm": True},
    "norm of the embedding": {"embed_layernorm": True},
    "q, k norms": {"qk_norm": "head"},
    "q, k norms of all heads": {"qk_norm": "all"},
    "biases": {"hidden_bias": True},
    "biases of q, k, v": {"add_qkv_bias": True},
    "window": {"window_size": 3},
    "window by number": {"window_size": 2, "window_attn_skip_freq": "2"},
    "window by list": {"window_size": 1, "window_attn_skip_freq": "[0,1]"},
    "softmax scale": {"softmax_scale": 0.9},
    "capped scores": {"attn_logit_softcapping": 0.7},
    "capped logits": {"final_logit_softcapping": 1.5},
    "scaled embedding": {"scale_embeddings": True},
    "multiplied embedding": {"embedding_multiplier": 3.0},
    "scaled residual": {"residual_scale": 2.3},
    "scaled logits": {"dim_model_base": 5},
    "clipped": {"clip_qkv": 0.6},
    "squared relu": {"activation": "squared-relu"},
    "silu": {"activation": "silu"},
    "gated": {"activation": "gated-silu"},
    "untied": {"untie_embeddings": True},
    "parallel, one norm": {"parallel_residual": "shared-norm"},
    "parallel, two norms": {"parallel_residual": "separate-norms"},
    "logit scale": {"logit_scale": 0.3},
    "temperature": {**ROPE, "attention_temperature_scale": 0.4, "attention_temperature_floor": 2},
    "q, k norms with weights by head": {"qk_norm": "per-head"},
    "q, k norms with offset weights by head": {"qk_norm": "per-head", "layernorm_1p": True},
    "xielu": {"activation": "xielu"},
    "rope, longrope, short": {**ROPE, **LONGROPE, "rotary_original_positions": SEQ},
    "rope, longrope, long": {**ROPE, **LONGROPE, "rotary_original_positions": SEQ - 1, "rotary_attention_factor": 1.2},
    "sinks": {"softmax_type": "learnable"},
    "sinks of 0": {"softmax_type": "off-by-one"},
    "output gate": {"attention_output_gate": True},
    "rope, not in every layer": {**ROPE, "no_rope_freq": "2"},
    "rope, not in the first layer": {**ROPE, "no_rope_freq": "[1,0]"},
    "rope, interleaved": {**ROPE, "rotary_interleaved": True},
    "rope, yarn without rounding": {**ROPE, **YARN, "rotary_truncate": False},
    "q, k norms behind rope": {**ROPE, "qk_norm": "head", "qk_norm_order": "after"},
    "q, k norms without weights": {"qk_norm": "l2"},
    "gated, clamped": {"activation": "gated-silu", "activation_func_clamp_value": 0.3},
    "value heads": {"v_head_dim": 4},
    "large value heads": {"v_head_dim": 9},
    "scaled values": {"attention_value_scale": 0.6},
    "groups by window": {
        "num_query_groups": 1,
        "window_num_query_groups": 2,
        "window_size": 2,
        "window_attn_skip_freq": "2",
    },
    "sinks by window": {
        "softmax_type": "learnable",
        "sink_layers": "window",
        "window_size": 2,
        "window_attn_skip_freq": "[0,1]",
    },
    "gated, offset": {"activation": "gated-quick-gelu", "glu_linear_offset": 1.0},
}
"""Name -> what it sets; two that set one field differently are no pair."""


def are_compatible(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether both can be."""
    has_conflict = any(first[name] != second[name] for name in first.keys() & second.keys())
    merged = {**first, **second}
    is_after = merged.get("norm_placement") == "after"
    is_residual_normed = merged.get("apply_residual_connection_post_layernorm")
    is_parallel = "parallel_residual" in merged
    is_rejected = (is_after and (is_residual_normed or is_parallel)) or (is_residual_normed and is_parallel)
    if "v_head_dim" in merged and "attention_output_gate" in merged:
        return False
    if merged.get("rotary_scaling") == "longrope" and "rotary_percent" in merged:  # another number of factors
        return False
    return not has_conflict and not is_rejected


FEATURE_PAIRS = [
    (first, second) for first, second in combinations(FEATURES, 2) if are_compatible(FEATURES[first], FEATURES[second])
]
FULL_MODELS: dict[str, dict[str, Any]] = {
    "Qwen 3": {**FEATURES["groups"], **ROPE, **FEATURES["rms"], **FEATURES["q, k norms"], "activation": "gated-silu"},
    "Gemma 3": {
        **FEATURES["groups"], **ROPE, "rotary_local_base": 20.0, "rotary_scaling": "linear", "normalization": "RMSNorm",
        "layernorm_1p": True, "norm_placement": "both", "qk_norm": "head", "window_size": 2,
        "window_attn_skip_freq": "[1,0]", "softmax_scale": 0.5, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5, "scale_embeddings": True, "activation": "gated-gelu",
    },
    "OLMo 2": {**ROPE, **FEATURES["rms"], "norm_placement": "after", "qk_norm": "all", "activation": "gated-silu",
               "untie_embeddings": True},
    "MiniCPM": {**ROPE, **FEATURES["rms"], "activation": "gated-silu", "embedding_multiplier": 12.0,
                "residual_scale": 1.4, "dim_model_base": 4},
    "DeepSeek-V2": {**ROPE, **FEATURES["rms"], **LATENT, **YARN, "mscale": 0.9, "mscale_all_dim": 0.7,
                    "activation": "gated-silu", "untie_embeddings": True},
    "DeepSeek-V2, long values": {**ROPE, **FEATURES["rms"], **LATENT, "q_lora_rank": 0, "v_head_dim": 9,
                                 "attn_logit_softcapping": 1.1, "window_size": 3, "window_attn_skip_freq": "2"},
    "Ling 3": {**ROPE, **FEATURES["rms"], **LATENT, "q_lora_rank": 0, "attention_output_gate": True,
                 "activation": "gated-silu", "untie_embeddings": True},
    "latents with other parts": {
        **ROPE, **FEATURES["rms"], **LATENT, "rotary_interleaved": True, "parallel_residual": "shared-norm",
        "logit_scale": 0.3, "activation": "gated-silu", "activation_func_clamp_value": 0.4, "glu_linear_offset": 1.0,
    },
    "muP": {"mup_base_hidden_size": 8, "mup_base_head_dim": 3},
    "BLOOM": {"position_embedding_type": "alibi", "embed_layernorm": True, "hidden_bias": True},
    "gpt-oss": {
        **FEATURES["groups"], **ROPE, **YARN, "rotary_truncate": False, "normalization": "RMSNorm",
        "hidden_bias": True, "softmax_type": "learnable", "window_size": 2, "window_attn_skip_freq": "2",
        "activation": "gated-quick-gelu", "activation_func_clamp_value": 0.4, "glu_linear_offset": 1.0,
    },
    "AFMoE": {
        **FEATURES["groups"], **ROPE, "normalization": "RMSNorm", "norm_placement": "both", "qk_norm": "head",
        "attention_output_gate": True, "window_size": 2, "window_attn_skip_freq": "2", "no_rope_freq": "2",
        "activation": "gated-silu", "scale_embeddings": True,
    },
    "MiMo-V2-Flash": {
        **FEATURES["rope of a part"], **FEATURES["rms"], **FEATURES["groups by window"],
        "window_attn_skip_freq": "[0,1]", "softmax_type": "learnable", "sink_layers": "window", "v_head_dim": 4,
        "rotary_local_base": 20.0, "attention_value_scale": 0.6, "add_qkv_bias": True, "activation": "gated-silu",
        "untie_embeddings": True,
    },
}  # fmt: skip


def make_batch(has_documents: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, positions, documents and labels [b, s]."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    if has_documents:
        ids[0, 4:], ids[1, 2:], ids[1, 6:] = 1, 1, 2
    return text[:, :-1], positions_in_segments(ids), ids, text[:, 1:]


def check_matches_formulas(changes: dict[str, Any], *, has_documents: bool, **switches: Any) -> None:
    """Compare a model with the formulas: logits, and the gradients of a random weighing of their losses."""
    args = ModelArgs(**{**MODEL_FIELDS, **changes, **switches})
    model = fill_weights(DecoderModel(args).double())
    tokens, positions, ids, labels = make_batch(has_documents)
    inputs = {"position_ids": positions, "segment_ids": ids} if has_documents else {}
    mask = torch.rand(BATCH, SEQ, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    expected = reference_logits(args, weights, tokens, positions, ids)
    with torch.no_grad():
        actual = model(tokens, **inputs)
    assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max()
    losses = torch.nn.functional.cross_entropy(expected.permute(1, 2, 0), labels, reduction="none")  # [b, s]
    (losses * mask).sum().backward()
    loss, _ = model(tokens, **inputs, labels=labels, loss_mask=mask)
    loss.backward()
    for name, parameter in model.named_parameters():
        gradient = weights[name].grad
        assert gradient is not None and parameter.grad is not None, name
        assert (parameter.grad - gradient).abs().max() <= 1e-12 * max(gradient.abs().max(), 1.0), name


@pytest.mark.parametrize("name", FEATURES)
def test_feature_matches_formula(name: str) -> None:
    for has_documents in (False, True):
        check_matches_formulas(FEATURES[name], has_documents=has_documents)


def test_every_feature_changes_logits() -> None:
    tokens, _, _, _ = make_batch(False)
    logits = {}
    for name, changes in {"plain": {}, **FEATURES}.items():
        with torch.no_grad():
            logits[name] = fill_weights(DecoderModel(ModelArgs(**{**MODEL_FIELDS, **changes})).double())(tokens)
    for first, second in combinations(logits, 2):
        assert (logits[first] - logits[second]).abs().max() > 1e-4 or {first, second} == {"untied", "plain"}, (
            first,
            second,
        )


@pytest.mark.parametrize("name", FULL_MODELS)
@pytest.mark.parametrize("switches", [{}, {"loss_chunk_tokens": 3}, {"checkpoint_activations": True}], ids=str)
def test_full_models_match_formulas(name: str, switches: dict[str, Any]) -> None:
    check_matches_formulas(FULL_MODELS[name], has_documents=True, **switches)


def check_pairs(pairs: list[tuple[str, str]]) -> None:
    for pair_idx, (first, second) in enumerate(pairs):
        changes = {**FEATURES[first], **FEATURES[second]}
        changes = {
            "num_layers": 2 if changes.get("window_attn_skip_freq") or changes.get("no_rope_freq") else 1,
            **changes,
        }
        try:
            check_matches_formulas(changes, has_documents=pair_idx % 2 == 0)
        except AssertionError as error:
            raise AssertionError(f"{first} with {second}: {error}") from error


@pytest.mark.slow  # single features and models of many features, above and below, are in the short run
def test_sampled_feature_pairs_match_formulas() -> None:
    """Each feature is in one of them."""
    sampled = FEATURE_PAIRS[::11]
    assert {name for pair in sampled for name in pair} == set(FEATURES)
    check_pairs(sampled)


@pytest.mark.slow
def test_every_feature_pair_matches_formulas() -> None:
    assert len(FEATURE_PAIRS) > 450
    check_pairs(FEATURE_PAIRS)


def test_embedding_is_scaled_before_its_norm() -> None:
    """So the norm takes nearly all of it away, and all of it where its epsilon is 0."""
    fields = {**MODEL_FIELDS, "embed_layernorm": True, "layernorm_epsilon": 1e-12}
    models = [
        fill_weights(DecoderModel(ModelArgs(**fields, scale_embeddings=is_scaled)).double())
        for is_scaled in (False, True)
    ]
    tokens = make_batch(False)[0]
    with torch.no_grad():
        plain, scaled = (model(tokens) for model in models)
    torch.testing.assert_close(plain, scaled, rtol=1e-9, atol=1e-9)
    for dtype, scale in ((torch.bfloat16, 3.46875), (torch.float64, 12**0.5)):  # the root of 12, rounded
        model = fill_weights(
            DecoderModel(ModelArgs(**MODEL_FIELDS, scale_embeddings=True, position_embedding_type="none"))
        ).to(dtype)
        embeddings = model.embedding.word.weight[tokens].transpose(0, 1)
        assert model.embedding(tokens).equal(embeddings * scale)
