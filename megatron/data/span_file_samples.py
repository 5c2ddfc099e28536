"""T5 samples from a set of CPM's three files: spans as the set has them, sentinels numbered anew in each sample."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron import log
from megatron.data import t5_layout
from megatron.data.cache import Cache
from megatron.data.control_tokens import T5Tokens
from megatron.data.corruption import Pair
from megatron.data.documents import Documents, documents_key
from megatron.data.span_files import SpanFiles
from megatron.data.windows import Piece, Windows
from megatron.errors import SampleError

_SAMPLES_LOOKED_AT = 256


class SpanFileSamples:
    """Sample i, for any i >= 0, is the dictionary of ``t5_layout``; i // samples_per_epoch is its epoch.

    Inputs are ``enc_seq_length`` - 1 tokens of the contexts and the end. Targets are as long as their spans are: below
    ``dec_seq_length`` they are padded, above it cut, which the log tells by the first samples.

    Args:
        documents, seed, reset_attention_mask, cache: as ``T5Samples``.

    Raises:
        DataError: fewer tokens than one sample, or among the first samples one with more spans than sentinels.
    """

    def __init__(
        self,
        files: SpanFiles,
        *,
        documents: Documents,
        enc_seq_length: int,
        dec_seq_length: int,
        tokens: T5Tokens,
        seed: int,
        reset_attention_mask: bool = False,
        cache: Cache | None = None,
    ) -> None:
        self.files, self.documents, self.seed, self.tokens = files, documents, seed, tokens
        self.enc_seq_length, self.dec_seq_length = enc_seq_length, dec_seq_length
        self.reset_attention_mask = reset_attention_mask
        self._windows = Windows(
            files.context,
            documents=documents,
            length=enc_seq_length - 1,
            overlap=0,
            seed=seed,
            asked_by=f"--enc-seq-length {enc_seq_length}",
            cache=cache,
        )
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch
        self._sentinels = np.array(tokens.sentinels, np.int64)
        self._look_ahead()

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes with all that changes a sample or the order of samples."""
        lengths = (self.enc_seq_length, self.dec_seq_length)
        documents = self.documents if isinstance(self.documents, tuple) else documents_key(self.documents)
        parts = ("span files", self.files.fingerprint, documents, *lengths, self.tokens, self.seed)
        return hashlib.sha256(repr((*parts, self.reset_attention_mask)).encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``.

        Raises:
            SampleError: it cannot be read; names the sample.
            DataError: it has more spans than there are sentinels; names the sample.
        """
        return t5_layout.sample(self._pair(index), self.tokens, self.enc_seq_length, self.dec_seq_length)

    def _pair(self, index: int) -> Pair:
        pieces = self._windows.pieces(index)
        text = self._windows.read(index, pieces)
        is_marker = text >= self.files.vocab_size
        targets = self._targets(index, text, pieces)
        is_target_marker = targets >= self.files.vocab_size
        numbers = np.arange(len(pieces)) if self.reset_attention_mask else np.zeros(len(pieces), np.int64)
        documents = np.repeat(numbers, [piece.length for piece in pieces])
        of_spans = documents[is_marker]
        places = np.arange(len(of_spans)) - np.searchsorted(of_spans, of_spans)
        self.tokens.require_sentinels(int(places.max(initial=-1)) + 1, f"sample {index} of {self.files.prefix}")
        text[is_marker] = targets[is_target_marker] = self._sentinels[places]
        return Pair(text, targets, documents, of_spans[np.cumsum(is_target_marker) - 1])

    def _targets(self, index: int, text: np.ndarray, pieces: Sequence[Piece]) -> np.ndarray:
        """Return the spans whose markers stand in ``text``, each behind its marker."""
        found, start = [np.zeros(0, np.int64)], 0
        for piece in pieces:
            part = text[start : start + piece.length]
            spans = part[part >= self.files.vocab_size] - self.files.vocab_size
            start += piece.length
            if not len(spans):
                continue
            if not np.array_equal(spans, spans[0] + np.arange(len(spans))):
                raise SampleError(
                    f"sample {index} cannot be read: markers of document {piece.document} do not count up"
                )
            found.append(self._read(index, piece.document, int(spans[0]), len(spans)))
        return np.concatenate(found)

    def _read(self, index: int, document: int, first: int, count: int) -> np.ndarray:
        try:
            return self.files.read(document, first, count)
        except Exception as error:
            raise SampleError(f"sample {index} cannot be read: {error}") from error

    def _look_ahead(self) -> None:
        """Say what part of the targets will be cut."""
        looked_at = min(self.samples_per_epoch, _SAMPLES_LOOKED_AT)
        lengths = [len(self._pair(index).targets) + 1 for index in range(looked_at)]
        too_long = sum(length > self.dec_seq_length for length in lengths)
        if too_long:
            log.info(
                f"{too_long} of {looked_at} samples looked at have more than --dec-seq-length {self.dec_seq_length} "
                f"targets, up to {max(lengths)}; what is beyond is left out"
            )
