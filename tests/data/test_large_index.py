"""Files of all kinds, read as small ones (whole) and as large ones (in blocks): the same documents and errors."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data import IndexedDataset, IndexedDatasetBuilder, document_table, large_index
from megatron.data.cache import IndexCache
from megatron.errors import DataError
from tests.data.megatron_writers import write_2020, write_core
from tests.helpers.token_data import write_documents

DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6], []], [], [[7, 8, 9, 10]], [[11]]]
JOINED_DOCUMENTS = [[1, 2, 3], [4, 5, 6], [], [7, 8, 9, 10], [11]]


@pytest.fixture(params=["small", "large"])
def index_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "large":
        treat_all_files_as_large(monkeypatch)
    return request.param


def treat_all_files_as_large(patch: pytest.MonkeyPatch) -> None:
    """Let every file count as large, in blocks of few."""
    patch.setattr(document_table, "LARGE_FROM_SEQUENCES", 0)
    patch.setattr(large_index, "STRIDE", 2)
    patch.setattr(large_index, "_BLOCK", 4)
    patch.setattr(large_index, "_DOCUMENTS_PER_BLOCK", 2)


def texts(file: IndexedDataset) -> list[list[int]]:
    return [file.read(document).tolist() for document in range(file.num_documents)]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_files_of_both_megatron_writers_open(tmp_path: Path, index_size: str, dtype: str) -> None:
    write_2020(tmp_path / "a", DOCUMENTS, dtype)
    write_core(tmp_path / "b", DOCUMENTS, dtype)
    assert (tmp_path / "a.idx").read_bytes() == (tmp_path / "b.idx").read_bytes()
    for reader in ("mmap", "pread"):
        file = IndexedDataset(tmp_path / "b", reader=reader)
        assert texts(file) == JOINED_DOCUMENTS and file.dtype == dtype and file.num_tokens == 11
        assert file.starts.tolist() == [0, 3, 6, 6, 10, 11] and file.byte_offset(3, 1) == 7 * file.dtype.itemsize
        assert file.find_invalid_id(8) == (3, 1, 8) and file.find_invalid_id(12) is None


@pytest.mark.parametrize("code", [0, 6, 7, 9])
def test_unsupported_token_type_is_rejected_with_code(tmp_path: Path, index_size: str, code: int) -> None:
    write_core(tmp_path / "a", DOCUMENTS, "int32", dtype_code=code)
    with pytest.raises(DataError, match=rf"a.idx: token type code must be one of .*, got {code}"):
        IndexedDataset(tmp_path / "a")


def test_multimodal_dataset_is_rejected(tmp_path: Path, index_size: str) -> None:
    write_core(tmp_path / "a", DOCUMENTS, "uint16", modes=[0, 0, 1, 0, 0, 1])
    with pytest.raises(DataError, match="6 sequences .* one more byte per sequence, .* multimodal"):
        IndexedDataset(tmp_path / "a")


def test_lazy_format_is_rejected(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [3])
    (tmp_path / "a.idx").write_bytes(b"TNTIDX\0\0" + struct.pack("<6Q", 1, 4, 4, 0, 0, 1))
    with pytest.raises(DataError, match="lazy and cached .* --dataset-impl mmap"):
        IndexedDataset(tmp_path / "a")


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 7), min_size=1, max_size=20), st.data())
def test_large_and_small_index_readers_agree(tmp_path: Path, lengths: list[int], data: st.DataObject) -> None:
    inner_bounds = data.draw(st.sets(st.integers(0, len(lengths))))
    bounds = data.draw(st.sampled_from([sorted({0, len(lengths), *inner_bounds}), list(range(len(lengths) + 1))]))
    tokens, start = [], 0
    for length in lengths:
        tokens.append(list(range(start, start + length)))
        start += length
    write_core(
        tmp_path / "a",
        [tokens[start_idx:stop_idx] for start_idx, stop_idx in zip(bounds, bounds[1:], strict=False)],
        "uint16",
    )
    small = IndexedDataset(tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch:
        treat_all_files_as_large(patch)
        for reader in ("mmap", "pread"):
            for cache in (None, IndexCache(tmp_path / "cache")):
                large = IndexedDataset(tmp_path / "a", reader=reader, cache=cache)
                assert large.document_lengths.tolist() == small.document_lengths.tolist() and texts(large) == texts(
                    small
                )
                assert large.starts.tolist() == small.starts.tolist()
                for token_idx in range(start):
                    assert large._table.find_document(token_idx) == small._table.find_document(token_idx)


@pytest.mark.parametrize(
    "offset, replacement, text",
    [
        (34, struct.pack("<i", -1), "must not be negative, but sequence 0 has -1"),
        (34 + 4 * 4, struct.pack("<i", -5), "must not be negative, but sequence 4 has -5"),
        (34, struct.pack("<i", 4), "byte offsets do not follow"),
        (34 + 20 + 32, struct.pack("<q", 1), "byte offsets do not follow"),
        (34 + 60, struct.pack("<q", 1), "must increase from 0 to 5"),
        (34 + 60 + 16, struct.pack("<q", 9), "must increase from 0 to 5"),
        (34 + 60 + 40, struct.pack("<q", 4), "must increase from 0 to 5"),
        (26, struct.pack("<Q", 1 << 62), "document starts need"),
    ],
)
@pytest.mark.parametrize("has_sidecar", [True, False])
def test_damaged_index_is_rejected(
    tmp_path: Path, index_size: str, has_sidecar: bool, offset: int, replacement: bytes, text: str
) -> None:
    write_documents(tmp_path / "a", [3, 4, 2, 1, 6])
    if not has_sidecar:
        (tmp_path / "a.meta.json").unlink()
    data = bytearray((tmp_path / "a.idx").read_bytes())
    data[offset : offset + len(replacement)] = replacement
    (tmp_path / "a.idx").write_bytes(bytes(data))
    with pytest.raises(DataError, match=text):
        IndexedDataset(tmp_path / "a")


def test_lengths_not_matching_bin_size_are_rejected(tmp_path: Path, index_size: str) -> None:
    write_documents(tmp_path / "a", [3, 4])
    (tmp_path / "a.bin").write_bytes(bytes(13))
    with pytest.raises(DataError, match="must have 14 bytes .* has 13"):
        IndexedDataset(tmp_path / "a")


def test_sidecar_of_other_files_is_rejected(tmp_path: Path, index_size: str) -> None:
    write_documents(tmp_path / "a", [3, 4])
    write_documents(tmp_path / "b", [4, 3, 1])
    (tmp_path / "b.meta.json").rename(tmp_path / "a.meta.json")
    with pytest.raises(DataError, match="describes another .idx"):
        IndexedDataset(tmp_path / "a")


def test_oversized_document_is_named(tmp_path: Path, index_size: str) -> None:
    lengths = np.full(3, 2**30, "<i4")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 1, 3, 3)
    offsets, starts = np.arange(3, dtype="<i8") * 2**30, np.array([0, 1, 3], "<i8")
    (tmp_path / "a.idx").write_bytes(head + lengths.tobytes() + offsets.tobytes() + starts.tobytes())
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(3 * 2**30)
    with pytest.raises(DataError, match=rf"document 1 have {2**31}"):
        IndexedDataset(tmp_path / "a")


def test_fingerprint_of_large_file_depends_on_all_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    treat_all_files_as_large(monkeypatch)
    write_documents(tmp_path / "a", [3, 4, 2, 1, 6])
    fingerprints = [IndexedDataset(tmp_path / "a", reader=reader).fingerprint for reader in ("mmap", "pread")]
    (tmp_path / "a.meta.json").unlink()
    fingerprints.append(IndexedDataset(tmp_path / "a").fingerprint)
    assert len(set(fingerprints)) == 1
    write_documents(tmp_path / "a", [3, 4, 1, 2, 6])
    assert IndexedDataset(tmp_path / "a").fingerprint not in fingerprints


def test_index_fingerprints_are_stable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints hold them; the first was written down before large files were told apart."""
    with IndexedDatasetBuilder(tmp_path / "a", vocab_size=99) as writer:
        writer.add(np.arange(9), np.array([4, 5]))
    small_fingerprint = IndexedDataset(tmp_path / "a").fingerprint
    treat_all_files_as_large(monkeypatch)
    assert (small_fingerprint, IndexedDataset(tmp_path / "a").fingerprint) == FINGERPRINTS


FINGERPRINTS = ("47b7d05bd0075d0f", "20346886385b03a7")
