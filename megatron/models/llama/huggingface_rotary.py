"""Rotary positions: conversion between config.json and our settings.

transformers 5 saves one dictionary, ``rope_parameters``. Older versions save ``rope_theta`` and ``rope_scaling``, whose
``rope_type`` was first called ``type``. Gemma 3 has one set of parameters per layer type: nested in
``rope_parameters``, or ``rope_local_base_freq`` next to the older keys.

A folder may contain both forms, for example if Qwen's YaRN recipe was added to a folder saved by transformers 5. Both
are read as transformers 5 reads them (``convert_rope_params_to_dict``): a ``rope_scaling`` that is set replaces
``rope_parameters``, including the base; in Gemma 3 it updates the parameters of the layers without a window.

The older form is written: every version reads it, and a ``rope_scaling`` that a user adds to it takes effect. Gemma 3
with scaled windows cannot be expressed in the older form and is written as ``rope_parameters``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron import log
from megatron.config.decoder import parse_factors
from megatron.config.model import ModelConfig
from megatron.models.llama.huggingface_windows import FULL, SLIDING

_FIELD_BY_KEY = {
    "factor": "rotary_scaling_factor",
    "low_freq_factor": "rotary_low_frequency_factor",
    "high_freq_factor": "rotary_high_frequency_factor",
    "original_max_position_embeddings": "rotary_original_positions",
    "beta_fast": "rotary_beta_fast",
    "beta_slow": "rotary_beta_slow",
    "attention_factor": "rotary_attention_factor",
    "short_factor": "rotary_short_factors",
    "long_factor": "rotary_long_factors",
}
_LENGTH_KEY = "original_max_position_embeddings"
_FACTOR_LISTS = ("short_factor", "long_factor")
_KEYS_BY_TYPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH_KEY),
    "yarn": ("factor", _LENGTH_KEY, "beta_fast", "beta_slow", "attention_factor"),
    "longrope": ("factor", _LENGTH_KEY, "attention_factor", *_FACTOR_LISTS),
}
_OPTIONAL_KEYS = {_LENGTH_KEY, "beta_fast", "beta_slow", "attention_factor"}
_MSCALE_KEYS = ("mscale", "mscale_all_dim")
_DEFAULT_BASE, _LOCAL_BASE_KEY = 10000.0, "rope_local_base_freq"
ROTARY_KEYS = frozenset({
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", _LOCAL_BASE_KEY, "swa_rope_theta",
})  # fmt: skip
"""Keys of config.json for rotary positions."""


def rotary_fields(
    model: ModelConfig, *, has_local: bool, has_partial_rotary: bool = False, is_nested: bool = False
) -> dict[str, Any]:
    """Return the rotary fields of config.json.

    Args:
        has_local: in this model type, layers with a window have a separate rotary base.
        has_partial_rotary: this model type supports rotating only a share of each head.
        is_nested: this model type has parameters for each layer type, in ``rope_parameters`` only.
    """
    rope_type = {"none": "default"}.get(model.rotary_scaling, model.rotary_scaling)
    scaled = {"rope_type": rope_type, **{key: getattr(model, _FIELD_BY_KEY[key]) for key in _KEYS_BY_TYPE[rope_type]}}
    if not scaled.get("attention_factor", 1.0):
        del scaled["attention_factor"]  # transformers derives it from the factor, as we do
    if rope_type == "longrope":
        scaled |= {key: list(parse_factors(scaled[key])) for key in _FACTOR_LISTS}
    if rope_type == "yarn" and not model.rotary_truncate:
        scaled["truncate"] = False
    if is_nested:
        share = {"partial_rotary_factor": model.rotary_percent} if has_partial_rotary else {}
        full = local = {**scaled, "rope_theta": model.rotary_base, **share}
        if model.window_size and model.rotary_local_base:
            local = {"rope_type": "default", "rope_theta": model.rotary_local_base, **share}
        return {"rope_parameters": {FULL: full, SLIDING: dict(local)}}
    fields = {"rope_theta": model.rotary_base, "rope_scaling": scaled if rope_type != "default" else None}
    if has_partial_rotary:
        fields["partial_rotary_factor"] = model.rotary_percent
    if has_local and model.rotary_local_base:
        fields[_LOCAL_BASE_KEY] = model.rotary_local_base
    elif has_local and rope_type == "default":
        fields[_LOCAL_BASE_KEY] = model.rotary_base
    elif has_local:
        parameters = {**scaled, "rope_theta": model.rotary_base}
        return {"rope_parameters": {FULL: parameters, SLIDING: {**parameters}}}
    return fields


def rotary_values(
    hf_config: Mapping[str, Any],
    *,
    has_local: bool,
    has_windows: bool,
    has_partial_rotary: bool = False,
    default_share: float = 0.5,
) -> tuple[dict[str, Any], list[str]]:
    """Return our fields for a config.json, and its settings that we do not support.

    Args:
        has_windows: some layers have a window.
        has_local, has_partial_rotary: as in ``rotary_fields``.
        default_share: default of the class for the rotated share of each head.
    """
    if has_local and has_partial_rotary:
        return _partial_parameters_by_layer_type(hf_config, has_windows, default_share)
    if has_local:
        return _parameters_by_layer_type(hf_config, has_windows)
    rope = _global_parameters(hf_config)
    if FULL in rope or SLIDING in rope:
        return {}, [f"separate rope_parameters for {FULL} and {SLIDING} (supported: the same for all layers)"]
    outer_share = hf_config.get("partial_rotary_factor")
    rotary_share = rope.pop("partial_rotary_factor", None)
    rotary_share = outer_share if rotary_share is None else rotary_share
    if not has_partial_rotary and rotary_share not in (None, 1.0):
        return {}, [f"partial_rotary_factor {rotary_share!r} (supported: 1.0)"]
    fields, unsupported = _convert_parameters(rope, hf_config)
    if has_partial_rotary and fields:
        fields["rotary_percent"] = default_share if rotary_share is None else float(rotary_share)
    return fields, unsupported


def _global_parameters(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of all layers: ``rope_scaling`` if it is set, otherwise ``rope_parameters``."""
    rope_scaling, rope_parameters = hf_config.get("rope_scaling"), hf_config.get("rope_parameters")
    if rope_scaling and rope_parameters:
        base = dict(rope_scaling).get("rope_theta") or hf_config.get("rope_theta", _DEFAULT_BASE)
        replaced_base = rope_parameters.get("rope_theta")
        if replaced_base is not None and replaced_base != base:
            log.warn_once(
                f"config.json: rope_scaling replaces rope_parameters, as in transformers, so the rotary base is {base} "
                f"instead of {replaced_base}. To keep {replaced_base}, add it to rope_scaling as rope_theta"
            )
    return dict(rope_scaling or rope_parameters or {})


