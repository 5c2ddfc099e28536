"""DeepSpeed with another pipeline engine: ``import tds as deepspeed``.

All public names and modules of ``deepspeed`` are available under ``tds``; they are looked up in DeepSpeed on access.
tds defines these names itself: ``initialize`` (tds's engine for a pipeline model, DeepSpeed's behaviour for any other
model), ``PipelineEngine``, ``PipelineModule``, ``Weighted`` (a loss averaged over tokens), ``reduce_gradients``
and ``quiet``.

``import tds`` imports neither torch nor DeepSpeed. They are imported when the first name that needs them is accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tds.deepspeed.alias import forward_to_deepspeed, install

forward_to_deepspeed(
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
