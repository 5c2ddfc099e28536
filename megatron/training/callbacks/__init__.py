"""Callbacks of a training run, one per file."""

from __future__ import annotations

from megatron.training.trainer import Callback

__all__ = ["Callback"]
