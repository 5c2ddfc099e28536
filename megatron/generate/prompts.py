"""A person's text as the tokens that a model reads, and what it says as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from megatron.data.control_tokens import T5Tokens
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer

SENTINEL = "<extra_id_{}>"
"""How a text spells the place of a span, whatever the vocabulary calls it; the first is number 0."""
_SENTINEL = re.compile(r"\s*<extra_id_(\d+)>")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Stands for an id that the tokenizer does not have: the model's table may be larger."""


class Prompts:
    """Texts to tokens and back for one model.

    Text that spells another control token is ordinary text, as in training.

    Args:
        tokens: T5's control tokens; None: a GPT-2.
        mode: the kind of denoiser (R, X, S) whose token opens the inputs; for a T5 that was trained with several.

    Raises:
        DataError: ``mode`` is not one of the model's.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: T5Tokens | None, mode: str | None = None) -> None:
        self.tokenizer, self.tokens = tokenizer, tokens
        modes = {} if tokens is None else tokens.modes
        if mode is not None and mode not in modes:
            raise DataError(
                f"--mode must be one that the model was trained with, got {mode}; this one "
                f"{'has ' + ', '.join(modes) if modes else 'has none (several --denoisers make them)'}."
            )
        self.opening = [modes[mode or next(iter(modes))]] if modes else []

    @property
    def eos_id(self) -> int | None:
        """The token that ends what the model says; None: the vocabulary has none."""
        if self.tokens is not None:
            return self.tokens.eos_id
        return self.tokenizer.eod_id if self.tokenizer.has_eod else None

    def encode(self, text: str) -> list[int]:
        """Return what the model reads.

        GPT-2: the text; nothing but an end-of-document token, as documents begin behind one, where it is empty.
        T5: mode token, text with its sentinels, end.

        Raises:
            DataError: a sentinel that the model does not have, or an empty text without a token to start from.
        """
        if self.tokens is not None:
            return [*self.opening, *self._with_sentinels(text), self.tokens.eos_id]
        return self.tokenizer.encode(text) or [self.tokenizer.eod_id]

    def _with_sentinels(self, text: str) -> list[int]:
        """Return the tokens of ``text``. What follows a sentinel is encoded as the rest of the text, not as a new one;
        blanks before a sentinel go, since the words of a span carry their own."""
        ids: list[int] = []
        pieces: list[str] = []
        known = 0
        for place, part in enumerate(_SENTINEL.split(text)):
            if place % 2:
                ids.append(self._sentinel(int(part)))
            elif part:
                pieces.append(part)
                tokens = self.tokenizer.encode_pieces(pieces).tolist()
                ids += tokens[known:]
                known = len(tokens)
        return ids

    def _sentinel(self, number: int) -> int:
        assert self.tokens is not None
        if number >= len(self.tokens.sentinels):
            there = len(self.tokens.sentinels)
            raise DataError(
                f"{SENTINEL.format(number)} must be one of the model's {there} sentinels, "
                f"{SENTINEL.format(0)} to {SENTINEL.format(there - 1)}"
                if there
                else f"{SENTINEL.format(number)} stands for a span, and this model has no sentinels"
            )
        return self.tokens.sentinels[number]

    def decode(self, ids: Sequence[int], *, behind: Sequence[int] = ()) -> str:
        """Return the text of what the model said, without its end.

        Args:
            behind: the prompt, for a GPT-2: whether a word begins with a blank may hang on what is before it.
        """
        said = list(ids[:-1] if ids and ids[-1] == self.eos_id else ids)
        if self.tokens is not None:
            return " ".join(text.strip() for text in self._texts(said))
        before, whole = "".join(self._texts(behind)), "".join(self._texts([*behind, *said]))
        return whole[len(before) :] if whole.startswith(before) else "".join(self._texts(said))

    def _texts(self, ids: Sequence[int]) -> Iterator[str]:
        """Yield the text of each run of ordinary ids, and the name of each sentinel."""
        names = {}
        if self.tokens is not None:
            names = {token: SENTINEL.format(number) for number, token in enumerate(self.tokens.sentinels)}
        size = self.tokenizer.vocab_size
        for (is_sentinel, is_known), run in groupby(ids, lambda token: (token in names, token < size)):
            if is_sentinel:
                yield from (names[token] for token in run)
            else:
                same = list(run)
                yield self.tokenizer.decode(same) if is_known else UNKNOWN * len(same)
