"""From the tokenizer flags to a tokenizer.

| --tokenizer-type | --tokenizer-path, or --vocab-file in its place |
|---|---|
| TokenizersJSON | FILE.json of the `tokenizers` library, or a folder with tokenizer.json |
| GPT2BPETokenizer | --vocab-file vocab.json and --merge-file merges.txt |
| SentencePiece | FILE.model |
| T5SentencePiece | T5's FILE.model, or a folder with spiece.model; 100 sentinels are added behind its pieces |
| BertWordPiece | vocab.txt, or a folder with it; lower case by its tokenizer_config.json or its tokens |
| CPM1 | FILE.model, or a folder with chinese_vocab.model and perhaps vocab.json |
| CPM2 | vocab.txt, or a folder with it, or a JSON file of ids by token |
| not given | TokenizersJSON, SentencePiece for a FILE.model, GPT2BPETokenizer with --merge-file |

A kind's library is imported when a tokenizer of that kind is built.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import Tokenizer

_BUILDERS = {
    "TokenizersJSON": ("huggingface", "from_json_files"),
    "GPT2BPETokenizer": ("huggingface", "from_gpt2_files"),
    "SentencePiece": ("sentence_piece", "SentencePieceTokenizer"),
    "T5SentencePiece": ("t5", "from_t5_files"),
    "BertWordPiece": ("wordpiece", "from_bert_files"),
    "CPM1": ("cpm1", "from_cpm1_files"),
    "CPM2": ("cpm2", "from_cpm2_files"),
}
TYPES = tuple(_BUILDERS)


def build(
    tokenizer_type: str | None = None,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_path: str | Path | None = None,
) -> Tokenizer:
    """Return the tokenizer that the flags name: the table at the top of this file.

    Raises:
        DataError: unknown type, a file that is missing or not of that type, a library that is not installed.
    """
    given = tokenizer_path or vocab_file
    kind = tokenizer_type or _guess(given, merge_file)
    if kind not in TYPES:
        raise DataError(f"--tokenizer-type must be one of {', '.join(TYPES)}, got {kind}")
    module, name = _BUILDERS[kind]
    if kind == "GPT2BPETokenizer":
        files = [_present(vocab_file, "--vocab-file", kind), _present(merge_file, "--merge-file", kind)]
    else:
        files = [_present(given, "--tokenizer-path", kind)]
    try:
        found = importlib.import_module(f"megatron.tokenizer.{module}")
    except ModuleNotFoundError as error:
        raise DataError(
            f"--tokenizer-type {kind} needs {error.name}, which is not installed. Run: pip install {error.name}"
        ) from error
    return getattr(found, name)(*files)


def _guess(given: str | Path | None, merge_file: str | Path | None) -> str:
    if merge_file:
        return "GPT2BPETokenizer"
    if given is None:
        raise DataError(
            "a tokenizer is needed: give --tokenizer-path FILE.json or FILE.model, or --vocab-file vocab.json with "
            "--merge-file merges.txt. tools/train_tokenizer.py trains one."
        )
    if Path(given).name == "vocab.txt":
        raise DataError(f"{given} may be of several kinds: give --tokenizer-type BertWordPiece or CPM2")
    return "SentencePiece" if str(given).endswith(".model") else "TokenizersJSON"


def _present(path: str | Path | None, flag: str, kind: str) -> Path:
    if path is None:
        raise DataError(f"--tokenizer-type {kind} needs {flag}")
    if not Path(path).exists():
        raise DataError(f"{flag} {path} does not exist")
    return Path(path)
