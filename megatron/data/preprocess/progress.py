"""Progress display, a job's progress, and bad record limits."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from megatron import log
from megatron.data.preprocess.job_types import Counts, Summary, Unit, is_indivisible, sum_counts
from megatron.data.preprocess.shards import Shard

# Progress display: a bar on a terminal, otherwise a log line every few seconds.

_LOG_INTERVAL_S = 5.0


class UpdateProgress(Protocol):
    """Updates the progress display with the amount that is done and a text."""

    def __call__(self, done: int, text: str) -> None: ...


@contextmanager
def progress(title: str, total: int, initial: int = 0) -> Iterator[UpdateProgress]:
    """Display progress; the yielded function updates the display.

    Args:
        total: total amount; 0 if unknown.
        initial: amount that was done before and is excluded from the estimate of the remaining time.
    """
    if sys.stderr.isatty():
        with _progress_bar(title, total) as update:
            yield update
    else:
        yield _LoggedProgress(title, total, initial)


@contextmanager
def _progress_bar(title: str, total: int) -> Iterator[UpdateProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total or None, text="")
        yield lambda done, text: bar.update(task, completed=done, text=text)


class _LoggedProgress:
    def __init__(self, title: str, total: int, initial: int) -> None:
        self._title, self._total, self._initial = title, total, initial
        self._start = self._last = time.monotonic()

    def __call__(self, done: int, text: str) -> None:
        now = time.monotonic()
        if now - self._last < _LOG_INTERVAL_S:
            return
        self._last = now
        share = f"{100 * done / self._total:.0f}%, " if self._total else ""
        remaining = ""
        if self._total and done > self._initial:
            seconds = (now - self._start) * (self._total - done) / (done - self._initial)
            remaining = f", {format_duration(seconds)} left"
        log.info(f"{self._title}: {share}{text}{remaining}")


def format_duration(seconds: float) -> str:
    """Format a duration as 42 s, 3:07 min or 2:05 h."""
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s} s"
    return (
        f"{total_s // 60}:{total_s % 60:02d} min"
        if total_s < 3600
        else f"{total_s // 3600}:{total_s % 3600 // 60:02d} h"
    )


# A job's progress: finished and running units.


class JobProgress:
    """Progress of a job's units; ``counts`` covers the finished units."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = {unit.idx: unit for unit in units}
        self.counts = Counts()
        self.total_bytes = sum(unit.size for unit in units)
        self._has_bound = all(
            unit.format in ("jsonl", "text-block") and not is_indivisible(unit.path, unit.format) for unit in units
        )
        self._finished: dict[int, Shard] = {}
        self._started = self._encoding_since = time.monotonic()
        self._num_finished_bytes = self._encoded_before = self._num_resumed = 0

    def begin(self) -> None:
        """Start measuring the encoding speed."""
        self._encoding_since = time.monotonic()

    def add(self, shard: Shard, is_new: bool) -> None:
        """Add a finished unit; ``is_new`` is False if it was finished before this job began."""
        self._finished[shard.unit] = shard
        self.counts = sum_counts((self.counts, shard.counts))
        self._num_finished_bytes += self.units[shard.unit].size
        if not is_new:
            self._num_resumed += 1
            self._encoded_before += shard.counts.num_bytes

    def shards(self) -> list[Shard]:
        """List the finished units' shards in order."""
        return [self._finished[unit_idx] for unit_idx in sorted(self._finished)]

    def num_done_bytes(self, running: Mapping[int, Counts]) -> int:
        """Count the encoded bytes, out of ``total_bytes``.

        A compressed unit has more text than bytes on disk; at most its size on disk is counted.
        """
        return self._num_finished_bytes + sum(
            min(counts.num_bytes, self.units[unit_idx].size) for unit_idx, counts in running.items()
        )

    def max_records(self, running: Mapping[int, Counts], counts: Counts) -> float:
        """Compute an upper bound for the record count, assuming one byte per remaining record.

        The bound is infinite for formats in which the bytes on the disk do not limit the record count.

        Args:
            counts: counts for the finished and the running units.
        """
        if not self._has_bound:
            return math.inf
        return counts.num_records + self.total_bytes - self.num_done_bytes(running)

    def format_status(self, counts: Counts) -> str:
        """Format this run's speed and ``counts``."""
        seconds = max(time.monotonic() - self._encoding_since, 1e-9)
        speed = (counts.num_bytes - self._encoded_before) / 1e6 / seconds
        text = f"{speed:.1f} MB/s, {counts.num_documents:,} documents, {counts.num_tokens:,} tokens"
        return text + (f", {counts.num_bad:,} bad" if counts.num_bad else "")

    def summary(self, bad_path: str | None) -> Summary:
        """Summarize the job; ``bad_path`` is the file that lists its bad records, if any."""
        return Summary(
            num_documents=self.counts.num_documents,
            num_tokens=self.counts.num_tokens,
            num_empty=self.counts.num_empty,
            num_bad=self.counts.num_bad,
            num_bytes=self.counts.num_bytes,
            num_units=len(self._finished),
            num_resumed=self._num_resumed,
            seconds=time.monotonic() - self._started,
            bad_path=bad_path,
        )


# Bad record limits.


class TooManyBadRecords(Exception):
    """A bad record limit is exceeded; the message names it."""


@dataclass(frozen=True)
class ErrorLimits:
    """Bad record limits; a job fails when a limit is exceeded. Without limits, no record may be bad.

    Args:
        max_lines: maximum bad records.
        max_fraction: maximum fraction of bad records. A running job fails as soon as the fraction would be exceeded
            even if all remaining records were valid. The result therefore does not depend on the unit order.
    """

    max_lines: int | None = None
    max_fraction: float | None = None

    def check(self, counts: Counts, max_records: float) -> None:
        """Check the limits.

        Args:
            counts: counts for the records read so far.
            max_records: upper bound for the record count in the input; at the end, the actual count.

        Raises:
            TooManyBadRecords: a limit is exceeded.
        """
        max_lines = 0 if self.max_lines is None and self.max_fraction is None else self.max_lines
        if max_lines is not None and counts.num_bad > max_lines:
            raise TooManyBadRecords(
                f"at most {max_lines} bad line{'' if max_lines == 1 else 's'} may be skipped (--max-bad-lines), "
                f"got {counts.num_bad} so far"
            )
        if self.max_fraction is not None and counts.num_bad > self.max_fraction * max_records:
            raise TooManyBadRecords(
                f"at most {self.max_fraction:g} of all lines may be bad (--max-bad-fraction), got {counts.num_bad} of "
                f"{counts.num_records} so far"
            )
