"""``deepspeed.runtime.pipe.engine`` with our ``PipelineEngine`` and ``PipelineModule``; all else is DeepSpeed's."""

from __future__ import annotations

from tds.deepspeed.alias import follow
from tds.deepspeed.module import PipelineModule as PipelineModule
from tds.engine.engine import PipelineEngine as PipelineEngine

follow(__name__, {"PipelineEngine": "tds.engine.engine", "PipelineModule": "tds.deepspeed.module"})
