from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.data.preprocess import BadRecord, plan_units, readers
from megatron.errors import DataError
from tests.helpers.preprocess_job import read_documents


def test_missing_pyarrow_error_names_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"c.parquet is parquet, which needs pyarrow: pip install -e '.\[parquet\]'"):
        plan_units([tmp_path], None)


def write_parquet(path: Path, table: object, rows_per_group: int = 3) -> Path:
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=rows_per_group)
    return path


def test_row_groups_are_units_and_positions_are_rows(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    raw = arrow.array([b"a", b"", b"b\r\n", b"c", b"\xff d", None, b"e\x00"], arrow.binary())
    strings = arrow.Array.from_buffers(arrow.string(), 7, raw.buffers())
    table = arrow.table({"text": strings, "n": range(7), "meta": [{"title": f"t{row}"} for row in range(7)]})
    path = write_parquet(tmp_path / "c.parquet", table)
    names = [unit.name() for unit in plan_units([path], None, unit_bytes=1)]
    assert names == [f"{path} row groups {group_idx}:{group_idx + 1}" for group_idx in range(3)]
    documents = read_documents([path], unit_bytes=1)
    assert [text for text in documents if isinstance(text, str)] == ["a", "b\n", "c"]
    bad_records = [result for result in documents if isinstance(result, BadRecord)]
    assert [result.to_json()["row"] for result in bad_records] == [4, 5, 6]
    reasons = ["not UTF-8 text .invalid start byte", "must be a string, got null", "contains a NUL"]
    for result, reason in zip(bad_records, reasons, strict=True):
        with pytest.raises(DataError, match=rf"c.parquet row {result.byte_offset}: .*{reason}"):
            raise DataError(str(result))
    titles = [text for text in read_documents([path], None, ["meta.title"]) if isinstance(text, str)]
    assert titles == [f"t{row}" for row in range(7)]
    assert [result for result in read_documents([path], None, ["meta.title", "text"]) if isinstance(result, str)][
        :2
    ] == [
        "t0\na",
        "t1",
    ]
    for key, text in (
        ("txt", "must have a column 'txt' .* has only text, n, meta"),
        ("n", "must contain strings, got"),
    ):
        with pytest.raises(DataError, match=text):
            read_documents([path], None, [key])


def test_non_utf8_row_is_reported_with_column_names(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    raw = arrow.array([b"good", b"a\xff b", b"c"], arrow.binary())
    strings = arrow.Array.from_buffers(arrow.string(), 3, raw.buffers())
    nested = arrow.StructArray.from_arrays([strings], names=["title"])
    plain = arrow.array(["x", "y", "z"])
    path = write_parquet(tmp_path / "c.parquet", arrow.table({"text": strings, "meta": nested, "n.o": plain}))
    for keys, opening in (
        (["text"], '{"text":"a\\xff b"}'),
        (["meta.title"], '{"meta.title":"a\\xff b"}'),
        (["n.o", "text"], '{"n.o":"y","text":"a\\xff b"}'),
    ):
        (bad_record,) = [result for result in read_documents([path], None, keys) if isinstance(result, BadRecord)]
        assert (bad_record.byte_offset, bad_record.opening) == (1, opening) and "not UTF-8 text" in bad_record.reason


def test_dotted_name_prefers_column_and_duplicate_names_are_rejected(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    both_table = arrow.table({"a.b": ["column"], "a": [{"b": "field"}]})
    assert read_documents([write_parquet(tmp_path / "c.parquet", both_table)], None, ["a.b"]) == ["column"]
    single_table = arrow.table({"a.b": ["column"], "n": [1]})
    assert read_documents([write_parquet(tmp_path / "c.parquet", single_table)], None, ["a.b"]) == ["column"]
    duplicate_table = arrow.Table.from_arrays([arrow.array(["x"]), arrow.array(["y"])], names=["text", "text"])
    with pytest.raises(DataError, match="must have one column 'text' .--json-key., but has 2 of that name"):
        read_documents([write_parquet(tmp_path / "c.parquet", duplicate_table)])


def test_large_rows_are_read_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(readers, "_MAX_BATCH_BYTES", 1000)
    num_read, num_converted = [], []

    def record_batch(batch: Any) -> Any:
        num_read.append(batch.num_rows)
        num_converted.extend(record_slice.num_rows for record_slice in original_slices(batch))
        return original_slices(batch)

    original_slices = readers._slice_batch
    monkeypatch.setattr(readers, "_slice_batch", record_batch)
    for rows in (
        [f"{row_idx:02d}" * 150 for row_idx in range(40)],
        ["x" * 300] * 40,
    ):  # the second is 300 bytes on disk
        num_read.clear()
        num_converted.clear()
        assert read_documents([write_parquet(tmp_path / "c.parquet", arrow.table({"text": rows}), 40)]) == rows
        assert sum(num_read) == sum(num_converted) == 40 and max(num_converted) <= 3
        assert max(num_read) <= 3 or rows[0] == rows[1]
    raw = arrow.array([b"a" * 400, b"b" * 400, b"c" * 400, b"\xff" * 400], arrow.binary())
    batch = arrow.record_batch({"text": arrow.Array.from_buffers(arrow.string(), 4, raw.buffers())})
    assert len(list(readers.rows_as_json(batch, ["text"]))) == 4, (
        "a row that is no UTF-8 does not bring earlier ones again"
    )


def test_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    path = write_parquet(tmp_path / "c.parquet", arrow.table({"text": [str(row**9) for row in range(500)]}), 500)
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-9])
    with pytest.raises(DataError, match="c.parquet must be a complete parquet file"):
        read_documents([path])
    content[8:60] = bytes(52)
    path.write_bytes(content)
    with pytest.raises(DataError, match="c.parquet must be a complete parquet file; it is damaged at row 0"):
        read_documents([path])
