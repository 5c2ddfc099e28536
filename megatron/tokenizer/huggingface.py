"""Tokenizers that the ``tokenizers`` library runs: its own JSON files, and GPT-2's vocab.json with merges.txt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import EOD_NAMES, Tokenizer


class LibraryTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer`` without padding, cutting or added control tokens."""

    def __init__(self, library: tokenizers.Tokenizer, paths: Sequence[Path]) -> None:
        self._library = library
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True  # the spelling of a control token is text
        self._vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        super().__init__(paths)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def token_to_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._library.encode_batch_fast(texts, add_special_tokens=False)]


def from_json(path: Path) -> LibraryTokenizer:
    """Return the tokenizer in a ``tokenizers`` JSON file."""
    try:
        library = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"--tokenizer-path {path} cannot be read: {error}") from error
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path} must be a JSON file of the `tokenizers` library; it says: {error}") from error
    return LibraryTokenizer(library, [path])


def from_gpt2_files(vocab: Path, merges: Path) -> LibraryTokenizer:
    """Return the byte-level BPE of GPT-2's two files."""
    try:
        library = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"--vocab-file {vocab} and --merge-file {merges} must be GPT-2's vocab.json and merges.txt; "
            f"the library says: {error}"
        ) from error
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([name for name in EOD_NAMES if library.token_to_id(name) is not None])
    return LibraryTokenizer(library, [vocab, merges])
