"""Alarms of ranks that have waited too long, exchanged over a store.

After an alarm, each rank reports its current operation. The rank that raised the alarm first determines the verdict,
which all ranks read.

| key | written by | content |
|---|---|---|
| ``N/alarm`` | the ranks that raise alarm number N | number of these ranks |
| ``N/report/R`` | rank R | its current operation |
| ``N/verdict``, ``N/number`` | the rank that raised the alarm first | the missing rank; number of reports |
| ``N/read`` | every rank | number of ranks that have read the verdict |
| ``at/R`` | rank R, periodically | its last known location |
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tds.torch_api import default_store
from tds.watchdog import thread_stack
from tds.watchdog.diagnosis import Report, verdict

POLL_S = 0.2
GATHER_S = 2.0
LINGER_S = 0.8
PATIENCE_S = 3.2
"""Maximum waits after an alarm: GATHER_S for the reports, LINGER_S for other ranks to read the verdict, PATIENCE_S for
the verdict.

Each wait ends as soon as its condition is met. The limits are long enough that slow ranks on an overloaded machine are
not reported as dead.
"""
POLLS_PER_S = 10_000
"""Maximum polls per second over all ranks. The store's single thread answered 28,000 to 49,000 polls/s on two cores."""
REPORTS_PER_S = 2_000
"""Reports per second that the rank which determines the verdict can read while all ranks poll."""
PAUSE_S = 0.02


class Alarms:
    """One rank's access to the table above.

    Args:
        store: a store used only by these ranks and this run.
        names: the name of every rank, for the verdict.
    """

    def __init__(self, store: Any, rank: int, names: Sequence[str]) -> None:
        self._store, self._rank, self._names = store, rank, names
        self.alarm_idx = 0

    @property
    def num_ranks(self) -> int:
        return len(self._names)

    @property
    def pause_s(self) -> float:
        """Pause between a rank's polls, so that all ranks' polls do not exceed the store's capacity."""
        return max(PAUSE_S, self.num_ranks / POLLS_PER_S)

    @property
    def extra_s(self) -> float:
        """Extra time for many ranks: for all to notice the alarm, and for all reports to be read."""
        return self.num_ranks / POLLS_PER_S + self.num_ranks / REPORTS_PER_S

    def is_raised(self) -> bool:
        """Return True if a rank has raised the next alarm."""
        return bool(self._store.check([f"{self.alarm_idx}/alarm"]))

    def write_location(self, location: str) -> None:
        """Store this rank's location, in case it cannot report later."""
        self._store.set(f"at/{self._rank}", location)

    def answer(self, local_report: Report) -> str | None:
        """Raise the next alarm, or answer it if another rank has raised it.

        Args:
            local_report: this rank's report.

        Returns:
            The verdict; None on timeout.
        """
        store, result = dist.PrefixStore(str(self.alarm_idx), self._store), None
        is_first = not store.check(["alarm"]) and store.add("alarm", 1) == 1
        store.set(f"report/{self._rank}", local_report.encode())
        if is_first:
            reports = self._gather(store)
            store.set("number", str(len(reports)))
            store.set("verdict", verdict(reports, self._names, self._rank, self._last_locations(reports)))
        if wait_until(lambda: store.check(["verdict"]), PATIENCE_S - POLL_S + self.extra_s, self.pause_s):
            result = store.get("verdict").decode()
        self.alarm_idx += 1
        return result

    def linger(self) -> None:
        """Wait until the other ranks have read the last verdict.

        Must be called before this rank exits, because it may host the store, and its exit breaks the connections of the
        other ranks.
        """
        store = dist.PrefixStore(str(self.alarm_idx - 1), self._store)
        if store.check(["verdict"]):
            readers = int(store.get("number"))
            store.add("read", 1)
            wait_until(lambda: store.add("read", 0) >= readers, LINGER_S + self.pause_s, self.pause_s)

    def _gather(self, store: Any) -> dict[int, Report]:
        """Gather the reports that arrive within ``GATHER_S`` (more for many ranks), by rank."""
        reports: dict[int, Report] = {}
        missing = set(range(len(self._names)))

        def have_all_reported() -> bool:
            for rank in list(missing):
                if store.check([f"report/{rank}"]):
                    reports[rank] = Report.decode(store.get(f"report/{rank}"))
                    missing.discard(rank)
            return not missing

        wait_until(have_all_reported, GATHER_S + self.extra_s, self.pause_s)
        return reports

    def _last_locations(self, reports: dict[int, Report]) -> dict[int, str]:
        """Look up the last known locations of up to eight ranks without a report."""
        silent = [rank for rank in range(len(self._names)) if rank not in reports][:8]
        return {rank: self._store.get(f"at/{rank}").decode() for rank in silent if self._store.check([f"at/{rank}"])}


def write_report(line: str, local_report: Report) -> None:
    """Write ``line`` to standard error, with the stack of the main thread if it does not wait for other ranks.

    The text is written in one call, so that the lines of several ranks do not mix.
    """
    stack = "" if local_report.is_waiting else thread_stack.format_stack(thread_stack.main_frame())
    sys.stderr.write(f"{line}\n{stack}")
    sys.stderr.flush()


def open_store(run: str, prefix: str = "tds/watchdog") -> Any:
    """Open a store for ``run`` on a new connection to the default process group's store; None if there is none."""
    try:
        store: Any = default_store()
    except (RuntimeError, ValueError):
        return None
    connection = dist.PrefixStore(f"{prefix}/{run}", store.clone())
    connection.set_timeout(timedelta(seconds=PATIENCE_S))
    return connection


def wait_until(condition: Callable[[], bool], limit_s: float, pause_s: float = PAUSE_S) -> bool:
    """Wait at most ``limit_s`` for ``condition``; return True if it is met."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True
