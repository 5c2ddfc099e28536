"""What Spark and datatrove have written is read as it is, in a stated order; what they have not finished is refused."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.data.preprocess import find_inputs, plan_units, readers
from megatron.errors import DataError
from tests.helpers.preprocess_job import END_OF_TEXT, Corpus, read_documents

SPARK_JOB_ID = "6a1d0c0e-7d3e-4c1b-9d55-2f0c7a4f7f11"


def write_parquet(path: Path, rows: list[dict[str, Any]], rows_per_group: int = 1 << 20) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = None if rows else arrow.schema([("text", arrow.string())])
    parquet.write_table(
        arrow.Table.from_pylist(rows, schema), path, row_group_size=rows_per_group, compression="snappy"
    )
    return path


def write_spark(folder: Path, partitions: list[list[str]]) -> Path:
    """Write a folder as ``DataFrame.write.parquet`` does; a part may have no rows, and no row groups then."""
    for part_idx, partition in enumerate(partitions):
        name = f"part-{part_idx:05d}-{SPARK_JOB_ID}-c000.snappy.parquet"
        write_parquet(folder / name, [{"text": text, "n": len(text)} for text in partition])
        (folder / f".{name}.crc").write_bytes(b"crc\x00\x00\x00\x02\x00")
    (folder / "_SUCCESS").touch()
    (folder / "._SUCCESS.crc").write_bytes(b"crc\x00")
    return folder


def write_datatrove(folder: Path, texts_by_task: list[list[str]]) -> Path:
    """Write a folder as ``JsonlWriter`` does: a file for each task that has a document."""
    folder.mkdir(parents=True)
    for rank, documents in enumerate(texts_by_task):
        if documents:
            rows = [
                {"text": text, "id": f"c/{rank}/{row_idx}", "metadata": {"url": "u", "lang": {"score": 0.9}}}
                for row_idx, text in enumerate(documents)
            ]
            data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
            (folder / f"{rank:05d}.jsonl.gz").write_bytes(gzip.compress(data))
    return folder


def write_logs(folder: Path, num_tasks: int, num_completed: int) -> Path:
    for name in ("completions", "logs", "stats"):
        (folder / name).mkdir(parents=True)
    (folder / "executor.json").write_text(json.dumps({"pipeline": [], "world_size": num_tasks}, indent=4))
    for rank in range(num_completed):
        (folder / "completions" / f"{rank:05d}").touch()
        (folder / "logs" / f"task_{rank:05d}.log").write_text("INFO: done")
        (folder / "stats" / f"{rank:05d}.json").write_text("[\n]")
    return folder


def test_spark_folder_is_read_in_partition_order(tmp_path: Path) -> None:
    folder = write_spark(tmp_path / "spark", [["one", "two"], [], ["three"]])
    assert read_documents([folder]) == ["one", "two", "three"]


def test_table_partitions_are_read_in_name_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("lang=zh", "窗"), ("lang=en", "a"), ("_lang=de", "d")):
        write_parquet(tmp_path / "t" / name / f"part-00000-{SPARK_JOB_ID}.c000.zstd.parquet", [{"text": text}])
    for name in ("_SUCCESS", "_metadata", "_common_metadata", "_started_77", "_committed_77"):
        (tmp_path / "t" / name).write_bytes(b"\x00")
    assert read_documents([tmp_path / "t"]) == ["d", "a", "窗"] and not capsys.readouterr().err
    (tmp_path / "t" / "_notes.txt").write_text("of mine")
    assert read_documents([tmp_path / "t"]) == ["d", "a", "窗"]
    assert "t: skipped _notes.txt, hidden by an underscore" in capsys.readouterr().err
    assert read_documents([tmp_path / "t" / "_notes.txt"]) == ["of mine"], "named itself it is read"


def test_datatrove_folders_are_read_in_task_order(tmp_path: Path) -> None:
    folder = write_datatrove(tmp_path / "jsonl", [["one", "two\nlines"], [], ["three"]])
    assert [path.name for path in find_inputs([folder])] == ["00000.jsonl.gz", "00002.jsonl.gz"]
    assert read_documents([folder]) == ["one", "two\nlines", "three"]
    rows = [{"text": f"t{row}", "id": str(row), "metadata": {"url": "u"}} for row in range(5)]
    path = write_parquet(tmp_path / "parquet" / "000_00000.parquet", rows, rows_per_group=2)
    assert read_documents([path.parent]) == [f"t{row}" for row in range(5)]
    assert read_documents([path], keys=["metadata.url", "text"])[4] == "u\nt4"


def test_datatrove_log_folder_is_skipped_and_requires_completed_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_datatrove(tmp_path / "out", [["one"], ["two"]])
    logs = write_logs(folder / "logs" / "2026", 3, 3)
    assert read_documents([folder]) == ["one", "two"]
    assert "skipped the log folder of datatrove, all 3 tasks completed" in capsys.readouterr().err
    (logs / "completions" / "00001").unlink()
    with pytest.raises(DataError, match="2026 is the log folder .* not completed: 1 of 3 tasks are missing, 00001"):
        find_inputs([folder])


@pytest.mark.parametrize("name", ["_temporary", f"part-00001-{SPARK_JOB_ID}-c000.parquet._COPYING_", "_started_5"])
def test_unfinished_spark_output_is_rejected(tmp_path: Path, name: str) -> None:
    folder = write_spark(tmp_path / "in" / "spark", [["one"]])
    (folder / name).mkdir()
    with pytest.raises(DataError, match=f"spark must be finished; {name} shows that Spark or Hadoop is still writing"):
        find_inputs([tmp_path / "in"])


def test_delta_table_is_rejected(tmp_path: Path) -> None:
    folder = write_spark(tmp_path / "delta", [["one"]])
    (folder / "_delta_log").mkdir()
    with pytest.raises(DataError, match="is a Delta table; some of its files may belong to older versions"):
        find_inputs([folder])


def test_truncated_files_are_rejected(tmp_path: Path) -> None:
    folder = write_spark(tmp_path / "spark", [["one"], ["two"]])
    partition = sorted(folder.glob("part-*"))[1]
    partition.write_bytes(partition.read_bytes()[:-9])
    with pytest.raises(DataError, match="part-00001.*must be a complete parquet file"):
        plan_units([folder], None)
    rng = random.Random(0)
    folder = write_datatrove(tmp_path / "jsonl", [[str(rng.random()) for _ in range(2000)]])
    path = folder / "00000.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="00000.jsonl.gz must be a complete .gz file; it is truncated"):
        read_documents([folder])


def test_tiny_row_groups_are_merged_into_one_unit(tmp_path: Path) -> None:
    """datatrove writes one for each 1000 documents."""
    path = write_parquet(tmp_path / "c.parquet", [{"text": f"{row:02d}" * 5} for row in range(11)], rows_per_group=1)
    group_bytes = readers.row_groups(str(path))
    units = plan_units([path], None, unit_bytes=3 * max(group_bytes))
    assert [(unit.start, unit.stop) for unit in units] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [unit.size for unit in units] == [sum(group_bytes[unit.start : unit.stop]) for unit in units]
    units = plan_units([path], None, unit_bytes=1)
    assert [(unit.start, unit.stop) for unit in units] == [(row, row + 1) for row in range(11)]


def test_spark_and_datatrove_folders_yield_identical_tokens(tmp_path: Path) -> None:
    partitions, outputs = [["one", "two"], [], ["窗前有一盏灯"]], []
    for folder in (write_spark(tmp_path / "s", partitions), write_datatrove(tmp_path / "d", partitions)):
        corpus = Corpus(tmp_path)
        corpus.preprocess(inputs=[folder], num_workers=2)
        outputs.append(corpus.read_output())
        assert corpus.read_texts() == [text + END_OF_TEXT for partition in partitions for text in partition]
    assert outputs[0] == outputs[1]
