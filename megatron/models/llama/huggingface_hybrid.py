"""Hybrid decoders in Hugging Face files: tensor names and settings that all types share.

The tables of the types are in ``huggingface_mamba_types`` and ``huggingface_delta_types``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.config import Config
from megatron.config.decoder import ARCHITECTURE
from megatron.config.layer_types import LayerType, layer_types
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import (
    HFFormat,
    WeightMapping,
    by_recipes,
    keep_tensor_name,
    leave_hf_model_unchanged,
    unsupported_mechanisms,
    unsupported_settings,
)
from megatron.models.common.huggingface_mtp import PREFIX, MTPNames, layer_names
from megatron.models.common.stacked_rows import StackedRows
from megatron.models.llama import huggingface
from megatron.models.llama.huggingface import EXAMPLE_SIZES, ROTARY_BUFFERS
from megatron.models.llama.huggingface_rotary import ROTARY_KEYS

Problems = list[str]
Recipes = dict[str, WeightMapping]


@dataclass(frozen=True, kw_only=True)
class HybridType:
    """Tensor names and keys of config.json of one ``model_type``.

    Args:
        architecture: name of the Hugging Face class.
        prefix: prefix of all tensor names except the head's.
        word, final_norm: names of the word embedding and of the final norm after ``prefix``.
        fixed: our settings that all models of the type share and that differ from GPT-2's.
        free: our settings that config.json can express.
        defaults: defaults of the Hugging Face class for missing keys.
        epsilon_key: key of the epsilon of norms.
        layer_recipes: function from our model, the layer's index and the names of our and their layer to the mappings
            of the layer's weights.
        fields: function from our model to the entries of config.json that are not common to all types.
        values: function from config.json, completed by ``defaults``, to (our settings that are not common to all types,
            messages about unsupported settings).
        problems: function that yields a message for each setting that an export cannot express.
        aliases: further values of ``model_type`` in config.json of published models of the type.
        mtp: names of the multi-token prediction layers; None: folders of the type have none.
        rename_tensor, unpack: as in ``HFFormat``.
        is_selectable: ``--model`` accepts the type.
        example: keys of config.json with which ``--model`` reads the settings of the type, in addition to
            ``EXAMPLE_SIZES``.
        required_fields: as in ``HFFormat``.
        only_values: key of config.json -> its only supported value. A missing key or null counts as this value.
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
    aliases: tuple[str, ...] = ()
    mtp: MTPNames | None = None
    rename_tensor: Callable[[str, Config], str | None] = keep_tensor_name
    unpack: Callable[[str, Sequence[int]], Mapping[str, StackedRows]] = lambda name, shape: {}
    is_selectable: bool = False
    example: Mapping[str, Any] = field(default_factory=dict)
    required_fields: tuple[str, ...] = ()
    only_values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Our settings that all models of the type share."""
        return {"normalization": "RMSNorm", **self.fixed}


# Weights.


def recipes(hybrid_type: HybridType, config: Config) -> Recipes:
    """Return the mapping of each of our weights, by name."""
    model, prefix = config.model, hybrid_type.prefix
    mappings = {
        "embedding.word.weight": WeightMapping((f"{prefix}.{hybrid_type.word}.weight",)),
        "final_norm.weight": WeightMapping((f"{prefix}.{hybrid_type.final_norm}.weight",)),
    }
    for layer_idx in range(model.num_layers):
        ours, theirs = f"layers.{layer_idx}", f"{prefix}.layers.{layer_idx}"
        mappings |= hybrid_type.layer_recipes(model, layer_idx, ours, theirs)
    if hybrid_type.mtp is not None:
        for layer_idx, ours, theirs in layer_names(hybrid_type.mtp, model):
            if ours.startswith(PREFIX):
                mappings |= hybrid_type.layer_recipes(model, layer_idx, ours, theirs)
        mappings |= hybrid_type.mtp.recipes(model)
    if model.untie_embeddings:
        mappings["head.weight"] = WeightMapping(("lm_head.weight",))
    return mappings


def row_mappings(
    names: list[str],
    num_rows: tuple[int, ...],
    hf_name: str,
    *,
    unit_dims: tuple[int, ...] = (),
    is_grouped: bool = False,
) -> Recipes:
    """Return the mappings of weights that are consecutive rows of the tensor ``hf_name``.

    Args:
        num_rows: number of rows of each weight; with ``is_grouped`` in each group of rows.
        unit_dims: as in ``WeightMapping``.
    """
    starts = [sum(num_rows[:idx]) for idx in range(len(num_rows))]
    rows_per_group = sum(num_rows) if is_grouped else 0
    return {
        name: WeightMapping((hf_name,), rows=(start, num), rows_per_group=rows_per_group, unit_dims=unit_dims)
        for name, start, num in zip(names, starts, num_rows, strict=True)
    }


def attention_recipes(model: ModelConfig, ours: str, theirs: str) -> Recipes:
    """Return the mappings of an attention layer with separate projections in Hugging Face files."""
    query_key_value = tuple(f"{theirs}.{name}_proj.weight" for name in "qkv")
    return {
        f"{ours}.query_key_value.weight": WeightMapping(query_key_value, num_blocks=model.num_query_groups),
        f"{ours}.dense.weight": WeightMapping((f"{theirs}.o_proj.weight",)),
    }


def heights(config: Config) -> dict[str, int]:
    """Return the numbers of rows of the query, key and value weights; query weights include the output gate."""
    num_rows = huggingface.heights(config)
    if config.model.attention_output_gate:
        num_rows["q_proj.weight"] *= 2
    return num_rows


# Settings that all types share.


def fields(hybrid_type: HybridType, config: Config) -> dict[str, Any]:
    """Return the contents of config.json for ``config``."""
    model = config.model
    return {
        "architectures": [hybrid_type.architecture],
        "model_type": hybrid_type.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        hybrid_type.epsilon_key: model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings,
        **({} if hybrid_type.mtp is None else {hybrid_type.mtp.config_key: model.mtp_num_layers}),
        **hybrid_type.fields(model),
    }


def values(hybrid_type: HybridType, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Convert the contents of a config.json to our settings, by field name (without sections).

    Raises:
        CheckpointError: a setting is not supported; the message lists all of them.
    """
    settings = {**hybrid_type.defaults, **hf_config}
    special, unsupported = hybrid_type.values(settings)
    unsupported += [
        f"{key} {settings[key]!r} (supported: {value!r})"
        for key, value in hybrid_type.only_values.items()
        if settings.get(key) not in (None, value)
    ]
    unsupported += unsupported_mechanisms(settings)
    if unsupported:
        raise CheckpointError(
            f"our decoders do not support these settings of {hybrid_type.model_type}: {'; '.join(unsupported)}"
        )
    return {
        **hybrid_type.settings,
        "num_layers": settings.get("num_hidden_layers"),
        "hidden_size": settings["hidden_size"],
        "layernorm_epsilon": settings[hybrid_type.epsilon_key],
        "vocab_size": settings["vocab_size"],
        "untie_embeddings": not settings.get("tie_word_embeddings", False),
        "attention_dropout": settings.get("attention_dropout") or 0.0,
        "hidden_dropout": settings.get("hidden_dropout") or 0.0,
        "init_method_std": settings.get("initializer_range", 0.02),
        "hidden_bias": False,
        **({} if hybrid_type.mtp is None else {"mtp_num_layers": settings.get(hybrid_type.mtp.config_key) or 0}),
        **special,
    }


