"""``deepspeed.runtime.pipe.engine`` with our ``PipelineEngine`` and ``PipelineModule``; all else is DeepSpeed's."""

from __future__ import annotations

from tds.engine import PipelineEngine as PipelineEngine
from tds.finder import follow
from tds.module import PipelineModule as PipelineModule

follow(__name__, {"PipelineEngine": "tds.engine", "PipelineModule": "tds.module"})
