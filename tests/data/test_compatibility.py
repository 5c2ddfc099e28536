"""Our files are Megatron's, to the byte: a writer and a reader of the format written here from its table alone."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import IndexedDataset, IndexedDatasetBuilder
from megatron.errors import DataError

U16, I32 = (8, "<u2", 50_000), (4, "<i4", 100_000)
"""Code in the index, type, a vocabulary of ours that has it."""


def encode_reference(documents: list[list[int]], code: int, dtype: str) -> tuple[bytes, bytes]:
    """Return ``.bin`` and ``.idx`` of one sequence a document, as Megatron-LM of 2020 and of today writes them."""
    tokens = b"".join(np.array(document, dtype).tobytes() for document in documents)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(document)) for document in documents)
    offset = 0
    for document in documents:
        index += struct.pack("<q", offset)
        offset += len(document) * np.dtype(dtype).itemsize
    return tokens, index + b"".join(struct.pack("<q", document_idx) for document_idx in range(len(documents) + 1))


def decode_reference(prefix: Path) -> list[list[int]]:
    """Return the documents as a reader of Megatron-LM finds them: by byte offset and length of each sequence."""
    index, tokens = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    _, code, num_sequences, num_starts = struct.unpack_from("<QBQQ", index, 9)
    dtype = {8: "<u2", 4: "<i4"}[code]
    lengths = np.frombuffer(index, "<i4", num_sequences, 34)
    offsets = np.frombuffer(index, "<i8", num_sequences, 34 + 4 * num_sequences)
    starts = np.frombuffer(index, "<i8", num_starts, 34 + 12 * num_sequences)
    assert starts.tolist() == list(range(num_sequences + 1))
    return [
        np.frombuffer(tokens, dtype, length, offset).tolist() for length, offset in zip(lengths, offsets, strict=True)
    ]


@pytest.mark.parametrize("code, dtype, vocab_size", [U16, I32], ids=["u16", "i32"])
@settings(max_examples=8, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 49_999), min_size=1, max_size=5), min_size=1, max_size=6))
def test_our_files_equal_reference_format_bytes(
    tmp_path_factory: pytest.TempPathFactory, code: int, dtype: str, vocab_size: int, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("ours") / "c"
    with IndexedDatasetBuilder(prefix, vocab_size=vocab_size) as writer:
        writer.add(
            np.concatenate([np.array(document) for document in documents]),
            np.array([len(document) for document in documents]),
        )
    tokens, index = encode_reference(documents, code, dtype)
    assert prefix.with_suffix(".bin").read_bytes() == tokens
    assert prefix.with_suffix(".idx").read_bytes() == index
    assert decode_reference(prefix) == documents


@pytest.mark.parametrize("code, dtype", [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatron_files_of_every_dtype_open(tmp_path: Path, code: int, dtype: str) -> None:
    documents = [[1, 2, 3], [4], [5, 127]]
    for suffix, content in zip((".bin", ".idx"), encode_reference(documents, code, dtype), strict=True):
        (tmp_path / f"c{suffix}").write_bytes(content)
    file = IndexedDataset(tmp_path / "c")
    assert [file.read(document_idx).tolist() for document_idx in range(3)] == documents


@pytest.mark.parametrize(
    "offset, replacement, message",
    [
        (17, bytes([6]), "code must be one of .* got 6"),  # float in 2020, float64 today
        (17, bytes([7]), "got 7"),
        (0, b"XXXX", "XXXX"),
        (34, struct.pack("<i", 2), "offsets"),
    ],
    ids=["code-6", "code-7", "magic", "length"],
)
def test_corrupted_header_is_rejected_with_value(tmp_path: Path, offset: int, replacement: bytes, message: str) -> None:
    tokens, index = encode_reference([[1, 2, 3], [4]], 8, "<u2")
    (tmp_path / "c.bin").write_bytes(tokens)
    (tmp_path / "c.idx").write_bytes(index[:offset] + replacement + index[offset + len(replacement) :])
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "c")


def test_lengths_not_matching_bin_size_are_rejected_with_both_sizes(tmp_path: Path) -> None:
    tokens, index = encode_reference([[1, 2, 3], [4]], 8, "<u2")
    (tmp_path / "c.bin").write_bytes(tokens[:-2])
    (tmp_path / "c.idx").write_bytes(index)
    with pytest.raises(DataError, match="8 bytes.* has 6"):
        IndexedDataset(tmp_path / "c")
