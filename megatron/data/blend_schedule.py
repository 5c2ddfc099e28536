"""BlendSchedule: map each sample in a run to a corpus and an index within the corpus.

A run is divided into phases. Within a phase, ``BlendIndex`` selects the corpus for each sample by the weights. Each
corpus continues at its cursor, the number of samples that earlier phases have read from it. Each corpus therefore
yields its samples 0, 1, 2, ... without gaps or repetitions, even if weights change or corpora are added.

A new phase starts where the mixture schedule changes the weights, and where a run is resumed with different weights.
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
_MAX_TOTAL = 1 << 48


@dataclass(frozen=True)
class Corpus:
    """Corpus properties that a schedule needs.

    Args:
        fingerprint: digest of everything that determines the samples.
        samples_per_epoch: number of samples in an epoch; 0 if it is unknown because the text is being encoded.
        has_random_draws: the samples depend on random draws (spans, fill-in-the-middle), which differ between a single
            corpus and a mixture.
        num_documents, num_tokens: counts of the token files, for messages; None if unknown.
        other_fingerprints: further fingerprints of this corpus that a checkpoint may contain; they have another digest
            of the same tokenizer.
    """

    name: str
    fingerprint: str
    samples_per_epoch: int
    has_random_draws: bool = False
    num_documents: int | None = None
    num_tokens: int | None = None
    other_fingerprints: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Unit ("documents", "tokens") -> count, without unknown counts."""
        counts = {"documents": self.num_documents, "tokens": self.num_tokens}
        return {name: count for name, count in counts.items() if count is not None}


@dataclass(frozen=True)
class Phase:
    """Part of a run, from sample ``start`` on, in which the mixture has constant ``weights``.

    Args:
        cursors: samples read from each corpus before ``start``.
        ranks: each corpus's position when sorted by fingerprint. Ranks break ties between equal weights, independently
            of the listed order and of additional corpora.
    """

    start: int
    weights: tuple[int, ...]
    cursors: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def blend_index(self) -> BlendIndex:
        return BlendIndex(self.weights, self.ranks)

    def cursors_at(self, samples_consumed: int) -> tuple[int, ...]:
        """Count the samples read per corpus; ``samples_consumed`` must be in this phase or at its end."""
        counts = self.blend_index.counts(samples_consumed - self.start)
        return tuple(cursor + count for cursor, count in zip(self.cursors, counts, strict=True))


