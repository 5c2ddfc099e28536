"""SentencePiece tokenizers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from megatron.errors import DataError
from megatron.tokenizer.continued_pieces import ContinuationEncoder
from megatron.tokenizer.control_tokens import Spellings, all_names
from megatron.tokenizer.sentence_piece_model import model_identity_values, with_control_pieces
from megatron.tokenizer.tokenizer import Arrays, Tokenizer, as_arrays


class SentencePieceTokenizer(Tokenizer):
    """The tokenizer of a SentencePiece ``.model`` file, unigram or BPE.

    A control token that the model declares as a user-defined symbol is converted to a control piece, which is never
    produced from a text.
    """

    def __init__(self, path: Path, paths: Sequence[Path] = (), settings: str = "") -> None:
        self._path = path
        try:
            model = path.read_bytes()
            self._library = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path} must be a SentencePiece .model file; reading it failed: {error}") from error
        self._raw_model, self._settings = model, settings
        spelled = self._spelled_names()
        self._spelled = spelled - self.plain_names
        self._use_control_pieces(self._spelled)
        beyond_eod = sorted(spelled - {self.former_eod_name})
        super().__init__([path, *paths], "\n".join(filter(None, [settings, *beyond_eod])))
        self.use_eod_piece()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path,), self.eod_name

    def use_eod(self, name: str) -> None:
        super().use_eod(name)
        self.use_eod_piece()

    def use_eod_piece(self) -> None:
        """Convert the end-of-document token to a control piece if it is an ordinary symbol."""
        if self.eod_name in self.plain_names:
            self._use_control_pieces({*self._spelled, self.eod_name})
            self._spellings = Spellings(self._names_to_escape(self.control_tokens))

    def _use_control_pieces(self, names: Collection[str]) -> None:
        self._model = with_control_pieces(self._raw_model, names) if names else self._raw_model
        self._library = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        self.__dict__.pop("_continued", None)

    @cached_property
    def plain_names(self) -> frozenset[str]:
        """<s> and </s> if they are ordinary symbols (HTML tags) in a vocabulary with other pieces for BOS and EOS."""
        library = self._library
        ends = {"<s>": library.bos_id(), "</s>": library.eos_id()}
        return frozenset(
            name
            for name, control in ends.items()
            if control >= 0 and library.piece_to_id(name) not in (control, library.unk_id())
        )

    def _spelled_names(self) -> set[str]:
        candidates = {name: token for name in all_names() if (token := self.token_to_id(name)) is not None}
        candidates = {name: token for name, token in candidates.items() if not self._library.is_unknown(token)}
        encoded = self._library.encode([f"a{name}a" for name in candidates])
        return {name for name, ids in zip(candidates, encoded, strict=True) if candidates[name] in ids}

    @property
    def vocab_size(self) -> int:
        return self._library.get_piece_size()

    @cached_property
    def text_vocab_size(self) -> int:
        if type(self) is not SentencePieceTokenizer:
            return self.vocab_size
        size = self._library.get_piece_size()
        while size and self._library.is_control(size - 1):
            size -= 1
        return max(size, self._largest_used_id() + 1)

    def token_to_id(self, token: str) -> int | None:
        id_ = self._library.piece_to_id(token)
        is_unknown = id_ == self._library.unk_id() and token != self._library.id_to_piece(id_)
        return None if is_unknown else id_

    @property
    def spelling(self) -> str:
        return "text"

    def piece(self, token: int) -> str | None:
        return str(self._library.id_to_piece(token)) if token < self._library.get_piece_size() else None

    @property
    def version_text(self) -> str:
        return f"sentencepiece {sentencepiece.__version__}"

    def _identity_values(self) -> Iterable[Any]:
        return [self._settings, *model_identity_values(self._raw_model)]

    def _former_control_names(self) -> list[str]:
        names = super()._former_control_names()
        # versions up to 8c23b9e6 converted the plain names to control pieces, which are never produced from a text
        return [name for name in names if name not in self.plain_names]

    def _declared_control_names(self) -> Iterable[str]:
        library = self._library
        return (library.id_to_piece(token) for token in range(library.get_piece_size()) if library.is_control(token))

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids))

    @cached_property
    def _continued(self) -> ContinuationEncoder:
        return ContinuationEncoder(self._model)

    def encode_chunks(self, chunks: Iterable[str]) -> np.ndarray:
        return super().encode_chunks(self._continued.move_blanks_forward(chunks))

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        return as_arrays(self._library.encode(texts))

    def _encode_continued(self, texts: list[str]) -> Arrays:
        return as_arrays(list(self._continued.encode(texts)))
