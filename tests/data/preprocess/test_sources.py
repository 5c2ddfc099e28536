from __future__ import annotations

import gzip
import os
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.data.preprocess import Unit, plan_units, read_unit, readers
from megatron.data.preprocess.corpus import unit_documents
from megatron.errors import DataError
from tests.helpers.preprocess_job import read_documents

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
FRAGMENTS = [b"a", b"\n", b"\n", b"\r\n", b" ", b"\n\n", b"\r", "窗".encode(), b"\xff", b"\xe2\x80\xa8", b"\x00"]
CONTENTS = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map(b"".join)


def records(units: list[Unit]) -> list[tuple[int, bytes]]:
    return [(record.byte_offset, record.data) for unit in units for record in read_unit(unit)]


def expected_lines(content: bytes) -> list[tuple[int, bytes]]:
    """Every line with its place, by cutting the whole content at line feeds."""
    start = 3 if content.startswith(b"\xef\xbb\xbf") else 0
    lines = []
    while start < len(content):
        stop = content.find(b"\n", start) if b"\n" in content[start:] else len(content)
        lines.append((start, content[start:stop]))
        start = stop + 1
    return lines


def expected_blocks(content: bytes) -> list[tuple[int, bytes]]:
    """Runs of lines that are not blank, each to the end of its last line."""
    runs: list[list[int]] = []
    is_open = False
    for start, line in expected_lines(content):
        if line.strip():
            stop = min(start + len(line) + 1, len(content))
            runs = [*runs[:-1], [runs[-1][0], stop]] if is_open else [*runs, [start, stop]]
        is_open = bool(line.strip())
    return [(start, content[start:stop]) for start, stop in runs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@settings(max_examples=60, deadline=None)
@given(CONTENTS, st.booleans(), st.lists(st.integers(4, 60), max_size=4))
@example(b"one\ntwo\n\nthree\n", False, [4])
@example(b"one\ntwo\n\nthree\n", False, [6, 9])
def test_records_are_independent_of_unit_boundaries(
    folder: Path, content: bytes, has_bom: bool, offsets: list[int]
) -> None:
    content = (b"\xef\xbb\xbf" if has_bom else b"") + content
    path = folder / "c"
    path.write_bytes(content)
    boundaries = sorted({0, *(offset for offset in offsets if offset < len(content)), len(content)})
    for format, expected in (("jsonl", expected_lines(content)), ("text-block", expected_blocks(content))):
        full_unit = Unit(0, str(path), format, 0, len(content), len(content))
        units = [
            replace(full_unit, start=start, stop=stop) for start, stop in zip(boundaries, boundaries[1:], strict=False)
        ]
        assert records([full_unit]) == records(units) == expected


@settings(max_examples=15, deadline=None)
@given(CONTENTS, st.integers(1, 9), st.sampled_from([1, 2, 5]))
def test_compressed_or_split_files_yield_same_records(
    folder: Path, content: bytes, unit_bytes: int, block_bytes: int
) -> None:
    content = content.replace(b"\x00", b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.data.preprocess.readers.BLOCK_BYTES", block_bytes)
        for suffix, compress in COMPRESS.items():
            path = folder / f"c.jsonl{suffix}"
            path.write_bytes(compress(content))
            for format, expected in (("jsonl", expected_lines(content)), ("text-block", expected_blocks(content))):
                assert records(plan_units([path], format, unit_bytes)) == expected


def test_byte_order_marks_between_concatenated_files_are_stripped(folder: Path) -> None:
    bom = b"\xef\xbb\xbf"
    content = b"".join(bom + b'{"text": "%d"}\n' % line_idx for line_idx in range(4)) + bom + bom + b"\n" + bom
    path = folder / "c.jsonl"
    path.write_bytes(content)
    for unit_bytes in range(4, len(content) + 1):
        units = plan_units([path], "jsonl", unit_bytes)
        documents = [text for unit in units for _, text in unit_documents(unit, ["text"])]
        assert documents == ["0", "1", "2", "3"], unit_bytes
    path.write_bytes(bom + b"one\n\n" + bom + b"two\n" + bom + b"more\n" + bom + b"\n" + bom + b"three\n")
    for unit_bytes in range(4, path.stat().st_size + 1):
        units = plan_units([path], "text-block", unit_bytes)
        documents = [text for unit in units for _, text in unit_documents(unit, None)]
        assert documents == ["one\n", "two\nmore\n", "three\n"], unit_bytes
    path.with_suffix(".txt").write_bytes(bom + b"one\n" + bom + b"two\n")
    assert read_documents([path.with_suffix(".txt")]) == ["one\ntwo\n"]


def test_units_are_byte_ranges_compressed_files_and_file_groups(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' * 10)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "y"}'))
    for name in "cdefg":
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    units = plan_units([tmp_path], None, 100)
    assert [unit.name() for unit in units] == [
        f"{tmp_path}/a.jsonl bytes 0:100",
        f"{tmp_path}/a.jsonl bytes 100:140",
        f"{tmp_path}/b.jsonl.gz",
        f"{tmp_path}/c.txt and 4 more files",
    ]
    assert [unit.idx for unit in units] == [0, 1, 2, 3] and [unit.size for unit in units[:2]] == [100, 40]
    assert [len(unit.paths) for unit in plan_units([tmp_path], "text-file", 20)] == [1, 1, 2, 2, 1]
    assert read_documents([tmp_path]) == ["x"] * 10 + ["y"] + [f"text of {name}" for name in "cdefg"]


def test_folders_are_walked_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/10.txt", "a.txt", ".hidden", "b/.git/x", "b-c/1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    assert read_documents([tmp_path]) == ["a.txt", "b/10.txt", "b/2.txt", "b-c/1.txt"]
    assert read_documents([tmp_path / "b/2.txt", tmp_path / "a.txt", tmp_path / "a.txt"]) == [
        "b/2.txt",
        "a.txt",
        "a.txt",
    ]


def test_invalid_inputs_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    for paths, text in (
        ([tmp_path / "gone"], "gone does not exist"),
        ([tmp_path / "empty"], "empty is a folder without files"),
        ([tmp_path / "pipe"], "must be a file or a folder, got a pipe.*--input -"),
        (["-", "-"], "can be read only once"),
        ([], "must name at least one"),
    ):
        with pytest.raises(DataError, match=text):
            plan_units(paths, None)
    with pytest.raises(DataError, match="--format must be one of jsonl, .* got csv"):
        plan_units([tmp_path / "pipe"], "csv")


def test_giant_line_is_one_record_and_excessive_line_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.jsonl"
    giant = b'{"text": "' + b"word " * 400_000 + b'"}'
    path.write_bytes(b'{"text": "a"}\n' + giant + b'\n{"text": "b"}\n')
    units = plan_units([path], None, 300_000)
    record_lengths = [[len(record.data) for record in read_unit(unit)] for unit in units]
    assert record_lengths == [[13, len(giant)], [], [], [], [], [], [13]]
    monkeypatch.setattr(readers, "_MAX_LINE_BYTES", 1_000_000)
    with pytest.raises(DataError, match="c.jsonl must have lines of at most 1000000 bytes.*jq -c"):
        read_documents([path])


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "a"}\n')
    (unit,) = plan_units([path], None)
    path.unlink()
    with pytest.raises(DataError, match="c.jsonl cannot be read: No such file"):
        list(read_unit(unit))
