"""Whether ``gigatoken`` may stand in for ``tokenizers``: only where each id of a sample agrees."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence

import numpy as np

from megatron import log
from megatron.errors import DataError
from megatron.tokenizer.tokenizer import Tokenizer

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
"""Texts on which tokenizers are apt to differ; they are compared whatever the sample is."""


def with_gigatoken(tokenizer: Tokenizer, sample: Sequence[str], *, is_required: bool = False) -> Tokenizer:
    """Return the same tokenizer with its BPE done by gigatoken, if that gives each id of ``sample`` and of hard texts.

    Otherwise warn with the reason, the first difference if there is one, and return ``tokenizer``.

    Args:
        is_required: gigatoken was asked for by name, so that it must be there and fit the kind of tokenizer; even then
            an id that differs is only a warning.

    Raises:
        DataError: ``is_required``, and gigatoken or what it needs is not installed, or the tokenizer is no BPE.
    """
    reason = _why_not(tokenizer)
    if reason and is_required:
        raise DataError(reason)
    if not reason:
        try:
            return _verified(tokenizer, [*_PROBES, *_spellings(tokenizer), *sample])
        except ImportError as error:
            reason = f"gigatoken needs {error.name or error}, which cannot be imported: pip install -e '.[gigatoken]'"
            if is_required:
                raise DataError(f"{reason}; the import says: {error}") from error
        except _DiffersError as error:
            reason = str(error)
    log.warning(f"{reason}; going on without gigatoken")
    return tokenizer


class _DiffersError(Exception):
    """gigatoken cannot stand in."""


def _why_not(tokenizer: Tokenizer) -> str:
    if importlib.util.find_spec("gigatoken") is None:
        return "gigatoken must be installed to encode with it: pip install -e '.[gigatoken]'"
    description = getattr(tokenizer, "description", None)
    kind = json.loads(description)["model"].get("type", "BPE") if description else type(tokenizer).__name__
    return "" if kind == "BPE" else f"gigatoken encodes byte-pair vocabularies (BPE) only, this one is {kind}"


def _verified(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokenizer:
    giga = importlib.import_module("megatron.tokenizer.giga")
    try:
        fast = giga.standing_in_for(tokenizer)
        difference = _first_difference(tokenizer, fast, texts)
    except Exception as error:  # what a young library raises is not settled
        raise _DiffersError(f"gigatoken cannot do this vocabulary: {error}") from error
    if difference:
        raise _DiffersError(f"gigatoken differs from `tokenizers`: {difference}")
    return fast


def _spellings(tokenizer: Tokenizer) -> list[str]:
    return [f"a{name}a{name} {name}\n" for name in tokenizer.control_tokens]


def _first_difference(slow: Tokenizer, fast: Tokenizer, texts: Sequence[str]) -> str:
    expected, got = slow.encode_arrays(texts), fast.encode_arrays(texts)
    if all(map(np.array_equal, expected, got)):
        return ""
    starts = [np.cumsum(sizes) - sizes for _, sizes in (expected, got)]
    for text, *spans in zip(texts, *starts, expected[1], got[1], strict=True):
        right = expected[0][spans[0] : spans[0] + spans[2]]
        wrong = got[0][spans[1] : spans[1] + spans[3]]
        if not np.array_equal(right, wrong):
            return _told(slow, text, right.tolist(), wrong.tolist())
    return ""


def _told(tokenizer: Tokenizer, text: str, right: list[int], wrong: list[int]) -> str:
    place = next(
        (at for at, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b), min(len(right), len(wrong))
    )
    before = tokenizer.decode(right[:place])
    return (
        f"token {place} of the text that begins {text[:40]!r} is {wrong[place : place + 3]} rather than "
        f"{right[place : place + 3]}, behind {before[-20:]!r}"
    )
