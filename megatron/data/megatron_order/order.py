"""MegatronOrder: map each sample in a run to a corpus and an index within the corpus, as megatron-core does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.data.blend_schedule import FORMAT, Corpus
from megatron.data.cache import IndexCache
from megatron.data.megatron_order.blend_choices import blend_choices
from megatron.data.megatron_order.epochs import EpochPlan
from megatron.errors import SampleError

ORDER = "megatron"
"""Name of this order in checkpoints, and value of --data-order."""
_BLOCK = 1 << 16
_CACHED_FROM_SAMPLES = 1 << 21


@dataclass(frozen=True)
class MegatronOrder:
    """A run's sample order; it has the methods of ``BlendSchedule``.

    The run's sample i is always the order's sample i. The consumed samples are therefore the only state, as
    in Megatron, and a changed corpus or weight changes the entire order. It is picklable without its arrays, and equal
    on all ranks that construct it with the same arguments.

    Args:
        corpora: the corpora in command-line order, on which the sample order depends.
        plans: epochs per corpus.
        shares: corpus shares, as Megatron normalises the weights; None for a single corpus without a weight.
        num_samples: samples in the order; at least ``run_samples``.
        run_samples: samples that the run reads, for which the order is built.
        cache_path: cache folder that shares the blend between a host's processes; see ``IndexCache``.
    """

    corpora: tuple[Corpus, ...]
    plans: tuple[EpochPlan, ...]
    shares: tuple[float, ...] | None
    num_samples: int
    run_samples: int
    cache_path: str | None = None

    @property
    def schedule(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """(first sample, weight per corpus): the weights never change."""
        return ((0, self.shares or (1.0,)),)

    def locate(self, index: int) -> tuple[int, int]:
        """Map sample ``index`` to (corpus index, sample index within the corpus).

        Raises:
            SampleError: the order has no such sample.
        """
        if not 0 <= index < self.num_samples:
            raise SampleError(
                f"--data-order megatron orders {self.num_samples} samples for the length of this run, got sample "
                f"{index}. Set --train-samples {self.run_samples} to end the run there. A longer run has another order."
            )
        if self.shares is None:
            return 0, index
        corpora, indices = self._blend
        return int(corpora[index]), int(indices[index])

    def index_of(self, corpus_idx: int, sample_idx: int) -> int | None:
        """Find the run's sample that is sample ``sample_idx`` of a corpus; None if the order never reads it."""
        if self.shares is None:
            return sample_idx if sample_idx < self.num_samples else None
        corpora, indices = self._blend
        positions = np.flatnonzero((corpora == corpus_idx) & (indices == sample_idx))
        return int(positions[0]) if len(positions) else None

    def cursors(self, samples_consumed: int) -> dict[str, int]:
        """Count the samples read per corpus."""
        if self.shares is None:
            return {self.corpora[0].name: samples_consumed}
        num_corpora, (choices, _) = len(self.corpora), self._blend
        blocks, remainder = divmod(min(samples_consumed, self.num_samples), _BLOCK)
        counts = self._block_counts[blocks] + np.bincount(
            choices[blocks * _BLOCK : blocks * _BLOCK + remainder], minlength=num_corpora
        )
        return {corpus.name: int(count) for corpus, count in zip(self.corpora, counts, strict=True)}

    def epochs(self, samples_consumed: int) -> dict[str, float]:
        """Compute the fractional epochs read per corpus."""
        cursors = self.cursors(samples_consumed)
        return {
            corpus.name: cursors[corpus.name] * plan.num_epochs / plan.num_samples
            for corpus, plan in zip(self.corpora, self.plans, strict=True)
        }

    def weights(self, samples_consumed: int) -> dict[str, float]:
        """Return each corpus's sample share."""
        return {corpus.name: share for corpus, share in zip(self.corpora, self.shares or (1.0,), strict=True)}

    def state(self, samples_consumed: int) -> dict[str, Any]:
        """Build the JSON-serializable state, from which ``resumed_megatron_order`` continues."""
        return {
            "format": FORMAT,
            "order": ORDER,
            "samples_consumed": samples_consumed,
            "run_samples": self.run_samples,
            "corpora": [corpus.name for corpus in self.corpora],
            "fingerprints": {corpus.name: corpus.fingerprint for corpus in self.corpora},
            "sizes": {corpus.name: corpus.counts for corpus in self.corpora},
            "cursors": self.cursors(samples_consumed),
            "weights": self.weights(samples_consumed),
            "epochs": {corpus.name: list(plan) for corpus, plan in zip(self.corpora, self.plans, strict=True)},
        }

    @cached_property
    def _blend(self) -> tuple[np.ndarray, np.ndarray]:
        """Each sample's corpus and its index within the corpus; computed at the first use in a process."""
        shares = np.array(self.shares)
        if self.num_samples < _CACHED_FROM_SAMPLES:
            return blend_choices(shares, self.num_samples)

        def build() -> Iterator[np.ndarray]:
            choices, indices = blend_choices(shares, self.num_samples)
            yield indices.view(np.uint8)
            yield choices.view(np.uint8)

        key = hashlib.sha256(repr((FORMAT, self.shares, self.num_samples)).encode()).hexdigest()[:16]
        content = IndexCache(self.cache_path).built_once(f"megatron-blend-{key}", build)
        num_index_bytes = len(content) - 2 * self.num_samples
        indices = content[:num_index_bytes].view(np.int32 if num_index_bytes == 4 * self.num_samples else np.int64)
        return content[num_index_bytes:].view(np.int16), indices

    @cached_property
    def _block_counts(self) -> np.ndarray:
        """int64[blocks + 1, corpora], samples per corpus before each block of samples."""
        choices = self._blend[0]
        counts = [
            np.bincount(choices[begin : begin + _BLOCK], minlength=len(self.corpora))
            for begin in range(0, self.num_samples, _BLOCK)
        ]
        return np.cumsum([np.zeros(len(self.corpora), np.int64), *counts], axis=0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_blend", "_block_counts")}


def normalized_shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Divide the weights by their sum in float64.

    Megatron's builder normalises the weights for the corpus sizes, and its blend normalises the result again.
    """
    array = np.array(weights, np.float64)
    return tuple((array / np.sum(array)).tolist())
