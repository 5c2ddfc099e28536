"""Worker processes and their supervision."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from megatron.child_process import die_with_parent
from megatron.data.preprocess.corpus import read_unit
from megatron.data.preprocess.encode import Encoder, chunk_records
from megatron.data.preprocess.job_types import Counts, Unit, compression_type, sum_counts
from megatron.data.preprocess.readers import check_decompresses
from megatron.data.preprocess.shards import Shard, ShardFolder, ShardWriter
from megatron.errors import DataError

# A worker process: it receives units one after another and sends back progress reports.

_REPORT_INTERVAL_S = 0.2


@dataclass(frozen=True)
class Running:
    """Report on a unit that is being encoded, with its counts so far."""

    counts: Counts


@dataclass(frozen=True)
class Finished:
    """Report on a finished unit; ``is_new`` is False if its shard already existed."""

    shard: Shard
    is_new: bool


@dataclass(frozen=True)
class Failed:
    """Report on a failed unit. ``error_number`` is the errno of an OSError, otherwise 0."""

    reason: str
    is_data_error: bool = False
    error_number: int = 0
    traceback_text: str = ""


Report = Running | Finished | Failed


@dataclass(frozen=True)
class Work:
    """Data that a worker needs. It is inherited through the fork and never pickled."""

    units: Mapping[int, Unit]
    encoder: Encoder
    shard_folder: ShardFolder


def run(connection: Connection, work: Work, parent_pid: int) -> None:
    """Encode the units whose numbers arrive on ``connection`` until None arrives; send reports on ``connection``."""
    _init_worker(parent_pid)
    try:
        while (unit_idx := connection.recv()) is not None:
            for report in encode_with_reports(
                work.encoder, work.shard_folder, work.units[unit_idx], _REPORT_INTERVAL_S
            ):
                connection.send(report)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent process has ended


def _init_worker(parent_pid: int) -> None:
    die_with_parent()
    if os.getppid() != parent_pid:  # the parent died before die_with_parent() took effect
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent process stops its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # keep inherited pages shared; otherwise the garbage collector would write to all of them


def encode_with_reports(encoder: Encoder, shard_folder: ShardFolder, unit: Unit, interval_s: float) -> Iterator[Report]:
    """Encode ``unit`` unless its shard exists; report Running, and finally Finished or Failed."""
    try:
        if shard := shard_folder.load_finished(unit.idx):
            yield Finished(shard, is_new=False)
        else:
            yield from _encode_unit(encoder, shard_folder, unit, interval_s)
    except DataError as error:
        yield Failed(str(error), is_data_error=True)
    except OSError as error:
        yield Failed(str(error), error_number=error.errno or errno.EIO, traceback_text=traceback.format_exc())
    except Exception as error:
        yield Failed(f"{type(error).__name__}: {error}", traceback_text=traceback.format_exc())


def _encode_unit(encoder: Encoder, shard_folder: ShardFolder, unit: Unit, interval_s: float) -> Iterator[Report]:
    counts, reported_s = Counts(), time.monotonic()
    is_checked = compression_type(unit.path) is None
    with ShardWriter(shard_folder, unit.idx) as writer:
        for chunk in chunk_records(read_unit(unit, encoder.json_keys)):
            encoded = encoder.encode(chunk, unit.format)
            # Bad records may be garbage after a flipped bit in a compressed file. Verify the checksum, which is at the
            # end of the file, before reporting them.
            if encoded.bad_records and not is_checked:
                check_decompresses(unit.path)
                is_checked = True
            counts = sum_counts((counts, encoded.counts))
            writer.add(encoded, counts)
            if encoded.bad_records or time.monotonic() - reported_s >= interval_s:
                yield Running(counts)
                reported_s = time.monotonic()
        shard = writer.finish()
    yield Finished(shard, is_new=True)


# The pool: it distributes units, monitors the workers, and stops all of them after an error.


class UnitError(RuntimeError):
    """A unit could not be encoded for a reason other than its data."""


class _Worker:
    """The parent's handle to a worker process."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("fork")  # inherit the tokenizer instead of loading or copying it
        self.connection, worker_connection = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=run, args=(worker_connection, work, os.getpid()), daemon=True
        )
        self.process.start()
        worker_connection.close()  # so that the connection ends when the worker dies
        self.unit: int | None = None

    def send_unit(self, unit: int | None) -> None:
        """Send the next unit to the worker; None stops the worker."""
        self.unit = unit
        with suppress(BrokenPipeError, ConnectionResetError):  # receive_report() detects a dead worker
            self.connection.send(unit)

    def receive_report(self) -> Report | None:
        """Wait for the next report; None if the worker is dead."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            return None


class Workers:
    """Pool of ``num_workers`` forked processes, used as a context manager.

    The processes are forked on entry. The parent must not have started threads before.
    """

    def __init__(self, work: Work, num_workers: int) -> None:
        self._work = work
        self._workers: list[_Worker] = []
        self._num_workers = num_workers

    def __enter__(self) -> Workers:
        try:
            for _ in range(self._num_workers):
                self._workers.append(_Worker(self._work))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()  # unfinished shards are ignored
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()

    def encode(
        self,
        units: Iterable[int],
        on_report: Callable[[Mapping[int, Counts]], None],
        on_finished: Callable[[Shard, bool], None],
    ) -> None:
        """Encode all ``units``, starting them in this order.

        Args:
            on_report: called after each report with counts for the units that are being encoded.
            on_finished: called with each finished unit's shard, and True if the shard is new.

        Raises:
            DataError: a unit cannot be read.
            UnitError: a worker failed or died; the message names its unit.
        """
        waiting = iter(units)
        running: dict[int, Counts] = {}
        for worker in self._workers:
            self._send_next_unit(worker, waiting, running)
        while running:
            for worker, report in self._reports():
                unit_idx = worker.unit
                assert unit_idx is not None, "a worker without a unit sends no reports"
                if isinstance(report, Running):
                    running[unit_idx] = report.counts
                elif isinstance(report, Finished):
                    del running[unit_idx]
                    on_finished(report.shard, report.is_new)
                    self._send_next_unit(worker, waiting, running)
                else:
                    raise self._make_error(worker, report, unit_idx)
                on_report(running)

    def _send_next_unit(self, worker: _Worker, waiting: Iterator[int], running: dict[int, Counts]) -> None:
        """Send the next waiting unit to an idle worker, or stop the worker if there is none."""
        worker.send_unit(next(waiting, None))
        if worker.unit is not None:
            running[worker.unit] = Counts()

    def _reports(self) -> Iterator[tuple[_Worker, Report | None]]:
        """Wait for reports as (worker, report); the report is None for a worker that died."""
        busy = {worker.connection: worker for worker in self._workers if worker.unit is not None}
        for ready in connection.wait(list(busy)):
            worker = busy[ready]  # type: ignore[index]
            yield worker, worker.receive_report()

    def _make_error(self, worker: _Worker, report: Failed | None, unit_idx: int) -> Exception:
        unit_name = self._work.units[unit_idx].name()
        if report is None:
            worker.process.join()
            return UnitError(f"a worker process {_describe_exit(worker.process.exitcode)} while it encoded {unit_name}")
        return make_error(report, unit_name)


def make_error(report: Failed, unit_name: str) -> Exception:
    """Build the exception for a failure in the unit called ``unit_name``."""
    if report.is_data_error:
        return DataError(report.reason)
    if report.error_number:
        return OSError(report.error_number, f"while a worker encoded {unit_name}: {report.reason}")
    return UnitError(
        f"a worker process failed while it encoded {unit_name}: {report.reason}\n{report.traceback_text}".rstrip()
    )


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (possibly out of memory: check dmesg, and reduce --workers)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
