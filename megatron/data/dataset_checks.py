"""Check token files before training starts.

Each check raises ``DataError`` if it fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron import log
from megatron.data.cache import IndexCache
from megatron.data.documents import Documents, count_documents, count_tokens
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.split import SPLIT_NAMES
from megatron.errors import DataError
from megatron.tokenizer import probe
from megatron.tokenizer.identity import is_same

_MAX_CHECKED_ENDS = 1000
_CACHED_FROM_TOKENS = 1 << 26


def check_one_sample(token_file: IndexedDataset, sample_tokens: int, length_flag: str) -> None:
    """Check that all documents together have enough tokens for one sample.

    Args:
        sample_tokens: file tokens that one sample needs.
        length_flag: the flag and value that determine ``sample_tokens``, such as "--seq-length 512".
    """
    if token_file.num_tokens < sample_tokens:
        raise DataError(
            f"{token_file.prefix} has {token_file.num_tokens} tokens in total, but one sample of {length_flag} needs "
            f"{sample_tokens}. Reduce {length_flag.split()[0]} or add more data."
        )


def check_splits(
    token_file: IndexedDataset,
    splits: Sequence[Documents],
    needed: Sequence[bool],
    flags: str,
    sample_tokens: int,
    length_flag: str,
) -> None:
    """Check that each needed split has enough tokens for one sample.

    Args:
        splits: documents for training, validation and test.
        flags: the flags that determine the splits, such as "--split 949,50,1".
        sample_tokens, length_flag: see ``check_one_sample``.
    """
    for name, documents, is_needed in zip(SPLIT_NAMES, splits, needed, strict=True):
        if not is_needed:
            continue
        num_tokens = count_tokens(token_file.document_lengths, documents)
        if num_tokens < sample_tokens:
            raise DataError(
                f"the {name} split must have at least one sample of {sample_tokens} tokens, got "
                f"{count_documents(documents)} of {token_file.num_documents} documents with {num_tokens} tokens "
                f"({flags}, {length_flag}, {token_file.prefix}). Increase the share of {name} in --split, reduce "
                f"{length_flag.split()[0]}, add more data, or disable evaluation (--eval-interval 0, --eval-iters 0)."
            )


def check_tokenizer(
    token_file: IndexedDataset, identity: str | None, run_probe: Mapping[str, Any] | None = None
) -> None:
    """Check that the tokenizer with this ``identity`` and ``run_probe`` built the data, as far as they are known."""
    text = probe.difference(token_file.sidecar.probe if token_file.sidecar else None, run_probe)
    data_identity = token_file.sidecar.tokenizer if token_file.sidecar else None
    if data_identity and identity and not is_same(data_identity, identity):
        log.debug(f"tokenizer identity of {token_file.prefix}: {data_identity}; now: {identity}")
        raise DataError(
            f"{token_file.prefix} was built with a different tokenizer than the tokenizer of this run"
            f"{f' ({text})' if text else ''}. Use the tokenizer of the data, or build the data again with "
            "tools/preprocess_data.py."
        )
    if text:
        raise DataError(
            f"{token_file.prefix} was built with the tokenizer files of this run, but {text}. Install the library of "
            "the data, or build the data again with tools/preprocess_data.py."
        )


def check_token_ids(token_file: IndexedDataset, vocab_size: int, cache: IndexCache) -> None:
    """Check that every token id is in the vocabulary; ``cache`` stores the result for large files without a sidecar."""
    highest = token_file.max_token_id
    if highest is not None and highest < vocab_size:
        return
    if highest is None and _are_ids_in_vocabulary(token_file, vocab_size, cache):
        return
    invalid_id = token_file.find_invalid_id(vocab_size)
    if invalid_id is None:
        return
    document, offset, token = invalid_id
    raise DataError(
        f"token ids must be in 0 ... {vocab_size - 1} (the vocabulary), got {token} in document {document} at token "
        f"{offset}, byte {token_file.byte_offset(document, offset)} of {token_file.token_path}. "
        "The data was built with a different tokenizer. Use that tokenizer, or build the data again."
    )


def _are_ids_in_vocabulary(token_file: IndexedDataset, vocab_size: int, cache: IndexCache) -> bool:
    """Return True if all ids in a file without a sidecar are valid. A large file is scanned once per host."""

    def scan() -> np.ndarray:
        log.info(f"{token_file.prefix} has no .meta.json: checking all {token_file.num_tokens} token ids once")
        return np.array([token_file.find_invalid_id(vocab_size) is None], np.uint8)

    if token_file.num_tokens < _CACHED_FROM_TOKENS:
        return bool(scan()[0])
    mtime_ns = token_file.mtime_ns  # a large file's fingerprint covers only parts of it
    name = f"ids-{token_file.fingerprint}-{mtime_ns}-{vocab_size}"
    return bool(cache.array(name, scan, is_durable=True)[0])


def check_same_eod(token_file: IndexedDataset, eod_id: int | None) -> None:
    """Check that the sidecar, if any, names the tokenizer's end-of-document token.

    Raises:
        DataError: the documents end with another token.
    """
    sidecar = token_file.sidecar
    if sidecar is None or not sidecar.has_eod or sidecar.eod_id is None or eod_id is None or sidecar.eod_id == eod_id:
        return
    raise DataError(
        f"the documents of {token_file.prefix} end with the token of id {sidecar.eod_id}, but the end-of-document "
        f"token of the tokenizer has id {eod_id}. Set --eod-token to the token of id {sidecar.eod_id}, or build "
        "the data again."
    )


def check_eod(token_file: IndexedDataset, eod_id: int | None, flags: str) -> None:
    """Check that documents end with the end-of-document token, as ``flags`` require.

    Raises:
        DataError: the tokenizer has no end-of-document token, or the documents do not end with it.
    """
    check_same_eod(token_file, eod_id)
    if eod_id is None:
        raise DataError(f"{flags} need an end-of-document token, but the tokenizer has none")
    has_eod = token_file.has_eod
    if has_eod is None:
        nonempty = np.flatnonzero(token_file.document_lengths)[:_MAX_CHECKED_ENDS]
        ends = (token_file.read(int(document))[-1] for document in nonempty)
        has_eod = all(int(end) == eod_id for end in ends)
    if not has_eod:
        raise DataError(
            f"{flags} need documents that end with the end-of-document token (id {eod_id}), but the documents of "
            f"{token_file.prefix} do not. Build the data again without --no-append-eod, or remove the flags."
        )
