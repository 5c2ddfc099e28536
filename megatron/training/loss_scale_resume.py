"""Restore the loss scale from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron import log
from megatron.checkpoint import former
from megatron.config import Config
from megatron.optim.grad_scaler import GradScaler


def restore_scaler(scaler: GradScaler, metadata: Mapping[str, Any], config: Config) -> None:
    """Restore a checkpoint's loss scale if both scales are dynamic; otherwise keep a new run's scale.

    A loss scale that differs from the checkpoint's is logged.

    Args:
        metadata: checkpoint metadata.
    """
    # Missing in averaged and imported checkpoints.
    saved = dict(metadata.get("scaler") or {"scale": 1.0, "is_dynamic": False})
    if "is_dynamic" not in saved:  # written by an earlier version
        precision = former.convert_settings(metadata.get("config", {})).get("precision", {})
        saved["is_dynamic"] = precision.get("dtype") == "fp16" and not precision.get("loss_scale")
        saved["hysteresis"] = precision.get("hysteresis", scaler.hysteresis)
    scaler.load(saved)
    if (scaler.is_dynamic, scaler.scale) != (saved["is_dynamic"], saved["scale"]):
        log.info(f"{_describe_scale(scaler, config)}; {_describe_saved_scale(saved)}")


def _describe_scale(scaler: GradScaler, config: Config) -> str:
    if not scaler.is_dynamic:
        has_scale = config.precision.dtype == "fp16"
        return (
            f"loss scale: fixed at {scaler.scale:g}" if has_scale else f"loss scale: none in {config.precision.dtype}"
        )
    return f"loss scale: dynamic, starts at {scaler.scale:g}"


def _describe_saved_scale(saved: Mapping[str, Any]) -> str:
    if saved["is_dynamic"]:
        return f"the checkpoint has a dynamic one at {saved['scale']:g}"
    return (
        "the checkpoint has none" if saved["scale"] == 1.0 else f"the checkpoint has a fixed one of {saved['scale']:g}"
    )
