"""Alarms of ranks that have waited too long, over a store: each rank says what it is at, one judges, all read it.

| key | written by | holds |
|---|---|---|
| ``N/alarm`` | the rank that raises alarm number N, or those that do so at once | how many |
| ``N/report/R`` | rank R | what it is at |
| ``N/verdict``, ``N/number`` | the first that raised it | who did not come; how many have answered |
| ``N/read`` | every rank | how many have read the verdict |
| ``at/R`` | rank R, now and then | where it was last heard of |
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
"""After the alarm: for the answers; for the others to read the verdict; for the verdict itself.

All end as soon as they have what they wait for. They are this long because a rank of a machine that has more to do than
it can looks late, and one that lives is not to be called dead.
"""
LOOKS_PER_S = 10_000
"""How often all ranks together look into the store, whose one thread answered 28,000 to 49,000 looks on two cores."""
ANSWERS_PER_S = 2_000
"""How many ranks the one that judges can hear in a second, beside all who look."""
PAUSE_S = 0.02


class Alarms:
    """One rank's view of the table above.

    Args:
        store: for these ranks and this run alone.
        names: of every rank, for the verdict.
    """

    def __init__(self, store: Any, rank: int, names: Sequence[str]) -> None:
        self._store, self._rank, self._names = store, rank, names
        self.number = 0

    @property
    def num_ranks(self) -> int:
        return len(self._names)

    @property
    def pause_s(self) -> float:
        """How long a rank pauses between two looks, so that those of all ranks are not more than the store takes."""
        return max(PAUSE_S, self.num_ranks / LOOKS_PER_S)

    @property
    def more_s(self) -> float:
        """How much longer than among few ranks the answers of all may take: to notice the alarm, and to be read."""
        return self.num_ranks / LOOKS_PER_S + self.num_ranks / ANSWERS_PER_S

    def is_raised(self) -> bool:
        """Return whether another rank has raised the next alarm."""
        return bool(self._store.check([f"{self.number}/alarm"]))

    def note(self, place: str) -> None:
        """Leave word of where this rank is, in case that it cannot answer later."""
        self._store.set(f"at/{self._rank}", place)

    def answer(self, own: Report) -> str | None:
        """Raise the next alarm, or answer it if it is raised; return its verdict, or None if there came none."""
        store, found = dist.PrefixStore(str(self.number), self._store), None
        is_first = not store.check(["alarm"]) and store.add("alarm", 1) == 1
        store.set(f"report/{self._rank}", own.encode())
        if is_first:
            reports = self._gather(store)
            store.set("number", str(len(reports)))
            store.set("verdict", verdict(reports, self._names, self._rank, self._last_places(reports)))
        if until(lambda: store.check(["verdict"]), PATIENCE_S - POLL_S + self.more_s, self.pause_s):
            found = store.get("verdict").decode()
        self.number += 1
        return found

    def linger(self) -> None:
        """Wait until the others have read the last verdict, too: this rank may be the store's host and leave after it.

        Each does so once it has made use of the verdict, for those who leave cut the connections of the rest.
        """
        store = dist.PrefixStore(str(self.number - 1), self._store)
        if store.check(["verdict"]):
            readers = int(store.get("number"))
            store.add("read", 1)
            until(lambda: store.add("read", 0) >= readers, LINGER_S + self.pause_s, self.pause_s)

    def _gather(self, store: Any) -> dict[int, Report]:
        """Return what the ranks say of themselves within ``GATHER_S``."""
        reports: dict[int, Report] = {}
        missing = set(range(len(self._names)))

        def have_all_reported() -> bool:
            for rank in list(missing):
                if store.check([f"report/{rank}"]):
                    reports[rank] = Report.decode(store.get(f"report/{rank}"))
                    missing.discard(rank)
            return not missing

        until(have_all_reported, GATHER_S + self.more_s, self.pause_s)
        return reports

    def _last_places(self, reports: dict[int, Report]) -> dict[int, str]:
        """Return where those who do not answer were last heard of, as far as they have left word."""
        silent = [rank for rank in range(len(self._names)) if rank not in reports][:8]
        return {rank: self._store.get(f"at/{rank}").decode() for rank in silent if self._store.check([f"at/{rank}"])}


def write_report(line: str, own: Report) -> None:
    """Write ``line`` to standard error, and the stack of the main thread if it waits for nobody.

    It is one call, so that lines of several ranks do not mix.
    """
    stack = "" if own.is_waiting else thread_stack.format_stack(thread_stack.main_frame())
    sys.stderr.write(f"{line}\n{stack}")
    sys.stderr.flush()


def own_store(run: str, prefix: str = "tds/watchdog") -> Any:
    """Return a connection to the store of the default process group, for ``run`` alone; None if it has none."""
    try:
        store: Any = default_store()
    except (RuntimeError, ValueError):
        return None
    copy = dist.PrefixStore(f"{prefix}/{run}", store.clone())
    copy.set_timeout(timedelta(seconds=PATIENCE_S))
    return copy


def until(condition: Callable[[], bool], limit_s: float, pause_s: float = PAUSE_S) -> bool:
    """Wait until ``condition`` holds, for ``limit_s`` at most; return whether it does."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True
