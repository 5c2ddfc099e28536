"""Settings and weights that only SmolLM3, AFMoE, gpt-oss and MiMo-V2-Flash have in Hugging Face files.

| ours | SmolLM3 | AFMoE | gpt-oss | MiMo-V2-Flash |
|---|---|---|---|---|
| --no-rope-freq | no_rope_layers (1: with rotary positions) | the layers without a window | none | none |
| layer with a window | layer_types | layer_types | layer_types | layer_types |
| attention.query_key_value | q, k, v | q, output gate (gate_proj), k, v | q, k, v | q, k, v |
| --window-num-query-groups | | | | 2 num_key_value_heads |
| attention.sinks | | | self_attn.sinks | self_attn.attention_sink_bias, with a window only |
| mlp.router | | mlp.router.gate; bias of choices: mlp.expert_bias | mlp.router, with a bias | mlp.gate |
| mlp.experts.N.up, .down | | one tensor per expert and projection | two tensors of all experts, biases | as AFMoE |

The published config.json of MiMo-V2-Flash has the keys of its own code (``hybrid_layer_pattern``, ``swa_rope_theta``
and others). They are read where the keys of the class are missing. Its multi-token prediction layers (``model.mtp``)
are skipped, as by the class.

The published weights of gpt-oss are quantised (MXFP4: blocks of 4-bit numbers with a scale each). They are rejected by
name, because training needs weights that it can change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.layer_features import no_rope_layers
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import WeightMapping
from megatron.models.llama.huggingface_windows import FULL, SLIDING

_MXFP4_ADVICE = (
    "its weights are quantised to MXFP4. Convert them to bf16 first: load the folder with transformers' "
    "AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True)) and save it with "
    "save_pretrained"
)
_SWIGLU_ALPHA, _GPT_OSS_WINDOW = 1.702, 128


@dataclass(frozen=True, kw_only=True)
class TypeExtras:
    """Settings of one ``model_type`` in addition to those of ``Preset``.

    Args:
        keys: key of this type's config.json -> key with the same meaning in other types.
        completed: function that adds the keys of the class to a config.json that has the keys of other code.
        fields: function from our model and the layers with a window to further fields of config.json.
        values: function from config.json and the layers with a window to our further settings, and the settings that
            we do not support.
        problems: function that yields a message for each setting of our model that config.json cannot express.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    fields: Callable[[ModelConfig, tuple[bool, ...]], dict[str, Any]] = lambda model, has_window: {}
    values: Callable[[Mapping[str, Any], list[bool]], tuple[dict[str, Any], list[str]]]
    completed: Callable[[dict[str, Any]], dict[str, Any]] = lambda hf_config: hf_config
    problems: Callable[[ModelConfig, tuple[bool, ...]], Iterator[str]] = lambda model, has_window: iter(())

    def read_keys(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``hf_config`` with the keys of other types."""
        return self.completed({self.keys.get(key, key): value for key, value in hf_config.items()})

    def written_keys(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``hf_config`` with the keys of this type."""
        own_keys = {other: own for own, other in self.keys.items()}
        return {own_keys.get(key, key): value for key, value in hf_config.items()}


def format_no_rope(is_without: list[bool]) -> str:
    """Return the ``no_rope_freq`` that describes the layers without rotary positions."""
    if not any(is_without):
        return ""
    for period in range(1, len(is_without) + 1):
        if no_rope_layers(str(period), len(is_without)) == tuple(is_without):
            return str(period)
    return f"[{','.join(str(int(entry)) for entry in is_without)}]"


# SmolLM3


def _smollm3_fields(model: ModelConfig, has_window: tuple[bool, ...]) -> dict[str, Any]:
    is_without = no_rope_layers(model.no_rope_freq, model.num_layers)
    return {"no_rope_layers": [int(not entry) for entry in is_without], "use_sliding_window": any(has_window)}


def _smollm3_values(settings: Mapping[str, Any], has_window: list[bool]) -> tuple[dict[str, Any], list[str]]:
    has_rope = smollm3_rotary_layers(settings)
    if len(has_rope) < settings["num_hidden_layers"]:
        return {}, [f"no_rope_layers with {len(has_rope)} entries for {settings['num_hidden_layers']} layers"]
    return {"no_rope_freq": format_no_rope([not entry for entry in has_rope[: settings["num_hidden_layers"]]])}, []


def smollm3_rotary_layers(settings: Mapping[str, Any]) -> list[bool]:
    """Return a bool per layer: True if SmolLM3's config.json gives it rotary positions."""
    layers, interval = settings.get("no_rope_layers"), settings.get("no_rope_layer_interval", 4)
    if layers is not None:
        return [bool(entry) for entry in layers]
    return [(layer + 1) % interval != 0 for layer in range(settings["num_hidden_layers"])]


SMOLLM3 = TypeExtras(fields=_smollm3_fields, values=_smollm3_values)


# AFMoE


def _afmoe_fields(model: ModelConfig, has_window: tuple[bool, ...]) -> dict[str, Any]:
    return {"mup_enabled": model.scale_embeddings, "score_func": "sigmoid", "route_norm": True}


def _afmoe_values(settings: Mapping[str, Any], has_window: list[bool]) -> tuple[dict[str, Any], list[str]]:
    unsupported = [
        f"{key} {settings[key]!r} (supported: {accepted!r})"
        for key, accepted in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1))
        if settings.get(key) not in (None, accepted)
    ]
    if not settings["n_shared_experts"]:
        unsupported.append(f"num_shared_experts {settings['n_shared_experts']!r} (supported: at least 1)")
    no_rope_freq = format_no_rope([not entry for entry in has_window])
    return {"no_rope_freq": no_rope_freq, "scale_embeddings": bool(settings.get("mup_enabled"))}, unsupported


