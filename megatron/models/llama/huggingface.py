"""Decoders with RMS norms, rotary positions and a gated activation from Hugging Face's classes and back, bit for bit.

One table of names for all, and a ``Preset`` for each ``model_type``: which of our settings it always has, which its
config.json says. The type of a model of ours is the first that can hold all of its settings, in this order:

| model_type | what it has |
|---|---|
| llama | biases everywhere or nowhere; no windows |
| mistral | a window in all layers or in none |
| qwen2 | biases on queries, keys and values; windows by layer (Qwen 2 and 2.5) |
| qwen3 | a norm of each query and key head; windows by layer |
| gemma2 | norms on both sides, less 1; a scaled embedding; soft-caps; windows by layer |
| gemma3_text | the same with norms of heads, no soft-cap of scores, a base of its own in layers with a window |
| olmo2 | norms behind the parts, and over all query and all key heads |
| mixtral, qwen3_moe, qwen2_moe, glm4_moe | experts (``huggingface_experts``) in a mistral, qwen3, qwen2 and a llama |

| ours | theirs | change |
|---|---|---|
| embedding.word.weight [v, h] | model.embed_tokens.weight | |
| layers.{i}.attention.query_key_value.* | ...self_attn.q_proj.*, .k_proj.*, .v_proj.* | queries, key, value per group |
| layers.{i}.attention.query_norm, .key_norm | ...self_attn.q_norm, .k_norm | |
| layers.{i}.attention.dense.* | ...self_attn.o_proj.* | |
| layers.{i}.mlp.up.* | ...mlp.gate_proj.*, .up_proj.* | gate, value per row |
| layers.{i}.mlp.down.* | ...mlp.down_proj.* | |
| final_norm.weight | model.norm.weight | |
| head.weight (only when untied) | lm_head.weight | |

Norms of a layer have other names there by their placement:

| ours | before | both | after |
|---|---|---|---|
| input_norm | input_layernorm | input_layernorm | |
| attention_output_norm | | post_attention_layernorm | post_attention_layernorm |
| post_attention_norm | post_attention_layernorm | pre_feedforward_layernorm | |
| mlp_output_norm | | post_feedforward_layernorm | post_feedforward_layernorm |

Their files have the rows of queries and keys for positions that turn halves against each other, as ours. Meta's own
files, and GPT-J's way, turn neighbouring numbers: those must be permuted first, as Hugging Face's converter does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.config import Config
from megatron.config.decoder import ARCHITECTURE, window_pattern
from megatron.config.experts import has_experts
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import (
    HFFormat,
    WeightMapping,
    as_it_is,
    by_recipes,
    leave_as_it_is,
    other_settings,
)
from megatron.models.llama.huggingface_experts import (
    GLM4,
    MIXTRAL,
    QWEN2,
    QWEN3,
    ExpertNames,
    expert_fields,
    expert_problems,
    expert_recipes,
    expert_values,
)
from megatron.models.llama.huggingface_rotary import ROTARY_KEYS, rotary_fields, rotary_values

_ACTIVATIONS = {
    "silu": "gated-silu",
    "swish": "gated-silu",
    "gelu_pytorch_tanh": "gated-gelu",
    "gelu_new": "gated-gelu",
}
_THEIR_ACTIVATIONS = {"gated-silu": "silu", "gated-gelu": "gelu_pytorch_tanh"}
_BEFORE = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_AFTER = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_NORMS = {
    "before": _BEFORE,
    "after": _AFTER,
    "both": {**_BEFORE, "post_attention_norm": "pre_feedforward_layernorm", **_AFTER},
}
_WORD, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SLIDING, _FULL = "sliding_attention", "full_attention"
_OF_ALL = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
_WINDOW_KEYS = frozenset(
    {"sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "sliding_window_pattern"}
)
_WINDOWS = {"window_size", "window_attn_skip_freq"}
_ROTARY_BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb(_local)?\.(original_)?inv_freq")
"""Buffers that older versions saved, per layer or once for the model."""
_REFUSED = {"use_mrope": False, "use_bidirectional_attention": False, "quantization_config": None}
"""What changes numbers and no model of ours has -> the value that may stand there, or None."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One ``model_type``.

    Args:
        architecture: their class.
        fixed: our settings that it has, where they are not those of a GPT-2 or ``_OF_ALL``.
        free: our settings that config.json says, beside sizes, rotary positions and biases.
        defaults: what their class takes where config.json is silent; None where there is nothing.
        biases: whether all products may have biases.
        window: all: in all layers; layer: in some of them.
        is_divided: the hidden size must be a multiple of the heads.
        experts: how it has experts; None: its layers are dense.
    """

    model_type: str
    architecture: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: bool = False
    window: str = ""
    is_divided: bool = False
    experts: ExpertNames | None = None

    @property
    def is_gemma(self) -> bool:
        return self.model_type.startswith("gemma")

    @property
    def activation(self) -> str:
        """Their name of the activation."""
        return "hidden_activation" if self.is_gemma else "hidden_act"


_GEMMA = {"layernorm_1p": True, "norm_placement": "both", "scale_embeddings": True}
_OF_GEMMA = {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_OF_QWEN = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
PRESETS = (
    Preset(model_type="llama", architecture="LlamaForCausalLM", biases=True, is_divided=True),
    Preset(
        model_type="mistral",
        architecture="MistralForCausalLM",
        free=frozenset(_WINDOWS),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        window="all",
    ),
    Preset(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        fixed={"add_qkv_bias": True},
        free=frozenset(_WINDOWS),
        defaults=_OF_QWEN,
        window="layer",
    ),
    Preset(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        fixed={"qk_norm": "head"},
        free=frozenset(_WINDOWS),
        defaults={**_OF_QWEN, "head_dim": 128},
        window="layer",
    ),
    Preset(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        fixed=_GEMMA,
        free=frozenset({*_WINDOWS, "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping"}),
        defaults={
            **_OF_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "sliding_window_pattern": 2,
        },
        window="layer",
        is_divided=True,
    ),
    Preset(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        fixed={**_GEMMA, "qk_norm": "head"},
        free=frozenset({*_WINDOWS, "softmax_scale", "final_logit_softcapping", "rotary_local_base"}),
        defaults={
            **_OF_GEMMA, "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
        },
        window="layer",
        is_divided=True,
    ),
    Preset(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        fixed={"norm_placement": "after", "qk_norm": "all"},
        defaults={"rms_norm_eps": 1e-5},
    ),
    Preset(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        free=frozenset(_WINDOWS),
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            **MIXTRAL.defaults,
        },
        window="all",
        experts=MIXTRAL,
    ),
    Preset(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        fixed={"qk_norm": "head"},
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, **QWEN3.defaults},
        experts=QWEN3,
    ),
    Preset(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        fixed={"add_qkv_bias": True},
        defaults={"num_key_value_heads": 16, "max_position_embeddings": 32768, **QWEN2.defaults},
        experts=QWEN2,
    ),
    Preset(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        free=frozenset({"qk_norm", "add_qkv_bias", "rotary_percent"}),
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **GLM4.defaults,
        },
        experts=GLM4,
    ),
)  # fmt: skip
"""In the order in which a model of ours looks for its type."""


# Weights: the names depend on our settings alone.


def recipes(preset: Preset, config: Config) -> dict[str, WeightMapping]:
    """Return how each of our weights is made of theirs."""
    model = config.model
    found = {
        "embedding.word.weight": WeightMapping((_WORD,)),
        "final_norm.weight": WeightMapping(("model.norm.weight",)),
    }
    for i in range(model.num_layers):
        at, there = f"layers.{i}", f"model.layers.{i}"
        for ours, theirs in _NORMS[model.norm_placement].items():
            found[f"{at}.{ours}.weight"] = WeightMapping((f"{there}.{theirs}.weight",))
        for name in ("query", "key") if model.qk_norm != "none" else ():
            found[f"{at}.attention.{name}_norm.weight"] = WeightMapping((f"{there}.self_attn.{name[0]}_norm.weight",))
        for kind in ("weight", "bias") if model.hidden_bias or model.add_qkv_bias else ("weight",):
            heads = tuple(f"{there}.self_attn.{name}_proj.{kind}" for name in "qkv")
            found[f"{at}.attention.query_key_value.{kind}"] = WeightMapping(heads, blocks=model.num_query_groups)
        for kind in ("weight", "bias") if model.hidden_bias else ("weight",):
            found[f"{at}.attention.dense.{kind}"] = WeightMapping((f"{there}.self_attn.o_proj.{kind}",))
            if preset.experts is not None and has_experts(model, i):
                found |= expert_recipes(preset.experts, model, at, there)
                continue
            gated = tuple(f"{there}.mlp.{name}_proj.{kind}" for name in ("gate", "up"))
            found[f"{at}.mlp.up.{kind}"] = WeightMapping(gated, blocks=model.ff_hidden_size)
            found[f"{at}.mlp.down.{kind}"] = WeightMapping((f"{there}.mlp.down_proj.{kind}",))
    if model.untie_embeddings:
        found["head.weight"] = WeightMapping((_HEAD,))
    return found


def heights(config: Config) -> dict[str, int]:
    """Return the rows of queries, keys and values, which differ, by the end of their names."""
    queries = config.model.attention_size
    keys = config.model.num_query_groups * config.model.kv_hidden_size
    sizes = {"q": queries, "k": keys, "v": keys}
    return {f"{name}_proj.{kind}": rows for name, rows in sizes.items() for kind in ("weight", "bias")}


# Settings, ours to theirs.


def problems(preset: Preset, config: Config) -> Iterator[str]:
    """Yield what of ``config`` the type cannot hold."""
    model, title = config.model, preset.model_type
    free = {*preset.free, "rotary_scaling", *(["num_experts"] if preset.experts is not None else [])}
    yield from other_settings(model, {**_OF_ALL, **preset.fixed}, free=free)
    if preset.experts is not None:
        yield from expert_problems(preset.experts, model)
    if preset.experts is GLM4 and model.qk_norm == "all":
        yield "--qk-norm must be none or head there, got all"
    if model.activation not in _THEIR_ACTIVATIONS:
        yield f"{title} has the activation {' or '.join(_THEIR_ACTIVATIONS)} there, got {model.activation}"
    if model.hidden_bias and not preset.biases:
        yield f"{title} has no --hidden-bias there, got it"
    if preset.is_divided and model.hidden_size % model.num_attention_heads:
        yield (
            "the hidden size must be a multiple of the heads there, got "
            f"{model.hidden_size} and {model.num_attention_heads}"
        )
    if preset.window == "all" and model.window_size and not all(_pattern(config)):
        yield f"{title} has the window in all layers there, got --window-attn-skip-freq {model.window_attn_skip_freq}"
    if model.softmax_scale and "softmax_scale" in preset.free and _scalar(config) ** -0.5 != model.softmax_scale:
        yield (
            "--softmax-scale must be 1 / sqrt(n) of a whole number n there (query_pre_attn_scalar), got "
            f"{model.softmax_scale!r}"
        )


def fields(preset: Preset, config: Config) -> dict[str, Any]:
    """Return config.json of ``config``."""
    model = config.model
    found = {
        "architectures": [preset.architecture],
        "model_type": preset.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ff_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_hidden_size,
        preset.activation: _THEIR_ACTIVATIONS[model.activation],
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "attention_bias": model.hidden_bias,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,  # which their model does not have: read back by ours alone
        "tie_word_embeddings": not model.untie_embeddings,
        **_window_fields(preset, config),
        **rotary_fields(model, has_local=preset.model_type == "gemma3_text", has_share=preset.experts is GLM4),
        **({} if preset.experts is None else expert_fields(preset.experts, model)),
    }
    if preset.experts is GLM4:
        found |= {"use_qk_norm": model.qk_norm == "head", "attention_bias": model.add_qkv_bias}
    if preset.biases:
        found["mlp_bias"] = model.hidden_bias
    if preset.model_type in ("qwen2", "qwen2_moe"):
        del found["attention_bias"]  # which it always has, and on queries, keys and values alone
    if preset.is_gemma:
        found["query_pre_attn_scalar"] = _scalar(config)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            found[name] = getattr(model, name) or None
    return found


def _scalar(config: Config) -> int:
    """Return the whole number whose root scores are divided by."""
    model = config.model
    return round(model.softmax_scale**-2) if model.softmax_scale else model.kv_hidden_size


def _pattern(config: Config) -> tuple[bool, ...]:
    model = config.model
    if not model.window_size:
        return (False,) * model.num_layers
    return window_pattern(model.window_attn_skip_freq, model.num_layers)


def _window_fields(preset: Preset, config: Config) -> dict[str, Any]:
    """Their window holds the token itself, ours does not."""
    has = _pattern(config)
    size = config.model.window_size + 1 if any(has) else None
    if not preset.window:
        return {}
    if preset.window == "all":
        return {"sliding_window": size}
    found: dict[str, Any] = {"sliding_window": size, "layer_types": [_SLIDING if each else _FULL for each in has]}
    if preset.is_gemma:  # whose class wants a number where no layer reads it, too
        return {**found, "sliding_window": size or preset.defaults["sliding_window"]}
    if size is None:
        return {**found, "use_sliding_window": False}
    return {**found, "use_sliding_window": True, "max_window_layers": has.index(True)}


# Settings, theirs to ours.


def values(preset: Preset, theirs: dict[str, Any]) -> dict[str, Any]:
    """Return flat fields of our configuration of their config.json.

    Raises:
        CheckpointError: listing the settings that no model of ours has.
    """
    given = {**preset.defaults, **theirs}
    activation = given.get(preset.activation) or preset.defaults.get(preset.activation, "silu")
    size, heads, layers = given["hidden_size"], given["num_attention_heads"], given["num_hidden_layers"]
    windows, found = _window_values(preset, given, layers)
    rotary, odd = rotary_values(
        given,
        has_local=preset.model_type == "gemma3_text",
        has_windows="window_size" in windows,
        has_share=preset.experts is GLM4,
    )
    experts, strange = ({}, []) if preset.experts is None else expert_values(preset.experts, given)
    found = [*odd, *found, *strange, *_other_values(preset, given)]
    if activation not in _ACTIVATIONS:
        found.append(f"{preset.activation} {activation!r} (known: {', '.join(_ACTIVATIONS)})")
    if found:
        raise CheckpointError(
            f"our decoders have no counterpart of these settings of a {preset.model_type}: {'; '.join(found)}"
        )
    head = given.get("head_dim") or size // heads
    gemma: dict[str, Any] = {}
    glm: dict[str, Any] = {}
    if preset.experts is GLM4:
        glm = {
            "qk_norm": "head" if given.get("use_qk_norm") else "none",
            "add_qkv_bias": bool(given.get("attention_bias")),
        }
    if preset.is_gemma:
        scalar = given["query_pre_attn_scalar"]
        gemma = {name: float(given.get(name) or 0.0) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
        gemma["softmax_scale"] = 0.0 if scalar == head else scalar**-0.5
    return {
        **_OF_ALL,
        **preset.fixed,
        "num_layers": layers,
        "hidden_size": size,
        "num_attention_heads": heads,
        "num_query_groups": given.get("num_key_value_heads") or heads,
        "kv_hidden_size": head,
        "ff_hidden_size": given["intermediate_size"],
        "activation": _ACTIVATIONS[activation],
        "hidden_bias": preset.biases and given.get("attention_bias", False),
        "layernorm_epsilon": given.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": given.get("max_position_embeddings", 2048),
        "vocab_size": given["vocab_size"],
        "untie_embeddings": not given.get("tie_word_embeddings", False),
        "attention_dropout": given.get("attention_dropout") or 0.0,
        "hidden_dropout": given.get("hidden_dropout", 0.0),
        "init_method_std": given.get("initializer_range", 0.02),
        **gemma,
        **windows,
        **rotary,
        **experts,
        **glm,
    }


_SIZES = {
    "num_hidden_layers": 60,  # a multiple of the periods of windows
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 256,
}
"""Any sizes, for the settings that do not depend on them."""


def architecture(preset: Preset) -> dict[str, Any]:
    """Return our settings of a model of the type, as the defaults of their class make it; sizes are left out."""
    found = values(preset, _SIZES)
    return {name: found[name] for name in ARCHITECTURE if name in found}


def _other_values(preset: Preset, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that change numbers and that a model of ours of this type does not have."""
    for name, only in _REFUSED.items():
        if given.get(name) not in (None, only):
            yield f"{name} {given[name]!r} (known: {only!r})"
    biases = given.get("attention_bias") or False
    if preset.biases and (given.get("mlp_bias") or False) != biases:
        yield f"attention_bias {biases} with mlp_bias {not biases} (known: both, or none)"
    if not preset.biases and not preset.model_type.startswith("qwen2") and preset.experts is not GLM4 and biases:
        yield "attention_bias True (known: False)"
    if preset.model_type == "gemma3_text" and given.get("attn_logit_softcapping"):
        yield f"attn_logit_softcapping {given['attn_logit_softcapping']!r} (known: None; their model passes it over)"