def problems(hybrid_type: HybridType, config: Config) -> Iterator[str]:
    """Yield a message for each setting of ``config`` that the type cannot express."""
    model = config.model
    yield from unsupported_settings(model, hybrid_type.settings, free=hybrid_type.free)
    if model.hidden_bias:
        yield f"{hybrid_type.model_type} does not support --hidden-bias"
    if hybrid_type.mtp is not None:
        yield from hybrid_type.mtp.problems(model)
    yield from hybrid_type.problems(model)


def activation_problems(settings: Mapping[str, Any], key: str, supported: tuple[str, ...]) -> Problems:
    """Return a message if ``key`` of config.json is not ``supported``; a missing key is."""
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

_LAYER_KEYS = frozenset({
    "hybrid_override_pattern", "layers_block_type", "layer_types", "full_attention_interval", "linear_attn_config",
    "layer_group_size",
})  # fmt: skip
"""Keys of config.json for the layer types."""


def architecture(hybrid_type: HybridType) -> dict[str, Any]:
    """Return our settings, without sizes, that correspond to the defaults of the Hugging Face class."""
    all_settings = values(hybrid_type, {**EXAMPLE_SIZES, **hybrid_type.example})
    return {name: all_settings[name] for name in ARCHITECTURE if name in all_settings}


def _use_eager_experts(hf_model: Any, config: Config) -> None:
    """Compute the Hugging Face experts one by one; the default, grouped products, does not support fp64."""
    if config.model.num_experts:
        hf_model.set_experts_implementation("eager")


def make_format(hybrid_type: HybridType) -> HFFormat:
    """Return the Hugging Face format of a type."""
    return HFFormat(
        model_types=(hybrid_type.model_type, *hybrid_type.aliases),
        problems=partial(problems, hybrid_type),
        fields=partial(fields, hybrid_type),
        values=partial(values, hybrid_type),
        **by_recipes(partial(recipes, hybrid_type), heights),
        word=f"{hybrid_type.prefix}.{hybrid_type.word}.weight",
        key_groups=(ROTARY_KEYS, _LAYER_KEYS),
        ignored_names=ROTARY_BUFFERS,
        rename_tensor=hybrid_type.rename_tensor,
        unpack=hybrid_type.unpack,
        patch_hf_model=_use_eager_experts if "num_experts" in hybrid_type.free else leave_hf_model_unchanged,
        logit_tolerance=1e-5,  # Hugging Face computes norms, decays and scans in fp32
        architecture=partial(architecture, hybrid_type) if hybrid_type.is_selectable else None,
        fixed=hybrid_type.settings,
        required_fields=hybrid_type.required_fields,
    )
