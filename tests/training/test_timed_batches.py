"""Waiting for data is measured, and the processes that read ahead are let go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.errors import CheckpointError, DataError, PeerError, SampleError, StopRequest, marked
from megatron.runtime.exit_guard import is_same_everywhere
from megatron.training.batch_iterators import TimedBatches


class Readers:
    """Two batches, and a note of what is asked of whoever reads them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._left = [1, 2]

    def __iter__(self) -> Readers:
        return self

    def __next__(self) -> int:
        if not self._left:
            raise StopIteration
        return self._left.pop(0)

    def close(self) -> None:
        self.asked.append("close")

    def explained(self, error: RuntimeError) -> RuntimeError:
        self.asked.append("explained")
        return RuntimeError("reader 1 died") if "worker" in str(error) else error


def test_only_the_time_in_next_counts_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.25, 5.0, 5.5, 9.0, 9.125])
    monkeypatch.setattr("megatron.training.batch_iterators.time.perf_counter", lambda: next(times))
    batches = TimedBatches([7, 8])
    assert [next(batches), next(batches)] == [7, 8]
    assert batches.drain_waited_s() == 0.75
    with pytest.raises(StopIteration):
        next(batches)
    assert (batches.drain_waited_s(), batches.drain_waited_s()) == (0.125, 0.0)


def test_readers_are_closed_when_the_training_ends_and_not_when_it_dies() -> None:
    ended, died = Readers(), Readers()
    with TimedBatches(ended) as batches:
        assert list(batches) == [1, 2]
    with pytest.raises(KeyError), TimedBatches(died):
        raise KeyError
    assert (ended.asked, died.asked) == (["close"], [])
    with TimedBatches([1]):
        pass


def test_the_death_of_a_reader_is_explained_and_other_errors_stay() -> None:
    with pytest.raises(RuntimeError, match=r"^reader 1 died$"), TimedBatches(Readers()):
        raise RuntimeError("DataLoader worker is killed")
    with pytest.raises(RuntimeError, match="^planted$"), TimedBatches(Readers()):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match=r"^reader 1 died$"), TimedBatches(Readers()):
        raise SampleError("sample 3 cannot be read") from RuntimeError("DataLoader worker is killed")


def test_what_a_sample_cannot_be_read_for_is_said_by_the_rank_that_read_it() -> None:
    def failing() -> Iterator[int]:
        raise SampleError("sample 3")
        yield 1

    with pytest.raises(SampleError) as raised:
        next(TimedBatches(failing()))
    assert not is_same_everywhere(raised.value)
    assert is_same_everywhere(DataError()) and is_same_everywhere(StopRequest())
    assert not any(map(is_same_everywhere, (CheckpointError(), PeerError(), KeyError())))
    with pytest.raises(CheckpointError) as alike, marked(is_of_this_rank=False):
        raise CheckpointError
    assert is_same_everywhere(alike.value) and not is_same_everywhere(CheckpointError())
