"""The Hugging Face types with delta-rule layers.

| model_type | recurrent layers | other layers | feed-forward |
|---|---|---|---|
| qwen3_next | Gated DeltaNet | attention with an output gate, partial rotary positions | experts in most layers |
| qwen3_5_text | Gated DeltaNet | the same | dense |
| qwen3_5_moe_text | Gated DeltaNet | the same | experts in all layers |
| olmo_hybrid | Gated DeltaNet with negative eigenvalues | attention with norms after it | dense |
| kimi_linear | Kimi Delta Attention | multi-latent attention without positions | experts in most layers |
| bailing_hybrid | Kimi Delta Attention with full gates | multi-latent attention with an output gate | the same |

Published folders of Qwen3.5 contain a model that also reads images, model_type qwen3_5 or qwen3_5_moe. An import reads
its text part, as ``Qwen3_5ForCausalLM`` does, and skips the vision weights with a warning. An export writes a folder of
the text type, without vision weights. Published folders stack the experts of a layer in one tensor; transformers saves
one tensor per expert, and so does an export.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron import log
from megatron.config import Config
from megatron.config.layer_types import ATTENTION, has_experts, layer_types
from megatron.config.model import ModelConfig
from megatron.models.common.gated_query_rows import GatedQueryRows
from megatron.models.common.huggingface import WeightMapping
from megatron.models.common.huggingface_mtp import QWEN as QWEN_MTP
from megatron.models.common.stacked_rows import StackedRows
from megatron.models.llama.huggingface_delta import (
    LINEAR,
    delta_problems,
    gated_delta_fields,
    gated_delta_values,
    grouped_recipes,
    layer_fields,
    layer_values,
    packed_recipes,
    separate_recipes,
)
from megatron.models.llama.huggingface_experts import (
    KIMI_LINEAR,
    LING,
    QWEN3_5,
    QWEN3_NEXT,
    ExpertNames,
    expert_fields,
    expert_problems,
    expert_recipes,
    expert_values,
)
from megatron.models.llama.huggingface_hybrid import (
    HybridType,
    Problems,
    Recipes,
    activation_problems,
    attention_recipes,
    make_format,
)
from megatron.models.llama.huggingface_latent import (
    LATENT_SETTINGS,
    latent_fields,
    latent_recipes,
    latent_size_fields,
    latent_size_values,
    latent_values,
)
from megatron.models.llama.huggingface_rotary import rotary_fields, rotary_values
from megatron.models.llama.huggingface_windows import FULL

_GATED_DELTA, _KIMI_DELTA = "gated_delta_net", "kimi_delta"
_SILU = ("silu", "swish")


def _norm_recipes(ours: str, theirs: str, names: dict[str, str]) -> Recipes:
    return {
        f"{ours}.{our_name}.weight": WeightMapping((f"{theirs}.{hf_name}.weight",))
        for our_name, hf_name in names.items()
    }


def _gated_mlp_recipes(model: ModelConfig, ours: str, theirs: str) -> Recipes:
    gate_and_up = tuple(f"{theirs}.{name}_proj.weight" for name in ("gate", "up"))
    return {
        f"{ours}.up.weight": WeightMapping(gate_and_up, num_blocks=model.ff_hidden_size),
        f"{ours}.down.weight": WeightMapping((f"{theirs}.down_proj.weight",)),
    }


def _feed_forward_recipes(
    model: ModelConfig, names: ExpertNames | None, layer_idx: int, ours: str, theirs: str
) -> Recipes:
    if names is not None and has_experts(model, layer_idx):
        return expert_recipes(names, model, ours, theirs)
    return _gated_mlp_recipes(model, f"{ours}.mlp", f"{theirs}.mlp")


def _common_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": model.ff_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        **layer_fields(model),
    }


def _common_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    num_heads = settings["num_attention_heads"]
    unsupported = activation_problems(settings, "hidden_act", _SILU)
    unsupported += ["attention_bias True (supported: False)"] if settings.get("attention_bias") else []
    return {
        "num_attention_heads": num_heads,
        "num_query_groups": settings.get("num_key_value_heads") or num_heads,
        "kv_hidden_size": settings.get("head_dim") or settings["hidden_size"] // num_heads,
        "max_position_embeddings": settings["max_position_embeddings"],
    }, unsupported


# Qwen3-Next and Qwen3.5.

_QWEN_NORMS = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""Rotary parameters for images and videos. They have no effect on text, where all parts of a position are equal."""
_VISION_PREFIX, _TEXT_PREFIX = "model.visual.", "model.language_model."


