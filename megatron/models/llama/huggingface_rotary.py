"""Rotary positions of a config.json under our settings and back.

Since transformers 5 everything stands in ``rope_parameters``; before, ``rope_theta`` stood beside ``rope_scaling``,
whose kind was called ``type`` at first. Gemma 3 has one of them for each kind of layers, before transformers 5
``rope_local_base_freq`` beside the others. All are written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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


def rotary_fields(model: ModelConfig, *, has_local: bool, has_share: bool = False) -> dict[str, Any]:
    """Return the fields of config.json.

    Args:
        has_local: layers with a window have a base of their own there.
        has_share: a share of each head may turn there.
    """
    kind = {"none": "default"}.get(model.rotary_scaling, model.rotary_scaling)
    scaled = {"rope_type": kind, **{key: getattr(model, _SCALING[key]) for key in _OF_SCALING[kind]}}
    if not scaled.get("attention_factor", 1.0):
        del scaled["attention_factor"]  # theirs follows from the factor then, as ours
    whole = {**scaled, "rope_theta": model.rotary_base}
    found = {"rope_theta": model.rotary_base, "rope_scaling": scaled if kind != "default" else None}
    if has_share:
        found["partial_rotary_factor"] = whole["partial_rotary_factor"] = model.rotary_percent
    if not has_local:
        return {**found, "rope_parameters": whole}
    local = (
        {**whole} if not model.rotary_local_base else {"rope_type": "default", "rope_theta": model.rotary_local_base}
    )
    return {**found, _LOCAL_BASE: local["rope_theta"], "rope_parameters": {_FULL: whole, _SLIDING: local}}


def rotary_values(
    theirs: Mapping[str, Any], *, has_local: bool, has_windows: bool, has_share: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return our fields of a config.json, and which of its settings have no counterpart."""
    given, local = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}, None
    if has_share:
        theirs, given = dict(theirs), dict(given)
        inner, outer = given.pop("partial_rotary_factor", None), theirs.pop("partial_rotary_factor", None)
        share = outer if inner is None else inner
        found, odd = rotary_values({**theirs, "rope_parameters": given}, has_local=has_local, has_windows=has_windows)
        return {**found, "rotary_percent": 0.5 if share is None else float(share)}, odd
    if _FULL in given or _SLIDING in given:
        if not has_local:
            return {}, [f"rope_parameters of {_FULL} and {_SLIDING} (known: one for all layers)"]
        given, local = given.get(_FULL) or {}, given.get(_SLIDING) or {}
    share = theirs.get("partial_rotary_factor")
    if share not in (None, 1.0):
        return {}, [f"partial_rotary_factor {share!r} (known: 1.0)"]
    found, odd = _one(given, theirs)
    if not has_local or not has_windows or odd:
        return found, odd
    base = float((local or {}).get("rope_theta") or theirs.get(_LOCAL_BASE, _BASE))
    kind = (local or {}).get("rope_type", "default")
    if kind == "default":
        is_same = found["rotary_scaling"] == "none" and found["rotary_base"] == base
        return (found if is_same else {**found, "rotary_local_base": base}), []
    same, odd = _one(local or {}, {**theirs, "rope_theta": base})
    if same != found and not odd:
        odd = [f"rope_type {kind!r} of layers with a window (known: default, or all as in the others)"]
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
        log = 0.1 * math.log(factor) if factor > 1 else 0.0
        given["attention_factor"] = (one * log + 1.0) / (other * log + 1.0)