def _afmoe_problems(model: ModelConfig, has_window: tuple[bool, ...]) -> Iterator[str]:
    is_without = no_rope_layers(model.no_rope_freq, model.num_layers)
    if any(is_rotated == is_windowed for is_rotated, is_windowed in zip(is_without, has_window, strict=True)):
        yield (
            "rotary positions must be in the layers with a window only, got "
            f"--no-rope-freq {model.no_rope_freq or 'of no layer'} and --window-attn-skip-freq "
            f"{model.window_attn_skip_freq or 'of all layers'} with --window-size {model.window_size}"
        )
    if not model.moe_shared_expert_intermediate_size:
        yield "a shared expert is required. Set --moe-shared-expert-intermediate-size"


AFMOE = TypeExtras(
    keys={
        "num_dense_layers": "first_k_dense_replace", "num_shared_experts": "n_shared_experts",
        "route_scale": "routed_scaling_factor", "global_attn_every_n_layers": "sliding_window_pattern",
    },
    fields=_afmoe_fields,
    values=_afmoe_values,
    problems=_afmoe_problems,
)  # fmt: skip


# gpt-oss


def gpt_oss_expert_recipes(model: ModelConfig, our_layer: str, hf_layer: str) -> dict[str, WeightMapping]:
    """Return the mappings of the router and the experts of a layer.

    A Hugging Face tensor has the weights of all experts, [E, in, out]. The columns of gate and value alternate as the
    rows of our weight.
    """
    mappings = {
        f"{our_layer}.mlp.router.{suffix}": WeightMapping((f"{hf_layer}.mlp.router.{suffix}",))
        for suffix in ("weight", "bias")
    }
    for idx in range(model.num_experts):
        for ours, theirs in (("up", "gate_up_proj"), ("down", "down_proj")):
            our_name, hf_name = f"{our_layer}.mlp.experts.{idx}.{ours}", f"{hf_layer}.mlp.experts.{theirs}"
            mappings[f"{our_name}.weight"] = WeightMapping((hf_name,), is_transposed=True, index=idx)
            mappings[f"{our_name}.bias"] = WeightMapping((f"{hf_name}_bias",), index=idx)
    return mappings


def reject_mxfp4(name: str) -> None:
    """Raise an error if the tensor ``name`` of a gpt-oss folder is part of a quantised weight.

    Raises:
        CheckpointError: the tensor contains MXFP4 blocks or their scales.
    """
    if name.endswith(("_proj_blocks", "_proj_scales")):
        raise CheckpointError(f"gpt_oss: {name} cannot be read: {_MXFP4_ADVICE}")


def _gpt_oss_values(settings: Mapping[str, Any], has_window: list[bool]) -> tuple[dict[str, Any], list[str]]:
    unsupported = []
    quantization = settings.get("quantization_config") or {}
    if quantization.get("quant_method") == "mxfp4":
        raise CheckpointError(f"gpt_oss: quantization_config mxfp4 is not supported: {_MXFP4_ADVICE}")
    if settings.get("swiglu_alpha", _SWIGLU_ALPHA) != _SWIGLU_ALPHA:
        unsupported.append(f"swiglu_alpha {settings['swiglu_alpha']!r} (supported: {_SWIGLU_ALPHA})")
    if not settings.get("attention_bias", True):
        unsupported.append("attention_bias False (supported: True)")
    limit = settings.get("swiglu_limit", 7.0)
    if not limit or limit < 0:
        unsupported.append(f"swiglu_limit {limit!r} (supported: numbers above 0)")
    return {"activation_func_clamp_value": float(limit or 0.0)}, unsupported


