"""Processes that read ahead: what they share, which signals they heed, how they and their errors end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from megatron.data import BlendedDataset, BlendSchedule, DataLoader
from megatron.data.blend_schedule import Corpus
from megatron.data.prefetch_workers import PrefetchWorkers
from megatron.data.sample_order import as_ordered
from megatron.errors import SampleError
from tests.data.test_batches import IndexedSamples


def make_loader(dataset: object, num_workers: int) -> DataLoader:
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        micro_batch_size=1,
        num_micro_batches=1,
        data_rank=0,
        data_size=1,
        num_workers=num_workers,
        prefetch_factor=3,
    )


def start_prefetching(dataset: object, num_workers: int = 2) -> PrefetchWorkers:
    workers = iter(make_loader(dataset, num_workers))
    assert isinstance(workers, PrefetchWorkers)
    return workers


def test_dead_worker_is_named_by_index_and_pid() -> None:
    workers = start_prefetching(IndexedSamples())
    next(workers)
    pid = workers._pids[1]
    error = workers.explained(RuntimeError(f"DataLoader worker (pid {pid}) is killed by signal: Killed. \nmore"))
    assert f"reader 1 (pid {pid}) is killed by signal: Killed. Free memory" in str(error)
    other = RuntimeError("something else")
    assert workers.explained(other) is other
    workers.close()
    assert list(workers) == []


def _closed_pipe() -> int:
    """Return a descriptor that is ready, as that of a process that has ended."""
    reading, writing = os.pipe()
    os.close(writing)
    return reading


@pytest.mark.parametrize("pipe_error", [EOFError(), ConnectionResetError(104, "Connection reset by peer")])
def test_broken_pipe_before_death_notice_names_worker(pipe_error: Exception) -> None:
    class FakeBatches:
        _workers: ClassVar = [
            SimpleNamespace(pid=7, sentinel=_closed_pipe(), exitcode=None, is_alive=lambda: True),
            SimpleNamespace(pid=8, sentinel=_closed_pipe(), exitcode=-9, is_alive=lambda: False),
        ]

        def __next__(self) -> None:
            raise pipe_error

    workers = start_prefetching(IndexedSamples())
    workers.close()
    workers._batches = FakeBatches()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"^a data-loading process died: reader 1 \(pid 8\) ended with exit code -9"):
        next(workers)
    FakeBatches._workers.pop()
    with pytest.raises(type(pipe_error)):
        next(workers)


class FailingSamples(IndexedSamples):
    """The samples of a corpus; its sample 1 cannot be read."""

    fingerprint, samples_per_epoch = "x", 9

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 1:
            raise ArithmeticError("planted")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_user_code_error_reports_sample_corpus_and_line(num_workers: int) -> None:
    order = BlendSchedule([Corpus("a", "x", 9), Corpus("b", "y", 9)], [(0, (1.0, 1.0))])
    blended = BlendedDataset({"a": FailingSamples(), "b": IndexedSamples()}, order)  # type: ignore[dict-item]
    sample_idx = next(index for index in range(9) if order.locate(index) == (0, 1))
    text = (
        rf"^sample {sample_idx} \(sample 1 of corpus a\) cannot be read: ArithmeticError: planted \(in test_read_ahead"
    )
    batches = iter(make_loader(blended, num_workers))
    with pytest.raises(SampleError, match=text):
        list(batches)
    if isinstance(batches, PrefetchWorkers):
        batches.close()


class AttributeLookalike(IndexedSamples):
    """A data set of a user's own, with attributes that are called as those of ours and mean something else."""

    order, parts = np.arange(9)[::-1], ["a", "b"]

    def __getitem__(self, index: int) -> np.ndarray:
        raise OSError("gone")


def test_unrelated_user_attributes_are_ignored() -> None:
    assert as_ordered(AttributeLookalike()) is None
    with pytest.raises(SampleError, match="^sample 0 cannot be read: OSError: gone"):
        next(iter(make_loader(AttributeLookalike(), 0)))


class ProcessInfoSamples(IndexedSamples):
    """A sample is the reading process, and the modules that it has imported."""

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([os.getpid(), len(sys.modules)])


def test_workers_ignore_signals_import_nothing_and_preserve_rng() -> None:
    torch.manual_seed(3)
    state, num_modules = torch.get_rng_state(), len(sys.modules)
    workers = start_prefetching(ProcessInfoSamples())
    pid, num_imported = next(workers)["text"][0].tolist()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, signal_number)
    worker_pids = [next(workers)["text"][0, 0].item() for _ in range(20)]
    assert pid in worker_pids and len(set(worker_pids)) == 2
    assert num_imported <= num_modules + 3
    assert torch.get_rng_state().equal(state)
    workers.close()
    assert not any(is_running(pid) for pid in set(worker_pids))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_exit_when_training_process_dies(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        workers = start_prefetching(ProcessInfoSamples())
        pids = {next(workers)["text"][0, 0].item() for _ in range(8)}
        (tmp_path / "pids").write_text(" ".join(map(str, pids)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 2 and not any(map(is_running, pids))
