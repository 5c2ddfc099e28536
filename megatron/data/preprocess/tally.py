"""What a job has done so far: finished units and those that are being encoded, as numbers and in words."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from megatron.data.preprocess.counts import Counts, total
from megatron.data.preprocess.parts import Part
from megatron.data.preprocess.records import Unit, is_whole
from megatron.data.preprocess.settings import Summary


class Tally:
    """Counts the units of a job; ``counts`` are those of the finished ones."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.counts = Counts()
        self.total_bytes = sum(unit.size for unit in units)
        self._has_bound = all(
            unit.format in ("jsonl", "text-block") and not is_whole(unit.path, unit.format) for unit in units
        )
        self._finished: dict[int, Part] = {}
        self._started = self._encoding_since = time.monotonic()
        self._done = self._encoded_before = self._num_resumed = 0

    def begin(self) -> None:
        """Say that the encoding begins, from which its speed is reckoned."""
        self._encoding_since = time.monotonic()

    def add(self, part: Part, is_new: bool) -> None:
        """Count a finished unit, ``is_new`` unless it was finished before this job began."""
        self._finished[part.unit] = part
        self.counts = total((self.counts, part.counts))
        self._done += self.units[part.unit].size
        if not is_new:
            self._num_resumed += 1
            self._encoded_before += part.counts.num_bytes

    def parts(self) -> list[Part]:
        """Return the parts of the finished units in order."""
        return [self._finished[number] for number in sorted(self._finished)]

    def done(self, running: Mapping[int, Counts]) -> int:
        """Return how many of ``total_bytes`` are encoded.

        A compressed unit gives more text than it has bytes; it counts for those at most.
        """
        return self._done + sum(min(counts.num_bytes, self.units[unit].size) for unit, counts in running.items())

    def most_records(self, running: Mapping[int, Counts], counts: Counts) -> float:
        """Return how many records there can be at most, ``counts`` being those so far: each takes a byte at least.

        Infinite where bytes on the disk say nothing about that.
        """
        if not self._has_bound:
            return math.inf
        return counts.num_records + self.total_bytes - self.done(running)

    def in_words(self, counts: Counts) -> str:
        """Return the speed of this run, and ``counts``."""
        seconds = max(time.monotonic() - self._encoding_since, 1e-9)
        speed = (counts.num_bytes - self._encoded_before) / 1e6 / seconds
        text = f"{speed:.1f} MB/s, {counts.num_documents:,} documents, {counts.num_tokens:,} tokens"
        return text + (f", {counts.num_bad:,} bad" if counts.num_bad else "")

    def summary(self, bad_path: str | None) -> Summary:
        """Return what the job came to, its bad records told in ``bad_path``."""
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
