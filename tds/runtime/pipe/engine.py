"""``deepspeed.runtime.pipe.engine`` with our ``PipelineEngine`` and ``PipelineModule``; all else is DeepSpeed's."""

from __future__ import annotations

from tds.deepspeed_alias import follow
from tds.engine.engine import PipelineEngine as PipelineEngine
from tds.module import PipelineModule as PipelineModule

follow(__name__, {"PipelineEngine": "tds.engine.engine", "PipelineModule": "tds.module"})
