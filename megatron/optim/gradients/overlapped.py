"""Overlapped.

Up to the last micro-batch a gradient is added up where it lies, and nothing is sent. In the last backward each is
final as soon as it comes. What the last micro-batch does not reach has the sum of the others, or zeros: its bucket
goes last.
"""

from __future__ import annotations

from megatron.optim.gradients.buffered import BufferedGradients
from megatron.optim.param_store import MainParams
from tds.gradient_reducer import GradientReducer


class OverlappedMainGradients(BufferedGradients):
    """``BufferedGradients`` that are summed over the replicas by themselves."""

    are_summed = True

    def __init__(self, masters: MainParams) -> None:
        super().__init__(masters)
        group = masters.data_group.handle
        scatter = self.follow(self._order)
        way_out = "Recompute with use_reentrant=False, or add --no-overlap-grad-reduce"
        self._reducer = GradientReducer(self._order, self.of, group, way_out=way_out, scatter=scatter)
        self._is_last = False

    def begin_last_backward(self) -> None:
        self._is_last = True
        self._reducer.begin_last_backward()  # its hooks come behind those that add up in fp32

    def end_micro_batch(self) -> None:
        """After the last one start the sums that have not started. Collective."""
        if self._is_last:
            self._is_last = False
            self._reducer.end_last_backward()
            self._reducer.finish_launch()

    def finish(self, factor: float) -> None:
        self._reducer.wait(factor)

    def clear(self) -> None:
        self._is_last = False
        self._reducer.reset()
        super().clear()
