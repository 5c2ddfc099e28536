from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.config.batch_rampup import BatchSizes
from megatron.data import DataLoader, GPTDataset
from megatron.data.prefetch_workers import PrefetchWorkers
from megatron.errors import DataError, SampleError
from tests.helpers.token_data import write_documents


class IndexedSamples:
    """Sample i is [i, i]."""

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(2, index, np.int64)


def read_batches(
    data_size: int, num_micro_batches: int, micro_batch_size: int, *, consumed: int = 0, num_steps: int = 3
) -> list[list[int]]:
    """Return the samples of each global batch, all replicas together in their order."""
    replicas = [
        DataLoader(
            IndexedSamples(),
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            data_rank=rank,
            data_size=data_size,
            samples_consumed=consumed,
        )
        for rank in range(data_size)
    ]
    iterators = [iter(replica) for replica in replicas]
    batches = []
    for _ in range(num_steps):
        local_batches = [[next(iterator)["text"] for _ in range(num_micro_batches)] for iterator in iterators]
        batches.append(
            [int(row[0]) for local_batch in local_batches for micro_batch in local_batch for row in micro_batch]
        )
    return batches


@pytest.mark.parametrize(
    "data_size, num_micro_batches, micro_batch_size", [(1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2), (4, 2, 1)]
)
def test_global_batches_are_identical_in_every_layout(
    data_size: int, num_micro_batches: int, micro_batch_size: int
) -> None:
    assert read_batches(data_size, num_micro_batches, micro_batch_size) == [
        list(range(8 * step, 8 * step + 8)) for step in range(3)
    ]


@pytest.mark.parametrize("data_size, num_micro_batches, micro_batch_size", [(2, 2, 2), (1, 2, 3), (3, 1, 5)])
def test_resume_continues_with_next_sample_in_any_layout(
    data_size: int, num_micro_batches: int, micro_batch_size: int
) -> None:
    before = [sample for batch in read_batches(2, 2, 2) for sample in batch]
    after = [
        sample
        for batch in read_batches(data_size, num_micro_batches, micro_batch_size, consumed=len(before))
        for sample in batch
    ]
    assert before + after == list(range(len(before) + len(after)))


def test_prefetched_batches_equal_direct_batches(tmp_path: Path) -> None:
    samples = GPTDataset(write_documents(tmp_path / "a", [40, 50]), documents=(0, 2), seq_length=8, seed=1)
    direct, prefetched = (
        DataLoader(samples, micro_batch_size=2, num_micro_batches=2, data_rank=0, data_size=1, num_workers=num_workers)
        for num_workers in (0, 2)
    )
    prefetch_iterator = iter(prefetched)
    pairs = list(itertools.islice(zip(direct, prefetch_iterator, strict=True), 8))
    prefetch_iterator.close()  # type: ignore[attr-defined]
    assert len(pairs) == 8 and all(expected["text"].equal(batch["text"]) for expected, batch in pairs)
    assert pairs[0][0]["text"].shape == (2, 9)


def test_batch_size_rampup_is_identical_in_every_layout_and_after_resume() -> None:
    batch_sizes = BatchSizes.ramp(16, 4, 4, 40)
    expected, consumed = [], [0]
    while len(expected) < 7:
        expected.append(list(range(consumed[-1], consumed[-1] + batch_sizes.at(consumed[-1]))))
        consumed.append(consumed[-1] + len(expected[-1]))
    assert [len(batch) for batch in expected] == [4, 4, 4, 4, 8, 8, 12]
    for data_size, micro_batch_size, first_step in itertools.product((1, 2, 4), (1, 2, 4), (0, 3, 5)):
        if data_size * micro_batch_size > 4:
            continue
        replicas = [
            DataLoader(
                IndexedSamples(),
                micro_batch_size=micro_batch_size,
                num_micro_batches=16 // (micro_batch_size * data_size),
                data_rank=rank,
                data_size=data_size,
                samples_consumed=consumed[first_step],
                batch_sizes=batch_sizes,
            )
            for rank in range(data_size)
        ]
        iterators = [replica.micro_batches() for replica in replicas]
        for step in range(first_step, 7):
            num_micro_batches = replicas[0].share_at(consumed[step]).num_micro_batches
            assert num_micro_batches == len(expected[step]) // (micro_batch_size * data_size)
            assert [
                idx for iterator in iterators for _ in range(num_micro_batches) for idx in next(iterator).indices
            ] == expected[step]


def test_step_not_divisible_by_replicas_is_rejected() -> None:
    with pytest.raises(ValueError, match="multiple of 2 samples .*for each of 2 replicas, got 2 samples"):
        DataLoader(
            IndexedSamples(),
            micro_batch_size=2,
            num_micro_batches=2,
            data_rank=0,
            data_size=2,
            batch_sizes=BatchSizes.ramp(8, 2, 2, 10),
        )


