"""Windows by layer in Hugging Face files: ``layer_types``, and ``sliding_window``, which includes the token itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.decoder import window_pattern

SLIDING, FULL = "sliding_attention", "full_attention"
"""Entries of ``layer_types``: a layer with a window, and one without."""
WINDOW_KEYS = frozenset({
    "sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
    "hybrid_layer_pattern", "sliding_window_size",
})  # fmt: skip
"""Keys of config.json for windows."""


def layer_types_of(has_window: Sequence[bool]) -> list[str]:
    """Return ``layer_types`` for a bool per layer, True if it has a window."""
    return [SLIDING if is_sliding else FULL for is_sliding in has_window]


def layer_types_problems(layer_types: Sequence[Any], num_layers: int) -> list[str]:
    """Return the problem of a ``layer_types`` that is not supported; an empty list if it is supported."""
    if unknown := sorted({str(layer_type) for layer_type in layer_types} - {SLIDING, FULL}):
        return [f"layer_types with {', '.join(unknown)} (supported: {SLIDING}, {FULL})"]
    if len(layer_types) != num_layers:
        return [f"layer_types with {len(layer_types)} entries for num_hidden_layers {num_layers}"]
    return []


def window_settings(has_window: list[bool], window_size: Any) -> tuple[dict[str, Any], list[str]]:
    """Return our window fields, empty without windows, and the settings that we do not support.

    Args:
        has_window: for each layer, True if it has a window.
        window_size: ``sliding_window`` of config.json.
    """
    if not any(has_window):
        return {}, []
    if not isinstance(window_size, int) or window_size < 2:
        return {}, [
            f"sliding_window {window_size!r} with a window in {sum(has_window)} layers (supported: integers of at "
            "least 2)"
        ]
    return {"window_size": window_size - 1, "window_attn_skip_freq": skip_freq(has_window)}, []


def skip_freq(has_window: list[bool]) -> str:
    """Return the ``window_attn_skip_freq`` that describes the layers with a window."""
    if all(has_window):
        return ""
    for period in range(2, len(has_window) + 1):
        if tuple(has_window) == window_pattern(str(period), len(has_window)):
            return str(period)
    return f"[{','.join(str(int(is_windowed)) for is_windowed in has_window)}]"
