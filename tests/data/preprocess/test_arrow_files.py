"""Arrow files: both IPC formats, units of record batches, damage, folders that `datasets` wrote."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.data.preprocess import BadRecord, plan_units
from megatron.data.preprocess.tokenizer_corpus import sample
from megatron.errors import DataError
from tests.helpers.fake_store import make_empty_store
from tests.helpers.preprocess_job import read_documents

FORMATS = ("stream", "file")


def write_arrow(path: Path, table: Any, format: str = "stream", rows_per_batch: int = 3) -> Path:
    """Write a table in record batches of ``rows_per_batch``; "stream" as `datasets` does."""
    ipc = pytest.importorskip("pyarrow.ipc")
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(path, "wb") as file,
        (ipc.new_stream if format == "stream" else ipc.new_file)(file, table.schema) as writer,
    ):
        for batch in table.to_batches(max_chunksize=rows_per_batch):
            writer.write_batch(batch)
    return path


def test_missing_pyarrow_error_names_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.arrow").write_bytes(b"ARROW1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        DataError, match=r"c.arrow is an Arrow file, which needs pyarrow: pip install -e '.\[parquet\]'"
    ):
        plan_units([tmp_path], None)


@pytest.mark.parametrize("format", FORMATS)
def test_record_batches_are_units_and_positions_are_rows(tmp_path: Path, format: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    raw = arrow.array([b"a", b"", b"b\r\n", b"c", b"\xff d", None, b"e\x00"], arrow.binary())
    strings = arrow.Array.from_buffers(arrow.string(), 7, raw.buffers())
    meta = [{"title": f"t{row}", "raw": b"\xff", "day": None} for row in range(7)]
    table = arrow.table({"text": strings, "n": range(7), "meta": meta, "big": strings.slice(0, 4).take([0] * 7)})
    table = table.set_column(3, "big", table["big"].cast(arrow.large_string()))
    path = write_arrow(tmp_path / "c.arrow", table, format)
    assert [unit.name() for unit in plan_units([path], None, unit_bytes=1)] == [
        f"{path} record batches {batch_idx}:{batch_idx + 1}" for batch_idx in range(3)
    ]
    assert len(plan_units([path], None)) == 1
    for unit_bytes in (1, sys.maxsize):
        documents = read_documents([path], unit_bytes=unit_bytes)
        assert [text for text in documents if isinstance(text, str)] == ["a", "b\n", "c"]
        bad_records = [result for result in documents if isinstance(result, BadRecord)]
        assert [result.to_json()["row"] for result in bad_records] == [4, 5, 6]
        assert (
            "not UTF-8" in bad_records[0].reason
            and "got null" in bad_records[1].reason
            and "NUL" in bad_records[2].reason
        )
    assert read_documents([path], None, ["meta.title"]) == [f"t{row}" for row in range(7)]
    assert read_documents([path], None, ["meta.title", "big"])[:2] == ["t0\na", "t1\na"]
    for key, text in (
        ("txt", "must have a column 'txt' .* has only text, n, meta, big"),
        ("n", "must contain strings"),
    ):
        with pytest.raises(DataError, match=text):
            read_documents([path], None, [key])


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_arrow_file_raises_with_its_name(tmp_path: Path, format: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": [f"{row:04d}" * 99 for row in range(60)]})
    path = write_arrow(tmp_path / "c.arrow", table, format, rows_per_batch=20)
    content = path.read_bytes()
    for num_bytes in (len(content) * 2 // 3, 100, 7, 3, 0):
        path.write_bytes(content[:num_bytes])
        with pytest.raises(DataError, match="c.arrow must be a complete Arrow file; it is damaged"):
            read_documents([path])
    offsets = struct.pack("<3i", 0, 396, 792)  # of the texts in the first batch; ends alone are checked on opening
    corrupted = content.replace(offsets, struct.pack("<3i", 0, 396, 0x7FFFFF00), 1)
    assert corrupted != content
    path.write_bytes(corrupted)
    with pytest.raises(DataError, match="must be a complete Arrow file; it is damaged between row 0 and 20"):
        read_documents([path])


def test_arrow_file_with_wrong_extension_is_detected(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    for format, description in (("stream", "an Arrow stream"), ("file", "an Arrow file")):
        path = write_arrow(tmp_path / f"{format}.txt", arrow.table({"text": ["a"]}), format)
        with pytest.raises(
            DataError, match=f"looks like {description}; rename it to end in .arrow, or set --format arrow"
        ):
            read_documents([path])
        assert read_documents([path], "arrow") == ["a"]
    with pytest.raises(DataError, match="cannot be arrow"):
        plan_units(["-"], "arrow")


@pytest.mark.parametrize("format", FORMATS)
def test_object_store_yields_same_rows_as_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    arrow = pytest.importorskip("pyarrow")
    store = make_empty_store(monkeypatch, 50_000)
    path = write_arrow(tmp_path / "c.arrow", arrow.table({"text": [str(row) for row in range(9)]}), format)
    store.pipe("/b/data.arrow", path.read_bytes())
    store.pipe("/b/dataset_info.json", b"{}")
    store.pipe("/b/state.json", b'{"_data_files": [{"filename": "data.arrow"}]}')
    store.pipe("/b/cache-1.arrow", path.read_bytes())
    assert read_documents(["memory://b"], unit_bytes=1) == [str(row) for row in range(9)]
    units = plan_units(["memory://b"], None, unit_bytes=1)
    assert len(units) == (1 if format == "stream" else 3)  # a stream would have to be read to count its batches


def test_saved_dataset_folder_yields_its_data_files(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    root = tmp_path / "saved"
    for split, shards in (("train", 2), ("test", 1)):
        names = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
        for name in (*names, "cache-0123456789abcdef.arrow"):
            write_arrow(root / split / name, arrow.table({"text": [f"{split} {name[:10]}"]}))
        state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x"}
        (root / split / "state.json").write_text(json.dumps(state))
        (root / split / "dataset_info.json").write_text("{\n}")
    (root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read_documents([root]) == ["test data-00000", "train data-00000", "train data-00001"]
    assert read_documents([root / "train"]) == ["train data-00000", "train data-00001"]
    (root / "train" / names[0].replace("00000-of-00001", "00001-of-00002")).unlink()
    with pytest.raises(DataError, match="must contain all files that state.json lists; 1 are missing: data-00001-of"):
        read_documents([root])


def test_datasets_cache_folder_excludes_map_results(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    for name in ("stories-train.arrow", "cache-1f.arrow"):
        write_arrow(tmp_path / name, arrow.table({"text": [name]}))
    assert read_documents([tmp_path]) == ["cache-1f.arrow", "stories-train.arrow"]
    (tmp_path / "dataset_info.json").write_text("{}")
    assert read_documents([tmp_path]) == ["stories-train.arrow"]


def test_sample_of_arrow_file_counts_only_text_column(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    rows = [f"{row_idx:06d}" + "x" * 94 for row_idx in range(400)]
    write_arrow(tmp_path / "c.arrow", arrow.table({"text": rows, "other": ["unread" * 50] * 400}), rows_per_batch=100)
    sampled = list(sample([tmp_path], None, ["text"], 10_000))
    assert 95 <= len(sampled) <= 105 and sampled == list(sample([tmp_path], None, ["text"], 10_000))
