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
from megatron.data.preprocess.encode import Encoder, in_chunks
from megatron.data.preprocess.job_types import Counts, Unit, compression_of, total
from megatron.data.preprocess.readers import check_is_whole
from megatron.data.preprocess.shards import Part, PartWriter, ShardFolder
from megatron.errors import DataError

# A worker process: it receives units one after another and sends back progress reports.

_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(frozen=True)
class Running:
    """The report of a unit that is being encoded, with its counts so far."""

    counts: Counts


@dataclass(frozen=True)
class Finished:
    """The report of a finished unit; ``is_new`` is False if its part already existed."""

    part: Part
    is_new: bool


@dataclass(frozen=True)
class Failed:
    """The report of a failed unit. ``error_number`` is the errno of an OSError, else 0; ``where`` is the traceback."""

    reason: str
    is_data_error: bool = False
    error_number: int = 0
    where: str = ""


Report = Running | Finished | Failed


@dataclass(frozen=True)
class Work:
    """The data that a worker needs. It is inherited through the fork and never pickled."""

    units: Mapping[int, Unit]
    encoder: Encoder
    parts: ShardFolder


def run(connection: Connection, work: Work, parent: int) -> None:
    """Encode the units whose numbers arrive on ``connection`` until None arrives; send reports on ``connection``."""
    _become_worker(parent)
    try:
        while (unit_number := connection.recv()) is not None:
            for report in reports(work.encoder, work.parts, work.units[unit_number], _SECONDS_BETWEEN_REPORTS):
                connection.send(report)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent process has ended


def _become_worker(parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:  # the parent died before die_with_parent() took effect
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent process stops its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # keep inherited pages shared; otherwise the garbage collector would write to all of them


def reports(encoder: Encoder, parts: ShardFolder, unit: Unit, seconds_between: float) -> Iterator[Report]:
    """Encode ``unit`` unless its part exists; yield Running reports, and finally Finished or Failed."""
    try:
        if part := parts.finished(unit.number):
            yield Finished(part, is_new=False)
        else:
            yield from _encoded(encoder, parts, unit, seconds_between)
    except DataError as error:
        yield Failed(str(error), is_data_error=True)
    except OSError as error:
        yield Failed(str(error), error_number=error.errno or errno.EIO, where=traceback.format_exc())
    except Exception as error:
        yield Failed(f"{type(error).__name__}: {error}", where=traceback.format_exc())


def _encoded(encoder: Encoder, parts: ShardFolder, unit: Unit, seconds_between: float) -> Iterator[Report]:
    counts, reported_s = Counts(), time.monotonic()
    is_checked = compression_of(unit.path) is None
    with PartWriter(parts, unit.number) as writer:
        for chunk in in_chunks(read_unit(unit, encoder.json_keys)):
            encoded = encoder.encode(chunk, unit.format)
            # Bad records may be garbage after a flipped bit in a compressed file. Verify the checksum, which is at the
            # end of the file, before reporting them.
            if encoded.bad and not is_checked:
                check_is_whole(unit.path)
                is_checked = True
            counts = total((counts, encoded.counts))
            writer.add(encoded, counts)
            if encoded.bad or time.monotonic() - reported_s >= seconds_between:
                yield Running(counts)
                reported_s = time.monotonic()
        part = writer.finish()
    yield Finished(part, is_new=True)


# The pool: it distributes units, monitors the workers, and stops all of them after an error.


class UnitError(RuntimeError):
    """A unit could not be encoded for a reason other than its data."""


class _Worker:
    """The parent's handle of a worker process."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("fork")  # inherit the tokenizer instead of loading or copying it
        self.connection, other_end = context.Pipe()
        self.process: BaseProcess = context.Process(target=run, args=(other_end, work, os.getpid()), daemon=True)
        self.process.start()
        other_end.close()  # so that the connection ends when the worker dies
        self.unit: int | None = None

    def give(self, unit: int | None) -> None:
        """Send the next unit to the worker; None stops the worker."""
        self.unit = unit
        with suppress(BrokenPipeError, ConnectionResetError):  # a dead worker is detected by take()
            self.connection.send(unit)

    def take(self) -> Report | None:
        """Return the next report; None if the worker is dead."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            return None


class Workers:
    """A pool of ``num_workers`` forked processes, used as a context manager.

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
            worker.process.kill()  # unfinished parts are ignored
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()

    def encode(
        self,
        units: Iterable[int],
        on_report: Callable[[Mapping[int, Counts]], None],
        on_finished: Callable[[Part, bool], None],
    ) -> None:
        """Encode all ``units``, starting them in this order.

        Args:
            on_report: called after each report with the counts of the units that are being encoded.
            on_finished: called with the part of each finished unit, and True if the part is new.

        Raises:
            DataError: a unit cannot be read.
            UnitError: a worker failed or died; the message names its unit.
        """
        waiting = iter(units)
        running: dict[int, Counts] = {}
        for worker in self._workers:
            self._next(worker, waiting, running)
        while running:
            for worker, report in self._reports():
                unit = worker.unit
                assert unit is not None, "a worker without a unit sends no reports"
                if isinstance(report, Running):
                    running[unit] = report.counts
                elif isinstance(report, Finished):
                    del running[unit]
                    on_finished(report.part, report.is_new)
                    self._next(worker, waiting, running)
                else:
                    raise self._error(worker, report, unit)
                on_report(running)

    def _next(self, each: _Worker, waiting: Iterator[int], running: dict[int, Counts]) -> None:
        """Send the next waiting unit to an idle worker, or stop the worker if there is none."""
        each.give(next(waiting, None))
        if each.unit is not None:
            running[each.unit] = Counts()

    def _reports(self) -> Iterator[tuple[_Worker, Report | None]]:
        """Wait for reports and yield (worker, report); the report is None for a worker that died."""
        busy = {worker.connection: worker for worker in self._workers if worker.unit is not None}
        for ready in connection.wait(list(busy)):
            worker = busy[ready]  # type: ignore[index]
            yield worker, worker.take()

    def _error(self, each: _Worker, report: Failed | None, number: int) -> Exception:
        unit = self._work.units[number].name()
        if report is None:
            each.process.join()
            return UnitError(f"a worker process {_end_of(each.process.exitcode)} while it encoded {unit}")
        return error_of(report, unit)


def error_of(report: Failed, unit: str) -> Exception:
    """Return the exception for the failure of the unit called ``unit``."""
    if report.is_data_error:
        return DataError(report.reason)
    if report.error_number:
        return OSError(report.error_number, f"while a worker encoded {unit}: {report.reason}")
    return UnitError(f"a worker process failed while it encoded {unit}: {report.reason}\n{report.where}".rstrip())


def _end_of(code: int | None) -> str:
    """Describe the exit code of a process."""
    if code is None or code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (possibly out of memory: check dmesg, and reduce --workers)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
