"""The table of dense Hugging Face types that ``huggingface_dense`` converts.

| model_type | mechanisms, in addition to LLaMA's |
|---|---|
| olmo3 | as olmo2, with windows per layer; layers with a window have separate rotary parameters |
| seed_oss | biases of queries, keys and values only, of all linear layers, or none |
| ernie4_5 | rotary pairs of adjacent elements |
| ministral3 | windows in all layers or none; a temperature of late queries |
| granite | factors of the embedding, residual branches, scores and logits; also the export of MiniCPM |
| phi3 | packed projections, LongRoPE, partial rotary positions, windows in all layers or none |
| stablelm | layer norms, partial rotary positions, optionally norms with weights per head and parallel attention |
| apertus | xIELU without a gate, head norms |
| arcee | squared ReLU without a gate |
| nemotron | layer norms stored minus 1, squared ReLU without a gate, partial rotary positions |
| cohere2 | layer norms without bias, parallel attention, a logit scale, rotary positions in layers with a window only |
| hunyuan_v1_dense | head norms after the rotation |
| glm4 | norms before and after, packed gate, partial rotary positions of adjacent elements |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from megatron.config.decoder import SEQUENTIAL, SHARED_NORM, window_layers
from megatron.config.layer_features import no_rope_layers
from megatron.config.model import ModelConfig
from megatron.models.llama.huggingface_dense import (
    PRE_NORMS,
    BiasKeys,
    DenseType,
    Problems,
    make_format,
)
from megatron.models.llama.huggingface_extras import format_no_rope
from megatron.models.llama.huggingface_rotary import rotary_fields
from megatron.models.llama.huggingface_windows import FULL, SLIDING

_LENGTH_KEY, _BETA_KEY = "original_max_position_embeddings", "llama_4_scaling_beta"
_SQUARED_RELU = {"relu2": "squared-relu"}
_ALL_BIASES = BiasKeys(query_key_value="attention_bias", output="attention_bias", feed_forward="mlp_bias")
_ATTENTION_BIASES = BiasKeys(query_key_value="attention_bias", output="attention_bias")
_POST_NORMS = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}


def shortest_decimal(approximation: float, is_exact: Callable[[float], bool]) -> float:
    """Return the decimal with the fewest digits near ``approximation`` for which ``is_exact`` returns True.

    If there is none, return ``approximation``.
    """
    for num_digits in range(17):
        candidate = float(f"{approximation:.{num_digits}e}")
        if is_exact(candidate):
            return candidate
    return approximation


# OLMo 3: separate rotary parameters of layers with and without a window.


def _olmo3_rotary(model: ModelConfig, common: dict[str, Any]) -> dict[str, Any]:
    return rotary_fields(model, has_local=True, is_nested=True)


def _olmo3_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    rope = settings.get("rope_parameters")
    if rope and not {FULL, SLIDING} & rope.keys():
        return {}, [f"rope_parameters with {', '.join(rope)} (supported: parameters for {FULL} and {SLIDING})"]
    return {}, []


# Ministral 3: the factor of late queries is part of the rotary parameters.


def _ministral3_rotary(model: ModelConfig, common: dict[str, Any]) -> dict[str, Any]:
    scaled = common["rope_scaling"] or {"rope_type": "default"}
    floor = model.attention_temperature_floor if model.attention_temperature_scale else model.max_position_embeddings
    return {
        "rope_parameters": {
            _LENGTH_KEY: floor,
            **scaled,
            "rope_theta": model.rotary_base,
            _BETA_KEY: model.attention_temperature_scale,
        }
    }


def _ministral3_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    rope = dict(settings.get("rope_scaling") or settings["rope_parameters"])
    beta, _ = rope.pop(_BETA_KEY, None), rope.pop("max_position_embeddings", None)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    floor = rope.get(_LENGTH_KEY)
    if rope_type not in ("llama3", "yarn", "longrope"):
        rope.pop(_LENGTH_KEY, None)
    elif floor is None:
        floor = settings["max_position_embeddings"]
    settings |= {"rope_parameters": rope, "rope_scaling": None}
    if beta is None or floor is None:
        return {}, [f"rope_parameters without {_BETA_KEY if beta is None else _LENGTH_KEY}"]
    if not beta:
        return {}, []
    return {"attention_temperature_scale": float(beta), "attention_temperature_floor": floor}, []


def _ministral3_problems(model: ModelConfig) -> Iterator[str]:
    floor, length = model.attention_temperature_floor, model.rotary_original_positions
    has_length = model.rotary_scaling in ("llama3", "yarn", "longrope")
    if model.attention_temperature_scale and has_length and floor != length:
        yield (
            "--attention-temperature-floor must equal --rotary-original-positions, because config.json has one key "
            f"for both, got {floor} and {length}"
        )


# Granite: four factors. The scalings of MiniCPM are the same factors, given by other numbers.


def granite_fields(model: ModelConfig) -> dict[str, Any]:
    logit_multiplier = model.logit_multiplier
    return {
        "embedding_multiplier": model.embedding_multiplier,
        "logits_scaling": shortest_decimal(1.0 / logit_multiplier, lambda scaling: 1.0 / scaling == logit_multiplier),
        "residual_multiplier": model.residual_multiplier,
        "attention_multiplier": model.softmax_scale or model.kv_hidden_size**-0.5,
    }


def granite_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    numbers = {
        name: settings[name]
        for name in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    }
    unsupported = [f"{name} {number!r} (supported: above 0)" for name, number in numbers.items() if number <= 0]
    if unsupported:
        return {}, unsupported
    hidden_size, residual = settings["hidden_size"], float(numbers["residual_multiplier"])
    attention, logit_multiplier = float(numbers["attention_multiplier"]), 1.0 / numbers["logits_scaling"]
    root = math.sqrt(settings["num_hidden_layers"])
    base = round(hidden_size * logit_multiplier)
    is_base_width = base >= 1 and base / hidden_size == logit_multiplier
    return {
        "embedding_multiplier": float(numbers["embedding_multiplier"]),
        "residual_scale": 0.0 if residual == 1.0 else shortest_decimal(residual * root, lambda x: x / root == residual),
        "softmax_scale": 0.0 if attention == settings["head_dim"] ** -0.5 else attention,
        "dim_model_base": base if is_base_width and base != hidden_size else 0,
        "logit_scale": 1.0 if is_base_width else logit_multiplier,
    }, []


# Phi 3: LongRoPE, whose original length is a key of its own.


def _phi3_rotary(model: ModelConfig, common: dict[str, Any]) -> dict[str, Any]:
    scaled = common["rope_scaling"]
    if scaled is None:
        return {**common, _LENGTH_KEY: model.max_position_embeddings}
    length = scaled.pop(_LENGTH_KEY)
    if scaled["factor"] == model.max_position_embeddings / length:
        del scaled["factor"]  # what the class derives
    return {**common, "rope_scaling": scaled, _LENGTH_KEY: length}


def _phi3_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    rope = dict(settings.get("rope_scaling") or settings.get("rope_parameters") or {})
    rope_type = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if rope_type in ("su", "yarn"):  # former names
        rope_type = "longrope"
    if rope_type not in ("default", "longrope"):
        return {}, [f"rope_type {rope_type!r} (supported: default, longrope)"]
    length = {_LENGTH_KEY: settings[_LENGTH_KEY]} if rope_type == "longrope" else {}
    settings |= {"rope_parameters": {**rope, **length, "rope_type": rope_type}, "rope_scaling": None}
    return {}, []


def _phi3_problems(model: ModelConfig) -> Iterator[str]:
    if model.rotary_scaling not in ("none", "longrope"):
        yield f"--rotary-scaling must be none or longrope, got {model.rotary_scaling}"
    head_size, num_heads, hidden_size = model.kv_hidden_size, model.num_attention_heads, model.hidden_size
    if model.rotary_scaling == "longrope" and head_size != hidden_size // num_heads:
        yield (
            "--kv-hidden-size must be --hidden-size / --num-attention-heads with longrope, got "
            f"{head_size} and {hidden_size} / {num_heads}"
        )


# StableLM: two switches.


def _stablelm_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "use_parallel_residual": model.parallel_residual == SHARED_NORM,
        "qk_layernorm": model.qk_norm == "per-head",
    }


def _stablelm_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    return {
        "parallel_residual": SHARED_NORM if settings.get("use_parallel_residual") else SEQUENTIAL,
        "qk_norm": "per-head" if settings.get("qk_layernorm") else "none",
    }, []


def _stablelm_problems(model: ModelConfig) -> Iterator[str]:
    if model.parallel_residual not in (SEQUENTIAL, SHARED_NORM):
        yield f"--parallel-residual must be {SEQUENTIAL} or {SHARED_NORM}, got {model.parallel_residual}"
    if model.qk_norm not in ("none", "per-head"):
        yield f"--qk-norm must be none or per-head, got {model.qk_norm}"


# Cohere 2: rotary positions only in layers with a window, and a factor of the logits.


def _cohere2_fields(model: ModelConfig) -> dict[str, Any]:
    return {"logit_scale": model.logit_scale}


def _cohere2_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    num_layers, period = settings["num_hidden_layers"], settings["sliding_window_pattern"]
    layer_types = settings.get("layer_types")
    if layer_types is None:
        layer_types = [FULL if layer % period == 0 else SLIDING for layer in range(1, num_layers + 1)]
    if settings["sliding_window"] is None or SLIDING not in layer_types:
        return {}, [f"layers without a window only, which have no positions (supported: {SLIDING} in some layers)"]
    no_rope_freq = format_no_rope([layer_type != SLIDING for layer_type in layer_types])
    return {"logit_scale": float(settings["logit_scale"]), "no_rope_freq": no_rope_freq}, []


def _cohere2_problems(model: ModelConfig) -> Iterator[str]:
    has_window, has_rope = window_layers(model), [not x for x in no_rope_layers(model.no_rope_freq, model.num_layers)]
    if not any(has_window) or list(has_window) != has_rope:
        yield (
            "layers must have rotary positions exactly if they have a window, got --window-size "
            f"{model.window_size}, --window-attn-skip-freq {model.window_attn_skip_freq or 'of all layers'} and "
            f"--no-rope-freq {model.no_rope_freq or 'of no layer'}"
        )


# Hunyuan: a rotary base that is stretched by a fixed number.


def _hunyuan_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    """Convert ``rope_type`` dynamic with ``alpha``, whose frequencies do not depend on the length, to a rotary base."""
    rope = dict(settings.get("rope_scaling") or settings.get("rope_parameters") or {})
    rope_type, alpha = rope.get("rope_type", rope.get("type", "default")), rope.get("alpha")
    if rope_type == "dynamic" and alpha:
        head_size = settings["head_dim"]
        base = rope.get("rope_theta", settings.get("rope_theta", 10000.0)) * alpha ** (head_size / (head_size - 2))
        settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": base}, "rope_scaling": None}
    return {}, []


# Apertus and Arcee.


def _apertus_rotary(model: ModelConfig, common: dict[str, Any]) -> dict[str, Any]:
    """Return the entries with ``rope_scaling`` set, because the class replaces missing parameters by its own."""
    return {**common, "rope_scaling": common["rope_scaling"] or {"rope_type": "default"}}


def _arcee_problems(model: ModelConfig) -> Iterator[str]:
    if model.hidden_size % model.num_attention_heads:
        yield (
            "--hidden-size must be a multiple of --num-attention-heads, got "
            f"{model.hidden_size} and {model.num_attention_heads}"
        )


DENSE_TYPES = (
    DenseType(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        fixed={"norm_placement": "after", "qk_norm": "all"},
        free=frozenset({"rotary_local_base"}),
        defaults={
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "rope_local_base_freq": 500000.0, "sliding_window": 4096, "sliding_window_pattern": 4,
        },
        biases=_ATTENTION_BIASES,
        norms=_POST_NORMS,
        window="layer",
        rotary=_olmo3_rotary,
        values=_olmo3_values,
    ),
    DenseType(
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        free=frozenset({"attention_temperature_scale"}),
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
        },
        default_rope={
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, _LENGTH_KEY: 16384, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, _BETA_KEY: 0.1,
        },
        window="all",
        rotary=_ministral3_rotary,
        values=_ministral3_values,
        problems=_ministral3_problems,
    ),
    DenseType(
        model_type="granite",
        architecture="GraniteForCausalLM",
        free=frozenset({
            "embedding_multiplier", "residual_scale", "softmax_scale", "dim_model_base", "mup_base_hidden_size",
            "logit_scale",
        }),
        defaults={
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
            "residual_multiplier": 1.0, "attention_multiplier": 1.0,
        },
        biases=_ALL_BIASES,
        fields=granite_fields,
        values=granite_values,
    ),
    DenseType(
        model_type="stablelm",
        architecture="StableLmForCausalLM",
        fixed={"normalization": "LayerNorm"},
        free=frozenset({"rotary_percent", "qk_norm", "parallel_residual"}),
        defaults={
            "num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        biases=BiasKeys(query_key_value="use_qkv_bias"),
        epsilon_key="layer_norm_eps",
        query_key_norms=("q_layernorm", "k_layernorm"),
        has_fixed_head_size=True,
        fields=_stablelm_fields,
        values=_stablelm_values,
        problems=_stablelm_problems,
    ),
    DenseType(
        model_type="apertus",
        architecture="ApertusForCausalLM",
        fixed={"qk_norm": "head"},
        defaults={"max_position_embeddings": 65536, "rms_norm_eps": 1e-5},
        default_rope={
            "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, _LENGTH_KEY: 8192, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        biases=_ATTENTION_BIASES,
        activations={"xielu": "xielu"},
        norms={"input_norm": "attention_layernorm", "post_attention_norm": "feedforward_layernorm"},
        rotary=_apertus_rotary,
    ),
    DenseType(
        model_type="arcee",
        architecture="ArceeForCausalLM",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        biases=_ALL_BIASES,
        activations=_SQUARED_RELU,
        problems=_arcee_problems,
    ),
    DenseType(
        model_type="nemotron",
        architecture="NemotronForCausalLM",
        fixed={"normalization": "LayerNorm", "layernorm_1p": True},
        free=frozenset({"rotary_percent"}),
        defaults={
            "max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
            "initializer_range": 0.0134,
        },
        biases=_ALL_BIASES,
        activations=_SQUARED_RELU,
        epsilon_key="norm_eps",
    ),
    DenseType(
        model_type="cohere2",
        architecture="Cohere2ForCausalLM",
        fixed={"normalization": "LayerNorm", "norm_bias": False, "parallel_residual": SHARED_NORM},
        free=frozenset({"no_rope_freq", "logit_scale"}),
        defaults={
            "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True,
            "logit_scale": 0.0625, "sliding_window": 4096, "sliding_window_pattern": 4,
        },
        biases=_ATTENTION_BIASES,
        epsilon_key="layer_norm_eps",
        norms={"input_norm": "input_layernorm"},
        has_adjacent_pairs=True,
        window="layer",
        has_fixed_head_size=True,
        fields=_cohere2_fields,
        values=_cohere2_values,
        problems=_cohere2_problems,
    ),
    DenseType(
        model_type="hunyuan_v1_dense",
        architecture="HunYuanDenseV1ForCausalLM",
        fixed={"qk_norm": "head", "qk_norm_order": "after"},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        biases=_ATTENTION_BIASES,
        query_key_norms=("query_layernorm", "key_layernorm"),
        values=_hunyuan_values,
    ),
    DenseType(
        model_type="glm4",
        architecture="Glm4ForCausalLM",
        fixed={"norm_placement": "both"},
        free=frozenset({"rotary_percent"}),
        defaults={
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07,
            "partial_rotary_factor": 0.5, "attention_bias": True,
        },
        biases=BiasKeys(query_key_value="attention_bias"),
        norms={
            **PRE_NORMS,
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
        has_packed_gate=True,
        has_adjacent_pairs=True,
    ),
    DenseType(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        free=frozenset({"rotary_percent"}),
        defaults={
            "max_position_embeddings": 4096, _LENGTH_KEY: 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
        },
        hidden_dropout_key="resid_pdrop",
        has_packed_query_key_value=True,
        has_packed_gate=True,
        window="all",
        rotary=_phi3_rotary,
        values=_phi3_values,
        problems=_phi3_problems,
    ),
    DenseType(
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6,
            "attention_bias": True, "attention_dropout": 0.1, "residual_dropout": 0.1,
        },
        biases=BiasKeys(
            query_key_value="attention_bias", output="attention_out_bias", feed_forward="mlp_bias"
        ),
        hidden_dropout_key="residual_dropout",
    ),
    DenseType(
        model_type="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        defaults={
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "tie_word_embeddings": True,
        },
        biases=BiasKeys(query_key_value="use_bias", output="use_bias", feed_forward="use_bias"),
        has_adjacent_pairs=True,
    ),
)  # fmt: skip
"""All dense types. Like ``PRESETS``, in the order in which an export tries them, after those of ``PRESETS``."""
DENSE_FORMATS = tuple(make_format(dense_type) for dense_type in DENSE_TYPES)
