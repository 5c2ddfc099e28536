"""DeepSpeed with another pipeline engine: ``import tds as deepspeed``.

Every public name of ``deepspeed`` is reachable here, looked up in DeepSpeed at the moment of use, and every module of
it under its name in tds. Ours are ``initialize`` (a pipeline model gets our engine, anything else exactly what
DeepSpeed does), ``PipelineEngine``, ``PipelineModule``, ``Weighted`` (a loss as a mean over tokens),
``reduce_gradients`` and ``quiet``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tds.compatibility import check_torch, check_versions, spare_the_compiler

check_torch()
check_versions()
spare_the_compiler()

from tds import pipe as pipe  # noqa: E402
from tds import runtime as runtime  # noqa: E402
from tds.chatter import quiet as quiet  # noqa: E402
from tds.engine import PipelineEngine as PipelineEngine  # noqa: E402
from tds.finder import follow, install  # noqa: E402
from tds.gradients import reduce_gradients as reduce_gradients  # noqa: E402
from tds.initialize import initialize as initialize  # noqa: E402
from tds.loss import Weighted as Weighted  # noqa: E402
from tds.module import PipelineModule as PipelineModule  # noqa: E402

follow(
    __name__,
    ("PipelineEngine", "PipelineModule", "Weighted", "initialize", "pipe", "quiet", "reduce_gradients", "runtime"),
)
install()

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