def _qwen_recipes(
    names: ExpertNames | None,
    mixer_recipes: Callable[[ModelConfig, str, str], Recipes],
    model: ModelConfig,
    layer_idx: int,
    ours: str,
    theirs: str,
) -> Recipes:
    mappings = _norm_recipes(ours, theirs, _QWEN_NORMS)
    mappings |= _feed_forward_recipes(model, names, layer_idx, ours, theirs)
    if layer_types(model)[layer_idx].mixer != ATTENTION:
        return mappings | mixer_recipes(model, f"{ours}.recurrent", f"{theirs}.linear_attn")
    attention, hf_attention = f"{ours}.attention", f"{theirs}.self_attn"
    group_rows = 2 * model.attention_size // model.num_query_groups
    query_key_value = WeightMapping(
        tuple(f"{hf_attention}.{name}_proj.weight" for name in "qkv"),
        num_blocks=model.num_query_groups,
        row_orders=(GatedQueryRows(group_rows, model.kv_hidden_size), None, None),
    )
    head_norms = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
    return {
        **mappings,
        **attention_recipes(model, attention, hf_attention),
        f"{attention}.query_key_value.weight": query_key_value,
        **_norm_recipes(ours, theirs, head_norms),
    }


def _qwen_fields(names: ExpertNames | None, model: ModelConfig) -> dict[str, Any]:
    return {
        **_common_fields(model),
        "head_dim": model.kv_hidden_size,
        **gated_delta_fields(model),
        **rotary_fields(model, has_local=False, has_partial_rotary=True),
        **({} if names is None else expert_fields(names, model)),
    }


def _qwen_values(names: ExpertNames | None, settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    if "text_config" in settings:
        settings |= {key: value for key, value in settings.pop("text_config").items() if key != "model_type"}
    interval = settings.get("full_attention_interval") or 4
    types = settings.get("layer_types")
    if types is None:
        types = [LINEAR if layer % interval else FULL for layer in range(1, settings["num_hidden_layers"] + 1)]
    layers, unsupported_layers = layer_values(_GATED_DELTA, types, settings["num_hidden_layers"])
    for key in ("rope_parameters", "rope_scaling"):
        if settings.get(key) is not None:
            settings[key] = {name: value for name, value in settings[key].items() if name not in _MROPE_KEYS}
    rotary, unsupported_rotary = rotary_values(
        settings, has_local=False, has_windows=False, has_partial_rotary=True, default_share=0.25
    )
    experts, unsupported_experts = ({}, []) if names is None else expert_values(names, settings)
    common, unsupported = _common_values(settings)
    # without dense layers this size has no effect
    ff_size = (
        settings.get("intermediate_size") or settings["intermediate_size" if names is None else names.ffn_size_key]
    )
    return {
        **common,
        "ff_hidden_size": ff_size,
        **layers,
        **gated_delta_values(settings),
        **rotary,
        **experts,
    }, [*unsupported, *unsupported_layers, *unsupported_rotary, *unsupported_experts]


def _qwen_problems(names: ExpertNames | None, model: ModelConfig) -> Iterator[str]:
    yield from delta_problems(model, _GATED_DELTA, linear_norm_placement="same")
    if names is not None:
        yield from expert_problems(names, model)


def _rename_qwen(name: str, config: Config) -> str | None:
    """Return the name of the text model's tensor; None for vision tensors and unused multi-token prediction layers."""
    if name.startswith(_VISION_PREFIX):
        log.warn_once(f"skipping the tensors {_VISION_PREFIX}*: only the text model is supported, not images")
        return None
    if name.startswith("mtp.") and not config.model.mtp_num_layers:
        return None
    return name.replace(_TEXT_PREFIX, "model.", 1) if name.startswith(_TEXT_PREFIX) else name


def _unpack_experts(name: str, shape: Sequence[int]) -> dict[str, StackedRows]:
    """Return the weights of the experts in the tensors of published Qwen3.5 folders, which stack all experts.

    ``gate_up_proj`` is [E, 2 f, h], first the rows of the gate, then of the value. ``down_proj`` is [E, h, f].
    """
    match = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up|down)_proj", name)
    if match is None:
        return {}
    num_experts, num_rows = shape[:2]
    projections = ("gate", "up") if match[2] == "gate_up" else ("down",)
    height = num_rows // len(projections)
    return {
        f"{match[1]}.{idx}.{projection}_proj.weight": StackedRows(idx, part * height, (part + 1) * height)
        for idx in range(num_experts)
        for part, projection in enumerate(projections)
    }