def _window_values(preset: Preset, given: Mapping[str, Any], layers: int) -> tuple[dict[str, Any], list[str]]:
    """Return our fields of the windows, none where there is no window, and what of theirs has no counterpart."""
    kinds, size = given.get("layer_types"), given.get("sliding_window")
    if preset.model_type.startswith("qwen") and not given.get("use_sliding_window", False):
        size = None
    if kinds is not None:
        if strange := sorted({str(kind) for kind in kinds} - {_SLIDING, _FULL}):
            return {}, [f"layer_types with {', '.join(strange)} (known: {_SLIDING}, {_FULL})"]
        if len(kinds) != layers:
            return {}, [f"layer_types of {len(kinds)} layers for num_hidden_layers {layers}"]
    has = [kind == _SLIDING for kind in kinds] if kinds is not None else _default_windows(preset, given, size, layers)
    if not preset.window and (size is not None or any(has)):
        return {}, [f"sliding_window {size!r} with a window in {sum(has)} layers (known: none)"]
    if preset.window == "all" and size is not None and not all(has):
        return {}, [f"layer_types with {_FULL} beside sliding_window {size!r} (known: {_SLIDING} in all layers)"]
    if not any(has):
        return {}, []
    if not isinstance(size, int) or size < 2:
        return {}, [f"sliding_window {size!r} with a window in {sum(has)} layers (known: whole numbers of at least 2)"]
    return {"window_size": size - 1, "window_attn_skip_freq": _skip_freq(has)}, []


