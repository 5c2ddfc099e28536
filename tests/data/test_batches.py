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
from tests.helpers.token_data import write


class Numbered:
    """Sample i is [i, i]."""

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(2, index, np.int64)


def read(d: int, m: int, b: int, *, consumed: int = 0, steps: int = 3) -> list[list[int]]:
    """Return the samples of each global batch, all replicas together in their order."""
    replicas = [
        DataLoader(
            Numbered(),
            micro_batch_size=b,
            num_micro_batches=m,
            data_rank=rank,
            data_size=d,
            samples_consumed=consumed,
        )
        for rank in range(d)
    ]
    iterators = [iter(replica) for replica in replicas]
    batches = []
    for _ in range(steps):
        parts = [[next(it)["text"] for _ in range(m)] for it in iterators]
        batches.append([int(row[0]) for part in parts for micro in part for row in micro])
    return batches


@pytest.mark.parametrize("d, m, b", [(1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2), (4, 2, 1)])
def test_global_batches_are_the_same_in_every_layout(d: int, m: int, b: int) -> None:
    assert read(d, m, b) == [list(range(8 * k, 8 * k + 8)) for k in range(3)]


@pytest.mark.parametrize("d, m, b", [(2, 2, 2), (1, 2, 3), (3, 1, 5)])
def test_resume_goes_on_where_it_stopped_in_any_layout(d: int, m: int, b: int) -> None:
    before = [sample for batch in read(2, 2, 2) for sample in batch]
    after = [sample for batch in read(d, m, b, consumed=len(before)) for sample in batch]
    assert before + after == list(range(len(before) + len(after)))


def test_reading_ahead_gives_the_same(tmp_path: Path) -> None:
    samples = GPTDataset(write(tmp_path / "a", [40, 50]), documents=(0, 2), seq_length=8, seed=1)
    here, ahead = (
        DataLoader(samples, micro_batch_size=2, num_micro_batches=2, data_rank=0, data_size=1, num_workers=n)
        for n in (0, 2)
    )
    reading = iter(ahead)
    pairs = list(itertools.islice(zip(here, reading, strict=True), 8))
    reading.close()  # type: ignore[attr-defined]
    assert len(pairs) == 8 and all(a["text"].equal(b["text"]) for a, b in pairs)
    assert pairs[0][0]["text"].shape == (2, 9)


def test_the_batch_grows_with_the_samples_in_every_layout_and_from_any_step() -> None:
    sizes = BatchSizes(16, 4, 4, 40)
    wanted, consumed = [], [0]
    while len(wanted) < 7:
        wanted.append(list(range(consumed[-1], consumed[-1] + sizes.at(consumed[-1]))))
        consumed.append(consumed[-1] + len(wanted[-1]))
    assert [len(batch) for batch in wanted] == [4, 4, 4, 4, 8, 8, 12]
    for d, b, first in itertools.product((1, 2, 4), (1, 2, 4), (0, 3, 5)):
        if d * b > 4:
            continue
        replicas = [
            DataLoader(
                Numbered(),
                micro_batch_size=b,
                num_micro_batches=16 // (b * d),
                data_rank=rank,
                data_size=d,
                samples_consumed=consumed[first],
                sizes=sizes,
            )
            for rank in range(d)
        ]
        iterators = [replica.micro_batches() for replica in replicas]
        for step in range(first, 7):
            number = replicas[0].share_at(consumed[step]).num_micro_batches
            assert number == len(wanted[step]) // (b * d)
            assert [i for it in iterators for _ in range(number) for i in next(it).indices] == wanted[step]


def test_a_step_that_replicas_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 2 samples .*for each of 2 replicas, got 2 samples"):
        DataLoader(
            Numbered(), micro_batch_size=2, num_micro_batches=2, data_rank=0, data_size=2, sizes=BatchSizes(8, 2, 2, 10)
        )


