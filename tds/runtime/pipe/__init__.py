"""``deepspeed.runtime.pipe`` with tds's ``PipelineModule`` and ``engine``; all other names are DeepSpeed's.

``tds.runtime.pipe.module`` is DeepSpeed's module. Its ``PipelineModule`` is the base class of tds's, and tds's
engine trains it too.
"""

from __future__ import annotations

from tds.deepspeed.alias import forward_to_deepspeed
from tds.deepspeed.module import PipelineModule as PipelineModule
from tds.runtime.pipe import engine as engine

forward_to_deepspeed(__name__, {"PipelineModule": "tds.deepspeed.module"})