class BlendSchedule:
    """A run's sample order. It is picklable, and equal on all ranks that construct it with the same arguments.

    Args:
        corpora: corpora with distinct names and fingerprints.
        schedule: (first sample, weight per corpus) in ascending order, starting at sample 0. Weights are >= 0.
        history: (start, weights, cursors) for the phases that the run has been in; the last phase continues while its
            weights are in effect.
        samples_consumed: end of the history.
        cursors: samples read from each corpus up to ``samples_consumed``, used if there is no history.

    Raises:
        DataError: there is no corpus, two corpora have the same name or samples, or the weights are invalid.
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
        sorted_fingerprints = sorted(corpus.fingerprint for corpus in self.corpora)
        self._ranks = tuple(sorted_fingerprints.index(corpus.fingerprint) for corpus in self.corpora)
        self.phases = [
            Phase(start, tuple(phase_weights), tuple(phase_cursors), self._ranks)
            for start, phase_weights, phase_cursors in history
        ]
        steps = [(start, integer_weights(weights)) for start, weights in self.schedule]
        step_idx = bisect_right(steps, samples_consumed, key=lambda step: step[0]) - 1
        for start, weights in [(samples_consumed, steps[step_idx][1]), *steps[step_idx + 1 :]]:
            self._add_phase(start, weights, cursors)
        self._starts = [phase.start for phase in self.phases]

    def locate(self, index: int) -> tuple[int, int]:
        """Map sample ``index`` to (corpus index, sample index within the corpus)."""
        phase = self._phase(index)
        corpus_idx, sample_idx = phase.blend_index.locate(index - phase.start)
        return corpus_idx, phase.cursors[corpus_idx] + sample_idx

    def index_of(self, corpus_idx: int, sample_idx: int) -> int | None:
        """Find the run's sample that is sample ``sample_idx`` of a corpus; None if the order never reads it.

        Samples of phases before the first known one are not found.
        """
        for phase_idx, phase in enumerate(self.phases):
            position = sample_idx - phase.cursors[corpus_idx]
            if position < 0 or not phase.weights[corpus_idx]:
                continue
            low, high = 0, 1
            while phase.blend_index.counts(high)[corpus_idx] <= position:
                low, high = high, 2 * high
            while high - low > 1:  # counts(low) <= position < counts(high)
                middle = (low + high) // 2
                if phase.blend_index.counts(middle)[corpus_idx] <= position:
                    low = middle
                else:
                    high = middle
            index = phase.start + low
            if phase_idx + 1 == len(self.phases) or index < self.phases[phase_idx + 1].start:
                return index
        return None

    def cursors(self, samples_consumed: int) -> dict[str, int]:
        """Count the samples read per corpus."""
        return self._by_name(self._last_phase_before(samples_consumed).cursors_at(samples_consumed))

    def epochs(self, samples_consumed: int) -> dict[str, float]:
        """Compute the fractional epochs read per corpus, without corpora whose size is unknown."""
        cursors = self.cursors(samples_consumed)
        known = [corpus for corpus in self.corpora if corpus.samples_per_epoch]
        return {corpus.name: cursors[corpus.name] / corpus.samples_per_epoch for corpus in known}

    def weights(self, samples_consumed: int) -> dict[str, float]:
        """Compute each corpus's share of the samples that follow; the shares add up to 1."""
        weights = self._phase(samples_consumed).weights
        return self._by_name(tuple(weight / sum(weights) for weight in weights))

    def state(self, samples_consumed: int) -> dict[str, Any]:
        """Build the JSON-serializable state from which ``resumed_order`` continues."""
        used_phases = [phase for phase in self.phases if phase.start < samples_consumed]
        return {
            "format": FORMAT,
            "samples_consumed": samples_consumed,
            "fingerprints": {corpus.name: corpus.fingerprint for corpus in self.corpora},
            **(
                {"sizes": counts_by_corpus}
                if (
                    counts_by_corpus := {
                        counted_corpus.name: counted_corpus.counts
                        for counted_corpus in self.corpora
                        if counted_corpus.counts
                    }
                )
                else {}
            ),
            "cursors": self.cursors(samples_consumed),
            "phases": [
                {
                    "start": phase.start,
                    "weights": self._by_name(phase.weights),
                    "cursors": self._by_name(phase.cursors),
                }
                for phase in used_phases
            ],
        }

    def _add_phase(self, start: int, weights: tuple[int, ...], cursors: Sequence[int] | None) -> None:
        """Add a phase unless the weights are unchanged; ``cursors`` are the first phase's initial cursors."""
        if not self.phases:
            self.phases.append(Phase(start, weights, tuple(cursors or (0,) * len(self.corpora)), self._ranks))
        elif self.phases[-1].weights != weights:
            self.phases.append(Phase(start, weights, self.phases[-1].cursors_at(start), self._ranks))

    def _phase(self, index: int) -> Phase:
        """Find the phase that contains sample ``index``."""
        phase_idx = bisect_right(self._starts, index) - 1
        if phase_idx < 0:
            raise IndexError(f"sample indices of this order start at {self._starts[0]}, got {index}")
        return self.phases[phase_idx]

    def _last_phase_before(self, samples_consumed: int) -> Phase:
        """Find the phase of the last sample before ``samples_consumed``, or the first phase if there is none."""
        return self._phase(max(samples_consumed - 1, self._starts[0]))

    def _by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        return {corpus.name: value for corpus, value in zip(self.corpora, values, strict=True)}

    def _check(self) -> None:
        for attribute in ("name", "fingerprint"):
            seen: dict[str, Corpus] = {}
            for corpus in self.corpora:
                other = seen.setdefault(getattr(corpus, attribute), corpus)
                if other is not corpus:
                    raise DataError(
                        f"each corpus of a mixture must be listed once, got {other.name} and {corpus.name} with the "
                        f"same {attribute} {getattr(corpus, attribute)}. Keep one of them, with the sum of the weights."
                    )
        if not self.schedule or self.schedule[0][0] > 0:
            raise DataError("a mixture must have weights from its first sample on")


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Convert ``weights`` to the smallest integers in their printed ratio: 0.7 and 0.3 become 7 and 3.

    If the sum would exceed 2^48, the integers are scaled to a sum of about 2^48; positive weights stay positive.

    Raises:
        DataError: a weight is negative or not finite, or all weights are 0.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise DataError(f"weights of corpora must be finite, at least 0 and not all 0, got {list(weights)}")
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact, Fraction(0))
    scale = min(Fraction(math.lcm(*(weight.denominator for weight in exact))), _MAX_TOTAL / total)
    integers = [max(round(weight * scale), 1) if weight else 0 for weight in exact]
    divisor = math.gcd(*integers)
    return tuple(weight // divisor for weight in integers)
