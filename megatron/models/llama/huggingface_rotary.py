"""Rotary positions: config.json to our settings and back.

transformers 5 saves one dictionary, ``rope_parameters``. Older versions saved ``rope_theta`` next to ``rope_scaling``,
whose ``rope_type`` was first called ``type``. Gemma 3 has one set of parameters for each type of layer: nested in
``rope_parameters``, or ``rope_local_base_freq`` next to the older keys.

A folder may hold both forms, for example after Qwen's YaRN recipe was added to a folder that transformers 5 saved.
They are read as transformers 5 reads them (``convert_rope_params_to_dict``): a ``rope_scaling`` that is set replaces
``rope_parameters``, the base included; in Gemma 3 it updates those of the layers without a window.

The older form is written, which every version reads and in which a ``rope_scaling`` that a user adds takes effect.
Gemma 3 with scaled windows has no older form and is written as ``rope_parameters``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron import log
from megatron.config.model import ModelConfig

_SCALING = {
    "factor": "rotary_scaling_factor",
    "low_freq_factor": "rotary_low_frequency_factor",
    "high_freq_factor": "rotary_high_frequency_factor",
    "original_max_position_embeddings": "rotary_original_positions",
    "beta_fast": "rotary_beta_fast",
    "beta_slow": "rotary_beta_slow",
    "attention_factor": "rotary_attention_factor",
}
_LENGTH = "original_max_position_embeddings"
_OF_SCALING = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": ("factor", _LENGTH, "beta_fast", "beta_slow", "attention_factor"),
}
_MAY_LACK = {_LENGTH, "beta_fast", "beta_slow", "attention_factor"}
_MSCALES = ("mscale", "mscale_all_dim")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_BASE, _LOCAL_BASE = 10000.0, "rope_local_base_freq"
ROTARY_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", _LOCAL_BASE})
"""Keys of config.json that state the rotary positions."""


def rotary_fields(model: ModelConfig, *, has_local: bool, has_share: bool = False) -> dict[str, Any]:
    """Return the rotary fields of config.json.

    Args:
        has_local: layers with a window have a base of their own in this model type.
        has_share: only a share of each head may be rotated in this model type.
    """
    rope_type = {"none": "default"}.get(model.rotary_scaling, model.rotary_scaling)
    scaled = {"rope_type": rope_type, **{key: getattr(model, _SCALING[key]) for key in _OF_SCALING[rope_type]}}
    if not scaled.get("attention_factor", 1.0):
        del scaled["attention_factor"]  # transformers derives it from the factor, as we do
    found = {"rope_theta": model.rotary_base, "rope_scaling": scaled if rope_type != "default" else None}
    if has_share:
        found["partial_rotary_factor"] = model.rotary_percent
    if has_local and model.rotary_local_base:
        found[_LOCAL_BASE] = model.rotary_local_base
    elif has_local and rope_type == "default":
        found[_LOCAL_BASE] = model.rotary_base
    elif has_local:
        whole = {**scaled, "rope_theta": model.rotary_base}
        return {"rope_parameters": {_FULL: whole, _SLIDING: {**whole}}}
    return found


def rotary_values(
    theirs: Mapping[str, Any], *, has_local: bool, has_windows: bool, has_share: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return our fields for a config.json, and its settings without a counterpart.

    Args:
        has_windows: some layers have a window.
        has_local, has_share: as in ``rotary_fields``.
    """
    if has_local:
        return _by_layer_type(theirs, has_windows)
    rope = _global_parameters(theirs)
    if _FULL in rope or _SLIDING in rope:
        return {}, [f"rope_parameters of {_FULL} and {_SLIDING} (known: one for all layers)"]
    outer_share = theirs.get("partial_rotary_factor")
    share = rope.pop("partial_rotary_factor", None)
    share = outer_share if share is None else share
    if not has_share and share not in (None, 1.0):
        return {}, [f"partial_rotary_factor {share!r} (known: 1.0)"]
    found, odd = _one(rope, theirs)
    if has_share and found:
        found["rotary_percent"] = 0.5 if share is None else float(share)
    return found, odd


