"""Forked processes that read micro-batches ahead of training.

They are forked, so they import nothing and share what the data set holds with the process that trains. A signal for
the whole job is for that process alone: it may save and go on reading meanwhile. They end with it, however it ends.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch

from megatron.child_process import die_with_parent
from megatron.data.collate import (
    GuardedCollate,
    MicroBatch,
    Samples,
)
from megatron.data.step_predictions import StepPredictions
from megatron.errors import SampleError

_DEATH_SEEN_AFTER_S = 2.0


class PrefetchWorkers:
    """Iterates over the micro-batches that are ``asked`` for, which ``num_workers`` processes read in their order.

    Args:
        prefetch_factor: micro-batches that each process reads ahead.
        pin_memory: give tensors in pinned memory, which a GPU copies from while it computes.
        predictions: as ``Collate``.

    Raises:
        DataError: the data set is empty.
        SampleError: as ``Collate``.
        RuntimeError: a reading process died.
    """

    def __init__(
        self,
        dataset: Samples,
        asked: Iterable[MicroBatch],
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool,
        predictions: StepPredictions | None = None,
    ) -> None:
        loader: Iterable[Any] = torch.utils.data.DataLoader(
            GuardedCollate(dataset, predictions),  # type: ignore[arg-type]
            sampler=asked,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            multiprocessing_context="fork",
            worker_init_fn=partial(_become_reader, os.getpid()),
            generator=torch.Generator(),  # else it draws a seed from the generator that users' dropout draws from
        )
        self._batches: Iterator[Any] | None = iter(loader)
        self._pids = [process.pid for process in getattr(self._batches, "_workers", ())]

    def __iter__(self) -> PrefetchWorkers:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._batches is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except RuntimeError as error:
            raise self.explained(error) from error
        except (EOFError, OSError) as error:  # the pipe to a reader broke before torch saw it dead
            raise self._broken(error) from error
        if isinstance(batch, str):
            raise SampleError(batch)
        return batch

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Return what to say of ``error`` if it tells of the death of a reading process, else ``error`` itself.

        Torch raises such an error by a signal, wherever this process happens to be.
        """
        first_line = str(error).splitlines()[0] if str(error) else ""
        match = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", first_line)
        if match is None:
            return error
        dead = [int(pid) for pid in match.group(1).split(",")]
        known = [f"reader {self._pids.index(pid)} (pid {pid})" for pid in dead if pid in self._pids]
        return _death(", ".join(known or [f"pid {pid}" for pid in dead]), match.group(2).rstrip(". "))

    def _broken(self, error: Exception) -> Exception:
        """Return what to say of a broken pipe: which reader has died, or ``error`` itself if all live."""
        workers = getattr(self._batches, "_workers", ())
        wait([worker.sentinel for worker in workers], timeout=_DEATH_SEEN_AFTER_S)
        dead = [f"reader {number} (pid {w.pid})" for number, w in enumerate(workers) if not w.is_alive()]
        codes = [str(worker.exitcode) for worker in workers if not worker.is_alive()]
        return _death(", ".join(dead), f"ended with exit code {', '.join(codes)}") if dead else error

    def close(self) -> None:
        """End the processes."""
        batches, self._batches = self._batches, None
        del batches  # ends them, and waits until they have


def _death(who: str, how: str) -> RuntimeError:
    return RuntimeError(
        f"a process that reads data died: {who} {how}. "
        "Free memory, or read in the training process with --num-workers 0."
    )


def _become_reader(parent: int, number: int) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
