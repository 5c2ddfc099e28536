"""Multi-latent attention in Hugging Face files: weight names and settings of DeepSeek, MiniCPM3 and Youtu.

| ours | Hugging Face | change |
|---|---|---|
| attention.query_down, .query_latent_norm | self_attn.q_a_proj, .q_a_layernorm | |
| attention.query | self_attn.q_b_proj; without a query latent q_proj | order of the rotated rows of each head |
| attention.key_value_down | self_attn.kv_a_proj_with_mqa | order of the rotated rows |
| attention.key_value_latent_norm | self_attn.kv_a_layernorm | |
| attention.key_value | self_attn.kv_b_proj | |
| attention.dense | self_attn.o_proj | |

In all types except MiniCPM3, rotary pairs are adjacent elements (``RotaryRows``). The norms of latents have the epsilon
1e-6 whatever ``rms_norm_eps`` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.latent_attention import yarn_term
from megatron.config.model import ModelConfig
from megatron.models.common.huggingface import WeightMapping
from megatron.models.common.rotary_rows import RotaryRows
from megatron.models.llama.huggingface_rotary import rotary_fields, rotary_values

LATENT_SETTINGS = {"multi_latent_attention": True, "latent_norm_epsilon": 1e-6}
"""Our settings that all types with multi-latent attention share."""
_SIZES = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Key of config.json -> our size."""
_MSCALE, _MSCALE_ALL_DIM = "mscale", "mscale_all_dim"


def latent_recipes(
    model: ModelConfig, our_layer: str, hf_layer: str, *, has_adjacent_pairs: bool
) -> dict[str, WeightMapping]:
    """Return the mappings of the attention weights of a layer.

    Args:
        our_layer: name of our layer, such as "layers.2".
        hf_layer: name of the Hugging Face layer, such as "model.layers.2".
        has_adjacent_pairs: rotary pairs are adjacent elements.
    """
    ours, theirs, rotated = f"{our_layer}.attention", f"{hf_layer}.self_attn", model.qk_pos_emb_head_dim
    query_rows = key_rows = None
    if has_adjacent_pairs:
        query_rows = RotaryRows(model.kv_hidden_size, model.qk_head_dim, rotated)
        key_rows = RotaryRows(model.kv_lora_rank + rotated, model.kv_lora_rank, rotated)
    query_name = "q_b_proj" if model.q_lora_rank else "q_proj"
    mappings = {
        f"{ours}.query.weight": _mapping(theirs, query_name, query_rows),
        f"{ours}.key_value_down.weight": _mapping(theirs, "kv_a_proj_with_mqa", key_rows),
        f"{ours}.key_value_latent_norm.weight": _mapping(theirs, "kv_a_layernorm"),
        f"{ours}.key_value.weight": _mapping(theirs, "kv_b_proj"),
        f"{ours}.dense.weight": _mapping(theirs, "o_proj"),
    }
    if model.q_lora_rank:
        mappings[f"{ours}.query_down.weight"] = _mapping(theirs, "q_a_proj")
        mappings[f"{ours}.query_latent_norm.weight"] = _mapping(theirs, "q_a_layernorm")
    return mappings


def _mapping(hf_attention: str, name: str, rotary_rows: RotaryRows | None = None) -> WeightMapping:
    return WeightMapping((f"{hf_attention}.{name}.weight",), row_orders=() if rotary_rows is None else (rotary_rows,))


def latent_size_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json for the sizes of multi-latent attention."""
    return {
        "q_lora_rank": model.q_lora_rank or None,
        **{key: getattr(model, name) for key, name in _SIZES.items()},
    }


def latent_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json for multi-latent attention and its rotary positions."""
    fields = {**latent_size_fields(model), **rotary_fields(model, has_local=False)}
    scaling = fields["rope_scaling"]
    if scaling is not None and model.has_yarn:
        if model.mscale_all_dim:
            scaling |= {_MSCALE: model.mscale, _MSCALE_ALL_DIM: model.mscale_all_dim}
        elif model.mscale != 1.0:
            scaling.setdefault("attention_factor", model.latent_rotary_factor)
    return fields


def latent_values(settings: Mapping[str, Any], *, has_adjacent_pairs: bool) -> tuple[dict[str, Any], list[str]]:
    """Return our fields for a config.json, including rotary positions, and its settings that we do not support."""
    fields, unsupported = _rotary_values(settings)
    if has_adjacent_pairs and settings.get("rope_interleave") is False:
        unsupported.append("rope_interleave False (supported: True)")
    if settings.get("mlp_bias"):
        unsupported.append("mlp_bias True (supported: False)")
    return {**latent_size_values(settings), **LATENT_SETTINGS, **fields}, unsupported


def latent_size_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return our sizes of multi-latent attention for a config.json."""
    sizes = {name: settings[key] for key, name in _SIZES.items() if settings.get(key) is not None}
    sizes.setdefault("v_head_dim", settings["hidden_size"] // settings["num_attention_heads"])  # MiniCPM3's default
    return {"q_lora_rank": settings.get("q_lora_rank") or 0, **sizes}


def _rotary_values(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return our rotary fields with ``mscale`` and ``mscale_all_dim``, which also scale the scores of these types.

    Source: ``yarn_apply_mscale`` and ``_compute_yarn_parameters`` of transformers.
    """
    rope = dict(settings.get("rope_scaling") or settings.get("rope_parameters") or {})
    mscale, mscale_all_dim = (rope.get(key) or 0.0 for key in (_MSCALE, _MSCALE_ALL_DIM))
    stripped = dict(settings)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(settings.get(key), Mapping):
            stripped[key] = {
                name: value for name, value in settings[key].items() if name not in (_MSCALE, _MSCALE_ALL_DIM)
            }
    fields, unsupported = rotary_values(stripped, has_local=False, has_windows=False)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if mscale_all_dim and rope_type not in ("default", "yarn"):
        unsupported.append(f"{_MSCALE_ALL_DIM} {mscale_all_dim!r} with rope_type {rope_type!r} (supported: yarn)")
    if unsupported or rope_type != "yarn" or not mscale_all_dim:
        return fields, unsupported
    if mscale:
        return {**fields, _MSCALE: float(mscale), _MSCALE_ALL_DIM: float(mscale_all_dim)}, []
    factor = fields.get("rotary_attention_factor") or yarn_term(float(fields["rotary_scaling_factor"]), 1.0)
    return {**fields, _MSCALE_ALL_DIM: float(mscale_all_dim), "rotary_attention_factor": factor}, []
