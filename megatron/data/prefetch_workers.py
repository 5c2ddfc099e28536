"""Forked worker processes that prefetch micro-batches.

Because the workers are forked, they do not import anything again and share the dataset's memory with the training
process. They ignore signals that are sent to the whole job, because the training process may still read data while it
saves a checkpoint. They exit when the training process exits, for any reason.
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

_DEATH_TIMEOUT_S = 2.0


class PrefetchWorkers:
    """Iterator over ``micro_batches``, which ``num_workers`` processes read; the order is preserved.

    Args:
        micro_batches: micro-batches to read.
        prefetch_factor: micro-batches that each worker reads ahead.
        pin_memory: return tensors in pinned memory, which allows asynchronous copies to a GPU.
        predictions: see ``Collate``.

    Raises:
        DataError: the dataset is empty.
        SampleError: see ``Collate``.
        RuntimeError: a worker died.
    """

    def __init__(
        self,
        dataset: Samples,
        micro_batches: Iterable[MicroBatch],
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool,
        predictions: StepPredictions | None = None,
    ) -> None:
        loader: Iterable[Any] = torch.utils.data.DataLoader(
            GuardedCollate(dataset, predictions),  # type: ignore[arg-type]
            sampler=micro_batches,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            multiprocessing_context="fork",
            worker_init_fn=partial(_init_worker, os.getpid()),
            generator=torch.Generator(),  # the default would draw a seed from the global generator, used by dropout
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
        except (EOFError, OSError) as error:  # the pipe to a worker broke before torch noticed its death
            raise self._explain_broken_pipe(error) from error
        if isinstance(batch, str):
            raise SampleError(batch)
        return batch

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Explain ``error`` if it reports a worker's death, else return ``error`` itself.

        Torch raises this error from a signal handler, at an arbitrary point in the training process.
        """
        first_line = str(error).splitlines()[0] if str(error) else ""
        match = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", first_line)
        if match is None:
            return error
        dead_pids = [int(pid) for pid in match.group(1).split(",")]
        readers = [f"reader {self._pids.index(pid)} (pid {pid})" for pid in dead_pids if pid in self._pids]
        return _worker_died_error(
            ", ".join(readers or [f"pid {pid}" for pid in dead_pids]), match.group(2).rstrip(". ")
        )

    def _explain_broken_pipe(self, error: Exception) -> Exception:
        """Return an error that names the dead workers, which caused the broken pipe, or ``error`` if all are alive."""
        workers = getattr(self._batches, "_workers", ())
        wait([worker.sentinel for worker in workers], timeout=_DEATH_TIMEOUT_S)
        dead_workers = [f"reader {idx} (pid {w.pid})" for idx, w in enumerate(workers) if not w.is_alive()]
        exit_codes = [str(worker.exitcode) for worker in workers if not worker.is_alive()]
        return (
            _worker_died_error(", ".join(dead_workers), f"ended with exit code {', '.join(exit_codes)}")
            if dead_workers
            else error
        )

    def close(self) -> None:
        """Stop the worker processes."""
        batches, self._batches = self._batches, None
        del batches  # stops the workers and waits for them


def _worker_died_error(workers: str, cause: str) -> RuntimeError:
    return RuntimeError(
        f"a data-loading process died: {workers} {cause}. "
        "Free memory, or set --num-workers 0 to load data in the training process."
    )


def _init_worker(parent_pid: int, worker_idx: int) -> None:
    """Initialize a worker: ignore signals to the job, and exit if the training process exits."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signal_number, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent_pid:  # the parent died before die_with_parent() took effect
        os._exit(1)
