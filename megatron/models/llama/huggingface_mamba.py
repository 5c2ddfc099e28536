"""Mamba-2 layers in Hugging Face files: weight names and settings that all types with these layers share.

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
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.layer_types import MAMBA2, recurrent_mixers
from megatron.config.model import ModelConfig
from megatron.config.recurrent import GROUP_NORM, NO_NORM
from megatron.models.common.huggingface import WeightMapping
from megatron.models.llama.huggingface_hybrid import Recipes, row_mappings

_PARTS = ("z", "x", "B", "C", "dt")


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
            mappings |= row_mappings(names, num_rows, f"{theirs}.in_proj.{hf_suffix}")
            mappings[f"{ours}.dense.{hf_suffix}"] = WeightMapping((f"{theirs}.out_proj.{hf_suffix}",))
        if not suffix or model.mamba_conv_bias:
            names = [f"{ours}.convolution.{part}{suffix}" for part in _PARTS[1:4]]
            mappings |= row_mappings(
                names, num_rows[1:4], f"{theirs}.conv1d.{hf_suffix}", unit_dims=(1,) if hf_suffix == "weight" else ()
            )
    return mappings


def mamba_problems(model: ModelConfig, *, has_other_norms: bool = False) -> Iterator[str]:
    """Yield a message for each setting of the Mamba-2 layers of ``model`` that config.json cannot express.

    Args:
        has_other_norms: config.json can express every ``mamba_norm``.
    """
    if MAMBA2 not in recurrent_mixers(model):
        return
    if model.mamba_norm_groups != model.mamba_num_groups:
        yield (
            "--mamba-norm-groups must equal --mamba-num-groups, got "
            f"{model.mamba_norm_groups} and {model.mamba_num_groups}"
        )
    if not has_other_norms and model.mamba_norm != GROUP_NORM:
        yield f"--mamba-norm must be {GROUP_NORM}, got {model.mamba_norm}"


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
