"""SentencePiece models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file, unigram or BPE."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path} must be a SentencePiece .model file; reading it failed: {error}") from error
        super().__init__([path])

    @property
    def vocab_size(self) -> int:
        return self._library.get_piece_size()

    def token_to_id(self, token: str) -> int | None:
        found = self._library.piece_to_id(token)
        return None if found == self._library.unk_id() else found

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids))

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._library.encode(texts)
