"""Handing units to worker processes and watching over them: whatever goes wrong, no process is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from megatron.data.preprocess import worker
from megatron.data.preprocess.counts import Counts
from megatron.data.preprocess.parts import Part
from megatron.errors import DataError


class UnitError(RuntimeError):
    """A unit could not be encoded, for a reason that is no fault of the data."""


class _Worker:
    """A worker process, seen from the job."""

    def __init__(self, work: worker.Work) -> None:
        context = multiprocessing.get_context("fork")  # the tokenizer is inherited, not loaded again and not copied
        self.connection, other_end = context.Pipe()
        self.process: BaseProcess = context.Process(target=worker.run, args=(other_end, work, os.getpid()), daemon=True)
        self.process.start()
        other_end.close()  # so that a dead worker is the end of its connection
        self.unit: int | None = None

    def give(self, unit: int | None) -> None:
        """Hand over the next unit; None ends the worker."""
        self.unit = unit
        with suppress(BrokenPipeError, ConnectionResetError):  # it died; its connection says so when it is read
            self.connection.send(unit)

    def take(self) -> worker.Report | None:
        """Return the next report, None if the worker is dead."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            return None


class Workers:
    """``num_workers`` processes, forked at once: nothing may run threads before they are. A context."""

    def __init__(self, work: worker.Work, num_workers: int) -> None:
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
        for each in self._workers:
            each.process.kill()  # what they write counts for nothing until it is finished
        for each in self._workers:
            each.process.join()
            each.connection.close()

    def encode(
        self,
        units: Iterable[int],
        on_report: Callable[[Mapping[int, Counts]], None],
        on_finished: Callable[[Part, bool], None],
    ) -> None:
        """Have all ``units`` encoded, in this order as far as they are begun.

        Args:
            on_report: called after each report with what is counted in the units that are being encoded.
            on_finished: called with the part of each finished unit, and whether it is new.

        Raises:
            DataError: a unit cannot be read.
            UnitError: a worker failed or died; names its unit.
        """
        waiting = iter(units)
        running: dict[int, Counts] = {}
        for each in self._workers:
            self._next(each, waiting, running)
        while running:
            for each, report in self._reports():
                unit = each.unit
                assert unit is not None, "a worker without a unit has nothing to say"
                if isinstance(report, worker.Running):
                    running[unit] = report.counts
                elif isinstance(report, worker.Finished):
                    del running[unit]
                    on_finished(report.part, report.is_new)
                    self._next(each, waiting, running)
                else:
                    raise self._error(each, report, unit)
                on_report(running)

    def _next(self, each: _Worker, waiting: Iterator[int], running: dict[int, Counts]) -> None:
        each.give(next(waiting, None))
        if each.unit is not None:
            running[each.unit] = Counts()

    def _reports(self) -> Iterator[tuple[_Worker, worker.Report | None]]:
        """Wait for reports and yield them; None for a worker that died."""
        busy = {each.connection: each for each in self._workers if each.unit is not None}
        for ready in connection.wait(list(busy)):
            each = busy[ready]  # type: ignore[index]
            yield each, each.take()

    def _error(self, each: _Worker, report: worker.Failed | None, number: int) -> Exception:
        unit = self._work.units[number].name()
        if report is None:
            each.process.join()
            return UnitError(f"a worker process {_end_of(each.process.exitcode)} while it encoded {unit}")
        if report.is_data_error:
            return DataError(report.reason)
        if report.error_number:
            return OSError(report.error_number, f"while a worker encoded {unit}: {report.reason}")
        return UnitError(f"a worker process failed while it encoded {unit}: {report.reason}\n{report.where}".rstrip())


def _end_of(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (out of memory? see dmesg, and try fewer --workers)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
