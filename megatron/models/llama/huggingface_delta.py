"""Delta-rule mixers in Hugging Face files: weight names and settings that all types with these layers share.

g key heads have d_k elements and a value heads d_v, in n = a / g value heads per key head.

| ours, in ``recurrent`` | Qwen3-Next, ``linear_attn`` | Qwen3.5, ``linear_attn`` | OLMo Hybrid, ``linear_attn`` |
|---|---|---|---|
| projections.query, .key, .value, .gate | in_proj_qkvz | in_proj_qkv, in_proj_z | q_proj, k_proj, v_proj, g_proj |
| projections.beta, .decay | in_proj_ba | in_proj_b, in_proj_a | b_proj, a_proj |
| convolution.query, .key, .value | conv1d [channels, 1, k] | the same | q_conv1d, k_conv1d, v_conv1d |
| A_log, dt_bias | the same | the same | the same |
| output_norm, dense | norm, out_proj | norm, out_proj | o_norm, o_proj |

Rows of Qwen3-Next's in_proj_qkvz are grouped by key head: d_k rows of the query, d_k of the key, n d_v of the values
and n d_v of the gates. A group of in_proj_ba has n rows of beta, then n of the decay. in_proj_qkv and conv1d have the
rows of all queries, then of all keys, then of all values.

| ours, in ``recurrent`` | Kimi Linear, ``self_attn`` | bailing_hybrid, ``attention`` |
|---|---|---|
| projections.query, .key, .value, .beta | q_proj, k_proj, v_proj, b_proj | the same |
| projections.decay, .gate | | f_proj, g_proj |
| gates_down | f_a_proj, then g_a_proj | |
| decay_up, gate_up | f_b_proj, g_b_proj | |
| convolution.query, .key, .value | q_conv1d, k_conv1d, v_conv1d | the same |
| A_log | A_log [1, 1, a, 1] | A_log [a] |
| dt_bias, output_norm, dense | dt_bias, o_norm, o_proj | dt_bias, o_norm, dense |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.layer_types import ATTENTION, VARIANTS, layer_types
from megatron.config.model import ModelConfig
from megatron.models.common.huggingface import WeightMapping
from megatron.models.llama.huggingface_hybrid import Problems, Recipes, layer_type_problems, row_mappings
from megatron.models.llama.huggingface_windows import FULL, skip_freq

LINEAR = "linear_attention"
"""Entry of ``layer_types``: a recurrent layer."""
_CONVOLVED = ("query", "key", "value")
_DEFAULT_INTERVAL = 4
"""Every N-th layer has attention in a model without ``layer_types``."""


# Weights.


def grouped_recipes(model: ModelConfig, ours: str, theirs: str) -> Recipes:
    """Return the mappings of Qwen3-Next's Gated DeltaNet, whose projections are grouped by key head."""
    num_values = model.linear_num_value_heads // model.linear_num_key_heads
    key_size, value_size = model.linear_key_head_dim, num_values * model.linear_value_head_dim
    prefix = f"{ours}.projections"
    return {
        **row_mappings(
            [f"{prefix}.{name}" for name in (*_CONVOLVED, "gate")],
            (key_size, key_size, value_size, value_size),
            f"{theirs}.in_proj_qkvz.weight",
            is_grouped=True,
        ),
        **row_mappings(
            [f"{prefix}.beta", f"{prefix}.decay"],
            (num_values, num_values),
            f"{theirs}.in_proj_ba.weight",
            is_grouped=True,
        ),
        **_packed_convolution_recipes(model, ours, theirs),
        **_common_recipes(ours, theirs, norm="norm", dense="out_proj"),
    }


def packed_recipes(model: ModelConfig, ours: str, theirs: str) -> Recipes:
    """Return the mappings of Qwen3.5's Gated DeltaNet: one tensor of all queries, all keys and all values."""
    prefix = f"{ours}.projections"
    names = {"gate": "in_proj_z", "beta": "in_proj_b", "decay": "in_proj_a"}
    return {
        **row_mappings([f"{prefix}.{name}" for name in _CONVOLVED], _widths(model), f"{theirs}.in_proj_qkv.weight"),
        **{f"{prefix}.{part}": WeightMapping((f"{theirs}.{name}.weight",)) for part, name in names.items()},
        **_packed_convolution_recipes(model, ours, theirs),
        **_common_recipes(ours, theirs, norm="norm", dense="out_proj"),
    }