@pytest.mark.parametrize(("data_size", "num_micro_batches"), [(3, [3, 3, 2]), (5, [2, 2, 2, 1, 1]), (8, [1] * 8)])
def test_replicas_share_unequal_batches_in_sample_order(data_size: int, num_micro_batches: list[int]) -> None:
    """Eight micro-batches of two samples; the parts of all replicas, one after the other, are the step."""
    for step in range(2):
        indices = []
        for rank in range(data_size):
            loader = DataLoader(
                IndexedSamples(), micro_batch_size=2, num_micro_batches=9, data_rank=rank, data_size=data_size,
                batch_sizes=BatchSizes(16), samples_consumed=16 * step,
            )  # fmt: skip
            batches = loader.micro_batches()
            indices.append([next(batches).indices for _ in range(num_micro_batches[rank])])
            assert next(batches).indices[0] == 16 * (step + 1) + indices[-1][0][0] - 16 * step, "the next step"
        assert [idx for local_indices in indices for micro_batch in local_indices for idx in micro_batch] == [
            *range(16 * step, 16 * step + 16)
        ]


class FailingSamples(IndexedSamples):
    """Sample 3 fails as asked for, sample 9 ends the process that reads it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or SampleError("sample 3 cannot be read: document 7, byte 12 of a.bin")

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 3:
            raise self.error
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def first_error(dataset: object, num_workers: int, consumed: int = 0, micro_batch_size: int = 1) -> Exception:
    """Return what reading ``dataset`` ends with."""
    batches = DataLoader(
        dataset,  # type: ignore[arg-type]
        micro_batch_size=micro_batch_size,
        num_micro_batches=1,
        data_rank=0,
        data_size=1,
        samples_consumed=consumed,
        num_workers=num_workers,
    )
    iterator = iter(batches)
    try:
        while True:
            next(iterator)
    except Exception as error:
        return error.with_traceback(None)  # which would keep the reading processes
    finally:
        if isinstance(iterator, PrefetchWorkers):
            iterator.close()


def test_dead_prefetch_worker_raises_immediately() -> None:
    start_time = time.monotonic()
    error = first_error(FailingSamples(), 1, consumed=8)
    assert type(error) is RuntimeError and re.search("data-loading process died.*--num-workers 0", str(error))
    assert time.monotonic() - start_time < 5


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SampleError("sample 3 of a.bin"), "^sample 3 of a.bin$"),
        (DataError("no such sample"), "^sample 3 cannot be read: no such sample$"),
        (
            KeyError("/data/sample/x"),
            r"^sample 3 cannot be read: KeyError: '/data/sample/x' \(in test_batches.py, line \d+\)$",
        ),
        (StopIteration(), r"^sample 3 cannot be read: StopIteration: "),
    ],
    ids=["told", "data", "own", "stop"],
)
def test_unreadable_sample_is_named_once_with_and_without_workers(
    error: Exception, text: str, num_workers: int
) -> None:
    raised = first_error(FailingSamples(error), num_workers)
    assert type(raised) is SampleError and re.search(text, str(raised)), raised


@pytest.mark.parametrize("num_workers", [0, 1])
def test_unequal_array_shapes_are_reported_with_sample_indices(num_workers: int) -> None:
    class Ragged(IndexedSamples):
        def __getitem__(self, index: int) -> np.ndarray:
            return np.zeros(index + 1, np.int64)

    raised = first_error(Ragged(), num_workers, consumed=2, micro_batch_size=2)
    assert type(raised) is SampleError
    assert re.search(r"'text' must be .* one shape .*\(3,\), \(4,\).* samples \[2, 3\]", str(raised))


class FiniteSamples:
    """Five samples, each a dictionary."""

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, object]:
        if index >= self.length:
            raise IndexError(index)
        return {
            "tokens": np.full(3, index, np.int64),
            "is_pad": torch.tensor([index > 2, False]),
            "weight": 0.5 * index,
        }


def make_loader(dataset: object, num_workers: int = 0) -> DataLoader:
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        micro_batch_size=2,
        num_micro_batches=1,
        data_rank=0,
        data_size=1,
        samples_consumed=2,
        num_workers=num_workers,
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dictionaries_are_stacked_by_key_and_finite_dataset_restarts(num_workers: int) -> None:
    batches = list(itertools.islice(make_loader(FiniteSamples(), num_workers), 3))
    assert [batch["tokens"].tolist() for batch in batches] == [
        [[first] * 3, [second] * 3] for first, second in ((2, 3), (4, 0), (1, 2))
    ]
    assert batches[0]["is_pad"].dtype == torch.bool and batches[0]["is_pad"].tolist() == [[False, False], [True, False]]
    assert batches[1]["weight"].tolist() == [2.0, 0.0]


def test_unusable_samples_are_reported() -> None:
    class Ragged(FiniteSamples):
        def __getitem__(self, index: int) -> dict[str, object]:
            return {"tokens": np.zeros(index + 1)}

    with pytest.raises(DataError, match=r"'tokens' must be .* one shape .*\(3,\), \(4,\).* samples \[2, 3\]"):
        next(iter(make_loader(Ragged())))
    with pytest.raises(DataError, match="at least one sample"):
        iter(make_loader(FiniteSamples(0)))

    class FailingItems(FiniteSamples):
        def __getitem__(self, index: int) -> dict[str, object]:
            raise OSError("gone")

    with pytest.raises(SampleError, match=r"^sample 2 cannot be read: OSError: gone"):
        next(iter(make_loader(FailingItems())))
    with pytest.raises(SampleError, match=r"^sample 2 \(item 0 of FailingItems\) cannot be read: OSError: gone"):
        next(iter(make_loader(FailingItems(2))))


def test_gpt2_dataset_has_no_length() -> None:
    assert not hasattr(GPTDataset, "__len__")
