from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.data.preprocess import BadRecord, plan_units, readers
from megatron.errors import DataError
from tests.helpers.preprocess_job import texts


def test_parquet_needs_pyarrow_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"c.parquet is parquet, which needs pyarrow: pip install -e '.\[parquet\]'"):
        plan_units([tmp_path], None)


def parquet_file(path: Path, table: object, rows: int = 3) -> Path:
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=rows)
    return path


def test_parquet_row_groups_are_units_and_places_are_rows(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    raw = arrow.array([b"a", b"", b"b\r\n", b"c", b"\xff d", None, b"e\x00"], arrow.binary())
    strings = arrow.Array.from_buffers(arrow.string(), 7, raw.buffers())
    table = arrow.table({"text": strings, "n": range(7), "meta": [{"title": f"t{row}"} for row in range(7)]})
    path = parquet_file(tmp_path / "c.parquet", table)
    names = [unit.name() for unit in plan_units([path], None, unit_bytes=1)]
    assert names == [f"{path} row groups {number}:{number + 1}" for number in range(3)]
    found = texts([path], unit_bytes=1)
    assert [text for text in found if isinstance(text, str)] == ["a", "b\n", "c"]
    bad = [result for result in found if isinstance(result, BadRecord)]
    assert [result.to_json()["row"] for result in bad] == [4, 5, 6]
    reasons = ["not UTF-8 text .invalid start byte", "must be a string, got null", "contains a NUL"]
    for result, reason in zip(bad, reasons, strict=True):
        with pytest.raises(DataError, match=rf"c.parquet row {result.byte_offset}: .*{reason}"):
            raise DataError(str(result))
    good = [text for text in texts([path], None, ["meta.title"]) if isinstance(text, str)]
    assert good == [f"t{row}" for row in range(7)]
    assert [result for result in texts([path], None, ["meta.title", "text"]) if isinstance(result, str)][:2] == [
        "t0\na",
        "t1",
    ]
    for key, text in (
        ("txt", "must have a column 'txt' .* has only text, n, meta"),
        ("n", "must contain strings, got"),
    ):
        with pytest.raises(DataError, match=text):
            texts([path], None, [key])


def test_a_row_that_is_no_utf8_is_told_with_the_names_of_its_columns(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    raw = arrow.array([b"good", b"a\xff b", b"c"], arrow.binary())
    strings = arrow.Array.from_buffers(arrow.string(), 3, raw.buffers())
    nested = arrow.StructArray.from_arrays([strings], names=["title"])
    plain = arrow.array(["x", "y", "z"])
    path = parquet_file(tmp_path / "c.parquet", arrow.table({"text": strings, "meta": nested, "n.o": plain}))
    for keys, opening in (
        (["text"], '{"text":"a\\xff b"}'),
        (["meta.title"], '{"meta.title":"a\\xff b"}'),
        (["n.o", "text"], '{"n.o":"y","text":"a\\xff b"}'),
    ):
        (bad,) = [result for result in texts([path], None, keys) if isinstance(result, BadRecord)]
        assert (bad.byte_offset, bad.opening) == (1, opening) and "not UTF-8 text" in bad.reason


def test_a_name_with_a_dot_is_a_column_first_and_two_of_a_name_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    both = arrow.table({"a.b": ["column"], "a": [{"b": "field"}]})
    assert texts([parquet_file(tmp_path / "c.parquet", both)], None, ["a.b"]) == ["column"]
    alone = arrow.table({"a.b": ["column"], "n": [1]})
    assert texts([parquet_file(tmp_path / "c.parquet", alone)], None, ["a.b"]) == ["column"]
    twice = arrow.Table.from_arrays([arrow.array(["x"]), arrow.array(["y"])], names=["text", "text"])
    with pytest.raises(DataError, match="must have one column 'text' .--json-key., but has 2 of that name"):
        texts([parquet_file(tmp_path / "c.parquet", twice)])


def test_large_rows_are_taken_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(readers, "_BYTES_AT_ONCE", 1000)
    read, converted = [], []

    def note(batch: Any) -> Any:
        read.append(batch.num_rows)
        converted.extend(part.num_rows for part in slices(batch))
        return slices(batch)

    slices = readers._slices
    monkeypatch.setattr(readers, "_slices", note)
    for rows in ([f"{number:02d}" * 150 for number in range(40)], ["x" * 300] * 40):  # the second is 300 bytes on disk
        read.clear()
        converted.clear()
        assert texts([parquet_file(tmp_path / "c.parquet", arrow.table({"text": rows}), 40)]) == rows
        assert sum(read) == sum(converted) == 40 and max(converted) <= 3
        assert max(read) <= 3 or rows[0] == rows[1]
    raw = arrow.array([b"a" * 400, b"b" * 400, b"c" * 400, b"\xff" * 400], arrow.binary())
    batch = arrow.record_batch({"text": arrow.Array.from_buffers(arrow.string(), 4, raw.buffers())})
    assert len(list(readers.rows_as_json(batch, ["text"]))) == 4, (
        "a row that is no UTF-8 does not bring earlier ones again"
    )


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    path = parquet_file(tmp_path / "c.parquet", arrow.table({"text": [str(row**9) for row in range(500)]}), 500)
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-9])
    with pytest.raises(DataError, match="c.parquet must be a complete parquet file"):
        texts([path])
    content[8:60] = bytes(52)
    path.write_bytes(content)
    with pytest.raises(DataError, match="c.parquet must be a complete parquet file; it is damaged at row 0"):
        texts([path])