@pytest.mark.parametrize(("d", "numbers"), [(3, [3, 3, 2]), (5, [2, 2, 2, 1, 1]), (8, [1] * 8)])
def test_replicas_take_unequal_parts_of_a_step_in_the_same_order(d: int, numbers: list[int]) -> None:
    """Eight micro-batches of two samples; the parts of all replicas, one after the other, are the step."""
    for step in range(2):
        taken = []
        for rank in range(d):
            loader = DataLoader(
                Numbered(), micro_batch_size=2, num_micro_batches=9, data_rank=rank, data_size=d,
                sizes=BatchSizes(16), samples_consumed=16 * step,
            )  # fmt: skip
            batches = loader.micro_batches()
            taken.append([next(batches).indices for _ in range(numbers[rank])])
            assert next(batches).indices[0] == 16 * (step + 1) + taken[-1][0][0] - 16 * step, "the next step"
        assert [i for part in taken for micro_batch in part for i in micro_batch] == [*range(16 * step, 16 * step + 16)]


class Failing(Numbered):
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
    reading = iter(batches)
    try:
        while True:
            next(reading)
    except Exception as error:
        return error.with_traceback(None)  # which would keep the reading processes
    finally:
        if isinstance(reading, PrefetchWorkers):
            reading.close()


def test_a_reading_process_that_dies_ends_the_reading_at_once() -> None:
    started = time.monotonic()
    error = first_error(Failing(), 1, consumed=8)
    assert type(error) is RuntimeError and re.search("data-loading process died.*--num-workers 0", str(error))
    assert time.monotonic() - started < 5


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
def test_a_sample_that_cannot_be_read_is_named_once_with_and_without_workers(
    error: Exception, text: str, num_workers: int
) -> None:
    found = first_error(Failing(error), num_workers)
    assert type(found) is SampleError and re.search(text, str(found)), found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_arrays_of_unequal_shape_are_told_with_their_samples(num_workers: int) -> None:
    class Ragged(Numbered):
        def __getitem__(self, index: int) -> np.ndarray:
            return np.zeros(index + 1, np.int64)

    found = first_error(Ragged(), num_workers, consumed=2, micro_batch_size=2)
    assert type(found) is SampleError
    assert re.search(r"'text' must be .* one shape .*\(3,\), \(4,\).* samples \[2, 3\]", str(found))


class Finite:
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


def batches_of(dataset: object, num_workers: int = 0) -> DataLoader:
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
def test_dictionaries_are_stacked_key_by_key_and_a_finite_data_set_starts_anew(num_workers: int) -> None:
    batches = list(itertools.islice(batches_of(Finite(), num_workers), 3))
    assert [batch["tokens"].tolist() for batch in batches] == [[[i] * 3, [j] * 3] for i, j in ((2, 3), (4, 0), (1, 2))]
    assert batches[0]["is_pad"].dtype == torch.bool and batches[0]["is_pad"].tolist() == [[False, False], [True, False]]
    assert batches[1]["weight"].tolist() == [2.0, 0.0]


def test_samples_that_cannot_be_used_are_told() -> None:
    class Ragged(Finite):
        def __getitem__(self, index: int) -> dict[str, object]:
            return {"tokens": np.zeros(index + 1)}

    with pytest.raises(DataError, match=r"'tokens' must be .* one shape .*\(3,\), \(4,\).* samples \[2, 3\]"):
        next(iter(batches_of(Ragged())))
    with pytest.raises(DataError, match="at least one sample"):
        iter(batches_of(Finite(0)))

    class Short(Finite):
        def __getitem__(self, index: int) -> dict[str, object]:
            raise OSError("gone")

    with pytest.raises(SampleError, match=r"^sample 2 cannot be read: OSError: gone"):
        next(iter(batches_of(Short())))
    with pytest.raises(SampleError, match=r"^sample 2 \(item 0 of Short\) cannot be read: OSError: gone"):
        next(iter(batches_of(Short(2))))


def test_gpt2_samples_have_no_end() -> None:
    assert not hasattr(GPTDataset, "__len__")
