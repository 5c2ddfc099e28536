"""LLaMA weights and settings from Hugging Face's ``LlamaForCausalLM`` and back, bit for bit.

| ours | theirs | change |
|---|---|---|
| embedding.word.weight [v, h] | model.embed_tokens.weight | |
| layers.{i}.input_norm.weight | model.layers.{i}.input_layernorm.weight | |
| layers.{i}.attention.query_key_value.* | ...self_attn.q_proj.*, .k_proj.*, .v_proj.* | queries, key, value per group |
| layers.{i}.attention.dense.* | ...self_attn.o_proj.* | |
| layers.{i}.post_attention_norm.weight | ...post_attention_layernorm.weight | |
| layers.{i}.mlp.up.* | ...mlp.gate_proj.*, .up_proj.* | gate, value per row |
| layers.{i}.mlp.down.* | ...mlp.down_proj.* | |
| final_norm.weight | model.norm.weight | |
| head.weight (only when untied) | lm_head.weight | |

Their files have the rows of queries and keys for positions that turn halves against each other, as ours. Meta's own
files, and GPT-J's way, turn neighbouring numbers: those must be permuted first, as Hugging Face's converter does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import HFFormat, WeightMapping, by_recipes

_ACTIVATIONS = {
    "silu": "gated-silu",
    "swish": "gated-silu",
    "gelu_pytorch_tanh": "gated-gelu",
    "gelu_new": "gated-gelu",
}
_THEIR_ACTIVATIONS = {"gated-silu": "silu", "gated-gelu": "gelu_pytorch_tanh"}
_NORMS = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_SCALING = {
    "factor": "rotary_scaling_factor",
    "low_freq_factor": "rotary_low_frequency_factor",
    "high_freq_factor": "rotary_high_frequency_factor",
    "original_max_position_embeddings": "rotary_original_positions",
}
_OF_SCALING = {"default": (), "linear": tuple(_SCALING)[:1], "llama3": tuple(_SCALING)}
_WORD, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def recipes(config: Config) -> dict[str, WeightMapping]:
    """Return how each of our weights is made of theirs."""
    found = {
        "embedding.word.weight": WeightMapping((_WORD,)),
        "final_norm.weight": WeightMapping(("model.norm.weight",)),
    }
    for i in range(config.model.num_layers):
        at, there = f"layers.{i}", f"model.layers.{i}"
        found.update(
            {f"{at}.{ours}.weight": WeightMapping((f"{there}.{theirs}.weight",)) for ours, theirs in _NORMS.items()}
        )
        for kind in ("weight", "bias") if config.model.hidden_bias else ("weight",):
            heads = tuple(f"{there}.self_attn.{name}_proj.{kind}" for name in "qkv")
            found[f"{at}.attention.query_key_value.{kind}"] = WeightMapping(heads, blocks=config.model.num_query_groups)
            found[f"{at}.attention.dense.{kind}"] = WeightMapping((f"{there}.self_attn.o_proj.{kind}",))
            gated = tuple(f"{there}.mlp.{name}_proj.{kind}" for name in ("gate", "up"))
            found[f"{at}.mlp.up.{kind}"] = WeightMapping(gated, blocks=config.model.ff_hidden_size)
            found[f"{at}.mlp.down.{kind}"] = WeightMapping((f"{there}.mlp.down_proj.{kind}",))
    if config.model.untie_embeddings:
        found["head.weight"] = WeightMapping((_HEAD,))
    return found


def heights(config: Config) -> dict[str, int]:
    """Return the rows of queries, keys and values, which differ, by the end of their names."""
    queries = config.model.attention_size
    keys = config.model.num_query_groups * config.model.kv_hidden_size
    sizes = {"q": queries, "k": keys, "v": keys}
    return {f"{name}_proj.{kind}": rows for name, rows in sizes.items() for kind in ("weight", "bias")}


def problems(config: Config) -> Iterator[str]:
    """Yield what of ``config`` has no form there."""
    model = config.model
    if model.activation not in _THEIR_ACTIVATIONS:
        yield f"LLaMA has the activation {' or '.join(_THEIR_ACTIVATIONS)} there, got {model.activation}"
    if model.hidden_size % model.num_attention_heads:
        yield (
            "the hidden size must be a multiple of the heads there, got "
            f"{model.hidden_size} and {model.num_attention_heads}"
        )


def fields(config: Config) -> dict[str, Any]:
    """Return config.json of ``config``."""
    model = config.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ff_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": config.model.num_query_groups,
        "head_dim": model.kv_hidden_size,
        "hidden_act": _THEIR_ACTIVATIONS[model.activation],
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "attention_bias": model.hidden_bias,
        "mlp_bias": model.hidden_bias,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,  # which their model does not have: read back by ours alone
        "tie_word_embeddings": not model.untie_embeddings,
        "rope_theta": config.model.rotary_base,  # of transformers up to 4, which look here
        "rope_scaling": _rope(config) if config.model.rotary_scaling != "none" else None,
        "rope_parameters": {**_rope(config), "rope_theta": config.model.rotary_base},
    }


def _rope(config: Config) -> dict[str, Any]:
    kind = {"none": "default"}.get(config.model.rotary_scaling, config.model.rotary_scaling)
    return {"rope_type": kind, **{key: getattr(config.model, _SCALING[key]) for key in _OF_SCALING[kind]}}


def values(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return flat fields of our configuration of their config.json.

    Raises:
        CheckpointError: listing the settings that our LLaMA does not have.
    """
    activation, biases = theirs.get("hidden_act", "silu"), theirs.get("attention_bias", False)
    rotary, found = _rotary(theirs)
    if activation not in _ACTIVATIONS:
        found.append(f"hidden_act {activation!r} (known: {', '.join(_ACTIVATIONS)})")
    if theirs.get("mlp_bias", False) != biases:
        found.append(f"attention_bias {biases} with mlp_bias {not biases} (known: both, or none)")
    if found:
        raise CheckpointError(f"our LLaMA has no counterpart of these settings: {'; '.join(found)}")
    size, heads = theirs["hidden_size"], theirs["num_attention_heads"]
    return {
        "num_layers": theirs["num_hidden_layers"],
        "hidden_size": size,
        "num_attention_heads": heads,
        "num_query_groups": theirs.get("num_key_value_heads") or heads,
        "kv_hidden_size": theirs.get("head_dim") or size // heads,
        "ff_hidden_size": theirs["intermediate_size"],
        "activation": _ACTIVATIONS[activation],
        "hidden_bias": biases,
        "layernorm_epsilon": theirs.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": theirs.get("max_position_embeddings", 2048),
        "vocab_size": theirs["vocab_size"],
        "untie_embeddings": not theirs.get("tie_word_embeddings", False),
        "attention_dropout": theirs.get("attention_dropout") or 0.0,
        "hidden_dropout": theirs.get("hidden_dropout", 0.0),
        "init_method_std": theirs.get("initializer_range", 0.02),
        **rotary,
    }


def _rotary(theirs: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return our fields of the rotary positions, and which of their settings have no counterpart.

    Since transformers 5 everything stands in ``rope_parameters``; before, ``rope_theta`` stood beside ``rope_scaling``,
    whose kind was called ``type`` at first.
    """
    given = dict(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {})
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    base = given.pop("rope_theta", theirs.get("rope_theta", 10000.0))
    if kind not in _OF_SCALING:
        return {}, [f"rope_type {kind!r} (known: {', '.join(_OF_SCALING)})"]
    odd = [f"{key} of rope_type {kind!r}" for key in given if key not in _OF_SCALING[kind]]
    missing = [f"rope_type {kind!r} without {key}" for key in _OF_SCALING[kind] if key not in given]
    if odd or missing:
        return {}, odd + missing
    scaled = {_SCALING[key]: given[key] for key in _OF_SCALING[kind]}
    return {"rotary_base": float(base), "rotary_scaling": {"default": "none"}.get(kind, kind), **scaled}, []


FORMAT = HFFormat(
    model_types=("llama",),
    problems=problems,
    fields=fields,
    values=values,
    **by_recipes(recipes, heights),
    word=_WORD,
    unread=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    allowed=1e-5,  # their norms and angles are in fp32
)
