"""T5 samples from the token file that GPT-2 reads too: spans are cut out of a text when it is read.

A text is a window of ``raw_length`` tokens, whose inputs fill ``enc_seq_length``. Denoiser and spans follow from
(seed, index of the sample), so they are new in each epoch and the same in every layout, worker and resumed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron.data import t5_layout
from megatron.data.cache import Cache
from megatron.data.control_tokens import T5Tokens
from megatron.data.corruption import cut_out, draw_spans, num_words
from megatron.data.documents import Documents, documents_key
from megatron.data.random_words import random_words
from megatron.data.windows import TokenSource, Windows
from megatron.errors import DataError
from megatron.spans import Denoiser, has_modes, longest_target, most_spans, raw_length


class T5Samples:
    """Sample i, for any i >= 0, is the dictionary of ``t5_layout``; i // samples_per_epoch is its epoch.

    Args:
        documents: (start, stop) of the documents to take, or their ascending numbers.
        dec_seq_length: targets are padded to it; 0: the longest that a denoiser gives.
        denoisers: each sample's is drawn by their weights.
        seed: the same on all ranks.
        reset_attention_mask: keep the documents of a text apart: no span crosses the end of one, segments tell them
            apart. Without it a text is one document.
        cache: where the order of many documents is kept for all processes of this host; None: in each one's memory.
        draws: what corpora of a mixture differ in, so that sample i of one is not cut as sample i of the other. Not
            part of the fingerprint: a corpus that gets company stays the same corpus, whose texts go on.

    Raises:
        DataError: fewer tokens than one text, too few sentinels, ``dec_seq_length`` below the longest target.
    """

    def __init__(
        self,
        token_file: TokenSource,
        *,
        documents: Documents,
        enc_seq_length: int,
        dec_seq_length: int = 0,
        denoisers: Sequence[Denoiser],
        tokens: T5Tokens,
        seed: int,
        reset_attention_mask: bool = False,
        cache: Cache | None = None,
        draws: str = "",
    ) -> None:
        self.token_file, self.documents, self.seed, self.tokens = token_file, documents, seed, tokens
        self.denoisers, self.reset_attention_mask = tuple(denoisers), reset_attention_mask
        self.raw_length = raw_length(enc_seq_length, denoisers)
        self.enc_seq_length = enc_seq_length
        self.dec_seq_length = dec_seq_length or longest_target(self.raw_length, denoisers)
        self._check()
        self._windows = Windows(
            token_file,
            documents=documents,
            length=self.raw_length,
            overlap=0,
            seed=seed,
            asked_by=f"--enc-seq-length {enc_seq_length}",
            cache=cache,
        )
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch
        self._key = (draws, seed) if draws else (seed,)
        self._sentinels = np.array(tokens.sentinels, np.int64)
        weights = np.array([denoiser.weight for denoiser in denoisers])
        self._shares = np.cumsum(weights / weights.sum())[:-1]

    def _check(self) -> None:
        asked_by = f"--enc-seq-length {self.enc_seq_length}"
        self.tokens.require_sentinels(most_spans(self.raw_length, self.denoisers), asked_by)
        longest = longest_target(self.raw_length, self.denoisers)
        if self.dec_seq_length < longest:
            raise DataError(
                f"--dec-seq-length must be at least {longest}, the longest target of {asked_by}, got "
                f"{self.dec_seq_length}. Raise it, or leave it out."
            )
        missing = [d.kind for d in self.denoisers if has_modes(self.denoisers) and d.kind not in self.tokens.modes]
        if missing:
            raise DataError(f"each of several denoisers must have a mode token, {', '.join(missing)} has none")

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes with all that changes a sample or the order of samples."""
        parts = (
            "t5",
            self.token_file.fingerprint,
            self.documents if isinstance(self.documents, tuple) else documents_key(self.documents),
            self.enc_seq_length,
            self.dec_seq_length,
            self.raw_length,
            self.denoisers,
            self.reset_attention_mask,
            self.tokens,
            self.seed,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``.

        Raises:
            DataError: it cannot be read; names the sample, the document and the place in the file.
        """
        pieces = self._windows.pieces(index)
        text = self._windows.read(index, pieces)
        words = random_words(num_words(self.raw_length) + 1, "spans", *self._key, int(index))
        denoiser = self.denoisers[int(np.searchsorted(self._shares, words[-1] / 2.0**64, "right"))]
        sizes = [piece.length for piece in pieces] if self.reset_attention_mask else [self.raw_length]
        pair = cut_out(text, draw_spans(sizes, denoiser, words), self._sentinels)
        mode = denoiser.kind if has_modes(self.denoisers) else None
        return t5_layout.sample(pair, self.tokens, self.enc_seq_length, self.dec_seq_length, mode)
