"""Token ids as text that a person can read: control tokens by their names, the rest decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

PART_OF_A_CHARACTER = "(part of a character)"


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod_id(self) -> int: ...

    @property
    def control_tokens(self) -> Mapping[str, int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Words:
    """Names and texts of ids.

    Args:
        names: of control tokens that the tokenizer has no names of, or others.
    """

    def __init__(self, tokenizer: Decoder, names: Mapping[int, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self.names = {token: name for name, token in tokenizer.control_tokens.items()} | dict(names or {})

    def is_control(self, token: int) -> bool:
        """Whether ``token`` stands for itself rather than for text."""
        return token in self.names or token >= self._tokenizer.vocab_size

    def name(self, token: int) -> str:
        """Return the name of a control token."""
        return self.names.get(token, f"<id {token}>")

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of ordinary tokens."""
        return self._tokenizer.decode([int(token) for token in tokens])

    def short(self, token: int) -> str:
        """Return one token for a cell of a table: what stands on one line, with line ends and spaces spelled out."""
        if self.is_control(token):
            return self.name(token)
        text = self.text([token])
        return PART_OF_A_CHARACTER if "\ufffd" in text else repr(text)