_QWEN_SETTINGS = {
    "position_embedding_type": "rope", "layernorm_1p": True, "qk_norm": "head", "attention_output_gate": True,
    "activation": "gated-silu", "experimental_attention_variant": _GATED_DELTA,
}  # fmt: skip
_QWEN_FREE = frozenset({"rotary_percent", "rotary_scaling", "rotary_truncate"})
_QWEN_DEFAULTS = {
    "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip


def _qwen_functions(
    names: ExpertNames | None, mixer_recipes: Callable[[ModelConfig, str, str], Recipes]
) -> dict[str, Any]:
    """Return the parts of ``HybridType`` that the types of Qwen share."""
    return {
        "fixed": _QWEN_SETTINGS,
        "free": _QWEN_FREE if names is None else _QWEN_FREE | {"num_experts"},
        "layer_recipes": partial(_qwen_recipes, names, mixer_recipes),
        "fields": partial(_qwen_fields, names),
        "values": partial(_qwen_values, names),
        "problems": partial(_qwen_problems, names),
        "mtp": QWEN_MTP,
        "rename_tensor": _rename_qwen,
        "unpack": _unpack_experts,
        "is_selectable": True,
        "only_values": {"attn_output_gate": True},
        "required_fields": () if names is None else ("num_experts", "moe_shared_expert_intermediate_size"),
    }


# OLMo Hybrid. Layers with attention have norms after attention and feed-forward, other layers have them before.

_OLMO_EPSILON = 1e-5
"""Epsilon of the output norm, which is a constant in the class."""
_OLMO_NORMS = {
    LINEAR: {"input_norm": "attention_layer_norm", "post_attention_norm": "feedforward_layer_norm"},
    FULL: {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
}
_OLMO_CLASS_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
"""Norm in the class -> norm in published files, for layers without attention."""


def _olmo_recipes(model: ModelConfig, layer_idx: int, ours: str, theirs: str) -> Recipes:
    is_linear = layer_types(model)[layer_idx].mixer != ATTENTION
    mappings = _norm_recipes(ours, theirs, _OLMO_NORMS[LINEAR if is_linear else FULL])
    mappings |= _gated_mlp_recipes(model, f"{ours}.mlp", f"{theirs}.mlp")
    if is_linear:
        return mappings | separate_recipes(model, f"{ours}.recurrent", f"{theirs}.linear_attn")
    head_norms = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
    return {
        **mappings,
        **attention_recipes(model, f"{ours}.attention", f"{theirs}.self_attn"),
        **_norm_recipes(ours, theirs, head_norms),
    }


def _olmo_fields(model: ModelConfig) -> dict[str, Any]:
    rotary = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": None}}
    return {
        **_common_fields(model),
        **gated_delta_fields(model),
        "linear_allow_neg_eigval": model.linear_allow_neg_eigval,
        **(rotary_fields(model, has_local=False) if model.position_embedding_type == "rope" else rotary),
    }


def _olmo_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    num_heads, hidden_size, num_layers = (
        settings[key] for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    settings["head_dim"] = hidden_size // num_heads
    num_keys = settings["linear_num_key_heads"] = settings.get("linear_num_key_heads") or num_heads
    settings["linear_num_value_heads"] = settings.get("linear_num_value_heads") or num_heads
    key_size = settings["linear_key_head_dim"] = settings.get("linear_key_head_dim") or int(
        0.75 * hidden_size / num_keys
    )
    settings["linear_value_head_dim"] = settings.get("linear_value_head_dim") or 2 * key_size
    types = settings.get("layer_types")
    if types is None and num_layers < 4:
        types = [LINEAR] * (num_layers - 1) + [FULL]
    layers, unsupported_layers = layer_values(_GATED_DELTA, types, num_layers)
    rotary: dict[str, Any] = {"position_embedding_type": "none"}
    unsupported_rotary: Problems = []
    saved = settings.get("rope_parameters") or {}
    if saved.get("rope_theta", settings.get("rope_theta", 10000.0)) is not None:
        rotary, unsupported_rotary = rotary_values(settings, has_local=False, has_windows=False)
        rotary["position_embedding_type"] = "rope"
    common, unsupported = _common_values(settings)
    return {
        **common,
        "ff_hidden_size": settings["intermediate_size"],
        **layers,
        **gated_delta_values(settings),
        "linear_allow_neg_eigval": settings["linear_allow_neg_eigval"],
        "linear_norm_epsilon": _OLMO_EPSILON,
        **rotary,
    }, [*unsupported, *unsupported_layers, *unsupported_rotary]


def _olmo_problems(model: ModelConfig) -> Iterator[str]:
    yield from delta_problems(
        model,
        _GATED_DELTA,
        linear_allow_neg_eigval=model.linear_allow_neg_eigval,
        linear_norm_epsilon=_OLMO_EPSILON,
    )
    if model.position_embedding_type not in ("rope", "none"):
        yield f"--position-embedding-type must be rope or none, got {model.position_embedding_type}"
    if model.experimental_attention_variant == _GATED_DELTA and FULL not in layer_fields(model)["layer_types"]:
        yield "at least one layer must have attention. Set --linear-attention-freq"
    if model.kv_hidden_size * model.num_attention_heads != model.hidden_size:
        yield (
            "--kv-hidden-size must be --hidden-size / --num-attention-heads, got "
            f"{model.kv_hidden_size} and {model.hidden_size} / {model.num_attention_heads}"
        )


def _rename_olmo(name: str, config: Config) -> str:
    """Return the published name of the tensor ``name``.

    ``name`` may also be a name of the class, or come from a folder that transformers 5 saved. Such a folder has the
    norm after attention under ``feedforward_layer_norm``, a name of recurrent layers.
    """
    match = re.fullmatch(r"(model\.layers\.(\d+)\.)(\w+)(\.weight)", name)
    if match is None or int(match[2]) >= config.model.num_layers:
        return name
    prefix, layer, norm, suffix = match.groups()
    if layer_types(config.model)[int(layer)].mixer == ATTENTION:
        return f"{prefix}{norm.replace('feedforward_layer_norm', 'post_attention_layernorm')}{suffix}"
    return f"{prefix}{_OLMO_CLASS_NORMS.get(norm, norm)}{suffix}"


# Kimi Linear and bailing_hybrid (Ling 3).

_KIMI_NAMES = {
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
"""Key in config.json of these types -> key of DeepSeek-V3."""


def _kimi_recipes(model: ModelConfig, layer_idx: int, ours: str, theirs: str) -> Recipes:
    mappings = _norm_recipes(ours, theirs, _QWEN_NORMS)
    mappings |= _feed_forward_recipes(model, KIMI_LINEAR, layer_idx, ours, theirs)
    if layer_types(model)[layer_idx].mixer == ATTENTION:
        return mappings | latent_recipes(model, ours, theirs, has_adjacent_pairs=False)
    return mappings | separate_recipes(model, f"{ours}.recurrent", f"{theirs}.self_attn")


def _to_kimi_keys(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` with the keys of these types instead of DeepSeek-V3's."""
    kimi_keys = {key: kimi_key for kimi_key, key in _KIMI_NAMES.items()}
    return {kimi_keys.get(key, key): value for key, value in fields.items()}


def _from_kimi_keys(settings: dict[str, Any], num_dense: int) -> None:
    """Replace the keys of these types in ``settings`` by DeepSeek-V3's; set ``mlp_layer_types`` if it is missing.

    Args:
        num_dense: number of dense layers by default of the class.
    """
    settings |= {key: settings.pop(kimi_key) for kimi_key, key in _KIMI_NAMES.items() if kimi_key in settings}
    if settings.get("mlp_layer_types") is None:
        num_dense, num_layers = settings.get("first_k_dense_replace", num_dense), settings["num_hidden_layers"]
        settings["mlp_layer_types"] = ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)]


def _kimi_sizes(head_size: int, num_heads: int, kernel_size: int) -> dict[str, int]:
    """Return our sizes of Kimi Delta Attention."""
    return {
        "linear_key_head_dim": head_size,
        "linear_value_head_dim": head_size,
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": num_heads,
        "linear_conv_kernel_dim": kernel_size,
    }


def _kimi_fields(model: ModelConfig) -> dict[str, Any]:
    fields = _to_kimi_keys({
        **_common_fields(model), **latent_size_fields(model), **expert_fields(KIMI_LINEAR, model),
    })  # fmt: skip
    numbered_types = list(enumerate(fields["layer_types"], start=1))
    sizes = {
        "head_dim": model.linear_key_head_dim,
        "num_heads": model.linear_num_key_heads,
        "short_conv_kernel_size": model.linear_conv_kernel_dim,
    }
    return {
        **fields,
        "linear_head_dim": sizes["head_dim"],
        "linear_num_heads": sizes["num_heads"],
        "linear_conv_kernel_dim": sizes["short_conv_kernel_size"],
        "linear_attn_config": {  # the published code reads these keys
            **sizes,
            "full_attn_layers": [number for number, name in numbered_types if name == FULL],
            "kda_layers": [number for number, name in numbered_types if name == LINEAR],
        },
        "mla_use_nope": True,
    }


def _kimi_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    _from_kimi_keys(settings, 1)
    num_layers, linear = settings["num_hidden_layers"], settings.get("linear_attn_config") or {}
    types = settings.get("layer_types")
    if types is None and "full_attn_layers" in linear:
        types = [FULL if number in linear["full_attn_layers"] else LINEAR for number in range(1, num_layers + 1)]
    elif types is None:
        types = [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers)]
    layers, unsupported_layers = layer_values(_KIMI_DELTA, types, num_layers)
    experts, unsupported_experts = expert_values(KIMI_LINEAR, settings)
    common, unsupported = _common_values(settings)
    if "full_attn_layers" in linear and "kda_layers" in linear:
        numbers = sorted([*linear["full_attn_layers"], *linear["kda_layers"]])
        if numbers != list(range(1, num_layers + 1)):
            unsupported.append(
                f"linear_attn_config with full_attn_layers {linear['full_attn_layers']} and kda_layers "
                f"{linear['kda_layers']} (supported: each layer from 1 to {num_layers} in one of them)"
            )
    head_size = linear.get("head_dim", settings["linear_head_dim"])
    num_heads = linear.get("num_heads", settings["linear_num_heads"])
    return {
        **common,
        "ff_hidden_size": settings["intermediate_size"],
        **layers,
        **_kimi_sizes(head_size, num_heads, linear.get("short_conv_kernel_size", settings["linear_conv_kernel_dim"])),
        "num_query_groups": settings["num_attention_heads"],
        **latent_size_values(settings),
        **experts,
    }, [*unsupported, *unsupported_layers, *unsupported_experts]


def _kimi_problems(model: ModelConfig) -> Iterator[str]:
    yield from delta_problems(model, _KIMI_DELTA, linear_norm_placement="same")
    yield from expert_problems(KIMI_LINEAR, model)


def _rename_kimi(name: str, config: Config) -> str:
    """Return the published name of ``name``; transformers 5 saves dense feed-forward layers under the experts' name."""
    return re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name)


# bailing_hybrid (Ling 3).

_LING_PARTS = {"self_attn.o_proj": "attention.dense", "self_attn": "attention"}
"""Part of a tensor's name in Kimi Linear and DeepSeek-V3 -> part in bailing_hybrid."""


def _ling_recipes(model: ModelConfig, layer_idx: int, ours: str, theirs: str) -> Recipes:
    mappings = _norm_recipes(ours, theirs, _QWEN_NORMS)
    if layer_types(model)[layer_idx].mixer == ATTENTION:
        mappings |= latent_recipes(model, ours, theirs, has_adjacent_pairs=True)
        mappings |= _norm_recipes(ours, theirs, {"attention.output_gate": "self_attn.g_proj"})
    else:
        mappings |= separate_recipes(model, f"{ours}.recurrent", f"{theirs}.self_attn")
    for in_kimi, in_ling in _LING_PARTS.items():
        mappings = {
            name: replace(
                mapping,
                hf_names=tuple(hf_name.replace(f".{in_kimi}.", f".{in_ling}.") for hf_name in mapping.hf_names),
            )
            for name, mapping in mappings.items()
        }
    return mappings | _feed_forward_recipes(model, LING, layer_idx, ours, theirs)


def _ling_fields(model: ModelConfig) -> dict[str, Any]:
    fields = {**_common_fields(model), **latent_fields(model), **expert_fields(LING, model)}
    return {
        **_to_kimi_keys(fields),
        "head_dim": model.linear_key_head_dim,
        "linear_head_dim": model.linear_key_head_dim,
        "linear_num_heads": model.linear_num_key_heads,
        "short_conv_kernel_size": model.linear_conv_kernel_dim,
        "linear_conv_kernel_dim": model.linear_conv_kernel_dim,
        "kda_safe_gate": model.linear_decay_limit > 0,
        "kda_lower_bound": -model.linear_decay_limit if model.linear_decay_limit else _LING_LOWER_BOUND,
    }


def _ling_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    _from_kimi_keys(settings, 2)
    num_layers, period, types = settings["num_hidden_layers"], settings["layer_group_size"], settings.get("layer_types")
    if types is None:
        types = [LINEAR if layer % period else FULL for layer in range(1, num_layers + 1)]
    layers, unsupported_layers = layer_values(_KIMI_DELTA, types, num_layers)
    experts, unsupported_experts = expert_values(LING, settings)
    latents, unsupported_latents = latent_values(settings, has_adjacent_pairs=True)
    common, unsupported = _common_values(settings)
    head_size = settings.get("linear_head_dim") or settings["head_dim"]
    num_heads = settings.get("linear_num_heads") or settings["num_attention_heads"]
    kernel_size = settings.get("linear_conv_kernel_dim") or settings["short_conv_kernel_size"]
    return {
        **common,
        "ff_hidden_size": settings["intermediate_size"],
        **layers,
        **_kimi_sizes(head_size, num_heads, kernel_size),
        "linear_decay_limit": -float(settings["kda_lower_bound"]) if settings["kda_safe_gate"] else 0.0,
        "num_query_groups": settings["num_attention_heads"],
        **latents,
        **experts,
    }, [*unsupported, *unsupported_layers, *unsupported_experts, *unsupported_latents]


def _ling_problems(model: ModelConfig) -> Iterator[str]:
    yield from delta_problems(
        model,
        _KIMI_DELTA,
        linear_norm_placement="same",
        linear_full_rank_gates=True,
        linear_decay_limit=model.linear_decay_limit,
    )
    yield from expert_problems(LING, model)


def _rename_ling(name: str, config: Config) -> str | None:
    """Return ``name``; None for multi-token prediction layers after the last layer, which the class ignores."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return None if match is not None and int(match[1]) >= config.model.num_layers else name


_LING_LOWER_BOUND = -5.0
DELTA_TYPES = (
    HybridType(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 4},
        aliases=("qwen3_5",),
        **_qwen_functions(None, packed_recipes),
    ),
    HybridType(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 2, **QWEN3_5.defaults},
        aliases=("qwen3_5_moe",),
        **_qwen_functions(QWEN3_5, packed_recipes),
    ),
    HybridType(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 2, **QWEN3_NEXT.defaults},
        **_qwen_functions(QWEN3_NEXT, grouped_recipes),
    ),
    HybridType(
        model_type="olmo_hybrid",
        architecture="OlmoHybridForCausalLM",
        fixed={
            "norm_placement": "after", "qk_norm": "all", "activation": "gated-silu",
            "experimental_attention_variant": _GATED_DELTA, "linear_norm_placement": "before",
        },
        free=frozenset({"position_embedding_type", "rotary_scaling", "rotary_truncate"}),
        defaults={
            "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        layer_recipes=_olmo_recipes,
        fields=_olmo_fields,
        values=_olmo_values,
        problems=_olmo_problems,
        rename_tensor=_rename_olmo,
        is_selectable=True,
        only_values={"linear_use_gate": True},
    ),
    HybridType(
        model_type="kimi_linear",
        architecture="KimiLinearForCausalLM",
        fixed={
            **LATENT_SETTINGS, "position_embedding_type": "none", "activation": "gated-silu",
            "experimental_attention_variant": _KIMI_DELTA,
        },
        free=frozenset({"num_experts"}),
        defaults={
            "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "linear_head_dim": 128, "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            **{key: value for key, value in KIMI_LINEAR.defaults.items() if key != "first_k_dense_replace"},
        },
        layer_recipes=_kimi_recipes,
        fields=_kimi_fields,
        values=_kimi_values,
        problems=_kimi_problems,
        rename_tensor=_rename_kimi,
        is_selectable=True,
        only_values={"moe_router_activation_func": "sigmoid", "mla_use_nope": True, "moe_layer_freq": 1},
        example={"linear_attn_config": {"full_attn_layers": list(range(4, 61, 4))}},
        required_fields=("num_experts",),
    ),
    HybridType(
        model_type="bailing_hybrid",
        architecture="BailingHybridForCausalLM",
        word="word_embeddings",
        fixed={
            **LATENT_SETTINGS, "position_embedding_type": "rope", "activation": "gated-silu",
            "attention_output_gate": True, "experimental_attention_variant": _KIMI_DELTA,
            "linear_full_rank_gates": True,
        },
        free=frozenset({"num_experts", "rotary_scaling", "rotary_truncate", "mscale", "mscale_all_dim"}),
        defaults={
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 128, "short_conv_kernel_size": 4,
            "layer_group_size": 6, "kda_safe_gate": True, "kda_lower_bound": _LING_LOWER_BOUND,
            "rope_theta": 6000000.0,
            **{key: value for key, value in LING.defaults.items() if key != "first_k_dense_replace"},
        },
        layer_recipes=_ling_recipes,
        fields=_ling_fields,
        values=_ling_values,
        problems=_ling_problems,
        rename_tensor=_rename_ling,
        is_selectable=True,
        only_values={"score_function": "sigmoid", "use_bias": False, "use_qkv_bias": False},
        required_fields=("num_experts",),
    ),
)  # fmt: skip
"""The types, in the order in which an export tries them."""
DELTA_FORMATS = tuple(make_format(delta_type) for delta_type in DELTA_TYPES)
