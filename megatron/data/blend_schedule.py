"""BlendSchedule: the corpus and the sample within it of each sample of a run.

A run is cut into phases. In each, ``BlendIndex`` says by weights which corpus a sample comes from, and each corpus
goes on at its cursor: how many of its samples all phases before have given. So however weights change and corpora
come in addition, each corpus gives its samples 0, 1, 2, ... without a gap and without one twice.

A new phase starts where a schedule says so, and where a run is resumed with other weights than it was left with.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from megatron.data.blend_index import BlendIndex
from megatron.errors import DataError

FORMAT = 1
_LARGEST_TOTAL = 1 << 48


@dataclass(frozen=True)
class Corpus:
    """What an order must know of a corpus: ``fingerprint`` changes with all that changes its samples.

    ``is_drawn``: its samples are made by random draws (spans, fill-in-the-middle), which company changes.
    ``num_documents``, ``num_tokens``: of its files, for messages; None where they are unknown.
    ``other_fingerprints``: names of the same corpus in runs of other versions, or with a copy of the tokenizer.
    """

    name: str
    fingerprint: str
    samples_per_epoch: int
    is_drawn: bool = False
    num_documents: int | None = None
    num_tokens: int | None = None
    other_fingerprints: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of documents and tokens, as far as they are known."""
        known = {"documents": self.num_documents, "tokens": self.num_tokens}
        return {name: number for name, number in known.items() if number is not None}


@dataclass(frozen=True)
class Phase:
    """From sample ``start`` on ``weights`` hold; corpus c had given ``cursors[c]`` samples before.

    ``ranks`` decide between corpora of one weight: the place by fingerprint, so that an order in which corpora are
    listed, or one more of them, changes nothing for the others.
    """

    start: int
    weights: tuple[int, ...]
    cursors: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def interleaving(self) -> BlendIndex:
        return BlendIndex(self.weights, self.ranks)

    def cursors_at(self, samples_consumed: int) -> tuple[int, ...]:
        """Return how many samples each corpus has given; ``samples_consumed`` lies in this phase or at its end."""
        counts = self.interleaving.counts(samples_consumed - self.start)
        return tuple(cursor + count for cursor, count in zip(self.cursors, counts, strict=True))


