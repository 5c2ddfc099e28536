"""What is done around the steps of a run, a file each."""

from __future__ import annotations

from megatron.training.trainer import Callback

__all__ = ["Callback"]
