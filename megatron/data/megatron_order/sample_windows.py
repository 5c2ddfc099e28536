"""MegatronWindows: one corpus's samples in the order of megatron-core's ``GPTDataset``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from megatron import log
from megatron.data.cache import IndexCache
from megatron.data.concatenated_documents import ConcatenatedDocuments, Segment
from megatron.data.documents import DocumentSlice, TokenSource, count_tokens, gather_lengths, windows_of
from megatron.data.megatron_order.epochs import plan_epochs
from megatron.data.megatron_order.permutations import permuted_documents, permuted_samples

_FORMAT = 1
_STRIDE = 64
_BLOCK = 1 << 18
CACHED_FROM_ELEMENTS = 1 << 22
"""Number of documents and samples, over all epochs, from which an order is stored in a file for all processes."""


class MegatronWindows:
    """Windows with ``seq_length + extra_tokens`` tokens in Megatron's order; there are ``plan.num_samples`` windows.

    Megatron stores each sample's first document and offset. Here both are computed from the sample position
    in the concatenated documents: an order takes 4 bytes per document and epoch, and 4 bytes per sample.

    Args:
        documents: (start, stop) range of documents to use; they have at least one token.
        seed: numpy generator seed; the same on all ranks.
        num_samples: samples that the run reads, which determine the epoch count.
        extra_tokens: 1 if neighbouring samples share a token, which is the last label; else 0.
        cache: shares a large order between this host's processes; None: it is stored in this process's memory.
    """

    def __init__(
        self,
        source: TokenSource,
        *,
        documents: tuple[int, int],
        seq_length: int,
        seed: int,
        num_samples: int,
        extra_tokens: int = 1,
        cache: IndexCache | None = None,
    ) -> None:
        self._source, self._documents, self._seed = source, documents, seed
        self.seq_length, self.extra_tokens = seq_length, extra_tokens
        self.num_tokens = count_tokens(source.document_lengths, documents)
        self.plan = plan_epochs(self.num_tokens, seq_length, num_samples, extra_tokens)
        self.per_epoch = (self.num_tokens - extra_tokens) // seq_length
        starts, sample_order, document_order = self._split_content(self._read_content(cache))
        self._sample_order, self._document_order = sample_order, document_order
        self._concatenation = ConcatenatedDocuments(source.document_lengths, [Segment(starts, document_order, _STRIDE)])

    def slices(self, index: int) -> list[DocumentSlice]:
        """Find the nonempty document slices in sample ``index``.

        Raises:
            IndexError: the order has no such sample.
        """
        if not 0 <= index < self.plan.num_samples:
            raise IndexError(f"{self._source.prefix} has {self.plan.num_samples} ordered samples, got index {index}")
        start = int(self._sample_order[index]) * self.seq_length
        return self._concatenation.slices(start, start + self.seq_length + self.extra_tokens)

    def samples_of(self, document: int, first: int, stop: int) -> list[int]:
        """Find the samples from ``first`` to ``stop`` - 1 with tokens of ``document``, in ascending order."""
        length, windows = int(self._source.document_lengths[document]), list[int]()
        for position in np.flatnonzero(self._document_order == document).tolist():
            start = self._concatenation.start_of(position)
            windows += windows_of(start, start + length, self.seq_length, self.extra_tokens)
        indices = np.flatnonzero(np.isin(self._sample_order[first:stop], windows))
        return [first + index for index in indices.tolist()]

    @property
    def _num_positions(self) -> int:
        """Documents in all epochs."""
        return self.plan.num_epochs * (self._documents[1] - self._documents[0])

    def _read_content(self, cache: IndexCache | None) -> np.ndarray:
        """Read the order as one byte array, from the cache if it is large."""
        if cache is None or self._num_positions + self.plan.num_samples < CACHED_FROM_ELEMENTS:
            return np.concatenate(list(self._build()))
        key = repr((_FORMAT, _STRIDE, self._source.fingerprint, self._documents, self.seq_length, self.extra_tokens,
                    self.plan, self._seed))  # fmt: skip
        return cache.built_once(f"megatron-order-{hashlib.sha256(key.encode()).hexdigest()[:16]}", self._build)

    def _build(self) -> Iterator[np.ndarray]:
        """Compute the order as bytes: token starts, sample order, document order.

        The arrays with the widest elements come first, so that each array is aligned in a cache file.
        """
        log.debug(f"{self._source.prefix}: shuffling {self._num_positions:,} documents of {self.plan}")
        generator = np.random.RandomState(self._seed)
        document_order = permuted_documents(*self._documents, self.plan, generator)
        starts = np.zeros(_num_blocks(len(document_order)) + 1, np.int64)
        for begin in range(0, len(document_order), _BLOCK):
            lengths = gather_lengths(self._source.document_lengths, document_order[begin : begin + _BLOCK])
            stride_tokens = np.add.reduceat(lengths, np.arange(0, len(lengths), _STRIDE), dtype=np.int64)
            starts[1 + begin // _STRIDE :][: len(stride_tokens)] = stride_tokens
        np.cumsum(starts, out=starts)
        yield starts.view(np.uint8)
        yield permuted_samples(self.plan, generator).view(np.uint8)
        yield document_order.view(np.uint8)

    def _split_content(self, content: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Split the bytes into (token starts, sample order, document order)."""
        starts_end = 8 * (_num_blocks(self._num_positions) + 1)
        documents_begin = len(content) - 4 * self._num_positions
        width = (documents_begin - starts_end) // max(self.plan.num_samples, 1)
        return (
            content[:starts_end].view(np.int64),
            content[starts_end:documents_begin].view(np.uint32 if width == 4 else np.int64),
            content[documents_begin:].view(np.int32),
        )


def _num_blocks(length: int) -> int:
    return -(-length // _STRIDE)
