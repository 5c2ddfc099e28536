"""``deepspeed.pipe`` with our ``PipelineModule``; every other name is DeepSpeed's."""

from __future__ import annotations

from deepspeed.pipe import LayerSpec as LayerSpec
from deepspeed.pipe import TiedLayerSpec as TiedLayerSpec

from tds.finder import follow
from tds.module import PipelineModule as PipelineModule

follow(__name__, ("PipelineModule",))
