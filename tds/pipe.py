"""``deepspeed.pipe`` with our ``PipelineModule``; every other name is DeepSpeed's."""

from __future__ import annotations

from typing import Any

import deepspeed.pipe as _pipe
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from tds.module import PipelineModule

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


def __getattr__(name: str) -> Any:
    return getattr(_pipe, name)
