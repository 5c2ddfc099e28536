"""NullTokenizer: ids without text, for runs on random tokens and on token files from other programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import Arrays, Tokenizer

EOD_NAME = "<eod>"


class NullTokenizer(Tokenizer):
    """A vocabulary of ``vocab_size`` ids; the last one ends a document. Decoding returns space-separated numbers.

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
        encoded = [self._ids(text) for text in texts]
        return np.array([token for ids in encoded for token in ids], np.int32), np.array(
            [len(ids) for ids in encoded], np.int64
        )

    def _ids(self, text: str) -> list[int]:
        words = text.split()
        invalid_words = [word for word in words if not word.isdecimal() or int(word) >= self._vocab_size]
        if invalid_words:
            raise DataError(
                f"a text of NullTokenizer must be ids below {self._vocab_size} separated by spaces, got "
                f"{invalid_words[0]!r}. Use a tokenizer with a vocabulary"
            )
        return [int(word) for word in words]

    def _identity_values(self) -> Iterable[Any]:
        return [self.settings]

    def _names_to_escape(self, control: Mapping[str, int]) -> list[str]:
        return []


def null_tokenizer(vocab_size: int | None, files: Sequence[str | Path | None]) -> NullTokenizer:
    """Build a tokenizer with ``vocab_size`` ids.

    Raises:
        DataError: ``vocab_size`` is None, or a file is given.
    """
    if vocab_size is None:
        raise DataError("--tokenizer-type NullTokenizer requires --vocab-size. Set it to the number of ids")
    if given_files := [str(file) for file in files if file is not None]:
        raise DataError(
            f"--tokenizer-type NullTokenizer does not read files, got {', '.join(given_files)}. Remove the files, or "
            "use another --tokenizer-type"
        )
    return NullTokenizer(vocab_size)
