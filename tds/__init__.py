"""DeepSpeed with another pipeline engine: ``import tds as deepspeed``.

Every public name of ``deepspeed`` is reachable here, looked up in DeepSpeed at the moment of use. Ours are
``initialize`` (a pipeline model gets our engine, anything else exactly what DeepSpeed does), ``PipelineEngine``,
``PipelineModule``, ``reduce_gradients``, ``quiet`` and the module ``tds.pipe``.
"""

from __future__ import annotations

from typing import Any

from tds.compatibility import check_versions, spare_the_compiler

check_versions()
spare_the_compiler()

import deepspeed as _deepspeed  # noqa: E402

from tds import pipe  # noqa: E402
from tds.chatter import quiet  # noqa: E402
from tds.engine import PipelineEngine  # noqa: E402
from tds.gradients import reduce_gradients  # noqa: E402
from tds.initialize import initialize  # noqa: E402
from tds.module import PipelineModule  # noqa: E402

__all__ = ["PipelineEngine", "PipelineModule", "initialize", "pipe", "quiet", "reduce_gradients"]


def __getattr__(name: str) -> Any:
    return getattr(_deepspeed, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(_deepspeed)})
