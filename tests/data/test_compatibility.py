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


def written_by_hand(documents: list[list[int]], code: int, kind: str) -> tuple[bytes, bytes]:
    """Return ``.bin`` and ``.idx`` of one sequence a document, as Megatron-LM of 2020 and of today writes them."""
    tokens = b"".join(np.array(document, kind).tobytes() for document in documents)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(document)) for document in documents)
    place = 0
    for document in documents:
        index += struct.pack("<q", place)
        place += len(document) * np.dtype(kind).itemsize
    return tokens, index + b"".join(struct.pack("<q", number) for number in range(len(documents) + 1))


def read_by_hand(prefix: Path) -> list[list[int]]:
    """Return the documents as a reader of Megatron-LM finds them: by byte offset and length of each sequence."""
    index, tokens = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    _, code, count, num_starts = struct.unpack_from("<QBQQ", index, 9)
    kind = {8: "<u2", 4: "<i4"}[code]
    lengths = np.frombuffer(index, "<i4", count, 34)
    offsets = np.frombuffer(index, "<i8", count, 34 + 4 * count)
    starts = np.frombuffer(index, "<i8", num_starts, 34 + 12 * count)
    assert starts.tolist() == list(range(count + 1))
    return [
        np.frombuffer(tokens, kind, length, offset).tolist() for length, offset in zip(lengths, offsets, strict=True)
    ]


@pytest.mark.parametrize("code, kind, vocab_size", [U16, I32], ids=["u16", "i32"])
@settings(max_examples=8, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 49_999), min_size=1, max_size=5), min_size=1, max_size=6))
def test_our_files_are_those_of_the_format_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory, code: int, kind: str, vocab_size: int, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("ours") / "c"
    with IndexedDatasetBuilder(prefix, vocab_size=vocab_size) as writer:
        writer.add(np.concatenate([np.array(d) for d in documents]), np.array([len(d) for d in documents]))
    tokens, index = written_by_hand(documents, code, kind)
    assert prefix.with_suffix(".bin").read_bytes() == tokens
    assert prefix.with_suffix(".idx").read_bytes() == index
    assert read_by_hand(prefix) == documents


@pytest.mark.parametrize("code, kind", [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_files_of_every_type_of_megatron_open(tmp_path: Path, code: int, kind: str) -> None:
    documents = [[1, 2, 3], [4], [5, 127]]
    for suffix, content in zip((".bin", ".idx"), written_by_hand(documents, code, kind), strict=True):
        (tmp_path / f"c{suffix}").write_bytes(content)
    file = IndexedDataset(tmp_path / "c")
    assert [file.read(number).tolist() for number in range(3)] == documents


@pytest.mark.parametrize(
    "place, new, message",
    [
        (17, bytes([6]), "code must be one of .* got 6"),  # float in 2020, float64 today
        (17, bytes([7]), "got 7"),
        (0, b"XXXX", "XXXX"),
        (34, struct.pack("<i", 2), "offsets"),
    ],
    ids=["code-6", "code-7", "magic", "length"],
)
def test_what_is_no_such_file_is_refused_with_what_was_found(
    tmp_path: Path, place: int, new: bytes, message: str
) -> None:
    tokens, index = written_by_hand([[1, 2, 3], [4]], 8, "<u2")
    (tmp_path / "c.bin").write_bytes(tokens)
    (tmp_path / "c.idx").write_bytes(index[:place] + new + index[place + len(new) :])
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "c")


def test_lengths_that_do_not_add_up_to_the_bin_are_refused_with_both_numbers(tmp_path: Path) -> None:
    tokens, index = written_by_hand([[1, 2, 3], [4]], 8, "<u2")
    (tmp_path / "c.bin").write_bytes(tokens[:-2])
    (tmp_path / "c.idx").write_bytes(index)
    with pytest.raises(DataError, match="8 bytes.* has 6"):
        IndexedDataset(tmp_path / "c")
