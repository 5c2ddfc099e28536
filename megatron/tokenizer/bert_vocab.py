"""BERT's WordPiece vocabularies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron.errors import DataError
from megatron.tokenizer.build import read_vocabulary
from megatron.tokenizer.huggingface import LibraryTokenizer

_UNK = "[UNK]"
_CONTROL = ("[PAD]", _UNK, "[CLS]", "[SEP]", "[MASK]")
_MAX_WORD_CHARACTERS = 100


def from_lower_case_bert_files(path: Path) -> LibraryTokenizer:
    """Load a ``vocab.txt``, or the one in a folder; text is converted to lower case without accents."""
    return from_bert_files(path, is_lower_case=True)


def from_cased_bert_files(path: Path) -> LibraryTokenizer:
    """Load a ``vocab.txt``, or the one in a folder; case and accents are preserved."""
    return from_bert_files(path, is_lower_case=False)


def from_bert_files(path: Path, is_lower_case: bool | None = None) -> LibraryTokenizer:
    """Load a ``vocab.txt``, or the one in a folder. Each Chinese character is a word.

    Args:
        is_lower_case: convert text to lower case and remove accents. None: the value of ``"do_lower_case"`` in
            ``tokenizer_config.json`` next to the vocabulary; without such a value, True if no token in the vocabulary
            has an upper-case letter.
    """
    vocab = path / "vocab.txt" if path.is_dir() else path
    if not vocab.exists():
        raise DataError(f"--tokenizer-type BertWordPiece needs vocab.txt or a folder with it, got {path}")
    ids = read_vocabulary(vocab, _UNK)
    if is_lower_case is None:
        is_lower_case = _is_lower_case(vocab.parent / "tokenizer_config.json", ids)
    library = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token=_UNK, max_input_chars_per_word=_MAX_WORD_CHARACTERS)  # type: ignore[call-arg]
    )
    library.normalizer = normalizers.BertNormalizer(lowercase=is_lower_case)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens([name for name in _CONTROL if name in ids])
    return LibraryTokenizer(library.to_str(), [vocab], f"BertWordPiece lower case: {is_lower_case}")


def _is_lower_case(config: Path, tokens: Iterable[str]) -> bool:
    if config.exists():
        try:
            value = json.loads(config.read_text(encoding="utf-8")).get("do_lower_case")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{config} must be a JSON object; reading it failed: {error}") from error
        if value is not None:
            return bool(value)
    return not any(token != token.lower() for token in tokens if not token.startswith("["))