def _partial_parameters_by_layer_type(
    hf_config: Mapping[str, Any], has_windows: bool, default_share: float
) -> tuple[dict[str, Any], list[str]]:
    """Return our fields for ``rope_parameters`` by layer type, each with a share, and the unsupported settings."""
    saved = hf_config.get("rope_parameters") or {}
    parameters, shares = {}, set()
    for layer_type in (FULL, *([SLIDING] if has_windows else [])):
        if not isinstance(saved.get(layer_type), Mapping):
            return {}, [f"rope_parameters without {layer_type} (supported: parameters for each layer type)"]
        parameters[layer_type] = dict(saved[layer_type])
        shares.add(float(parameters[layer_type].pop("partial_rotary_factor", None) or default_share))
    if len(shares) > 1:
        return {}, [f"different values of partial_rotary_factor, {sorted(shares)} (supported: one for all layers)"]
    fields, unsupported = _parameters_by_layer_type({"rope_parameters": parameters}, has_windows)
    return {**fields, "rotary_percent": shares.pop()}, unsupported


def _parameters_by_layer_type(hf_config: Mapping[str, Any], has_windows: bool) -> tuple[dict[str, Any], list[str]]:
    """Return our fields and unsupported settings for a type whose layers with a window have a separate base."""
    saved, scaling = hf_config.get("rope_parameters") or {}, hf_config.get("rope_scaling")
    full, local = dict(saved.get(FULL) or {}), dict(saved.get(SLIDING) or {})
    if scaling is not None:
        if "type" in scaling and "rope_type" not in scaling:
            return {}, ["rope_scaling with type (supported: rope_type, the only key that Gemma 3 reads)"]
        full.update(scaling)
    for rotary_share in (hf_config.get("partial_rotary_factor"), full.get("partial_rotary_factor")):
        if rotary_share not in (None, 1.0):
            return {}, [f"partial_rotary_factor {rotary_share!r} (supported: 1.0)"]
    fields, unsupported = _convert_parameters(full, hf_config)
    if not has_windows or unsupported:
        return fields, unsupported
    base = float(local.get("rope_theta") or hf_config.get(_LOCAL_BASE_KEY, _DEFAULT_BASE))
    rope_type = local.get("rope_type", "default")
    if rope_type == "default":
        is_same = fields["rotary_scaling"] == "none" and fields["rotary_base"] == base
        return (fields if is_same else {**fields, "rotary_local_base": base}), []
    local_fields, unsupported = _convert_parameters(local, {**hf_config, "rope_theta": base})
    if local_fields != fields and not unsupported:
        unsupported = [
            f"rope_type {rope_type!r} of layers with a window (supported: default, or the parameters of other layers)"
        ]
    return local_fields, unsupported


