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
from tests.data.test_batches import Numbered


def batches_of(dataset: object, num_workers: int) -> DataLoader:
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        micro_batch_size=1,
        num_micro_batches=1,
        data_rank=0,
        data_size=1,
        num_workers=num_workers,
        prefetch_factor=3,
    )


def ahead(dataset: object, num_workers: int = 2) -> PrefetchWorkers:
    found = iter(batches_of(dataset, num_workers))
    assert isinstance(found, PrefetchWorkers)
    return found


def test_a_dead_reader_is_told_by_number_and_process_wherever_the_death_is_noticed() -> None:
    readers = ahead(Numbered())
    next(readers)
    pid = readers._pids[1]
    error = readers.explained(RuntimeError(f"DataLoader worker (pid {pid}) is killed by signal: Killed. \nmore"))
    assert f"reader 1 (pid {pid}) is killed by signal: Killed. Free memory" in str(error)
    other = RuntimeError("something else")
    assert readers.explained(other) is other
    readers.close()
    assert list(readers) == []


def _ended() -> int:
    """Return a descriptor that is ready, as that of a process that has ended."""
    reading, writing = os.pipe()
    os.close(writing)
    return reading


@pytest.mark.parametrize("broken", [EOFError(), ConnectionResetError(104, "Connection reset by peer")])
def test_a_pipe_that_breaks_before_torch_sees_the_death_names_the_reader_too(broken: Exception) -> None:
    class Batches:
        _workers: ClassVar = [
            SimpleNamespace(pid=7, sentinel=_ended(), exitcode=None, is_alive=lambda: True),
            SimpleNamespace(pid=8, sentinel=_ended(), exitcode=-9, is_alive=lambda: False),
        ]

        def __next__(self) -> None:
            raise broken

    readers = ahead(Numbered())
    readers.close()
    readers._batches = Batches()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"^a data-loading process died: reader 1 \(pid 8\) ended with exit code -9"):
        next(readers)
    Batches._workers.pop()
    with pytest.raises(type(broken)):
        next(readers)


class Failing(Numbered):
    """The samples of a corpus; its sample 1 cannot be read."""

    fingerprint, samples_per_epoch = "x", 9

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 1:
            raise ArithmeticError("planted")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_ones_own_code_comes_back_with_its_sample_corpus_and_line(num_workers: int) -> None:
    order = BlendSchedule([Corpus("a", "x", 9), Corpus("b", "y", 9)], [(0, (1.0, 1.0))])
    mixed = BlendedDataset({"a": Failing(), "b": Numbered()}, order)  # type: ignore[dict-item]
    place = next(index for index in range(9) if order.locate(index) == (0, 1))
    text = rf"^sample {place} \(sample 1 of corpus a\) cannot be read: ArithmeticError: planted \(in test_read_ahead"
    readers = iter(batches_of(mixed, num_workers))
    with pytest.raises(SampleError, match=text):
        list(readers)
    if isinstance(readers, PrefetchWorkers):
        readers.close()


class Alike(Numbered):
    """A data set of a user's own, with attributes that are called as those of ours and mean something else."""

    order, parts = np.arange(9)[::-1], ["a", "b"]

    def __getitem__(self, index: int) -> np.ndarray:
        raise OSError("gone")


def test_attributes_of_ones_own_that_are_called_as_ours_are_left_alone() -> None:
    assert as_ordered(Alike()) is None
    with pytest.raises(SampleError, match="^sample 0 cannot be read: OSError: gone"):
        next(iter(batches_of(Alike(), 0)))


class Telling(Numbered):
    """A sample is the reading process, and the modules that it has imported."""

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([os.getpid(), len(sys.modules)])


def test_readers_heed_no_signal_for_the_job_import_nothing_and_leave_seeds_alone() -> None:
    torch.manual_seed(3)
    state, modules = torch.get_rng_state(), len(sys.modules)
    readers = ahead(Telling())
    pids, imported = next(readers)["text"][0].tolist()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pids, number)
    later = [next(readers)["text"][0, 0].item() for _ in range(20)]
    assert pids in later and len(set(later)) == 2
    assert imported <= modules + 3
    assert torch.get_rng_state().equal(state)
    readers.close()
    assert not any(is_running(pid) for pid in set(later))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_readers_end_with_the_process_that_trains_however_it_ends(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        readers = ahead(Telling())
        pids = {next(readers)["text"][0, 0].item() for _ in range(8)}
        (tmp_path / "pids").write_text(" ".join(map(str, pids)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 2 and not any(map(is_running, pids))
