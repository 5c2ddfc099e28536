"""One writer of token files: documents one by one, or whole files laid end to end."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset, IndexedDatasetBuilder, file_io, index_format
from megatron.data.index_writer import index_chunks
from megatron.errors import DataError
from tests.helpers.token_data import write_documents


@pytest.mark.parametrize("lengths", [[], [3], [1, 2, 3, 4, 5, 6, 7]])
def test_index_bytes_are_independent_of_chunk_size(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data.index_writer._STARTS_PER_CHUNK", 2)
    length_array, dtype = np.array(lengths, np.int32), np.dtype(np.uint16)
    ends = np.cumsum(length_array, dtype=np.int64)
    header = index_format.HEADER.pack(b"MMIDIDX\0\0", 1, 8, len(length_array), len(length_array) + 1)
    arrays = [length_array, (ends - length_array) * 2, np.arange(len(length_array) + 1, dtype=np.int64)]
    expected = header + b"".join(array.tobytes() for array in arrays)
    for chunk_size in (1, 3, 100):
        chunks = [length_array[start : start + chunk_size] for start in range(0, len(length_array), chunk_size)]
        assert b"".join(index_chunks(lambda: chunks, len(length_array), dtype)) == expected  # noqa: B023


def test_offsets_beyond_32_bits_are_exact() -> None:
    lengths = np.full(3, 2**31 - 1, np.int32)
    data = b"".join(index_chunks(lambda: [lengths], 3, np.dtype(np.int32)))
    assert np.frombuffer(data, "<i8", 3, 34 + 12).tolist() == [0, 4 * (2**31 - 1), 8 * (2**31 - 1)]


@pytest.mark.parametrize("in_kernel", [True, False])
def test_appended_files_equal_single_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_kernel: bool) -> None:
    def raise_cross_device(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(file_io, "_READ_BYTES", 100)
    if not in_kernel:
        monkeypatch.setattr("os.copy_file_range", raise_cross_device)
    lengths = [random.Random(0).randrange(1, 90) for _ in range(20)]
    datasets = [write_documents(tmp_path / "a", lengths[:7]), write_documents(tmp_path / "b", lengths[7:])]
    single = write_documents(tmp_path / "whole", lengths)
    token_offset = datasets[0].num_tokens
    data = np.fromfile(tmp_path / "b.bin", np.uint16) + token_offset  # as if both had been written in one go
    data.tofile(tmp_path / "b.bin")
    with IndexedDatasetBuilder(tmp_path / "c", vocab_size=50_000, tokenizer="t") as writer:
        for dataset, crc32 in zip(datasets, (None, zlib.crc32(data)), strict=True):
            with_empty = np.insert(dataset.document_lengths, [0, 3], 0)
            writer.append(
                Path(f"{dataset.prefix}.bin"),
                [with_empty[:4], with_empty[4:]],
                num_tokens=dataset.num_tokens,
                max_token_id=single.max_token_id or 0,
                crc32=crc32,
            )
    for suffix in (".bin", ".idx", ".meta.json"):
        assert (tmp_path / f"c{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_appended_file_with_wrong_metadata_is_rejected(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [3, 4])
    for overrides, text in (
        ({"num_tokens": 8}, "a.bin must have 16 bytes, but has 14"),
        ({"lengths": [np.array([3, 3])]}, "lengths sum to 6, but it has 7 tokens"),
        ({"max_token_id": 99}, "token ids must be in 0 ... 49, got 0 ... 99"),
    ):
        values = {"lengths": [np.array([3, 4])], "num_tokens": 7, "max_token_id": 7} | overrides
        with pytest.raises(DataError, match=text), IndexedDatasetBuilder(tmp_path / "b", vocab_size=50) as writer:
            writer.append(tmp_path / "a.bin", **values)  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "a.idx", "a.meta.json"}


def test_files_with_unknown_vocabulary_remove_old_sidecar(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [3, 4])
    with IndexedDatasetBuilder(tmp_path / "a", vocab_size=None, dtype=np.dtype(np.int32)) as writer:
        writer.add(np.array([70_000, 1]))
    file = IndexedDataset(tmp_path / "a")
    assert file.sidecar is None and file.dtype == np.int32 and file.read(0).tolist() == [70_000, 1]
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "a.idx"}
    with pytest.raises(ValueError, match="dtype is required"):
        IndexedDatasetBuilder(tmp_path / "a", vocab_size=None)


@pytest.mark.slow
def test_memory_is_independent_of_document_count(tmp_path: Path) -> None:
    import resource

    block = np.ones(1 << 20, np.int32)
    with IndexedDatasetBuilder(tmp_path / "a", vocab_size=300) as writer:
        writer.add(block, block)
        initial_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(31):
            writer.add(block, block)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - initial_kb
    assert writer.num_documents == 1 << 25 and grown_kb < 65536, "kB, for 670 MB of index"
