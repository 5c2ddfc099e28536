"""DeepSpeed with another pipeline engine: ``import tds as deepspeed``.

Every public name of ``deepspeed`` is reachable here, looked up in DeepSpeed at the moment of use, and every module of
it under its name in tds. Ours are ``initialize`` (a pipeline model gets our engine, anything else exactly what
DeepSpeed does), ``PipelineEngine``, ``PipelineModule``, ``Weighted`` (a loss as a mean over tokens),
``reduce_gradients`` and ``quiet``.

The import alone brings neither torch nor DeepSpeed: they come with the first name that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tds.deepspeed.alias import follow, install

follow(
    __name__,
    {
        "PipelineEngine": "tds.deepspeed.engine",
        "PipelineModule": "tds.deepspeed.module",
        "Weighted": "tds.loss",
        "initialize": "tds.deepspeed.initialize",
        "quiet": "tds.deepspeed.alias",
        "reduce_gradients": "tds.gradients",
    },
)
install()

if TYPE_CHECKING:
    from tds import pipe as pipe
    from tds import runtime as runtime
    from tds.deepspeed.alias import quiet as quiet
    from tds.deepspeed.engine import PipelineEngine as PipelineEngine
    from tds.deepspeed.initialize import initialize as initialize
    from tds.deepspeed.module import PipelineModule as PipelineModule
    from tds.gradients import reduce_gradients as reduce_gradients
    from tds.loss import Weighted as Weighted

    def __getattr__(name: str) -> Any: ...
