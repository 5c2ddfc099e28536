"""MicroBatchReducer: which buckets each backward of a stage reduces, and in which order."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch
from torch import nn

from tds.bucket_reducer import Bucket
from tds.micro_batch_reducer import MicroBatchOrder, MicroBatchReducer


class FakeReduction:
    """Records the buckets that are started, as lists of parameter names."""

    def __init__(self, names: dict[nn.Parameter, str]) -> None:
        self.names = names
        self.started: list[list[str]] = []
        self.factors: list[float] = []

    def bucket_key(self, parameter: nn.Parameter) -> Hashable | None:
        name = self.names[parameter]
        return None if name == "local" else name.startswith("expert")

    def start(self, bucket: Bucket) -> None:
        self.started.append([self.names[parameter] for parameter in bucket])

    def finish(self, factor: float | torch.Tensor) -> None:
        self.factors.append(float(factor))


class Stage:
    """Two chunks with a shared weight, an expert, a weight of this rank only, and a weight outside of the chunks."""

    def __init__(self) -> None:
        names = ("first", "expert", "shared", "second", "local", "outside")
        self.weights = {name: nn.Parameter(torch.ones(4)) for name in names}
        self.reduction = FakeReduction({parameter: name for name, parameter in self.weights.items()})
        chunks = [self.select("first", "expert", "shared"), self.select("shared", "second", "local")]
        self.order = MicroBatchOrder(self.weights.values(), chunks, self.reduction, bucket_numel=4)
        self.reducer = MicroBatchReducer(self.order, self.reduction)

    def select(self, *names: str) -> list[nn.Parameter]:
        return [self.weights[name] for name in names]

    def run_backward(self, chunk: int, *names: str) -> None:
        """Run a full backward of ``chunk`` that reaches the weights ``names``, as the engine does."""
        with self.reducer.last_backward(chunk):
            torch.stack(self.select(*names)).sum().backward()
        self.reducer.register_chunk_ready(chunk)
        self.reducer.end_backward()

    def drain(self) -> list[list[str]]:
        """Return the buckets that were started since the last call."""
        started, self.reduction.started = self.reduction.started, []
        return started


FIRST_CHUNK, SECOND_CHUNK = [["shared"], ["first"], ["expert"]], [["second"], ["shared"]]


def test_each_backward_reduces_each_bucket_of_its_chunk_once() -> None:
    stage = Stage()
    for _ in range(2):
        stage.run_backward(1, "second", "shared", "local")
        assert stage.drain() == SECOND_CHUNK
        stage.run_backward(0, "shared", "expert", "first")
        assert stage.drain() == FIRST_CHUNK
        stage.run_backward(0, "first")
        assert stage.drain() == FIRST_CHUNK, "also buckets without gradients, in the same order"
    assert stage.order.all_buckets() == [stage.select(*names) for names in (*FIRST_CHUNK, *SECOND_CHUNK, ["outside"])]
    stage.reducer.finish(0.5)
    assert (stage.drain(), stage.reduction.factors) == ([["outside"]], [0.5])


def test_buckets_start_during_backward() -> None:
    stage = Stage()
    with stage.reducer.last_backward(0):
        stage.weights["shared"].sum().backward()
        assert stage.drain() == [["shared"]]
        stage.weights["expert"].sum().backward()
        assert stage.drain() == [], "the bucket before it is not complete"
        with pytest.raises(RuntimeError, match="accumulated twice"):
            stage.weights["shared"].sum().backward()


def test_deferred_gradients_complete_the_buckets_of_a_split_backward() -> None:
    stage = Stage()
    stage.reducer.register_chunk_ready(1, excluded=stage.select("second"))
    assert stage.drain() == []
    stage.reducer.mark_ready(stage.weights["second"])
    assert stage.drain() == SECOND_CHUNK
    stage.reducer.register_chunk_ready(1)
    stage.reducer.end_backward()
    assert stage.drain() == []


def test_frozen_weights_leave_their_buckets_at_the_next_step() -> None:
    stage = Stage()
    stage.weights["second"].requires_grad_(False)
    stage.reducer.reset()
    stage.run_backward(1, "shared")
    assert stage.drain() == [["shared"]]
    late_reducer = MicroBatchReducer(stage.order, stage.reduction, starts_early=False)
    late_reducer.register_chunk_ready(0)
    assert stage.drain() == []
    late_reducer.end_backward()
    assert stage.drain() == FIRST_CHUNK
