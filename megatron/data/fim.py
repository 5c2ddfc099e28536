"""Fill-in-the-middle: split documents into three parts and move the middle to the end.

| order | share | a document becomes |
|---|---|---|
| PSM | 1 - spm_rate | prefix_id PREFIX suffix_id SUFFIX middle_id MIDDLE |
| SPM | spm_rate | prefix_id suffix_id SUFFIX middle_id PREFIX MIDDLE |

SPM is the paper's second variant: it starts like a PSM document with an empty prefix, so that a model learns both
orders jointly. The transformation is applied to tokens when a sample is read. The three control tokens replace the
document's last three tokens, and the end-of-document token stays in place. Therefore, no document moves and no
length changes.

Source: Bavarian et al. 2022, "Efficient training of language models to fill in the middle", section 3 and appendix D.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron.config.data import FIM_TOKENS
from megatron.data.permutation import random_words
from megatron.data.sample_index import concatenate_ranges
from megatron.errors import ConfigError, DataError

TOKEN_NAMES = FIM_TOKENS
_NUM_CONTROL_TOKENS = 3
_MIN_TOKENS = 2 * _NUM_CONTROL_TOKENS
_WORDS_PER_DOCUMENT = 4


class Vocabulary(Protocol):
    """Interface of ``megatron.tokenizer.Tokenizer`` that ``fim_from`` needs."""

    @property
    def has_eod(self) -> bool: ...

    @property
    def eod_id(self) -> int: ...

    def token_to_id(self, token: str) -> int | None: ...


@dataclass(frozen=True)
class Fim:
    """Fill-in-the-middle settings: rates and control tokens.

    Args:
        rate: share of documents to rearrange, 0 ... 1.
        spm_rate: share of the rearranged documents that use SPM order.
        eod_id: end-of-document token. A document ends at this token and at each document boundary of the index. None
            if the vocabulary has no such token.
    """

    rate: float
    spm_rate: float
    prefix_id: int
    middle_id: int
    suffix_id: int
    eod_id: int | None = None

    @property
    def key(self) -> str:
        """Unique key for the settings. It is part of fingerprints in checkpoints, so its format must never change."""
        ids = (self.prefix_id, self.middle_id, self.suffix_id, self.eod_id)
        return f"fim {float(self.rate)} {float(self.spm_rate)} {' '.join(map(str, ids))}"

    def apply(self, text: np.ndarray, slice_lengths: Sequence[int], *key: int | str) -> np.ndarray:
        """Return ``text``, int64[n], with some documents rearranged; the length is unchanged.

        Documents with fewer than six tokens are not rearranged. The result is deterministic for a given ``key``.

        Args:
            slice_lengths: tokens per document slice in ``text``, in order.
            key: key of the random draws: the seed, the sample index, and optional additional values.
        """
        starts, lengths, ended = self._documents(text, slice_lengths)
        words = random_words(_WORDS_PER_DOCUMENT * len(starts), "fim", *key).reshape(-1, _WORDS_PER_DOCUMENT)
        shares = (words[:, :2] >> np.uint64(11)) * 2.0**-53  # in [0, 1), so that rate 0 means never and 1 always
        is_moved = (shares[:, 0] < self.rate) & (lengths >= _MIN_TOKENS)
        if not is_moved.any():
            return text
        ends = np.where(is_moved, lengths - _NUM_CONTROL_TOKENS, lengths)
        splits = _random_below(ends + 1, words[:, 2:])
        low, high = np.where(is_moved, splits.min(axis=1), ends), np.where(is_moved, splits.max(axis=1), ends)
        low[is_moved & (shares[:, 1] < self.spm_rate)] = 0  # SPM: the prefix is empty, PREFIX joins the middle
        return self._gather(text, starts, (low, high, ends), is_moved.astype(np.int64), ended)

    def _documents(self, text: np.ndarray, slice_lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find (start, tokens before the end-of-document token, 1 if there is such a token else 0) per document."""
        is_eod = np.zeros(len(text), np.bool_) if self.eod_id is None else text == self.eod_id
        is_last = is_eod.copy()
        is_last[np.cumsum(slice_lengths) - 1] = True
        last = np.flatnonzero(is_last)
        starts = np.concatenate([np.zeros(1, np.int64), last[:-1] + 1])
        ended = is_eod[last].astype(np.int64)
        return starts, last + 1 - starts - ended, ended

    def _gather(
        self, text: np.ndarray, starts: np.ndarray, bounds: tuple[np.ndarray, ...], moved: np.ndarray, ended: np.ndarray
    ) -> np.ndarray:
        """Reorder each document to prefix, suffix, middle.

        Args:
            bounds: prefix, middle and suffix ends in the original order. A document that is not
                rearranged consists only of a prefix.
            moved: 1 for rearranged documents, else 0.
            ended: 1 for documents with an end-of-document token, else 0.
        """
        low, high, ends = bounds
        control = len(text) + np.zeros_like(starts)
        lengths = ends + moved * _NUM_CONTROL_TOKENS
        begins = (control, starts, control + 1, starts + high, control + 2, starts + low, starts + lengths)
        counts = (moved, low, moved, ends - high, moved, high - low, ended)
        source = np.concatenate([text, (self.prefix_id, self.suffix_id, self.middle_id)])
        return source[concatenate_ranges(np.array(begins).T.ravel(), np.array(counts).T.ravel())]


def _random_below(limits: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Map each random word in row words[i] to an integer in 0 ... limits[i] - 1."""
    upper = words >> np.uint64(32)
    return (upper * limits.astype(np.uint64)[:, None] >> np.uint64(32)).view(np.int64)


def fim_from(tokenizer: Vocabulary, rate: float, spm_rate: float) -> Fim | None:
    """Build the settings for ``--fim-rate`` and ``--fim-spm-rate``; None for a rate of 0.

    Raises:
        ConfigError: a rate is outside 0 ... 1.
        DataError: the vocabulary has none of the three name sets in ``TOKEN_NAMES``.
    """
    for flag, value in (("--fim-rate", rate), ("--fim-spm-rate", spm_rate)):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{flag} must be from 0 to 1, got {value}. Use a share of the documents, such as 0.5.")
    if not rate:
        return None
    eod_id = tokenizer.eod_id if tokenizer.has_eod else None
    for names in TOKEN_NAMES:
        ids = [tokenizer.token_to_id(name) for name in names]
        prefix_id, middle_id, suffix_id = ids
        if prefix_id is not None and middle_id is not None and suffix_id is not None:
            return Fim(rate, spm_rate, prefix_id, middle_id, suffix_id, eod_id)
    known_names = " or ".join(" ".join(names) for names in TOKEN_NAMES)
    raise DataError(
        f"--fim-rate {rate} needs a vocabulary with the tokens {known_names}, but it has none of these sets. Train one "
        f"with `python tools/train_tokenizer.py --special-tokens {shlex.join(TOKEN_NAMES[0])} ...` and preprocess the "
        "corpus with it, or remove --fim-rate."
    )
