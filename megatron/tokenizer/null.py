"""NullTokenizer: ids that stand for nothing, for runs on random tokens and token files of other programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import Arrays, Tokenizer

EOD_NAME = "<eod>"


class NullTokenizer(Tokenizer):
    """``vocab_size`` ids, of which the last ends a document; the text of ids is the ids, with spaces between.

    Source: Megatron-LM, ``NullTokenizer``.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        super().__init__([], f"NullTokenizer of {vocab_size} ids")

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def token_to_id(self, token: str) -> int | None:
        return self._vocab_size - 1 if token == EOD_NAME else None

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        found = [self._ids(text) for text in texts]
        return np.array([one for ids in found for one in ids], np.int32), np.array(
            [len(ids) for ids in found], np.int64
        )

    def _ids(self, text: str) -> list[int]:
        words = text.split()
        wrong = [word for word in words if not word.isdecimal() or int(word) >= self._vocab_size]
        if wrong:
            raise DataError(
                f"a text of NullTokenizer must be ids below {self._vocab_size} with spaces between, got {wrong[0]!r}. "
                "Use a tokenizer with a vocabulary"
            )
        return [int(word) for word in words]

    def _facts(self) -> Iterable[Any]:
        return [self.settings]

    def _found_in_text(self, control: Mapping[str, int]) -> list[str]:
        return []


def null_tokenizer(vocab_size: int | None, files: Sequence[str | Path | None]) -> NullTokenizer:
    """Return the tokenizer of so many ids.

    Raises:
        DataError: there is no number of ids, or a file is given, too.
    """
    if vocab_size is None:
        raise DataError("--tokenizer-type NullTokenizer needs --vocab-size, got none. Give it")
    if named := [str(file) for file in files if file is not None]:
        raise DataError(f"--tokenizer-type NullTokenizer reads no file, got {', '.join(named)}. Leave one of them out")
    return NullTokenizer(vocab_size)