def _convert_parameters(
    rope_parameters: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return our fields for one set of rotary parameters, and its settings that we do not support."""
    parameters = {key: value for key, value in rope_parameters.items() if value is not None}
    rope_type = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    base = parameters.pop("rope_theta", hf_config.get("rope_theta", _DEFAULT_BASE))
    if rope_type not in _KEYS_BY_TYPE:
        return {}, [f"rope_type {rope_type!r} (supported: {', '.join(_KEYS_BY_TYPE)})"]
    truncate = parameters.pop("truncate", True) if rope_type == "yarn" else True
    ignored_defaults = {"partial_rotary_factor": 1.0}
    ignored_values = {key: parameters.pop(key, default) for key, default in ignored_defaults.items()}
    unsupported = [
        f"{key} {value!r} (supported: {ignored_defaults[key]!r})"
        for key, value in ignored_values.items()
        if value != ignored_defaults[key]
    ]
    if rope_type == "yarn":
        _resolve_mscale(parameters)
    if rope_type == "longrope":
        unsupported += _resolve_longrope(parameters, hf_config)
    unsupported += [f"{key} of rope_type {rope_type!r}" for key in parameters if key not in _KEYS_BY_TYPE[rope_type]]
    unsupported += [
        f"rope_type {rope_type!r} without {key}"
        for key in _KEYS_BY_TYPE[rope_type]
        if key not in parameters and key not in _OPTIONAL_KEYS
    ]
    if unsupported:
        return {}, unsupported
    if _LENGTH_KEY in _KEYS_BY_TYPE[rope_type]:
        parameters.setdefault(_LENGTH_KEY, hf_config.get(_LENGTH_KEY) or hf_config.get("max_position_embeddings", 2048))
    scaled = {_FIELD_BY_KEY[key]: parameters[key] for key in _KEYS_BY_TYPE[rope_type] if key in parameters}
    if not truncate:
        scaled["rotary_truncate"] = False
    return {"rotary_base": float(base), "rotary_scaling": {"default": "none"}.get(rope_type, rope_type), **scaled}, []


def _resolve_longrope(parameters: dict[str, Any], hf_config: Mapping[str, Any]) -> list[str]:
    """Convert the lists of factors in ``parameters`` to text and add the default of ``factor``.

    Returns:
        settings that we do not support.

    Source: ``_compute_longrope_parameters`` of transformers.
    """
    max_positions = hf_config.get("max_position_embeddings", 2048)
    length = parameters.setdefault(_LENGTH_KEY, hf_config.get(_LENGTH_KEY) or max_positions)
    parameters.setdefault("factor", max_positions / length)
    unsupported = []
    for key in parameters.keys() & _FACTOR_LISTS:
        factors = parameters[key]
        if isinstance(factors, list) and all(isinstance(factor, (int, float)) for factor in factors):
            parameters[key] = f"[{','.join(repr(float(factor)) for factor in factors)}]"
        else:
            unsupported.append(f"{key} {factors!r} (supported: a list of numbers)")
    if parameters["factor"] < 1.0:
        unsupported.append(f"factor {parameters['factor']!r} of rope_type 'longrope' (supported: at least 1)")
    return unsupported


def _resolve_mscale(parameters: dict[str, Any]) -> None:
    """Replace DeepSeek's ``mscale`` and ``mscale_all_dim`` in ``parameters`` by the attention factor, if both are set.

    Source: ``_compute_yarn_parameters`` of transformers.
    """
    mscale, mscale_all_dim = (parameters.pop(key, None) for key in _MSCALE_KEYS)
    factor = parameters.get("factor")
    if mscale and mscale_all_dim and factor and "attention_factor" not in parameters:
        log_factor = 0.1 * math.log(factor) if factor > 1 else 0.0
        parameters["attention_factor"] = (mscale * log_factor + 1.0) / (mscale_all_dim * log_factor + 1.0)
