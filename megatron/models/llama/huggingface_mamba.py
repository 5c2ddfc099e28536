"""Decoders with Mamba-2 layers in Hugging Face files: weight names and settings that all types share.

| ours, in ``recurrent`` | Hugging Face, in ``mixer`` or ``mamba`` | change |
|---|---|---|
| projections.z, .x, .B, .C, .dt | in_proj.weight | consecutive rows of one tensor |
| convolution.x, .B, .C | conv1d.weight [channels, 1, k] | consecutive rows of one tensor |
| the same with ``_bias`` | in_proj.bias, conv1d.bias | consecutive elements |
| A_log, D, dt_bias, norm.weight | the same | |
| dense | out_proj | |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.config import Config
from megatron.config.decoder import ARCHITECTURE
from megatron.config.layer_types import MAMBA2, LayerType, layer_types
from megatron.config.model import ModelConfig
from megatron.config.recurrent import GROUP_NORM, NO_NORM
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import (
    HFFormat,
    WeightMapping,
    by_recipes,
    leave_hf_model_unchanged,
    unsupported_settings,
)
from megatron.models.llama.huggingface import EXAMPLE_SIZES, ROTARY_BUFFERS, heights
from megatron.models.llama.huggingface_rotary import ROTARY_KEYS

Problems = list[str]
Recipes = dict[str, WeightMapping]
_PARTS = ("z", "x", "B", "C", "dt")


@dataclass(frozen=True, kw_only=True)
class MambaType:
    """Tensor names and keys of config.json of one ``model_type``.

    Args:
        architecture: name of the Hugging Face class.
        prefix: prefix of all tensor names except the head's.
        word, final_norm: names of the word embedding and of the final norm after ``prefix``.
        fixed: our settings that all models of the type share, without those that equal GPT-2's.
        free: our settings that config.json can express.
        defaults: defaults of the Hugging Face class for missing keys.
        epsilon_key: key of the epsilon of norms.
        layer_recipes: function from our model, the layer's index and the names of our and their layer to the mappings
            of the layer's weights.
        fields: function from our model to the entries of config.json that are not common to all types.
        values: function from config.json with the defaults of the class to our settings that are not common to all
            types, and to unsupported settings.
        problems: function that yields the problems of an export.
        is_selectable: ``--model`` accepts the type.
    """

    model_type: str
    architecture: str
    prefix: str = "model"
    word: str = "embed_tokens"
    final_norm: str = "norm"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    epsilon_key: str = "rms_norm_eps"
    layer_recipes: Callable[[ModelConfig, int, str, str], Recipes]
    fields: Callable[[ModelConfig], dict[str, Any]]
    values: Callable[[dict[str, Any]], tuple[dict[str, Any], Problems]]
    problems: Callable[[ModelConfig], Iterator[str]]
    is_selectable: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Our settings that all models of the type share."""
        return {"normalization": "RMSNorm", **self.fixed}


# Weights.


def recipes(mamba_type: MambaType, config: Config) -> Recipes:
    """Return the mapping of each of our weights, by name."""
    model, prefix = config.model, mamba_type.prefix
    mappings = {
        "embedding.word.weight": WeightMapping((f"{prefix}.{mamba_type.word}.weight",)),
        "final_norm.weight": WeightMapping((f"{prefix}.{mamba_type.final_norm}.weight",)),
    }
    for layer_idx in range(model.num_layers):
        ours, theirs = f"layers.{layer_idx}", f"{prefix}.layers.{layer_idx}"
        mappings |= mamba_type.layer_recipes(model, layer_idx, ours, theirs)
    if model.untie_embeddings:
        mappings["head.weight"] = WeightMapping(("lm_head.weight",))
    return mappings