def separate_recipes(model: ModelConfig, ours: str, theirs: str) -> Recipes:
    """Return the mappings of OLMo Hybrid's Gated DeltaNet and of Kimi Delta Attention: a tensor for each part."""
    is_kimi, is_full = model.experimental_attention_variant == "kimi_delta", model.linear_full_rank_gates
    letters = {"query": "q", "key": "k", "value": "v", "beta": "b"}
    if not is_kimi or is_full:
        letters |= {"gate": "g", "decay": "f" if is_kimi else "a"}
    mappings = {
        **{f"{ours}.projections.{part}": _mapping(theirs, f"{letter}_proj") for part, letter in letters.items()},
        **{
            f"{ours}.convolution.{part}": WeightMapping((f"{theirs}.{part[0]}_conv1d.weight",), unit_dims=(1,))
            for part in _CONVOLVED
        },
        **_common_recipes(ours, theirs, norm="o_norm", dense="o_proj"),
    }
    if not is_kimi or is_full:
        return mappings
    return mappings | {
        f"{ours}.gates_down.weight": WeightMapping((f"{theirs}.f_a_proj.weight", f"{theirs}.g_a_proj.weight")),
        f"{ours}.decay_up.weight": _mapping(theirs, "f_b_proj"),
        f"{ours}.gate_up.weight": _mapping(theirs, "g_b_proj"),
        f"{ours}.A_log": WeightMapping((f"{theirs}.A_log",), unit_dims=(0, 1, 3)),
    }


def _packed_convolution_recipes(model: ModelConfig, ours: str, theirs: str) -> Recipes:
    names = [f"{ours}.convolution.{name}" for name in _CONVOLVED]
    return row_mappings(names, _widths(model), f"{theirs}.conv1d.weight", unit_dims=(1,))


def _common_recipes(ours: str, theirs: str, *, norm: str, dense: str) -> Recipes:
    return {
        **{f"{ours}.{name}": WeightMapping((f"{theirs}.{name}",)) for name in ("A_log", "dt_bias")},
        f"{ours}.output_norm.weight": _mapping(theirs, norm),
        f"{ours}.dense.weight": _mapping(theirs, dense),
    }


def _mapping(theirs: str, name: str) -> WeightMapping:
    return WeightMapping((f"{theirs}.{name}.weight",))


def _widths(model: ModelConfig) -> tuple[int, int, int]:
    """Return the numbers of rows of all queries, all keys and all values."""
    key_width = model.linear_num_key_heads * model.linear_key_head_dim
    return key_width, key_width, model.linear_num_value_heads * model.linear_value_head_dim


# Settings.

_SIZES = {
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
}
"""Key of config.json of Gated DeltaNet -> our size."""


def layer_fields(model: ModelConfig) -> dict[str, Any]:
    """Return ``layer_types`` for config.json."""
    return {"layer_types": [FULL if layer_type.mixer == ATTENTION else LINEAR for layer_type in layer_types(model)]}


def layer_values(variant: str, types: list[str] | None, num_layers: int) -> tuple[dict[str, Any], Problems]:
    """Return our settings for ``layer_types`` of config.json, and messages about unsupported entries.

    Args:
        variant: value of ``experimental_attention_variant``.
        types: the entries; None: every fourth layer has attention.
    """
    if types is None:
        types = [LINEAR if layer % _DEFAULT_INTERVAL else FULL for layer in range(1, num_layers + 1)]
    if unknown := sorted({str(name) for name in types} - {LINEAR, FULL}):
        return {}, [f"layer_types with {', '.join(unknown)} (supported: {LINEAR}, {FULL})"]
    if len(types) != num_layers:
        return {}, [f"layer_types with {len(types)} entries for num_hidden_layers {num_layers}"]
    if LINEAR not in types:
        return {}, [f"layer_types without {LINEAR} (supported: at least one layer of this type)"]
    return {
        "experimental_attention_variant": variant,
        "linear_attention_freq": skip_freq([name == LINEAR for name in types]),
    }, []


def gated_delta_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the entries of config.json for the sizes of Gated DeltaNet."""
    return {key: getattr(model, name) for key, name in _SIZES.items()}


def gated_delta_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return our sizes of Gated DeltaNet."""
    return {name: settings[key] for key, name in _SIZES.items()}


def delta_problems(model: ModelConfig, variant: str, **required: Any) -> Iterator[str]:
    """Yield a message for each setting of the recurrent layers of ``model`` that config.json cannot express.

    Args:
        variant: the only ``experimental_attention_variant``.
        required: values of settings that differ from the defaults.
    """
    if model.experimental_attention_variant != variant:
        return  # reported by ``unsupported_settings``
    mixer = VARIANTS[variant]
    yield from layer_type_problems(
        model, lambda layer_type: layer_type.mixer in (mixer, ATTENTION), f"each layer must have {mixer} or attention"
    )
    expected = {
        "linear_allow_neg_eigval": False, "linear_norm_epsilon": model.layernorm_epsilon,
        "linear_full_rank_gates": False, "linear_decay_limit": 0.0, **required,
    }  # fmt: skip
    for name, value in expected.items():
        if getattr(model, name) != value:
            yield f"--{name.replace('_', '-')} must be {value}, got {getattr(model, name)}"
