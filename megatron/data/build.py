"""The three data sets of a run, with every check that can be made before training starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron import log
from megatron.data.gpt2_samples import GPT2Samples
from megatron.data.split import NAMES, split_documents
from megatron.data.token_file import TokenFile
from megatron.errors import DataError

_ENDS_LOOKED_AT = 1000


def build_train_valid_test(
    *,
    data_path: str | None,
    split: str,
    seq_length: int,
    seed: int,
    vocab_size: int,
    needed: tuple[bool, bool, bool] = (True, True, True),
    tokenizer_identity: str | None = None,
    eod_id: int | None = None,
    flags_needing_eod: Sequence[str] = (),
) -> tuple[GPT2Samples | None, GPT2Samples | None, GPT2Samples | None]:
    """Return the samples of train, valid and test; None for a split that is not needed.

    Args:
        vocab_size: of the model's tokenizer; every token id must be below it.
        tokenizer_identity: compared with the one in the sidecar where there is one.
        flags_needing_eod: flags in use that work only where documents end with the end-of-document token.

    Raises:
        DataError: rows D02 and D09-D14 of the list of faults.
    """
    if not data_path:
        raise DataError(
            "--data-path must name token files (their path without .bin and .idx), got none. "
            "tools/preprocess_data.py makes them; tools/make_sample_data.py makes a small set to try."
        )
    token_file = TokenFile(data_path)
    _check_tokenizer(token_file, tokenizer_identity)
    _check_token_ids(token_file, vocab_size)
    if flags_needing_eod:
        _check_eod(token_file, eod_id, " ".join(flags_needing_eod))
    if token_file.num_tokens <= seq_length:
        raise DataError(
            f"{token_file.prefix}: all data together is {token_file.num_tokens} tokens; one sample of --seq-length "
            f"{seq_length} needs {seq_length + 1}. Shorten --seq-length or give more data."
        )
    ranges = split_documents(token_file.num_documents, split)
    train, valid, test = (
        _build_one(token_file, name, documents, split, seq_length, seed) if is_needed else None
        for name, documents, is_needed in zip(NAMES, ranges, needed, strict=True)
    )
    return train, valid, test


def _build_one(
    token_file: TokenFile, name: str, documents: tuple[int, int], split: str, seq_length: int, seed: int
) -> GPT2Samples:
    num_tokens = int(token_file.sizes[slice(*documents)].sum(dtype=np.int64))
    if num_tokens <= seq_length:
        raise DataError(
            f"the {name} split must have at least one sample of {seq_length + 1} tokens, got "
            f"{documents[1] - documents[0]} of {token_file.num_documents} documents with {num_tokens} tokens "
            f"(--split {split}, --seq-length {seq_length}, {token_file.prefix}). Give {name} a larger part of --split, "
            "shorten --seq-length, give more data, or turn off what uses it (--eval-interval 0, --eval-iters 0)."
        )
    return GPT2Samples(token_file, documents=documents, seq_length=seq_length, seed=seed)


def _check_tokenizer(token_file: TokenFile, identity: str | None) -> None:
    built_with = token_file.sidecar.tokenizer if token_file.sidecar else None
    if built_with and identity and built_with != identity:
        raise DataError(
            f"{token_file.prefix} was built with another tokenizer (identity {built_with[:12]}...) than the one given "
            f"({identity[:12]}...). Give that tokenizer, or build the data again with tools/preprocess_data.py."
        )


def _check_token_ids(token_file: TokenFile, vocab_size: int) -> None:
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


def _check_eod(token_file: TokenFile, eod_id: int | None, flags: str) -> None:
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