def mamba_recipes(model: ModelConfig, ours: str, theirs: str) -> Recipes:
    """Return the mappings of a Mamba-2 mixer.

    Args:
        ours, theirs: names of the mixer's modules.
    """
    width, state_width = model.mamba_num_heads * model.mamba_head_dim, model.mamba_num_groups * model.mamba_state_dim
    num_rows = (width, width, state_width, state_width, model.mamba_num_heads)
    mappings = {f"{ours}.{name}": WeightMapping((f"{theirs}.{name}",)) for name in ("A_log", "D", "dt_bias")}
    if model.mamba_norm != NO_NORM:
        mappings[f"{ours}.norm.weight"] = WeightMapping((f"{theirs}.norm.weight",))
    for suffix, hf_suffix in (("", "weight"), ("_bias", "bias")):
        if not suffix or model.mamba_proj_bias:
            names = [f"{ours}.projections.{part}{suffix}" for part in _PARTS]
            mappings |= _row_mappings(names, num_rows, f"{theirs}.in_proj.{hf_suffix}")
            mappings[f"{ours}.dense.{hf_suffix}"] = WeightMapping((f"{theirs}.out_proj.{hf_suffix}",))
        if not suffix or model.mamba_conv_bias:
            names = [f"{ours}.convolution.{part}{suffix}" for part in _PARTS[1:4]]
            mappings |= _row_mappings(
                names, num_rows[1:4], f"{theirs}.conv1d.{hf_suffix}", unit_dims=(1,) if hf_suffix == "weight" else ()
            )
    return mappings


def _row_mappings(
    names: list[str], num_rows: tuple[int, ...], hf_name: str, *, unit_dims: tuple[int, ...] = ()
) -> Recipes:
    """Return the mappings of weights that are consecutive rows of the tensor ``hf_name``."""
    starts = [sum(num_rows[:idx]) for idx in range(len(num_rows))]
    return {
        name: WeightMapping((hf_name,), rows=(start, num), unit_dims=unit_dims)
        for name, start, num in zip(names, starts, num_rows, strict=True)
    }


def attention_recipes(model: ModelConfig, ours: str, theirs: str) -> Recipes:
    query_key_value = tuple(f"{theirs}.{name}_proj.weight" for name in "qkv")
    return {
        f"{ours}.query_key_value.weight": WeightMapping(query_key_value, num_blocks=model.num_query_groups),
        f"{ours}.dense.weight": WeightMapping((f"{theirs}.o_proj.weight",)),
    }


# Settings that all types share.


def fields(mamba_type: MambaType, config: Config) -> dict[str, Any]:
    """Return the contents of config.json for ``config``."""
    model = config.model
    return {
        "architectures": [mamba_type.architecture],
        "model_type": mamba_type.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        mamba_type.epsilon_key: model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings,
        **mamba_type.fields(model),
    }


