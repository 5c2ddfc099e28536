"""LayerFeatures: flags for attention sinks and gates, layers without rotary positions, and clamped activations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.config.experts import layer_pattern
from megatron.config.option import option

_option = partial(option, family_kind="decoder", elsewhere="it is supported in decoders only; remove it")

VANILLA, OFF_BY_ONE, LEARNABLE = "vanilla", "off-by-one", "learnable"
BEFORE_ROTATION, AFTER_ROTATION = "before", "after"
ALL_LAYERS, WINDOW_LAYERS = "all", "window"


@dataclass(frozen=True, kw_only=True)
class LayerFeatures:
    """Features of attention and feed-forward layers, named as in Megatron-LM; a base of ``ModelConfig``."""

    softmax_type: str = _option(
        VANILLA,
        "softmax of attention: off-by-one: the denominator has one more term, exp(0); learnable: it has one more term "
        "exp(sink) with a trained sink for each head, as in gpt-oss",
        choices=(VANILLA, OFF_BY_ONE, LEARNABLE),
    )
    sink_layers: str = _option(
        ALL_LAYERS,
        "layers with the softmax of --softmax-type: all, or window: only layers with a window, as in MiMo-V2-Flash",
        choices=(ALL_LAYERS, WINDOW_LAYERS),
    )
    window_num_query_groups: int = _option(
        0,
        "number of key and value heads in layers with a window",
        minimum=1,
        shown_default="num-query-groups",
    )
    attention_value_scale: float = _option(1.0, "factor for the values of attention; MiMo-V2-Flash: 0.707", above=0)
    attention_output_gate: bool = _option(
        False,
        "multiply the output of each head by the sigmoid of a further projection of the input, with one gate per "
        "element; with multi-latent attention one gate per head, as in bailing_hybrid",
    )
    no_rope_freq: str = _option(
        "",
        "layers without rotary positions: N: every N-th layer; or a list with 1 for a layer without rotary positions "
        "and 0 for a layer with them, such as [0,0,1] or ([0]*3+[1])*2",
        shown_default="none",
    )
    rotary_interleaved: bool = _option(
        False, "rotate the elements 2 i and 2 i + 1 of a head instead of i and i + d / 2, as in GPT-J and Meta's LLaMA"
    )
    rotary_truncate: bool = _option(
        True,
        "yarn: use the fractional indices of the pairs with --rotary-beta-fast and --rotary-beta-slow rotations "
        "instead of rounding them outwards, as in gpt-oss",
        flag="",
        constants={"--no-rotary-truncate": False},
    )
    qk_norm_order: str = _option(
        BEFORE_ROTATION,
        "apply --qk-norm before or after the rotation of queries and keys",
        choices=(BEFORE_ROTATION, AFTER_ROTATION),
    )
    activation_func_clamp_value: float = _option(
        0.0,
        "clamp the inputs of a gated activation: the gate from above to this value, the value to [-this, this]; 0: off",
        minimum=0,
    )
    glu_linear_offset: float = _option(0.0, "constant added to the value of a gated activation; gpt-oss: 1")


REFITTED = (
    "no_rope_freq", "rotary_interleaved", "rotary_truncate", "qk_norm_order", "activation_func_clamp_value",
    "glu_linear_offset", "attention_value_scale",
)  # fmt: skip
"""Fields that may differ when weights are loaded: the weights fit, but the outputs change."""
ARCHITECTURE = (
    "softmax_type", "attention_output_gate", "no_rope_freq", "rotary_interleaved", "rotary_truncate", "qk_norm_order",
    "activation_func_clamp_value", "glu_linear_offset", "sink_layers", "attention_value_scale",
)  # fmt: skip
"""Fields that ``--model`` sets."""


def has_rotary(model: Any, layer_idx: int) -> bool:
    """Return True if layer ``layer_idx``, counted from 0, has rotary positions.

    Raises:
        ValueError: ``no_rope_freq`` is invalid, or its list does not have one entry per layer.
    """
    return (
        model.position_embedding_type == "rope" and not no_rope_layers(model.no_rope_freq, model.num_layers)[layer_idx]
    )


def no_rope_layers(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return a bool per layer: True if ``text``, a value of ``no_rope_freq``, excludes it from rotary positions.

    Raises:
        ValueError: ``text`` is invalid, or its list does not have one entry per layer.

    Source: Megatron-LM's ``--no-rope-freq``: a number, or an expression of lists.
    """
    if not text:
        return (False,) * num_layers
    if re.fullmatch(r"\s*[1-9]\d*\s*", text):
        return tuple(layer % int(text) == 0 for layer in range(1, num_layers + 1))
    return layer_pattern(text, num_layers)


def layer_feature_problems(model: Any) -> Iterator[str]:
    """Yield an error message for each invalid layer feature in ``model``, a decoder's ``ModelConfig``."""
    try:
        no_rope_layers(model.no_rope_freq, model.num_layers)
    except ValueError:
        yield (
            "--no-rope-freq must be a number of at least 1, or a list with 1 or 0 for each of the "
            f"{model.num_layers} layers such as [0,0,1] or ([0]*3+[1])*2, got {model.no_rope_freq!r}"
        )
    has_gate = model.attention_output_gate and not model.multi_latent_attention
    if has_gate and model.value_size != model.kv_hidden_size:
        yield (
            "--attention-output-gate needs value heads of the size of query heads, got --v-head-dim "
            f"{model.value_size} and --kv-hidden-size {model.kv_hidden_size}. Remove one of them"
        )
    if not model.activation.startswith("gated-"):
        for flag, value in (
            ("--activation-func-clamp-value", model.activation_func_clamp_value),
            ("--glu-linear-offset", model.glu_linear_offset),
        ):
            if value:
                yield (
                    f"{flag} applies to gated activations only, got {value:g} with --activation {model.activation}. "
                    "Remove it, or use gated-silu, gated-gelu or gated-quick-gelu"
                )


def unused_layer_features(model: Any, explicit: tuple[str, ...]) -> Iterator[str]:
    """Yield an error message for each field in ``explicit`` (the fields set by flags) that has no effect."""
    flags = [
        flag
        for name, flag in (
            ("no_rope_freq", "--no-rope-freq"),
            ("rotary_interleaved", "--rotary-interleaved"),
            ("qk_norm_order", "--qk-norm-order"),
        )
        if name in explicit
    ]
    if flags and model.position_embedding_type != "rope":
        yield (
            f"{', '.join(flags)} has no effect without --position-embedding-type rope, got "
            f"{model.position_embedding_type}. Remove it, or change the type"
        )
    if "rotary_truncate" in explicit and model.rotary_scaling != "yarn":
        yield (
            f"--no-rotary-truncate has no effect without --rotary-scaling yarn, got {model.rotary_scaling}. Remove it, "
            "or change --rotary-scaling"
        )
    for name, flag in (("sink_layers", "--sink-layers"), ("window_num_query_groups", "--window-num-query-groups")):
        if name in explicit and not model.window_size:
            yield f"{flag} has no effect without --window-size. Remove it, or add --window-size"
    if "sink_layers" in explicit and model.softmax_type == VANILLA:
        yield "--sink-layers has no effect without --softmax-type, got vanilla. Remove it, or add --softmax-type"
    if "qk_norm_order" in explicit and model.qk_norm == "none":
        yield "--qk-norm-order has no effect without --qk-norm, got none. Remove it, or add --qk-norm"
