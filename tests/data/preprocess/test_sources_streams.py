from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard

from megatron.data.preprocess import BadRecord, encode, parse, plan_units, read_unit
from megatron.data.preprocess.corpus import unit_documents
from megatron.data.preprocess.readers import _COMPRESSED_CHUNK_BYTES
from megatron.errors import DataError
from tests.helpers.preprocess_job import Corpus, read_documents

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize(
    "name, content, text",
    [
        ("c.jsonl", gzip.compress(b"x", mtime=0), "looks like gzip; rename it to end in .gz"),
        ("c.jsonl", zstandard.compress(b"x"), "looks like zstandard; rename it to end in .zst"),
        ("c.jsonl.gz", b'{"text": "a"}\n', "must be a .gz file; its first bytes are 7b 22.*remove .gz"),
        ("c.jsonl.gz", gzip.compress(b"%PDF-1.7", mtime=0), "(decompressed) must be UTF-8 text; it looks like PDF"),
        ("c.tar.gz", gzip.compress(bytes(257) + b"ustar\x0000", mtime=0), "looks like tar; unpack it"),
        ("c.txt", b"\xfd7zXZ\x00", "looks like xz; unpack it: xz -d"),
        ("c.txt", b"BZh91AY", "looks like bzip2"),
        ("c.txt", b"PK\x03\x04", "looks like zip"),
        ("c.txt", b"PAR1xx", "looks like parquet; rename it to end in .parquet"),
        ("c.txt", b"MMIDIDX\x00\x00", "looks like a token index"),
        ("c.txt", "words".encode("utf-16"), "looks like UTF-16; convert it: iconv"),
        ("c.txt", "words".encode("utf-16-le"), "looks like a binary file or UTF-16"),
        ("c.txt", bytes(100), "looks like a binary file"),
        ("c.parquet", b"words and words", "must be a complete parquet file"),
        ("c.parquet.gz", b"words", "parquet files are compressed internally"),
    ],
)
def test_non_text_files_are_named_with_remedy(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_documents([tmp_path / name])
    assert str(tmp_path / name) in str(raised.value)
    assert all(fragment in str(raised.value) for fragment in text.split(".*"))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    "value, indent, remedy",
    [
        ([{"text": "a"}, {"text": "b"}], 2, "one JSON array. Write each object on its own line: jq -c '.[]'"),
        ({"text": "a"}, 4, "objects that span several lines. Write each object on its own line: jq -c '.'"),
        ([{"text": "a"}], None, "got a list; write each element of a JSON array on its own line: jq -c '.[]'"),
    ],
)
def test_multi_line_json_is_reported_once_with_remedy(
    tmp_path: Path, suffix: str, value: object, indent: int | None, remedy: str
) -> None:
    corpus = Corpus(tmp_path)
    path = corpus.write(COMPRESS[suffix](json.dumps(value, indent=indent).encode() + b"\n"), f"c.jsonl{suffix}")
    with pytest.raises(DataError) as error:
        corpus.preprocess(inputs=[path], unit_bytes=16)
    assert remedy in str(error.value) and str(path) in str(error.value) and str(error.value).count("jq") == 1
    assert "not JSON" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    ['\n [\n{"text": "a"}', '[{"text": "a"},\n{"text": "b"}]', '[{\n"text": "a"}]', '\ufeff[\r\n  {"text": "a"}\r\n]'],
)
def test_json_arrays_in_any_layout_are_detected(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_bytes(content.encode())
    with pytest.raises(DataError, match="c.json must have one JSON object on each line; it looks like one JSON array"):
        read_documents([tmp_path])


def test_bad_first_line_stays_bad_line(tmp_path: Path) -> None:
    for first in ("[note] begin", '["a"]', '{"text": "a', "{}"):
        (tmp_path / "c.jsonl").write_text(first + '\n{"text": "b"}\n')
        bad_record, text = read_documents([tmp_path])
        assert isinstance(bad_record, BadRecord) and text == "b"


def documents(path: Path) -> Iterator[str | BadRecord]:
    return (text for unit in plan_units([path], None) for _, text in unit_documents(unit, ["text"]))


def test_flipped_bit_raises_damaged_file_instead_of_bad_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "CHUNK_BYTES", 20_000)
    rng, corpus = random.Random(0), Corpus(tmp_path)
    content = b"".join(b'{"text": "%s"}\n' % rng.randbytes(40).hex().encode() for _ in range(3000))
    packed = gzip.compress(content, mtime=0)
    assert len(packed) > 2 * _COMPRESSED_CHUNK_BYTES["gz"], (
        "else the checksum at the end is read with the first bad line"
    )
    num_bad_before_error = 0
    for byte_idx in (2000, 20_000, 50_000):
        damaged = bytearray(packed)
        damaged[byte_idx] ^= 16
        path = corpus.write(damaged, "c.jsonl.gz")
        for run in (
            lambda path=path: corpus.preprocess(inputs=[path]),
            lambda path=path: corpus.preprocess(inputs=[path], max_bad_lines=1000),
            lambda path=path: any(isinstance(text, BadRecord) for text in documents(path)),
        ):
            with pytest.raises(DataError, match="c.jsonl.gz must be a complete .gz file; it is damaged before byte"):
                run()
        lines = (parse(record, ["text"]) for unit in plan_units([path], None) for record in read_unit(unit))
        with suppress(DataError):
            num_bad_before_error += any(isinstance(line, BadRecord) for line in lines)
    assert num_bad_before_error, "else it shows nothing"
    summary = corpus.preprocess(inputs=[corpus.write(gzip.compress(content + b"x\n"), "c.jsonl.gz")], max_bad_lines=1)
    assert (summary.num_bad, summary.num_documents) == (1, 3000), "a whole file's bad line is one"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_or_truncated_stream_raises_with_position(tmp_path: Path, suffix: str) -> None:
    content = b"".join(b'{"text": "%d"}\n' % line_idx**5 for line_idx in range(3000))
    packed = bytearray(COMPRESS[suffix](content))
    path = tmp_path / f"c.jsonl{suffix}"
    for stop in (len(packed) - 1, len(packed) // 2, 5):
        path.write_bytes(packed[:stop])
        with pytest.raises(DataError, match=rf"complete {suffix} file; it is truncated: it ends at byte {stop}, .*-t"):
            read_documents([path])
    packed[len(packed) // 2] ^= 255
    path.write_bytes(packed)
    if suffix == ".gz":  # the frames of zstandard.compress have no checksum
        with pytest.raises(DataError, match="damaged before byte [0-9]+ .* bytes of text"):
            read_documents([path])
    path.write_bytes(COMPRESS[suffix](b'{"text": "1"}\n') * 2 + (bytes(600) if suffix == ".gz" else b""))
    assert read_documents([path]) == ["1", "1"]
    path.write_bytes(b"")
    assert read_documents([path]) == []


def test_zstandard_checksums_large_windows_and_skippable_frames_are_read(tmp_path: Path) -> None:
    content = b'{"text": "x"}\n' * 2000
    parameters = zstandard.ZstdCompressionParameters(window_log=29, write_checksum=True, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = bytearray(compressor.compress(content) + compressor.flush())
    path = tmp_path / "c.jsonl.zst"
    path.write_bytes(packed)
    assert len(read_documents([path])) == 2000
    skippable_frame = b"\x50\x2a\x4d\x18\x02\x00\x00\x00ab"  # pzstd and seekable files have frames without text
    path.write_bytes(skippable_frame + packed + skippable_frame + packed)
    assert len(read_documents([path])) == 4000
    packed[-1] ^= 1
    path.write_bytes(packed)
    with pytest.raises(DataError, match="damaged before byte"):
        read_documents([path])


@pytest.fixture
def standard_input(tmp_path: Path) -> Iterator[Callable[[bytes], None]]:
    saved_descriptor = os.dup(0)

    def redirect(content: bytes) -> None:
        (tmp_path / "stdin").write_bytes(content)
        file = os.open(tmp_path / "stdin", os.O_RDONLY)
        os.dup2(file, 0)
        os.close(file)

    yield redirect
    os.dup2(saved_descriptor, 0)
    os.close(saved_descriptor)


def test_standard_input_is_one_unit_of_json_lines(standard_input: Callable[[bytes], None]) -> None:
    standard_input(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}')
    (unit,) = plan_units(["-"], None, 4)
    assert unit.name() == "standard input" and unit.size == 0
    assert [(record.path, record.line) for record in read_unit(unit)] == [("-", 1), ("-", 2)]
    standard_input(gzip.compress(b"x"))
    with pytest.raises(DataError, match="--input - must be UTF-8 text; it looks like gzip"):
        list(read_unit(unit))
    standard_input(b'[\n  {"text": "a"}\n]\n')
    with pytest.raises(DataError, match=r"--input - must have one JSON object on each line; .* jq -c '.\[\]'"):
        list(read_unit(unit))
    with pytest.raises(DataError, match="cannot be parquet"):
        plan_units(["-"], "parquet")