class BlendSchedule:
    """The order of the samples of a run; picklable, and equal on all ranks that make it from the same.

    Args:
        corpora: told apart by name and by fingerprint.
        schedule: (first sample, weight of each corpus) by rising samples, the first from sample 0 on. A weight is >= 0.
        history: (start, weights, cursors) of each phase that the run has been in; the last goes on while its weights
            hold.
        samples_consumed: where the history ends.
        cursors: samples that each corpus has given by then, where no history tells it.

    Raises:
        DataError: no corpus, two of one name or with the same samples, or weights that cannot be used.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        schedule: Sequence[tuple[int, Sequence[float]]],
        *,
        history: Sequence[tuple[int, Sequence[int], Sequence[int]]] = (),
        samples_consumed: int = 0,
        cursors: Sequence[int] | None = None,
    ) -> None:
        self.corpora, self.schedule = tuple(corpora), tuple((start, tuple(weights)) for start, weights in schedule)
        self._check()
        in_order = sorted(corpus.fingerprint for corpus in self.corpora)
        self._ranks = tuple(in_order.index(corpus.fingerprint) for corpus in self.corpora)
        self.phases = [Phase(start, tuple(w), tuple(c), self._ranks) for start, w, c in history]
        wanted = [(start, whole_weights(weights)) for start, weights in self.schedule]
        now = bisect_right(wanted, samples_consumed, key=lambda step: step[0]) - 1
        for start, weights in [(samples_consumed, wanted[now][1]), *wanted[now + 1 :]]:
            self._go_on(start, weights, cursors)
        self._starts = [phase.start for phase in self.phases]

    def locate(self, index: int) -> tuple[int, int]:
        """Return (number of the corpus, index within the corpus) of sample ``index`` of the run."""
        phase = self._phase(index)
        corpus, place = phase.interleaving.locate(index - phase.start)
        return corpus, phase.cursors[corpus] + place

    def cursors(self, samples_consumed: int) -> dict[str, int]:
        """Return how many samples each corpus has given."""
        return self._by_name(self._before(samples_consumed).cursors_at(samples_consumed))

    def epochs(self, samples_consumed: int) -> dict[str, float]:
        """Return how often each corpus has been read."""
        cursors = self.cursors(samples_consumed)
        return {corpus.name: cursors[corpus.name] / corpus.samples_per_epoch for corpus in self.corpora}

    def weights(self, samples_consumed: int) -> dict[str, float]:
        """Return each corpus's share of the samples that follow; they add up to 1."""
        weights = self._phase(samples_consumed).weights
        return self._by_name(tuple(weight / sum(weights) for weight in weights))

    def state(self, samples_consumed: int) -> dict[str, Any]:
        """Return what a checkpoint must hold so that ``resumed_order`` can go on; JSON can carry it."""
        used = [phase for phase in self.phases if phase.start < samples_consumed]
        return {
            "format": FORMAT,
            "samples_consumed": samples_consumed,
            "fingerprints": {corpus.name: corpus.fingerprint for corpus in self.corpora},
            **({"sizes": sizes} if (sizes := {each.name: each.sizes for each in self.corpora if each.sizes}) else {}),
            "cursors": self.cursors(samples_consumed),
            "phases": [
                {
                    "start": phase.start,
                    "weights": self._by_name(phase.weights),
                    "cursors": self._by_name(phase.cursors),
                }
                for phase in used
            ],
        }

    def _go_on(self, start: int, weights: tuple[int, ...], cursors: Sequence[int] | None) -> None:
        """Add a phase, unless the weights stay what they are; ``cursors`` are those before the first phase."""
        if not self.phases:
            self.phases.append(Phase(start, weights, tuple(cursors or (0,) * len(self.corpora)), self._ranks))
        elif self.phases[-1].weights != weights:
            self.phases.append(Phase(start, weights, self.phases[-1].cursors_at(start), self._ranks))

    def _phase(self, index: int) -> Phase:
        place = bisect_right(self._starts, index) - 1
        if place < 0:
            raise IndexError(f"samples of this order count from {self._starts[0]}, got {index}")
        return self.phases[place]

    def _before(self, samples_consumed: int) -> Phase:
        """Return the phase that the last sample before ``samples_consumed`` lies in, or the first."""
        return self._phase(max(samples_consumed - 1, self._starts[0]))

    def _by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        return {corpus.name: value for corpus, value in zip(self.corpora, values, strict=True)}

    def _check(self) -> None:
        for what in ("name", "fingerprint"):
            seen: dict[str, Corpus] = {}
            for corpus in self.corpora:
                other = seen.setdefault(getattr(corpus, what), corpus)
                if other is not corpus:
                    raise DataError(
                        f"each corpus of a mixture must stand there once, got {other.name} and {corpus.name} with the "
                        f"same {what} {getattr(corpus, what)}. Give one of them the sum of the weights."
                    )
        if not self.schedule or self.schedule[0][0] > 0:
            raise DataError("a mixture must have weights from its first sample on")


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the ratio of ``weights`` as they print: 0.7 and 0.3 are 7 and 3.

    Where their sum would pass 2^48 they are rounded to it; none that is above 0 becomes 0.

    Raises:
        DataError: negative, not finite, or all 0.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise DataError(f"weights of corpora must be finite, at least 0 and not all 0, got {list(weights)}")
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact, Fraction(0))
    scale = min(Fraction(math.lcm(*(weight.denominator for weight in exact))), _LARGEST_TOTAL / total)
    whole = [max(round(weight * scale), 1) if weight else 0 for weight in exact]
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)
