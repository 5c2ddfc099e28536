"""Settings and weights of SmolLM3, AFMoE and gpt-oss in Hugging Face files that no other type has.

| ours | SmolLM3 | AFMoE | gpt-oss |
|---|---|---|---|
| --no-rope-freq | no_rope_layers (1: with rotary positions) | the layers without a window | none |
| layer with a window | layer_types | layer_types | layer_types |
| attention.query_key_value | q, k, v | q, output gate (gate_proj), k, v | q, k, v |
| attention.sinks | | | self_attn.sinks |
| mlp.router | | mlp.router.gate; bias of choices: mlp.expert_bias | mlp.router, with a bias |
| mlp.experts.N.up, .down | | one tensor per expert and projection | two tensors of all experts, [in, out], and biases |

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

_MXFP4_ADVICE = (
    "its weights are quantised to MXFP4. Convert them to bf16 first: load the folder with transformers' "
    "AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True)) and save it with "
    "save_pretrained"
)
_SWIGLU_ALPHA = 1.702


@dataclass(frozen=True, kw_only=True)
class TypeExtras:
    """Settings of one ``model_type`` in addition to those of ``Preset``.

    Args:
        keys: key of this type's config.json -> key with the same meaning in other types.
        fields: function from our model and the layers with a window to further fields of config.json.
        values: function from config.json and the layers with a window to our further settings, and the settings that
            we do not support.
        problems: function that yields a message for each setting of our model that config.json cannot express.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    fields: Callable[[ModelConfig, tuple[bool, ...]], dict[str, Any]] = lambda model, has_window: {}
    values: Callable[[Mapping[str, Any], list[bool]], tuple[dict[str, Any], list[str]]]
    problems: Callable[[ModelConfig, tuple[bool, ...]], Iterator[str]] = lambda model, has_window: iter(())

    def read_keys(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``hf_config`` with the keys of other types."""
        return {self.keys.get(key, key): value for key, value in hf_config.items()}

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


def _smollm3_problems(model: ModelConfig, has_window: tuple[bool, ...]) -> Iterator[str]:
    if not any(no_rope_layers(model.no_rope_freq, model.num_layers)):  # such a model is a llama or mistral
        yield "a layer without rotary positions is required. Set --no-rope-freq"


SMOLLM3 = TypeExtras(fields=_smollm3_fields, values=_smollm3_values, problems=_smollm3_problems)


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
    if model.rotary_scaling == "none":  # without parameters the class scales by yarn
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rotary_base}
    return fields


def _gpt_oss_problems(model: ModelConfig, has_window: tuple[bool, ...]) -> Iterator[str]:
    if not model.activation_func_clamp_value:
        yield "--activation-func-clamp-value must be above 0, got 0"


GPT_OSS = TypeExtras(fields=_gpt_oss_fields, values=_gpt_oss_values, problems=_gpt_oss_problems)
