"""Waiting for data is measured, and the processes that read ahead are let go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.errors import CheckpointError, DataError, PeerError, SampleError, StopRequest, marked
from megatron.runtime.exit_guard import is_raised_on_all_ranks
from megatron.training.batch_iterators import TimedBatches


class FakeReaders:
    """Two batches, and a note of what is asked of whoever reads them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._remaining = [1, 2]

    def __iter__(self) -> FakeReaders:
        return self

    def __next__(self) -> int:
        if not self._remaining:
            raise StopIteration
        return self._remaining.pop(0)

    def close(self) -> None:
        self.calls.append("close")

    def explained(self, error: RuntimeError) -> RuntimeError:
        self.calls.append("explained")
        return RuntimeError("reader 1 died") if "worker" in str(error) else error


def test_wait_time_counts_only_next_and_drains_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.25, 5.0, 5.5, 9.0, 9.125])
    monkeypatch.setattr("megatron.training.batch_iterators.time.perf_counter", lambda: next(times))
    batches = TimedBatches([7, 8])
    assert [next(batches), next(batches)] == [7, 8]
    assert batches.drain_waited_s() == 0.75
    with pytest.raises(StopIteration):
        next(batches)
    assert (batches.drain_waited_s(), batches.drain_waited_s()) == (0.125, 0.0)


def test_readers_close_after_training_but_not_after_error() -> None:
    finished, failed = FakeReaders(), FakeReaders()
    with TimedBatches(finished) as batches:
        assert list(batches) == [1, 2]
    with pytest.raises(KeyError), TimedBatches(failed):
        raise KeyError
    assert (finished.calls, failed.calls) == (["close"], [])
    with TimedBatches([1]):
        pass


def test_reader_death_is_explained_and_other_errors_propagate() -> None:
    with pytest.raises(RuntimeError, match=r"^reader 1 died$"), TimedBatches(FakeReaders()):
        raise RuntimeError("DataLoader worker is killed")
    with pytest.raises(RuntimeError, match="^planted$"), TimedBatches(FakeReaders()):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match=r"^reader 1 died$"), TimedBatches(FakeReaders()):
        raise SampleError("sample 3 cannot be read") from RuntimeError("DataLoader worker is killed")


def test_sample_error_is_local_to_reading_rank() -> None:
    def failing_batches() -> Iterator[int]:
        raise SampleError("sample 3")
        yield 1

    with pytest.raises(SampleError) as error_info:
        next(TimedBatches(failing_batches()))
    assert not is_raised_on_all_ranks(error_info.value)
    assert is_raised_on_all_ranks(DataError()) and is_raised_on_all_ranks(StopRequest())
    assert not any(map(is_raised_on_all_ranks, (CheckpointError(), PeerError(), KeyError())))
    with pytest.raises(CheckpointError) as marked_error_info, marked(is_of_this_rank=False):
        raise CheckpointError
    assert is_raised_on_all_ranks(marked_error_info.value) and not is_raised_on_all_ranks(CheckpointError())
