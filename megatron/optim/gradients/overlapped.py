"""OverlappedGradReducer: reductions that start during the last backward of a step (ZeRO 0 and 1).

Until the last micro-batch, gradients accumulate and nothing is sent. In the last backward, each gradient is final as
soon as autograd has computed it. The bucket of a parameter that the last micro-batch does not reach is reduced at the
end, with the gradients of the earlier micro-batches or zeros.
"""

from __future__ import annotations

from megatron.mpu.groups import SINGLE, Group
from megatron.optim.gradients.all_reduce import AllReduceGradReducer
from megatron.optim.param_store import ParamStore
from tds.bucket_reducer import BucketReducer


class OverlappedGradReducer(AllReduceGradReducer):
    """All-reduces buckets while backward runs; with ZeRO 1 on NCCL, reduce-scatters them."""

    reduces_in_backward = True

    def __init__(self, store: ParamStore, model: Group = SINGLE, tensor: Group = SINGLE) -> None:
        super().__init__(store, model, tensor)
        scatter = self.use_buckets(self._order)
        advice = "Recompute with use_reentrant=False, or add --no-overlap-grad-reduce"
        group = store.data_group.handle
        self._reducer = BucketReducer(self._order, self.grad, group, error_hint=advice, scatter=scatter)
        self._is_last = False

    def begin_last_backward(self) -> None:
        self._is_last = True
        self._reducer.begin_last_backward()  # registers hooks, which run after the hooks that accumulate

    def end_micro_batch(self) -> None:
        if self._is_last:
            self._is_last = False
            self._reducer.end_last_backward()
            self._reducer.start_remaining()

    def finish(self, factor: float) -> None:
        self._reducer.wait(factor)

    def clear(self) -> None:
        self._is_last = False
        self._reducer.reset()
        super().clear()
