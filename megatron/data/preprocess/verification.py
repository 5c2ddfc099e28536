"""Verify a pair of token files completely, and show some documents."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron import files, log
from megatron.data.dataset_metadata import DatasetMetadata
from megatron.data.index_writer import index_chunks
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.identity import is_same

_LENGTHS_PER_BLOCK = 1 << 18
_READ_BYTES = 1 << 22
_SHOWN_TOKENS = 64


@dataclass(frozen=True)
class Verified:
    """A successful verification's result.

    Args:
        has_sidecar: True if the files have a sidecar, so that checksums were verified.
        samples: (document index, token count, first tokens as text) for some documents.
    """

    num_documents: int
    num_tokens: int
    has_sidecar: bool
    samples: list[tuple[int, int, str]]


def verify(prefix: str, tokenizer: Tokenizer | None, *, num_samples: int = 3, seed: int = 0) -> Verified:
    """Verify sizes, offsets, checksums, id range and document ends in ``PREFIX.bin`` and ``.idx``.

    Args:
        tokenizer: tokenizer that decodes the samples; None: the samples are token ids.
        seed: seed for selecting samples.

    Raises:
        DataError: a file is missing or damaged, or the data was built with another tokenizer than ``tokenizer``.
    """
    file = _open_output(prefix)
    if tokenizer is not None and file.sidecar is not None and not is_same(file.sidecar.tokenizer, tokenizer.identity):
        log.debug(f"tokenizer identity of {file.prefix}: {file.sidecar.tokenizer}; given: {tokenizer.identity}")
        raise DataError(
            f"{file.prefix} was built with a different tokenizer than the given tokenizer. Name the tokenizer of the "
            "data, or omit it."
        )
    if tokenizer is not None and file.sidecar is not None and file.sidecar.vocab_size != tokenizer.vocab_size:
        raise DataError(
            f"{file.prefix}.meta.json must state the vocabulary size of the tokenizer, {tokenizer.vocab_size}, got "
            f"{file.sidecar.vocab_size}. It is damaged. Delete the file, or build the data again."
        )
    crc32, lowest, highest = _scan_tokens(file)
    vocab_size = tokenizer.vocab_size if tokenizer else file.sidecar.vocab_size if file.sidecar else highest + 1
    if lowest < 0 or highest >= vocab_size:
        raise DataError(f"{file.prefix}.bin: ids must be in 0 ... {vocab_size - 1}, got {lowest} ... {highest}")
    if file.sidecar is not None:
        _check_sidecar(file, file.sidecar, crc32, highest)
    documents = sorted(random.Random(seed).sample(range(file.num_documents), min(num_samples, file.num_documents)))
    samples = [
        (document, int(file.document_lengths[document]), _preview(file, document, tokenizer)) for document in documents
    ]
    return Verified(file.num_documents, file.num_tokens, file.sidecar is not None, samples)


def _open_output(prefix: str) -> IndexedDataset:
    if not any(Path(prefix + suffix).is_file() for suffix in (".bin", ".idx", ".commit", "")):
        raise DataError(f"--output-prefix {prefix} must name files to verify; {prefix}.bin and .idx do not exist")
    return IndexedDataset(prefix)


def _scan_tokens(file: IndexedDataset) -> tuple[int, int, int]:
    """Compute the crc32 of the ``.bin``, and find the smallest and the largest token id."""
    crc32, lowest, highest = 0, 0, -1
    with open(file.token_path, "rb") as stream:
        while data := stream.read(_READ_BYTES):
            tokens = np.frombuffer(data, file.dtype)
            crc32 = zlib.crc32(data, crc32)
            lowest, highest = min(lowest, int(tokens.min())), max(highest, int(tokens.max()))
    return crc32, lowest, highest


def _check_sidecar(file: IndexedDataset, sidecar: DatasetMetadata, crc32: int, highest: int) -> None:
    counts = {
        "documents": (sidecar.num_documents, file.num_documents),
        "tokens": (sidecar.num_tokens, file.num_tokens),
        "bytes in .bin": (sidecar.bin_bytes, file.num_tokens * file.dtype.itemsize),
        "crc32 of .bin": (sidecar.bin_crc32, crc32),
        "crc32 of .idx": (sidecar.idx_crc32, files.size_and_crc(file.index_path)[1]),
        "crc32 of .idx computed from its lengths": (sidecar.idx_crc32, _crc32_from_lengths(file)),
        "largest id": (sidecar.max_token_id, highest),
    }
    if mismatches := [
        f"{name} {stated}, found {actual}" for name, (stated, actual) in counts.items() if stated != actual
    ]:
        raise DataError(
            f"{file.prefix}.bin and .idx must match {file.prefix}.meta.json; {'; '.join(mismatches)}. "
            "They are damaged. Build them again."
        )
    if sidecar.has_eod:
        _check_ends(file, sidecar.eod_id)


def _crc32_from_lengths(file: IndexedDataset) -> int:
    """Compute the crc32 of the ``.idx`` that follows from the document lengths, including offsets and starts."""
    crc32 = 0
    for chunk in index_chunks(lambda: _length_blocks(file), file.num_documents, file.dtype):
        crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _check_ends(file: IndexedDataset, eod_id: int | None) -> None:
    tokens = np.memmap(file.token_path, file.dtype, "r") if file.num_tokens else np.zeros(0, file.dtype)
    start = first = 0
    for lengths in _length_blocks(file):
        ends = start + np.cumsum(lengths, dtype=np.int64)
        mismatches = np.flatnonzero(tokens[ends - 1] != eod_id)
        if len(mismatches):
            document = first + int(mismatches[0])
            raise DataError(
                f"{file.prefix}: each document must end with the id {eod_id}, but document {document} ends with "
                f"{tokens[ends[mismatches[0]] - 1]}. The files are damaged. Build them again."
            )
        start, first = int(ends[-1]), first + len(lengths)


def _length_blocks(file: IndexedDataset) -> Iterator[np.ndarray]:
    for start in range(0, file.num_documents, _LENGTHS_PER_BLOCK):
        yield np.array(file.document_lengths[start : start + _LENGTHS_PER_BLOCK])


def _preview(file: IndexedDataset, document: int, tokenizer: Tokenizer | None) -> str:
    ids = file.read(document, 0, min(int(file.document_lengths[document]), _SHOWN_TOKENS)).tolist()
    return repr(tokenizer.decode(ids)) if tokenizer else " ".join(map(str, ids))
