"""``deepspeed.runtime.pipe.engine`` with tds's ``PipelineEngine`` and ``PipelineModule``."""

from __future__ import annotations

from tds.deepspeed.alias import follow
from tds.deepspeed.engine import PipelineEngine as PipelineEngine
from tds.deepspeed.module import PipelineModule as PipelineModule

follow(__name__, {"PipelineEngine": "tds.deepspeed.engine", "PipelineModule": "tds.deepspeed.module"})
