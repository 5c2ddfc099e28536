"""Build a tokenizer from --tokenizer-type and its files; read vocabularies with one token per line."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron import hub, log
from megatron.errors import DataError
from megatron.tokenizer import probe
from megatron.tokenizer.null import null_tokenizer
from megatron.tokenizer.tokenizer import Tokenizer

# Tokenizers by type.
#
# | --tokenizer-type | --tokenizer-path (or --vocab-file) |
# |---|---|
# | TokenizersJSON | FILE.json of the `tokenizers` library, or a folder with tokenizer.json |
# | GPT2BPETokenizer | --vocab-file vocab.json and --merge-file merges.txt |
# | SentencePiece | FILE.model |
# | T5SentencePiece | T5's FILE.model, or a folder with spiece.model; 100 sentinels are added after its pieces |
# | BertWordPiece | vocab.txt, or a folder with it; case from tokenizer_config.json or from the tokens |
# | BertWordPieceLowerCase, BertWordPieceCase | the same, lower case or cased |
# | CPM1 | FILE.model, or a folder with chinese_vocab.model and optionally vocab.json |
# | CPM2 | vocab.txt, or a folder with it, or a JSON file of ids by token |
# | NullTokenizer | no file: --vocab-size ids without text |
# | not given | TokenizersJSON, SentencePiece for a FILE.model, GPT2BPETokenizer with --merge-file |
#
# The library of a type is imported when a tokenizer of this type is built.

_BUILDERS = {
    "TokenizersJSON": ("huggingface", "from_json_files"),
    "GPT2BPETokenizer": ("huggingface", "from_gpt2_files"),
    "SentencePiece": ("sentence_piece", "SentencePieceTokenizer"),
    "T5SentencePiece": ("t5_sentence_piece", "from_t5_files"),
    "BertWordPiece": ("bert_vocab", "from_bert_files"),
    "BertWordPieceLowerCase": ("bert_vocab", "from_lower_case_bert_files"),
    "BertWordPieceCase": ("bert_vocab", "from_cased_bert_files"),
    "CPM1": ("cpm", "from_cpm1_files"),
    "CPM2": ("cpm", "from_cpm2_files"),
    "NullTokenizer": ("null", "null_tokenizer"),
}
TYPES = tuple(_BUILDERS)


def build(
    tokenizer_type: str | None = None,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_path: str | Path | None = None,
    vocab_size: int | None = None,
    eod_token: str | None = None,
) -> Tokenizer:
    """Build the tokenizer that the flags describe; see the table at the top of this file.

    Args:
        vocab_size: id count for a NullTokenizer.
        eod_token: name of the end-of-document token; ``BY_NAME``: the token of earlier versions
            (``Tokenizer.former_eod_name``); None: the tokenizer's own choice (``Tokenizer.eod_name``).

    Raises:
        DataError: the type is unknown, a file is missing or has another type, or a library is not installed.
    """
    path = tokenizer_path or vocab_file
    resolved_type = tokenizer_type or _guess_type(path, merge_file)
    if resolved_type not in TYPES:
        raise DataError(f"--tokenizer-type must be one of {', '.join(TYPES)}, got {resolved_type}")
    tokenizer = _build(resolved_type, vocab_file, merge_file, tokenizer_path, vocab_size)
    if eod_token is not None:
        tokenizer.use_eod(eod_token)
    _check_probe_file(tokenizer)
    return tokenizer


def _check_probe_file(tokenizer: Tokenizer) -> None:
    """Compare the tokenizer with the probe that an export has written next to it, if there is one.

    Raises:
        DataError: the tokenizer encodes the probe texts to other ids; the message names both versions.
    """
    if not tokenizer.paths or not (path := tokenizer.paths[0].parent / probe.FILE_NAME).is_file():
        return
    try:
        saved = json.loads(path.read_bytes())
        text = probe.difference(saved, tokenizer.probe)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({error!r}). Export the model again, or delete the file.") from error
    if text:
        raise DataError(
            f"{tokenizer.paths[0]} does not encode text as the tokenizer of the exported model did: {text}. Install "
            f"the library of the export, restore the tokenizer files, or delete {path} if other ids are intended."
        )


def _build(
    tokenizer_type: str,
    vocab_file: str | Path | None,
    merge_file: str | Path | None,
    tokenizer_path: str | Path | None,
    vocab_size: int | None,
) -> Tokenizer:
    if tokenizer_type == "NullTokenizer":
        return null_tokenizer(vocab_size, (vocab_file, merge_file, tokenizer_path))
    module, name = _BUILDERS[tokenizer_type]
    path = tokenizer_path or vocab_file
    if tokenizer_type == "GPT2BPETokenizer":
        files = [
            _require_file(vocab_file, "--vocab-file", tokenizer_type),
            _require_file(merge_file, "--merge-file", tokenizer_type),
        ]
    else:
        files = [_require_file(path, "--tokenizer-path", tokenizer_type)]
    try:
        imported = importlib.import_module(f"megatron.tokenizer.{module}")
    except ModuleNotFoundError as error:
        raise DataError(
            f"--tokenizer-type {tokenizer_type} needs {error.name}, which is not installed. Run: pip install "
            f"{error.name}"
        ) from error
    tokenizer: Tokenizer = getattr(imported, name)(*files)
    return tokenizer


def _guess_type(path: str | Path | None, merge_file: str | Path | None) -> str:
    if merge_file:
        return "GPT2BPETokenizer"
    if path is None:
        raise DataError(
            "a tokenizer is required. Set --tokenizer-path FILE.json or FILE.model, or --vocab-file vocab.json with "
            "--merge-file merges.txt. tools/train_tokenizer.py trains one."
        )
    if Path(path).name == "vocab.txt":
        raise DataError(f"{path} may have several formats. Set --tokenizer-type BertWordPiece or CPM2")
    return "SentencePiece" if str(path).endswith(".model") else "TokenizersJSON"


def _require_file(path: str | Path | None, flag: str, tokenizer_type: str) -> Path:
    if path is None:
        raise DataError(f"--tokenizer-type {tokenizer_type} needs {flag}")
    if not Path(path).exists():
        raise DataError(f"{flag} {path} does not exist.{hub.advice(path)}")
    return Path(path)


# Replacement of ``tokenizers`` by ``gigatoken``, only if all ids of a sample are equal.

_PROBES = (
    "",
    " ",
    "  two  spaces \n\n\n\tand a tab \r\n",
    "it's we'll I'VE 12345 3.14 1,000,000 x=y+1; // a_b-c",
    "窗前有一盏灯，灯亮着。「全角」１２３ ，ｆｕｌｌ",
    "café cafe\u0301 ﬁ naïve Straße Ωμέγα привет שלום مرحبا नमस्ते ไทย 한국어 ひらがな",
    "🙂👩‍👩‍👧🏽🇩🇪 \u200b\ufeff\u00a0\u3000\u2028\x00\x07\x7f\U00020000\U0010fffd",
    "a" * 300 + " " * 100 + "=" * 77,
)
"""Texts on which tokenizers are likely to differ; they are always compared in addition to the sample."""


def with_gigatoken(tokenizer: Tokenizer, sample: Sequence[str], *, is_required: bool = False) -> Tokenizer:
    """Replace ``tokenizer`` by a gigatoken version if the ids are equal on ``sample`` and on difficult texts.

    Otherwise, log a warning with the reason (such as the first difference) and return ``tokenizer``.

    Args:
        is_required: the user has requested gigatoken, so raise an error if it is not installed or does not support the
            tokenizer. A difference between the ids only causes a warning.

    Raises:
        DataError: ``is_required``, and gigatoken or a dependency is not installed, or the tokenizer is not a BPE.
    """
    reason = _unsupported_reason(tokenizer)
    if reason and is_required:
        raise DataError(reason)
    if not reason:
        try:
            return _verified_gigatoken(tokenizer, [*_PROBES, *_spellings(tokenizer), *sample])
        except ImportError as error:
            reason = f"gigatoken needs {error.name or error}, which cannot be imported: pip install -e '.[gigatoken]'"
            if is_required:
                raise DataError(f"{reason}. The import failed: {error}") from error
        except _DiffersError as error:
            reason = str(error)
    log.warning(f"{reason}; continuing without gigatoken")
    return tokenizer


class _DiffersError(Exception):
    """gigatoken cannot replace the tokenizer; the message has the reason."""


def supports_gigatoken(tokenizer: Tokenizer) -> bool:
    """Return True if gigatoken is installed and can encode for ``tokenizer``."""
    return not _unsupported_reason(tokenizer)


def _unsupported_reason(tokenizer: Tokenizer) -> str:
    """Explain why gigatoken cannot encode for ``tokenizer``; "" if it can."""
    if importlib.util.find_spec("gigatoken") is None:
        return "gigatoken must be installed to encode with it: pip install -e '.[gigatoken]'"
    description = getattr(tokenizer, "description", None)
    model_type = json.loads(description)["model"].get("type", "BPE") if description else type(tokenizer).__name__
    return (
        "" if model_type == "BPE" else f"gigatoken only supports byte-pair vocabularies (BPE), this one is {model_type}"
    )


def _verified_gigatoken(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokenizer:
    """Build a gigatoken version and check it; raise _DiffersError if the ids differ on ``texts``."""
    gigatoken_module = importlib.import_module("megatron.tokenizer.gigatoken")
    try:
        fast = gigatoken_module.gigatoken_version_of(tokenizer)
        difference = _first_difference(tokenizer, fast, texts)
    except Exception as error:  # the library does not document its exceptions
        raise _DiffersError(f"gigatoken does not support this vocabulary: {error}") from error
    if difference:
        raise _DiffersError(f"gigatoken differs from `tokenizers`: {difference}")
    return fast


def _spellings(tokenizer: Tokenizer) -> list[str]:
    """Return one test text per control token, which spells the token within and between words."""
    return [f"a{name}a{name} {name}\n" for name in (*tokenizer.control_tokens, *tokenizer.plain_names)]


def _first_difference(slow: Tokenizer, fast: Tokenizer, texts: Sequence[str]) -> str:
    expected, actual = slow.encode_arrays(texts), fast.encode_arrays(texts)
    if all(map(np.array_equal, expected, actual)):
        return ""
    starts = [np.cumsum(lengths) - lengths for _, lengths in (expected, actual)]
    for text, *spans in zip(texts, *starts, expected[1], actual[1], strict=True):
        expected_ids = expected[0][spans[0] : spans[0] + spans[2]]
        actual_ids = actual[0][spans[1] : spans[1] + spans[3]]
        if not np.array_equal(expected_ids, actual_ids):
            return _format_difference(slow, text, expected_ids.tolist(), actual_ids.tolist())
    return ""


def _format_difference(tokenizer: Tokenizer, text: str, right: list[int], wrong: list[int]) -> str:
    first = next(
        (idx for idx, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b), min(len(right), len(wrong))
    )
    text_before = tokenizer.decode(right[:first])
    return (
        f"token {first} of the text starting with {text[:40]!r} is {wrong[first : first + 3]} rather than "
        f"{right[first : first + 3]}, after {text_before[-20:]!r}"
    )


# Vocabularies with one token per line, or as a JSON object.


def read_vocabulary(path: Path, required_token: str) -> dict[str, int]:
    """Read token -> id; the id is the line number from 0, or the number in the JSON file.

    As in the original programs for these files, only ``\\n`` and ``\\r\\n`` end a line, whitespace around a token is
    removed, and the last of several equal lines counts.

    Raises:
        DataError: the file cannot be read, is not a vocabulary, or does not have the token ``required_token``.
    """
    try:
        with open(path, encoding="utf-8") as file:
            vocabulary = (
                json.load(file) if path.suffix == ".json" else {line.strip(): idx for idx, line in enumerate(file)}
            )
    except (OSError, ValueError) as error:
        raise DataError(f"{path} must list tokens in UTF-8, one per line; reading it failed: {error}") from error
    if not isinstance(vocabulary, dict) or not all(type(token) is int for token in vocabulary.values()):
        raise DataError(f"{path} must map each token to an id, such as {{{json.dumps(required_token)}: 0}}")
    if required_token not in vocabulary:
        raise DataError(
            f"{path} must contain the token {required_token}, got {len(vocabulary)} other tokens. Is it a vocabulary?"
        )
    return vocabulary
