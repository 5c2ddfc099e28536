"""Fill-in-the-middle: split documents in three and put the middle last.

| order | share | a document becomes |
|---|---|---|
| PSM | 1 - spm_rate | prefix_id PREFIX suffix_id SUFFIX middle_id MIDDLE |
| SPM | spm_rate | prefix_id suffix_id SUFFIX middle_id PREFIX MIDDLE |

SPM is the paper's second variant: its start is that of a PSM document without prefix, so that a model learns both
orders at once. It works on tokens, when a sample is read: the control tokens push a document's last three tokens out
of the sample, and its end-of-document token stays where it was, so no document moves and no length changes.

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
from megatron.data.sample_index import runs
from megatron.errors import ConfigError, DataError

NAMES = FIM_TOKENS
_NUM_CONTROL_TOKENS = 3
_SHORTEST = 2 * _NUM_CONTROL_TOKENS
_WORDS_A_DOCUMENT = 4


class Vocabulary(Protocol):
    """What must be known of a tokenizer: ``megatron.tokenizer.Tokenizer``, or what stands in for one."""

    @property
    def has_eod(self) -> bool: ...

    @property
    def eod_id(self) -> int: ...

    def token_to_id(self, token: str) -> int | None: ...


@dataclass(frozen=True)
class Fim:
    """How often documents are rearranged, and by which control tokens.

    Args:
        rate: share of the documents, 0 ... 1.
        spm_rate: share of these that are put in SPM order.
        eod_id: ends a document in the text, besides what the index says; None where the vocabulary has none.
    """

    rate: float
    spm_rate: float
    prefix_id: int
    middle_id: int
    suffix_id: int
    eod_id: int | None = None

    @property
    def key(self) -> str:
        """A text that tells these settings from others; fingerprints in checkpoints hold it, so it never changes."""
        ids = (self.prefix_id, self.middle_id, self.suffix_id, self.eod_id)
        return f"fim {float(self.rate)} {float(self.spm_rate)} {' '.join(map(str, ids))}"

    def apply(self, text: np.ndarray, sizes: Sequence[int], *key: int | str) -> np.ndarray:
        """Return ``text``, int64[n], with some of its documents rearranged; the length stays.

        A document of fewer than six tokens stays as it is. The same ``key`` gives the same.

        Args:
            sizes: tokens of the parts of ``text`` that come from different documents, in order.
            key: the seed, the number of the sample, and what else is to change it.
        """
        starts, lengths, ended = self._documents(text, sizes)
        words = random_words(_WORDS_A_DOCUMENT * len(starts), "fim", *key).reshape(-1, _WORDS_A_DOCUMENT)
        shares = (words[:, :2] >> np.uint64(11)) * 2.0**-53  # in [0, 1), so that 0 is never and 1 always
        is_moved = (shares[:, 0] < self.rate) & (lengths >= _SHORTEST)
        if not is_moved.any():
            return text
        kept = np.where(is_moved, lengths - _NUM_CONTROL_TOKENS, lengths)
        cuts = _below(kept + 1, words[:, 2:])
        low, high = np.where(is_moved, cuts.min(axis=1), kept), np.where(is_moved, cuts.max(axis=1), kept)
        low[is_moved & (shares[:, 1] < self.spm_rate)] = 0  # SPM is PSM with the prefix as a part of the middle
        return self._gather(text, starts, (low, high, kept), is_moved.astype(np.int64), ended)

    def _documents(self, text: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return start, tokens before the end-of-document token, and number of such tokens (0, 1) of each document."""
        is_eod = np.zeros(len(text), np.bool_) if self.eod_id is None else text == self.eod_id
        is_last = is_eod.copy()
        is_last[np.cumsum(sizes) - 1] = True
        last = np.flatnonzero(is_last)
        starts = np.concatenate([np.zeros(1, np.int64), last[:-1] + 1])
        ended = is_eod[last].astype(np.int64)
        return starts, last + 1 - starts - ended, ended

    def _gather(
        self, text: np.ndarray, starts: np.ndarray, bounds: tuple[np.ndarray, ...], moved: np.ndarray, ended: np.ndarray
    ) -> np.ndarray:
        """Return the text with each document as prefix, suffix and middle; one that stays is all prefix.

        ``bounds`` are the ends of prefix, middle and suffix in the old order, ``moved`` and ``ended`` 0 or 1.
        """
        low, high, kept = bounds
        control = len(text) + np.zeros_like(starts)
        lengths = kept + moved * _NUM_CONTROL_TOKENS
        begins = (control, starts, control + 1, starts + high, control + 2, starts + low, starts + lengths)
        counts = (moved, low, moved, kept - high, moved, high - low, ended)
        source = np.concatenate([text, (self.prefix_id, self.suffix_id, self.middle_id)])
        return source[runs(np.array(begins).T.ravel(), np.array(counts).T.ravel())]


def _below(limits: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return a random number from 0 ... limits[i] - 1 for each of words[i]."""
    upper = words >> np.uint64(32)
    return (upper * limits.astype(np.uint64)[:, None] >> np.uint64(32)).view(np.int64)


def fim_from(tokenizer: Vocabulary, rate: float, spm_rate: float) -> Fim | None:
    """Return what ``--fim-rate`` and ``--fim-spm-rate`` ask for; None for a rate of 0.

    Raises:
        ConfigError: a rate is outside 0 ... 1.
        DataError: the vocabulary has none of the three sets of names in ``NAMES``.
    """
    for flag, value in (("--fim-rate", rate), ("--fim-spm-rate", spm_rate)):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{flag} must be from 0 to 1, got {value}. Give a share of the documents, such as 0.5.")
    if not rate:
        return None
    eod_id = tokenizer.eod_id if tokenizer.has_eod else None
    for names in NAMES:
        ids = [tokenizer.token_to_id(name) for name in names]
        prefix_id, middle_id, suffix_id = ids
        if prefix_id is not None and middle_id is not None and suffix_id is not None:
            return Fim(rate, spm_rate, prefix_id, middle_id, suffix_id, eod_id)
    known = " or ".join(" ".join(names) for names in NAMES)
    raise DataError(
        f"--fim-rate {rate} needs a vocabulary with the tokens {known}; this one has none of these sets. Train one "
        f"with `python tools/train_tokenizer.py --special-tokens {shlex.join(NAMES[0])} ...` and preprocess the corpus "
        "with it, or leave --fim-rate out."
    )
