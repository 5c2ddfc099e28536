"""What can be checked of token files before training starts: rows D02 and D09-D14 of the list of faults.

Each raises ``DataError`` where it fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron import log
from megatron.data.split import NAMES
from megatron.data.token_file import TokenFile
from megatron.errors import DataError

Documents = tuple[int, int] | np.ndarray
_ENDS_LOOKED_AT = 1000
_SIZES_ADDED = 1 << 20


def check_one_sample(token_file: TokenFile, sample_tokens: int, asked_by: str) -> None:
    """All documents together must hold one sample.

    Args:
        sample_tokens: tokens that a sample takes from the file.
        asked_by: the flag with its value that asks for them, such as "--seq-length 512".
    """
    if token_file.num_tokens < sample_tokens:
        raise DataError(
            f"{token_file.prefix}: all data together is {token_file.num_tokens} tokens; one sample of {asked_by} needs "
            f"{sample_tokens}. Shorten {asked_by.split()[0]} or give more data."
        )


def check_splits(
    token_file: TokenFile,
    splits: Sequence[Documents],
    needed: Sequence[bool],
    flags: str,
    sample_tokens: int,
    asked_by: str,
) -> None:
    """Each split that is needed must hold one sample.

    Args:
        splits: the documents of train, valid and test.
        flags: what cut them, such as "--split 949,50,1".
        others: as ``check_one_sample``.
    """
    for name, documents, is_needed in zip(NAMES, splits, needed, strict=True):
        if not is_needed:
            continue
        count, num_tokens = _amount(token_file, documents)
        if num_tokens < sample_tokens:
            raise DataError(
                f"the {name} split must have at least one sample of {sample_tokens} tokens, got {count} of "
                f"{token_file.num_documents} documents with {num_tokens} tokens ({flags}, {asked_by}, "
                f"{token_file.prefix}). Give {name} a larger part of --split, shorten {asked_by.split()[0]}, give more "
                "data, or turn off what uses it (--eval-interval 0, --eval-iters 0)."
            )


def _amount(token_file: TokenFile, documents: Documents) -> tuple[int, int]:
    """Return how many documents these are, and how many tokens they hold."""
    if isinstance(documents, tuple):
        start, stop = documents
        return stop - start, int(token_file.sizes[start:stop].sum(dtype=np.int64))
    blocks = (documents[start : start + _SIZES_ADDED] for start in range(0, len(documents), _SIZES_ADDED))
    return len(documents), sum(int(token_file.sizes[block].sum(dtype=np.int64)) for block in blocks)


def check_tokenizer(token_file: TokenFile, identity: str | None) -> None:
    """The data must have been built with the tokenizer of this ``identity``, where both are known."""
    built_with = token_file.sidecar.tokenizer if token_file.sidecar else None
    if built_with and identity and built_with != identity:
        raise DataError(
            f"{token_file.prefix} was built with another tokenizer (identity {built_with[:12]}...) than the one given "
            f"({identity[:12]}...). Give that tokenizer, or build the data again with tools/preprocess_data.py."
        )


def check_token_ids(token_file: TokenFile, vocab_size: int) -> None:
    """Every token id must be in the vocabulary."""
    highest = token_file.max_token_id
    if highest is not None and highest < vocab_size:
        return
    if highest is None:
        log.info(f"{token_file.prefix} has no .meta.json: looking once at all {token_file.num_tokens} token ids")
    found = token_file.first_outside(vocab_size)
    if found is None:
        return
    document, offset, token = found
    raise DataError(
        f"token ids must be in 0 ... {vocab_size - 1} (the vocabulary), got {token} in document {document} at token "
        f"{offset}, byte {token_file.byte_offset(document, offset)} of {token_file.token_path}. "
        "The data was built with another tokenizer: give that one, or build the data again."
    )


def check_eod(token_file: TokenFile, eod_id: int | None, flags: str) -> None:
    """Documents must end with the end-of-document token; ``flags`` need it."""
    if eod_id is None:
        raise DataError(f"{flags} need an end-of-document token, the tokenizer has none")
    has_eod = token_file.has_eod
    if has_eod is None:
        filled = np.flatnonzero(token_file.sizes)[:_ENDS_LOOKED_AT]
        ends = (token_file.read(int(document))[-1] for document in filled)
        has_eod = all(int(end) == eod_id for end in ends)
    if not has_eod:
        raise DataError(
            f"{flags} need documents that end with the end-of-document token (id {eod_id}); those of "
            f"{token_file.prefix} do not. Build the data again without --no-append-eod, or leave the flags out."
        )