def _default_windows(preset: Preset, given: Mapping[str, Any], size: int | None, layers: int) -> list[bool]:
    """Return which layers have a window where ``layer_types`` does not say it."""
    if preset.is_gemma:
        every = given["sliding_window_pattern"]
        return [number % every != 0 for number in range(1, layers + 1)]
    first = given.get("max_window_layers", 0) if preset.window == "layer" else 0
    return [bool(preset.window) and size is not None and layer >= first for layer in range(layers)]


def _skip_freq(has: list[bool]) -> str:
    """Return ``window_attn_skip_freq`` with which these layers have the window."""
    if all(has):
        return ""
    for every in range(2, len(has) + 1):
        if tuple(has) == window_pattern(str(every), len(has)):
            return str(every)
    return f"[{','.join(str(int(each)) for each in has)}]"


def _named(name: str, config: Config) -> str | None:
    """Return ``name``; None of a layer behind the last, which GLM 4 predicts further tokens with."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return None if layer is not None and int(layer[1]) >= config.model.num_layers else name


def _one_by_one(theirs: Any, config: Config) -> None:
    """Let their experts compute one after another: their grouped products, which are the default, know no fp64."""
    theirs.set_experts_implementation("eager")


def _needs(preset: Preset) -> tuple[str, ...]:
    """Return the sizes that a model of the type cannot be without."""
    if preset.experts is None:
        return ()
    return ("num_experts", *(("moe_shared_expert_intermediate_size",) if preset.experts is QWEN2 else ()))


def _format(preset: Preset) -> HFFormat:
    return HFFormat(
        model_types=(preset.model_type,),
        problems=partial(problems, preset),
        fields=partial(fields, preset),
        values=partial(values, preset),
        **by_recipes(partial(recipes, preset), heights),
        word=_WORD,
        groups=(ROTARY_KEYS, _WINDOW_KEYS),
        unread=_ROTARY_BUFFERS,
        named=_named if preset.experts is GLM4 else as_it_is,
        prepare=_one_by_one if preset.experts is not None else leave_as_it_is,
        allowed=1e-5,  # their norms and angles are in fp32
        architecture=partial(architecture, preset),
        fixed={**_OF_ALL, **preset.fixed},
        needs=_needs(preset),
    )


FORMATS = tuple(_format(preset) for preset in PRESETS)
FORMAT = FORMATS[0]
"""Of ``llama`` itself; weights have the same names in all."""
