"""Model settings of Megatron-LM and its descendants, from the arguments that their checkpoints store. No torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from megatron.errors import CheckpointError

LEARNED = "learned_absolute"
POSITIONS = "embedding.position.weight"
_ACTIVATIONS = {"swiglu": "gated-silu", "squared_relu": "squared-relu"}
"""Boolean setting of Megatron-LM -> our activation."""
_UNSUPPORTED = {
    "quick_geglu": "a gated quick GELU",
    "multi_latent_attention": "latent attention",
    "use_mup": "muP (--use-mup)",
}
_UNSUPPORTED_IN_T5 = {
    "swiglu": "a gated activation",
    "squared_relu": "a squared ReLU",
    "apply_layernorm_1p": "norms whose weights are stored minus 1 (--apply-layernorm-1p)",
}
_ROPE_SCALING = {"rotary_scaling": "llama3", "rotary_low_frequency_factor": 1.0, "rotary_high_frequency_factor": 4.0,
                 "rotary_original_positions": 8192}  # fmt: skip
"""Our settings for --use-rope-scaling of Megatron-LM."""


def position_type(settings: Mapping[str, Any]) -> str:
    """Convert the position type from Megatron-LM's to our notation."""
    if settings.get("use_rotary_position_embeddings"):
        return "rope"
    return str(settings.get("position_embedding_type") or LEARNED)


def _normalization(settings: Mapping[str, Any]) -> str:
    """Read the norm type, which is in lower case in Megatron-DeepSpeed's settings."""
    norm = str(settings.get("normalization") or "LayerNorm")
    return {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(norm.lower(), norm)


def reject_unsupported(
    settings: Mapping[str, Any], names: Container[str], *, is_t5: bool = False, has_experts: bool = False
) -> None:
    """Reject settings that our models do not support.

    Args:
        names: our weight names.
        has_experts: experts are supported.

    Raises:
        CheckpointError: lists the settings; or the checkpoint has no learned positions although its settings need them.
    """
    positions = position_type(settings)
    supported_positions = (LEARNED,) if is_t5 else (LEARNED, "rope", "none")
    unsupported = [
        name for key, name in {**_UNSUPPORTED, **(_UNSUPPORTED_IN_T5 if is_t5 else {})}.items() if settings.get(key)
    ]
    norm = _normalization(settings)
    if norm not in (("LayerNorm",) if is_t5 else ("LayerNorm", "RMSNorm")):
        unsupported.append(f"{norm} instead of LayerNorm")
    has_dense_layers = settings.get("num_experts") in (None, 0, 1, [1])  # Megatron-DeepSpeed writes [1]
    if not (has_experts or has_dense_layers):
        unsupported.append("experts")
    if positions not in supported_positions:
        unsupported.append(f"positions of type {positions}")
    if (settings.get("softmax_type") or "vanilla") != "vanilla":
        unsupported.append(f"a softmax of type {settings['softmax_type']}")
    if unsupported:
        raise CheckpointError(f"the settings in the checkpoint require unsupported features: {', '.join(unsupported)}")
    if positions == LEARNED and POSITIONS not in names:
        raise CheckpointError(
            f"the checkpoint lacks learned positions ({POSITIONS}), and its settings name no other type of positions "
            "(position_embedding_type)"
        )


def decoder_settings(settings: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Convert the decoder settings for which Megatron-LM has other names.

    Args:
        names: our weight names.
    """
    positions, has_bias = position_type(settings), "layers.0.attention.query_key_value.bias" in names
    values: dict[str, Any] = {
        "position_embedding_type": positions,
        "normalization": _normalization(settings),
        "layernorm_1p": bool(settings.get("apply_layernorm_1p")),
        "add_qkv_bias": has_bias and "layers.0.mlp.up.bias" not in names,
        "qk_norm": "l2" if settings.get("qk_l2_norm") else "head" if settings.get("qk_layernorm") else "none",
        **_window(settings),
    }
    if settings.get("swiglu"):
        values["activation_func_clamp_value"] = float(settings.get("activation_func_clamp_value") or 0.0)
        values["glu_linear_offset"] = float(settings.get("glu_linear_offset") or 0.0)
    if settings.get("softmax_scale"):
        values["softmax_scale"] = float(settings["softmax_scale"])
    if positions != "rope":
        return values
    base = settings.get("rotary_base") or settings.get("rotary_position_embeddings_theta") or 10000.0
    values["rotary_base"] = float(base)
    values["rotary_percent"] = float(settings.get("rotary_percent") or 1.0)
    values["no_rope_freq"] = str(settings.get("no_rope_freq") or "").replace(" ", "")  # a number, or a list by layer
    if settings.get("use_rope_scaling"):
        values |= {**_ROPE_SCALING, "rotary_scaling_factor": float(settings.get("rope_scaling_factor") or 8.0)}
    elif settings.get("rotary_seq_len_interpolation_factor"):
        factor = float(settings["rotary_seq_len_interpolation_factor"])
        values |= {"rotary_scaling": "linear", "rotary_scaling_factor": factor}
    return values


def _window(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the attention window.

    Megatron-LM's window is (tokens before, tokens after), where -1 means no limit.

    Raises:
        CheckpointError: the window includes tokens after the current one.
    """
    window = settings.get("window_size")
    if window is None:
        return {}
    before, after = (int(size) for size in window)
    if after not in (0, -1) or (after == -1 and before != -1):
        raise CheckpointError(
            f"the attention window of a decoder must end at the current token, got window_size {tuple(window)}"
        )
    every = settings.get("window_attn_skip_freq")
    if before == -1:
        return {}
    return {"window_size": before, "window_attn_skip_freq": "" if every is None else str(every).replace(" ", "")}


def activation_of(settings: Mapping[str, Any]) -> str:
    """Read the activation. GELU means the tanh form, unless the settings show that the exact form was used."""
    for setting, activation in _ACTIVATIONS.items():
        if settings.get(setting):
            return activation
    is_exact = bool(settings) and not (settings.get("openai_gelu") or settings.get("bias_gelu_fusion", True))
    return "gelu" if is_exact else "gelu-tanh"


def get_num_groups(settings: Mapping[str, Any], num_heads: int) -> int:
    """Read the number of key and value heads from the run's settings.

    Megatron-LM has ``num_query_groups`` with ``group_query_attention``, Megatron-DeepSpeed ``num_key_value_heads``.
    """
    if settings.get("group_query_attention"):
        return int(settings.get("num_query_groups") or 1)
    return int(settings.get("num_key_value_heads") or num_heads)
