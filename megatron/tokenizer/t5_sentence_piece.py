"""T5's SentencePiece model, with its sentinel tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from megatron.errors import DataError
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer

NUM_SENTINELS = 100
_NAME = "<extra_id_{}>"


class T5SentencePieceTokenizer(SentencePieceTokenizer):
    """A T5 ``.model`` with n pieces and 100 sentinels: ``<extra_id_0>`` has id n + 99, ``<extra_id_99>`` has id n.

    If the model already has a piece ``<extra_id_0>``, like some later models, no sentinels are added.
    """

    def __init__(self, path: Path) -> None:
        self._appended: dict[str, int] = {}
        super().__init__(path, settings="T5SentencePiece")
        if super().token_to_id(_NAME.format(0)) is None:
            top = self._library.get_piece_size() + NUM_SENTINELS - 1
            self._appended = {_NAME.format(idx): top - idx for idx in range(NUM_SENTINELS)}
            self.__dict__.pop("control_tokens", None)  # the cached value lacks the sentinels

    @property
    def vocab_size(self) -> int:
        return self._library.get_piece_size() + len(self._appended)

    def token_to_id(self, token: str) -> int | None:
        return self._appended.get(token, super().token_to_id(token))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._decode_parts(ids))

    def _decode_parts(self, ids: Sequence[int]) -> Iterator[str]:
        size = self._library.get_piece_size()
        for is_sentinel, group in groupby(ids, lambda token: token >= size):
            if is_sentinel:
                yield from (_NAME.format(self.vocab_size - 1 - token) for token in group)
            else:
                yield self._library.decode(list(group))


def from_t5_files(path: Path) -> T5SentencePieceTokenizer:
    """Load a ``.model`` file, or a folder with ``spiece.model``."""
    model = path / "spiece.model" if path.is_dir() else path
    if not model.exists():
        hint = " Its tokenizer.json is read with --tokenizer-type TokenizersJSON." * (path / "tokenizer.json").exists()
        raise DataError(
            f"--tokenizer-type T5SentencePiece needs a .model file or a folder with spiece.model, got {path}.{hint}"
        )
    return T5SentencePieceTokenizer(model)
