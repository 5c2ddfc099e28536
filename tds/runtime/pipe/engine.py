"""``deepspeed.runtime.pipe.engine`` with tds's ``PipelineEngine`` and ``PipelineModule``."""

from __future__ import annotations

from tds.deepspeed.alias import forward_to_deepspeed
from tds.deepspeed.engine import PipelineEngine as PipelineEngine
from tds.deepspeed.module import PipelineModule as PipelineModule

forward_to_deepspeed(__name__, {"PipelineEngine": "tds.deepspeed.engine", "PipelineModule": "tds.deepspeed.module"})
