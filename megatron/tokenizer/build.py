"""From the tokenizer flags to a tokenizer.

| --tokenizer-type | files |
|---|---|
| TokenizersJSON | --tokenizer-path FILE.json, or a folder with tokenizer.json |
| GPT2BPETokenizer | --vocab-file vocab.json --merge-file merges.txt |
| SentencePiece | --tokenizer-path FILE.model |
| not given | whichever of the three the files are |

``--vocab-file`` may stand for ``--tokenizer-path``.
"""

from __future__ import annotations

from pathlib import Path

from megatron.errors import DataError
from megatron.tokenizer.huggingface import from_gpt2_files, from_json
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.tokenizer import Tokenizer

TYPES = ("TokenizersJSON", "GPT2BPETokenizer", "SentencePiece")


def build(
    tokenizer_type: str | None = None,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_path: str | Path | None = None,
) -> Tokenizer:
    """Return the tokenizer that the flags name: the table at the top of this file.

    Raises:
        DataError: unknown type, a file that is missing or not of that type.
    """
    given = tokenizer_path or vocab_file
    kind = tokenizer_type or _guess(given, merge_file)
    if kind not in TYPES:
        raise DataError(f"--tokenizer-type must be one of {', '.join(TYPES)}, got {kind}")
    if kind == "GPT2BPETokenizer":
        return from_gpt2_files(_present(vocab_file, "--vocab-file", kind), _present(merge_file, "--merge-file", kind))
    path = _present(given, "--tokenizer-path", kind)
    if kind == "SentencePiece":
        return SentencePieceTokenizer(path)
    return from_json(_present(path / "tokenizer.json", "--tokenizer-path", kind) if path.is_dir() else path)


def _guess(given: str | Path | None, merge_file: str | Path | None) -> str:
    if merge_file:
        return "GPT2BPETokenizer"
    if given is None:
        raise DataError(
            "a tokenizer is needed: give --tokenizer-path FILE.json or FILE.model, or --vocab-file vocab.json with "
            "--merge-file merges.txt. tools/train_tokenizer.py trains one."
        )
    return "SentencePiece" if str(given).endswith(".model") else "TokenizersJSON"


def _present(path: str | Path | None, flag: str, kind: str) -> Path:
    if path is None:
        raise DataError(f"--tokenizer-type {kind} needs {flag}")
    if not Path(path).exists():
        raise DataError(f"{flag} {path} does not exist")
    return Path(path)