def _gpt_oss_fields(model: ModelConfig, has_window: tuple[bool, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = {"swiglu_alpha": _SWIGLU_ALPHA, "swiglu_limit": model.activation_func_clamp_value}
    if not any(has_window):
        fields["sliding_window"] = _GPT_OSS_WINDOW  # the class requires a number
    if model.rotary_scaling == "none":  # without parameters the class scales by yarn
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rotary_base}
    return fields


def _gpt_oss_problems(model: ModelConfig, has_window: tuple[bool, ...]) -> Iterator[str]:
    if not model.activation_func_clamp_value:
        yield "--activation-func-clamp-value must be above 0, got 0"


GPT_OSS = TypeExtras(fields=_gpt_oss_fields, values=_gpt_oss_values, problems=_gpt_oss_problems)


# MiMo-V2-Flash

_PERIOD = 6


def _complete_mimo(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return ``hf_config`` with the keys of the class, taken from those of the published code where they are missing.

    As in the class, ``sliding_window_size`` excludes the token itself and takes precedence over ``sliding_window``.
    """
    completed, rope = dict(hf_config), hf_config.get("rope_parameters") or {}
    for key, other_key, names in (
        ("layer_types", "hybrid_layer_pattern", (FULL, SLIDING)),
        ("mlp_layer_types", "moe_layer_freq", ("dense", "sparse")),
    ):
        if hf_config.get(key) is None and isinstance(hf_config.get(other_key), list):
            completed[key] = [names[bool(entry)] for entry in hf_config[other_key]]
    if "rms_norm_eps" not in hf_config and "layernorm_epsilon" in hf_config:
        completed["rms_norm_eps"] = hf_config["layernorm_epsilon"]
    if hf_config.get("sliding_window_size") is not None:
        completed["sliding_window"] = hf_config["sliding_window_size"] + 1
    if FULL not in rope:
        share = {"partial_rotary_factor": hf_config.get("partial_rotary_factor") or MIMO_ROTARY_SHARE}
        full = {"rope_type": "default", "rope_theta": hf_config.get("rope_theta") or 5e6, **share, **rope}
        local = {"rope_type": "default", "rope_theta": hf_config.get("swa_rope_theta") or 1e4, **share}
        completed["rope_parameters"] = {FULL: full, SLIDING: local}
    return completed


def mimo_windows(num_layers: int) -> list[bool]:
    """Return a bool per layer: True if it has a window by default."""
    return [layer > 0 and (layer + 1) % _PERIOD != 0 for layer in range(num_layers)]


def _mimo_values(settings: Mapping[str, Any], has_window: list[bool]) -> tuple[dict[str, Any], list[str]]:
    heads, groups = settings["num_attention_heads"], settings["num_key_value_heads"]
    accepted = {
        "swa_num_key_value_heads": 2 * groups, "swa_num_attention_heads": heads, "swa_head_dim": settings["head_dim"],
        "swa_v_head_dim": settings["v_head_dim"], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "n_shared_experts": 0,
    }  # fmt: skip
    unsupported = [
        f"{key} {settings[key]!r} (supported: {value!r})"
        for key, value in accepted.items()
        if settings.get(key) not in (None, value)
    ]
    scale = settings.get("attention_value_scale")
    return {
        "v_head_dim": settings["v_head_dim"],
        "window_num_query_groups": 2 * groups if any(has_window) else 0,
        "attention_value_scale": 1.0 if scale is None else float(scale),
        "add_qkv_bias": bool(settings.get("attention_bias")),
    }, unsupported


def _mimo_fields(model: ModelConfig, has_window: tuple[bool, ...]) -> dict[str, Any]:
    window_size = model.window_size if any(has_window) else MIMO_WINDOW - 1  # the class requires a number
    return {
        "sliding_window": window_size + 1,
        "v_head_dim": model.value_size,
        "attention_value_scale": model.attention_value_scale,
        "attention_bias": model.add_qkv_bias,
    }


def _mimo_problems(model: ModelConfig, has_window: tuple[bool, ...]) -> Iterator[str]:
    groups = model.window_num_query_groups or model.num_query_groups
    if any(has_window) and groups != 2 * model.num_query_groups:
        yield f"--window-num-query-groups must be 2 x --num-query-groups, got {groups} and {model.num_query_groups}"


MIMO_ROTARY_SHARE, MIMO_WINDOW = 0.334, 129
"""Defaults of the class."""
MIMO = TypeExtras(completed=_complete_mimo, fields=_mimo_fields, values=_mimo_values, problems=_mimo_problems)
