from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset, IndexedDatasetBuilder
from megatron.data.index_format import decode_index
from megatron.data.index_writer import index_chunks
from megatron.errors import DataError
from tests.helpers.token_data import write_documents, write_megatron_files


@pytest.mark.parametrize("vocab_size, dtype", [(65_499, np.uint16), (65_500, np.int32)])
def test_written_tokens_are_read_and_empty_documents_dropped(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    file = write_documents(tmp_path / "a", [3, 0, 5, 1], vocab_size=vocab_size)
    assert file.dtype == dtype and file.document_lengths.tolist() == [3, 5, 1] and file.num_tokens == 9
    assert [file.read(document).tolist() for document in range(3)] == [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    assert file.read(1, 2, 2).tolist() == [6, 7] and file.max_token_id == 9 and file.has_eod is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.meta.json"]


def test_written_bytes_match_format(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [2, 3])
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<2i", 2, 3) + struct.pack("<2q", 0, 4) + struct.pack("<3q", 0, 1, 2)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<5H", 1, 2, 3, 4, 5)


def test_megatron_files_open_and_sequences_of_document_are_joined(tmp_path: Path) -> None:
    write_megatron_files(tmp_path / "a", [2, 3, 0, 4], [0, 2, 2, 4])
    file = IndexedDataset(tmp_path / "a.bin")
    assert file.document_lengths.tolist() == [5, 0, 4] and file.max_token_id is None and file.has_eod is None
    assert file.read(0).tolist() == [0, 1, 2, 3, 4] and file.read(2).tolist() == [5, 6, 7, 8]


def test_without_document_index_each_sequence_is_document(tmp_path: Path) -> None:
    write_megatron_files(tmp_path / "a", [2, 3, 0, 4], [0])
    assert IndexedDataset(tmp_path / "a").document_lengths.tolist() == [2, 3, 0, 4]
    write_megatron_files(tmp_path / "b", [2, 3], [1])
    with pytest.raises(DataError, match="must increase from 0 to 2"):
        IndexedDataset(tmp_path / "b")


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_missing_file_is_named_with_build_command(tmp_path: Path, suffix: str) -> None:
    write_documents(tmp_path / "a", [3])
    (tmp_path / f"a{suffix}").unlink()
    with pytest.raises(DataError, match=rf"a\{suffix} does not exist.*tools/preprocess_data.py"):
        IndexedDataset(tmp_path / "a")


def _overwrite(path: Path, offset: int, replacement: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(replacement)] = replacement
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "offset, replacement, text",
    [
        (0, b"X", "starts with"),
        (9, b"\x02", "version must be 1, got 2"),
        (17, b"\x06", "must be one of .* got 6"),
        (18, struct.pack("<Q", 1 << 60), f"{1 << 60} sequences .* the file has"),
        (26, struct.pack("<Q", 1 << 62), "document starts need"),
        (34, struct.pack("<i", -1), "must not be negative, but sequence 0 has -1"),
        (34, struct.pack("<i", 4), "byte offsets do not follow"),
        (34 + 24, struct.pack("<q", 1), "must increase from 0 to 2"),
    ],
)
def test_damaged_index_is_rejected(tmp_path: Path, offset: int, replacement: bytes, text: str) -> None:
    write_documents(tmp_path / "a", [3, 4])
    _overwrite(tmp_path / "a.idx", offset, replacement)
    with pytest.raises(DataError, match=text):
        IndexedDataset(tmp_path / "a")


def test_every_index_truncation_is_rejected(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [3, 4])
    data = (tmp_path / "a.idx").read_bytes()
    for length in range(len(data)):
        with pytest.raises(DataError):
            decode_index(data[:length], tmp_path / "a.idx")


@pytest.mark.parametrize("size_change", [-1, 2])
def test_bin_size_mismatch_is_rejected_with_both_sizes(tmp_path: Path, size_change: int) -> None:
    write_documents(tmp_path / "a", [3, 4])
    data = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes((data + b"00")[: len(data) + size_change])
    with pytest.raises(DataError, match=rf"must have 14 bytes .* has {14 + size_change}"):
        IndexedDataset(tmp_path / "a")


def test_sidecar_of_other_files_is_rejected(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [3, 4])
    write_documents(tmp_path / "b", [4, 3])
    (tmp_path / "b.meta.json").rename(tmp_path / "a.meta.json")
    with pytest.raises(DataError, match="describes another .idx"):
        IndexedDataset(tmp_path / "a")


def test_fingerprint_depends_on_tokens_instead_of_name(tmp_path: Path) -> None:
    first, second = write_documents(tmp_path / "a", [3, 4]), write_documents(tmp_path / "b", [3, 4])
    assert first.fingerprint == second.fingerprint
    _overwrite(tmp_path / "b.bin", 4, b"\x09")
    assert IndexedDataset(tmp_path / "b").fingerprint != first.fingerprint


def test_first_out_of_vocabulary_token_is_located(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "a", [3, 4])
    assert file.find_invalid_id(8) is None and file.find_invalid_id(6) == (1, 2, 6)


def test_offsets_beyond_2_31_are_correct(tmp_path: Path) -> None:
    lengths = np.full(5, 2**30, np.int32)
    data = b"".join(bytes(chunk) for chunk in index_chunks(lambda: iter([lengths]), 5, np.dtype(np.int32)))
    assert np.frombuffer(data, "<i8", 5, 34 + 20)[-1] == 4 * 4 * 2**30
    assert decode_index(data, tmp_path)[0].tolist() == lengths.tolist()


def test_write_error_leaves_old_files_only(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [3])
    with (
        pytest.raises(DataError, match="0 ... 9, got 1 ... 10"),
        IndexedDatasetBuilder(tmp_path / "a", vocab_size=10) as writer,
    ):
        writer.add(np.array([1, 10]))
    assert IndexedDataset(tmp_path / "a").num_tokens == 3
    assert len(list(tmp_path.iterdir())) == 3