def _global_parameters(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of all layers: ``rope_scaling`` where it is set, else ``rope_parameters``."""
    scaling, saved = theirs.get("rope_scaling"), theirs.get("rope_parameters")
    if scaling and saved:
        base = dict(scaling).get("rope_theta") or theirs.get("rope_theta", _BASE)
        hidden = saved.get("rope_theta")
        if hidden is not None and hidden != base:
            log.warn_once(
                f"config.json: rope_scaling replaces rope_parameters, as in transformers, so the rotary base is {base} "
                f"instead of {hidden}. To keep {hidden}, add it to rope_scaling as rope_theta"
            )
    return dict(scaling or saved or {})


def _by_layer_type(theirs: Mapping[str, Any], has_windows: bool) -> tuple[dict[str, Any], list[str]]:
    """Return our fields and the settings without a counterpart of a Gemma 3."""
    saved, scaling = theirs.get("rope_parameters") or {}, theirs.get("rope_scaling")
    full, local = dict(saved.get(_FULL) or {}), dict(saved.get(_SLIDING) or {})
    if scaling is not None:
        if "type" in scaling and "rope_type" not in scaling:
            return {}, ["rope_scaling with type (known: rope_type, the only key that Gemma 3 reads there)"]
        full.update(scaling)
    for share in (theirs.get("partial_rotary_factor"), full.get("partial_rotary_factor")):
        if share not in (None, 1.0):
            return {}, [f"partial_rotary_factor {share!r} (known: 1.0)"]
    found, odd = _one(full, theirs)
    if not has_windows or odd:
        return found, odd
    base = float(local.get("rope_theta") or theirs.get(_LOCAL_BASE, _BASE))
    rope_type = local.get("rope_type", "default")
    if rope_type == "default":
        is_same = found["rotary_scaling"] == "none" and found["rotary_base"] == base
        return (found if is_same else {**found, "rotary_local_base": base}), []
    same, odd = _one(local, {**theirs, "rope_theta": base})
    if same != found and not odd:
        odd = [f"rope_type {rope_type!r} of layers with a window (known: default, or all as in the others)"]
    return same, odd


def _one(rope: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return our fields of one set of their parameters, and what of them has no counterpart."""
    given = {key: value for key, value in rope.items() if value is not None}
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    base = given.pop("rope_theta", theirs.get("rope_theta", _BASE))
    if kind not in _OF_SCALING:
        return {}, [f"rope_type {kind!r} (known: {', '.join(_OF_SCALING)})"]
    neutral = {"partial_rotary_factor": 1.0, **({"truncate": True} if kind == "yarn" else {})}
    set_aside = {key: given.pop(key, only) for key, only in neutral.items()}
    odd = [f"{key} {value!r} (known: {neutral[key]!r})" for key, value in set_aside.items() if value != neutral[key]]
    if kind == "yarn":
        _resolve_mscale(given)
    odd += [f"{key} of rope_type {kind!r}" for key in given if key not in _OF_SCALING[kind]]
    odd += [
        f"rope_type {kind!r} without {key}" for key in _OF_SCALING[kind] if key not in given and key not in _MAY_LACK
    ]
    if odd:
        return {}, odd
    if _LENGTH in _OF_SCALING[kind]:
        given.setdefault(_LENGTH, theirs.get(_LENGTH) or theirs.get("max_position_embeddings", 2048))
    scaled = {_SCALING[key]: given[key] for key in _OF_SCALING[kind] if key in given}
    return {"rotary_base": float(base), "rotary_scaling": {"default": "none"}.get(kind, kind), **scaled}, []


def _resolve_mscale(given: dict[str, Any]) -> None:
    """Put the attention factor that follows from both of DeepSeek's ``mscale`` into ``given``; one alone says nothing.

    Source: ``_compute_yarn_parameters`` of transformers.
    """
    one, other = (given.pop(key, None) for key in _MSCALES)
    factor = given.get("factor")
    if one and other and factor and "attention_factor" not in given:
        log_factor = 0.1 * math.log(factor) if factor > 1 else 0.0
        given["attention_factor"] = (one * log_factor + 1.0) / (other * log_factor + 1.0)
