"""SentencePiece models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from megatron.errors import DataError
from megatron.tokenizer.names import all_names
from megatron.tokenizer.sentence_piece_continued import Continued
from megatron.tokenizer.sentence_piece_file import with_control_pieces
from megatron.tokenizer.tokenizer import Arrays, Tokenizer, as_arrays


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file, unigram or BPE.

    A control token that the model declares as a symbol of the text is made a control piece, which no text becomes.
    """

    def __init__(self, path: Path, paths: Sequence[Path] = (), settings: str = "") -> None:
        self._path = path
        try:
            model = path.read_bytes()
            self._library = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path} must be a SentencePiece .model file; reading it failed: {error}") from error
        changed = self._spelled_names()
        if changed:
            model = with_control_pieces(model, changed)
            self._library = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._model = model
        beyond_eod = sorted(changed - {self.eod_name})
        super().__init__([path, *paths], "\n".join(filter(None, [settings, *beyond_eod])))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path,)

    def _spelled_names(self) -> set[str]:
        found = {name: token for name in all_names() if (token := self.token_to_id(name)) is not None}
        found = {name: token for name, token in found.items() if not self._library.is_unknown(token)}
        encoded = self._library.encode([f"a{name}a" for name in found])
        return {name for name, ids in zip(found, encoded, strict=True) if found[name] in ids}

    @property
    def vocab_size(self) -> int:
        return self._library.get_piece_size()

    def token_to_id(self, token: str) -> int | None:
        found = self._library.piece_to_id(token)
        is_unknown = found == self._library.unk_id() and token != self._library.id_to_piece(found)
        return None if is_unknown else found

    @property
    def spelling(self) -> str:
        return "text"

    def piece(self, token: int) -> str | None:
        return str(self._library.id_to_piece(token)) if token < self._library.get_piece_size() else None

    def _declared_control_names(self) -> Iterable[str]:
        library = self._library
        return (library.id_to_piece(token) for token in range(library.get_piece_size()) if library.is_control(token))

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids))

    @cached_property
    def _continued(self) -> Continued:
        return Continued(self._model)

    def encode_pieces(self, pieces: Iterable[str]) -> np.ndarray:
        return super().encode_pieces(self._continued.blanks_in_front(pieces))

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        return as_arrays(self._library.encode(texts))

    def _encode_continued(self, texts: list[str]) -> Arrays:
        return as_arrays(list(self._continued.encode(texts)))
