"""BERT's samples from the token file that GPT-2 reads too: a text is paired and masked when it is read.

A text is a window of the documents laid end to end, as RoBERTa's FULL-SENTENCES. Token files know documents and no
sentences, so the seam of a pair is drawn within the document that has most of the window, as a segment of RoBERTa's
SEGMENT-PAIR may be any run of sentences. Half of the time the second segment is a run of as many tokens from elsewhere,
which begins within a document that the window does not touch. Everything follows from (seed, index of the sample), so
it is new in each epoch and the same in every layout, worker and resumed run.

Source: Devlin et al. 2019, "BERT", section 3.1 and appendix A.2; Liu et al. 2019, "RoBERTa", section 4.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron.data import bert_layout
from megatron.data.bert_control import BertTokens
from megatron.data.bert_masking import DRAWS, mask, num_to_mask
from megatron.data.cache import Cache
from megatron.data.documents import Documents, count_of, documents_key, longest_of
from megatron.data.random_words import random_words
from megatron.data.token_source import Piece
from megatron.data.windows import TokenSource, Windows
from megatron.errors import DataError

SHORTEST = 2
"""Tokens of the shortest text: one for each segment."""
_TRIES = 8
_IS_SHORT, _LENGTH, _IS_RANDOM, _SEAM, _PLACES, _HEAD = 0, 1, 2, 3, 4, 4 + _TRIES  # which random word is for what


class BertSamples:
    """Sample i, for any i >= 0, is the dictionary of ``bert_layout``; i // samples_per_epoch is its epoch.

    Args:
        documents: (start, stop) of the documents to take, or their ascending numbers.
        seq_length: tokens of a sample, with what frames it.
        has_pairs: two segments; else one run of text.
        mask_prob: share of the text that is masked.
        short_seq_prob: share of the samples that have a text of any length from 2 on, and are padded.
        word_starts: bool[vocabulary], whether a token begins a word; given, words are masked whole.
        seed: the same on all ranks.
        cache: where the order of many documents is kept for all processes of this host; None: in each one's memory.
        draws: as ``T5Samples``.

    Raises:
        DataError: fewer tokens than one text, or for pairs fewer than two documents.
    """

    def __init__(
        self,
        token_file: TokenSource,
        *,
        documents: Documents,
        seq_length: int,
        tokens: BertTokens,
        seed: int,
        has_pairs: bool = True,
        mask_prob: float = 0.15,
        short_seq_prob: float = 0.1,
        word_starts: np.ndarray | None = None,
        cache: Cache | None = None,
        draws: str = "",
    ) -> None:
        self.token_file, self.documents, self.seq_length = token_file, documents, seq_length
        self.tokens, self.seed, self.has_pairs = tokens, seed, has_pairs
        self.mask_prob, self.short_seq_prob, self.word_starts = mask_prob, short_seq_prob, word_starts
        self.text_length = text_length(seq_length, has_pairs)
        self._key = (draws, seed) if draws else (seed,)
        self._windows = Windows(
            token_file,
            documents=documents,
            length=self.text_length,
            overlap=0,
            seed=seed,
            asked_by=f"--seq-length {seq_length}",
            cache=cache,
        )
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch
        if has_pairs and count_of(documents) < 2:
            raise DataError(
                f"{token_file.prefix}: pairs need two documents, for a second segment from elsewhere, got "
                f"{count_of(documents)}. Give more documents to this split, or use --bert-no-binary-head."
            )

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes with all that changes a sample or the order of samples."""
        starts = None if self.word_starts is None else hashlib.sha256(self.word_starts.tobytes()).hexdigest()
        parts = (
            "bert",
            self.token_file.fingerprint,
            documents_key(self.documents),
            self.seq_length,
            self.has_pairs,
            self.mask_prob,
            self.short_seq_prob,
            starts,
            self.tokens,
            self.seed,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @cached_property
    def share_of_random(self) -> float:
        """About how many of the pairs have a second segment from elsewhere: half of them, or fewer where one document
        is nearly all of the text, in which places that are drawn mostly fall.
        """
        longest = longest_of(self.token_file.sizes, self.documents)
        beside = min((longest + self.text_length) / self.num_tokens, 1.0)
        return 0.5 * (1.0 - beside * beside**_TRIES)

    def num_predicted(self, index: int) -> int:
        """Return how many tokens of sample ``index`` are to be predicted, without reading it."""
        return num_to_mask(self._length(self._words(index, _LENGTH + 1)), self.mask_prob)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``.

        Raises:
            DataError: it cannot be read; names the sample, the document and the place in the file.
        """
        words = self._words(index, _HEAD + DRAWS * self.text_length)
        length = self._length(words)
        pieces = _first(self._windows.pieces(index), length)
        seam, is_random = length, False
        if self.has_pairs:
            seam, is_random, pieces = self._paired(index, pieces, words)
        text = self._windows.read(index, pieces)
        is_start = None
        if self.word_starts is not None:
            is_start = self.word_starts[text]
            is_start[seam : seam + 1] = True  # no word goes on in the second segment
        draws = words[_HEAD : _HEAD + DRAWS * length]
        masked = mask(text, num_to_mask(length, self.mask_prob), draws, self.tokens, is_start)
        return bert_layout.sample(masked, seam, is_random, self.tokens, self.seq_length, self.has_pairs)

    def _words(self, index: int, count: int) -> np.ndarray:
        return random_words(count, "bert", *self._key, int(index))

    def _length(self, words: np.ndarray) -> int:
        if _unit(words[_IS_SHORT]) >= self.short_seq_prob:
            return self.text_length
        return SHORTEST + int(words[_LENGTH]) % (self.text_length - SHORTEST + 1)

    def _paired(self, index: int, pieces: list[Piece], words: np.ndarray) -> tuple[int, bool, list[Piece]]:
        """Return where the second segment begins, whether it is from elsewhere, and what both are made of."""
        length = sum(piece.length for piece in pieces)
        start, stop = _longest(pieces)
        if stop - start < 2:  # nothing but documents of one token: any seam parts two
            return length // 2, True, pieces
        seam = start + 1 + int(words[_SEAM]) % (stop - start - 1)
        if _unit(words[_IS_RANDOM]) < 0.5:
            epoch, beside = int(index) // self.samples_per_epoch, {piece.document for piece in pieces}
            for word in words[_PLACES : _PLACES + _TRIES].tolist():
                place = word % (self.num_tokens - (length - seam) + 1)
                found = self._windows.run(epoch, place, length - seam)
                if found[0].offset and found[0].document not in beside:
                    return seam, True, _first(pieces, seam) + found
        return seam, False, pieces  # also where nearly all text is of one document


def text_length(seq_length: int, has_pairs: bool) -> int:
    """Return the tokens of text in a sample of ``seq_length``."""
    return seq_length - (3 if has_pairs else 2)


def _unit(word: np.uint64) -> float:
    return float(word) / 2.0**64


def _first(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """Return the pieces of the first ``length`` tokens."""
    found = []
    for piece in pieces:
        if length <= 0:
            break
        found.append(piece._replace(length=min(piece.length, length)))
        length -= piece.length
    return found


def _longest(pieces: Sequence[Piece]) -> tuple[int, int]:
    """Return where the longest piece, the first of several, begins and ends in the text."""
    start, stop, end = 0, 0, 0
    for piece in pieces:
        if piece.length > stop - start:
            start, stop = end, end + piece.length
        end += piece.length
    return start, stop
