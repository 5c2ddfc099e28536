"""``deepspeed.runtime.pipe`` with our ``PipelineModule`` and ``engine``; every other name is DeepSpeed's.

``tds.runtime.pipe.module`` is DeepSpeed's own module: its ``PipelineModule`` is the class that ours builds on, and our
engine trains it too.
"""

from __future__ import annotations

from tds.deepspeed.alias import follow
from tds.deepspeed.module import PipelineModule as PipelineModule
from tds.runtime.pipe import engine as engine

follow(__name__, {"PipelineModule": "tds.deepspeed.module"})