def values(mamba_type: MambaType, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Convert the contents of a config.json to our settings, by field name (without sections).

    Raises:
        CheckpointError: a setting is not supported; the message lists all of them.
    """
    settings = {**mamba_type.defaults, **hf_config}
    special, unsupported = mamba_type.values(settings)
    if settings.get("quantization_config") is not None:
        unsupported.append(f"quantization_config {settings['quantization_config']!r} (supported: None)")
    if unsupported:
        raise CheckpointError(
            f"our decoders do not support these settings of {mamba_type.model_type}: {'; '.join(unsupported)}"
        )
    return {
        **mamba_type.settings,
        "num_layers": settings.get("num_hidden_layers"),
        "hidden_size": settings["hidden_size"],
        "layernorm_epsilon": settings[mamba_type.epsilon_key],
        "vocab_size": settings["vocab_size"],
        "untie_embeddings": not settings.get("tie_word_embeddings", False),
        "attention_dropout": settings.get("attention_dropout") or 0.0,
        "hidden_dropout": settings.get("hidden_dropout") or 0.0,
        "init_method_std": settings.get("initializer_range", 0.02),
        "hidden_bias": False,
        **special,
    }


def problems(mamba_type: MambaType, config: Config) -> Iterator[str]:
    """Yield a message for each setting of ``config`` that the type cannot express."""
    model = config.model
    yield from unsupported_settings(model, mamba_type.settings, free=mamba_type.free)
    if model.hidden_bias:
        yield f"{mamba_type.model_type} does not support --hidden-bias"
    try:
        types = layer_types(model)
    except ValueError:  # not a valid model
        types = ()
    if any(layer_type.recurrent_mixer == MAMBA2 for layer_type in types):
        if model.mamba_norm_groups != model.mamba_num_groups:
            yield (
                "--mamba-norm-groups must equal --mamba-num-groups, got "
                f"{model.mamba_norm_groups} and {model.mamba_num_groups}"
            )
        if mamba_type.model_type != "falcon_h1" and model.mamba_norm != GROUP_NORM:
            yield f"--mamba-norm must be {GROUP_NORM}, got {model.mamba_norm}"
    yield from mamba_type.problems(model)


def time_step_fields(model: ModelConfig) -> dict[str, list[float]]:
    """Return the bounds of the time step in config.json; empty without bounds, which is the default of all classes."""
    if not model.mamba_dt_limit_min and not model.mamba_dt_limit_max:
        return {}
    return {"time_step_limit": [model.mamba_dt_limit_min, model.mamba_dt_limit_max or math.inf]}


def time_step_values(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return our bounds of the time step; transformers 5 saves infinity as ``{"__float__": "Infinity"}``."""
    low, high = settings.get("time_step_limit") or (0.0, math.inf)
    if isinstance(high, Mapping):
        high = float(high["__float__"])
    return {"mamba_dt_limit_min": float(low), "mamba_dt_limit_max": 0.0 if math.isinf(high) else float(high)}


def activation_problems(settings: Mapping[str, Any], key: str, supported: tuple[str, ...]) -> Problems:
    if settings.get(key, supported[0]) in supported:
        return []
    return [f"{key} {settings[key]!r} (supported: {', '.join(supported)})"]


def layer_type_problems(model: ModelConfig, supported: Callable[[LayerType], bool], needed: str) -> Iterator[str]:
    """Yield a message for the first layer whose type is not supported."""
    try:
        types = layer_types(model)
    except ValueError:
        return
    for layer_idx, layer_type in enumerate(types):
        if not supported(layer_type):
            yield f"{needed}, got {layer_type.label} in layer {layer_idx}"
            return


# The format of a type.

_EXAMPLE = {"mamba_n_heads": 8, "mamba_d_ssm": None, "num_local_experts": 0, "num_experts_per_tok": 0}
"""Sizes that fit ``EXAMPLE_SIZES``."""


def architecture(mamba_type: MambaType) -> dict[str, Any]:
    """Return our settings, without sizes, that correspond to the defaults of the Hugging Face class."""
    all_settings = values(mamba_type, {**EXAMPLE_SIZES, **_EXAMPLE})
    return {name: all_settings[name] for name in ARCHITECTURE if name in all_settings}


def rename_backbone(prefix: str, name: str, config: Config) -> str:
    """Return ``name`` with ``prefix`` instead of the names that other versions of transformers use.

    They are "model" instead of "backbone", and mamba-ssm's "embedding" instead of "embeddings".
    """
    for other in ("model.", "backbone."):
        if name.startswith(other):
            name = f"{prefix}.{name.removeprefix(other)}"
    return name.replace(".embedding.weight", ".embeddings.weight")


def _rename_granite(name: str, config: Config) -> str:
    """Return the name in files of ``name``, which may be that of a parameter in the class of transformers 5."""
    for in_class, in_file in (
        ("experts.gate_up_proj", "input_linear.weight"),
        ("experts.down_proj", "output_linear.weight"),
        ("router.weight", "router.layer.weight"),
    ):
        name = name.replace(f"block_sparse_moe.{in_class}", f"block_sparse_moe.{in_file}")
    return name


def _use_eager_experts(hf_model: Any, config: Config) -> None:
    """Compute the Hugging Face experts one by one; the default, grouped products, does not support fp64."""
    if config.model.num_experts:
        hf_model.set_experts_implementation("eager")


def make_format(mamba_type: MambaType) -> HFFormat:
    """Return the Hugging Face format of a type."""
    rename: dict[str, Any] = {}
    if mamba_type.prefix == "backbone":
        rename = {"rename_tensor": partial(rename_backbone, mamba_type.prefix)}
    elif mamba_type.model_type == "granitemoehybrid":
        rename = {"rename_tensor": _rename_granite}
    return HFFormat(
        model_types=(mamba_type.model_type,),
        problems=partial(problems, mamba_type),
        fields=partial(fields, mamba_type),
        values=partial(values, mamba_type),
        **by_recipes(partial(recipes, mamba_type), heights),
        word=f"{mamba_type.prefix}.{mamba_type.word}.weight",
        key_groups=(ROTARY_KEYS, frozenset({"hybrid_override_pattern", "layers_block_type", "layer_types"})),
        ignored_names=ROTARY_BUFFERS,
        patch_hf_model=_use_eager_experts if "num_experts" in mamba_type.free else leave_hf_model_unchanged,
        logit_tolerance=1e-5,  # Hugging Face computes norms and scans in fp32
        architecture=partial(architecture, mamba_type) if mamba_type.is_selectable else None,
        fixed=mamba_type.settings,
        **rename,
    )
