"""Jobs with --part K/N, which say nothing to each other, make the bytes of one job; what does not belong is named."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron import files
from megatron.data import preprocess
from megatron.data.preprocess import plan, shards
from megatron.data.preprocess.job_types import Share
from megatron.data.preprocess.shards import PartWriter
from megatron.errors import DataError
from tests.helpers.preprocess_job import GOOD, SUFFIXES, Corpus, lines
from tools import merge_data, preprocess_data

CONTENT = lines(*GOOD)
UNIT_BYTES = len(CONTENT) // 8 + 1  # eight units


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    found = Corpus(tmp_path)
    found.write(CONTENT)
    return found


def run_parts(corpus: Corpus, numbers: Sequence[int] = (1, 2, 3), num_jobs: int = 3, **changed: object) -> list[int]:
    """Run these parts and return how many units of each were finished before."""
    given = {"unit_bytes": UNIT_BYTES} | changed
    return [corpus.run(share=Share(number, num_jobs), **given).num_resumed for number in numbers]


def joined(corpus: Corpus) -> tuple[bytes, ...]:
    """Join the parts under another name and return the three files."""
    out = corpus.folder / "joined"
    preprocess.join(corpus.folder / "out.parts", str(out))
    return tuple(Path(f"{out}{suffix}").read_bytes() for suffix in SUFFIXES)


def whole(corpus: Corpus, folder: Path, **changed: object) -> tuple[bytes, ...]:
    """Return the three files of one job."""
    alone = Corpus(folder / "alone")
    alone.folder.mkdir()
    preprocess.run(corpus.job(output_prefix=str(alone.prefix), **changed))
    return alone.output()


@pytest.mark.parametrize("num_jobs", [1, 3, pytest.param(11, marks=pytest.mark.slow)])
def test_parts_in_any_order_are_joined_to_the_bytes_of_one_job(corpus: Corpus, tmp_path: Path, num_jobs: int) -> None:
    expected = whole(corpus, tmp_path)
    run_parts(corpus, [*range(num_jobs, 0, -1)], num_jobs)
    assert joined(corpus) == expected == joined(corpus), "the parts stay, so that they can be joined again"
    assert not corpus.prefix.with_suffix(".bin").exists()


def test_each_unit_is_of_one_job_and_neighbours_are_of_neighbours(corpus: Corpus) -> None:
    owned = [[unit for unit in range(10) if Share(number, 4).owns(unit)] for number in (1, 2, 3, 4)]
    assert owned == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    run_parts(corpus, [2], 4)
    made = {path.name for path in (corpus.folder / "out.parts").glob("unit-*.json")}
    assert made == {"unit-000001.json", "unit-000005.json"}


def test_the_cut_depends_on_no_machine(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on machines of 1 and 3 cores cut the input alike."""
    monkeypatch.setattr(plan, "_SMALLEST_UNIT", 100)
    monkeypatch.setattr(plan, "_UNITS_PER_WORKER", 1)
    for number, workers in ((1, 1), (2, 3)):
        run_parts(corpus, [number], 2, num_workers=workers, unit_bytes=None)
    assert joined(corpus)


def test_a_part_that_runs_again_goes_on_and_spoils_nothing(corpus: Corpus, tmp_path: Path) -> None:
    expected = whole(corpus, tmp_path)
    run_parts(corpus)
    folder = corpus.folder / "out.parts"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert run_parts(corpus, [2]) == [3] and run_parts(corpus, [1], resume=True) == [3]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    (folder / "unit-000004.bin").write_bytes(b"cut short")
    (folder / "unit-000007.bin.tmp-elsewhere-1").write_bytes(b"left by a kill")
    (folder / "unit-000007.json").unlink()
    assert run_parts(corpus, [2]) == [1] and not list(folder.glob("*.tmp-*"))
    assert joined(corpus) == expected


def test_missing_damaged_and_mixed_parts_are_named(corpus: Corpus, tmp_path: Path) -> None:
    folder, other = corpus.folder / "out.parts", corpus.folder / "other"
    run_parts(corpus)
    folder.rename(other)
    run_parts(corpus, [1, 3], append_eod=False)

    def said() -> str:
        with pytest.raises(DataError) as error:
            joined(corpus)
        assert not (corpus.folder / "joined.bin").exists()
        return str(error.value)

    text = "out.parts must contain all 8 units of 3 parts; missing: part 2/3 (units 1, 4, 7). Run again: --part 2/3."
    assert said().endswith(text)
    for unit in (1, 4):
        for kind in ("bin", "len", "bad", "json"):
            shutil.copy(other / f"unit-{unit:06d}.{kind}", folder)
    (folder / "unit-000003.len").unlink()
    (folder / "unit-000005.bin").write_bytes(b"")
    (folder / "unit-000099.json").write_bytes(b"{}")
    assert said().endswith(
        "missing: part 2/3 (units 7); damaged: part 1/3 (units 3), part 3/3 (units 5); of another job: part 2/3 (units "
        "1, 4); of another job: unit 99, which the plan does not have. Run again: --part 1/3, --part 2/3, --part 3/3. "
        f"Remove the files of other jobs from {folder}."
    )
    (folder / "unit-000099.json").unlink()
    assert run_parts(corpus, append_eod=False) == [2, 0, 1]
    assert joined(corpus) == whole(corpus, tmp_path, append_eod=False)


def test_parts_of_other_options_or_of_another_count_are_refused(corpus: Corpus) -> None:
    run_parts(corpus, [1])
    for changed, text in (
        ({"append_eod": False}, "--no-append-eod was False, now True"),
        ({"share": Share(2, 4)}, r"the output was divided among 3 jobs \(--part\), now 4 jobs \(--part\)"),
        ({"inputs": [corpus.folder / "c.jsonl"] * 2}, "c.jsonl was read 1 times, now 2"),
    ):
        with pytest.raises(DataError, match=f"--part ./.: .*out.parts has the parts of a different job; .*{text}"):
            corpus.run(**{"share": Share(2, 3), "unit_bytes": UNIT_BYTES} | changed)
    for resume, text in ((False, "contains the parts of jobs with --part. Merge"), (True, "among 3 jobs .* one job")):
        with pytest.raises(DataError, match=text):
            corpus.run(resume=resume, unit_bytes=UNIT_BYTES)
    assert run_parts(corpus, [1]) == [3], "nothing is lost by what was refused"
    (corpus.folder / "out.parts" / shards.PLAN).write_text("{")
    with pytest.raises(DataError, match="plan.json cannot be read. Remove"):
        run_parts(corpus, [2])
    with pytest.raises(DataError, match="it has no readable plan.json"):
        joined(corpus)


def test_the_folder_of_a_job_without_parts_is_not_joined(corpus: Corpus) -> None:
    def stop(operation: str, path: Path) -> None:
        if path.name.startswith("unit-000003"):
            raise OSError(5, "broken")

    files.before_operation, before = stop, files.before_operation
    try:
        with pytest.raises(OSError, match="broken"):
            corpus.run(unit_bytes=UNIT_BYTES)
    finally:
        files.before_operation = before
    with pytest.raises(DataError, match="got a job without --part, which --resume continues"):
        joined(corpus)
    with pytest.raises(DataError, match=r"the output was divided among one job, now 3 jobs \(--part\)"):
        run_parts(corpus, [1])
    assert corpus.run(resume=True, unit_bytes=UNIT_BYTES).num_resumed == 3


def test_bad_lines_are_limited_by_part_and_told_of_all(corpus: Corpus, tmp_path: Path) -> None:
    corpus.write(b"x\n" + CONTENT + b"y\n")
    with pytest.raises(DataError, match=r"(?s)at most 0 bad lines .*c.jsonl:1 .*the same command continues"):
        run_parts(corpus, [1])
    report = corpus.folder / "out.part-1-of-3.bad.jsonl"
    assert report.exists()
    run_parts(corpus, max_bad_lines=1)
    assert not report.exists() and len(joined(corpus)) == 3
    text = (corpus.folder / "joined.bad.jsonl").read_text()
    assert [int(line) for line in re.findall(r'"line":(\d+)', text)] == [1, 62]
    assert joined(corpus) == whole(corpus, tmp_path, max_bad_lines=2)


def test_an_input_that_changes_or_holds_nothing_is_refused(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    run_parts(corpus, [1])

    def change(operation: str, path: Path) -> None:
        if path.name == "unit-000001.json":
            os.utime(corpus.folder / "c.jsonl", ns=(1, 1))

    with monkeypatch.context() as patch:
        patch.setattr(files, "before_operation", change)
        with pytest.raises(DataError, match="must not change until all parts are finished; .*c.jsonl is "):
            run_parts(corpus, [2])
    assert len(list((corpus.folder / "out.parts").glob("unit-*.json"))) == 3, "only its own are given up"
    shutil.rmtree(corpus.folder / "out.parts")
    corpus.write(b"\n\n")
    run_parts(corpus, num_jobs=3)
    with pytest.raises(DataError, match="no documents in any part"):
        joined(corpus)
    with pytest.raises(DataError, match="--part needs input that can be read again"):
        run_parts(corpus, inputs=["-"])


def test_jobs_that_start_at_once_share_one_plan(corpus: Corpus) -> None:
    """Ten processes put their plan into one folder: nobody reads half of one, and the one that differs is refused."""
    folder = corpus.folder / "out.parts"
    folder.mkdir()
    plans = [
        plan.JobPlan(inputs=[], units="u" * 50_000, options={"--part": 2 + (kth == 4)}, tokenizer={})
        for kth in range(10)
    ]
    children = []
    for own in plans:
        children.append(os.fork())
        if not children[-1]:
            found = own.publish(folder)
            os._exit(9 if found is None else int(bool(own.differences(found))))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes in ([0] * 4 + [1] + [0] * 5, [1] * 4 + [0] + [1] * 5)
    assert [path.name for path in folder.iterdir()] == [shards.PLAN]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_writers_of_one_unit_leave_it_whole(corpus: Corpus, order: tuple[int, int]) -> None:
    """One was taken for lost and goes on, the other begins while it writes: whoever ends first, both leave it whole."""
    run_parts(corpus, [1], 1)
    folder = corpus.folder / "out.parts"
    found = plan.read(folder)
    assert found is not None
    parts = plan.folder_for(folder, found, is_shared=True)
    content = parts.path(0, "bin").read_bytes()
    parts.path(0, "json").unlink()
    writers = [PartWriter(parts, 0), PartWriter(parts, 0)]
    for writer in writers:
        writer.__enter__()
        writer._files["bin"].write(content)
    for number in order:
        writers[number].finish()
        assert isinstance(parts.look_at(0), shards.Part) and parts.path(0, "bin").read_bytes() == content


@pytest.mark.parametrize(
    "given, text",
    [
        ("0/16", "must be from 1/16 to 16/16, got 0/16; start the SLURM array at 1: --array=1-16"),
        ("17/16", "must be from 1/16 to 16/16, got 17/16"),
        ("3", "such as 3/16, got '3'"),
        ("3/", "such as 3/16"),
    ],
)
def test_a_part_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], given: str, text: str) -> None:
    with pytest.raises(SystemExit):
        preprocess_data.parse_args(["--input", "c", "--output-prefix", "o", "--part", given])
    assert text in capsys.readouterr().err


def test_the_tools_do_it_from_the_command_line(corpus: Corpus, tmp_path: Path, capfd, monkeypatch) -> None:
    from tests.helpers.preprocess_job import small_tokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preprocess_data, "tokenizer_of", lambda args: small_tokenizer)
    for number in (2, 1):
        given = ["--input", "c.jsonl", "--output-prefix", "out", "--unit-bytes", "1024", "--workers", "1"]
        preprocess_data.preprocess_corpus(preprocess_data.parse_args([*given, "--part", f"{number}/2"]))
    assert "part 1/2 of out: " in capfd.readouterr().err
    assert merge_data.main(["--input", "out.parts", "--output-prefix", "out"]) == 0
    assert "out.bin: 60 documents" in capfd.readouterr().err
    assert corpus.output() == whole(corpus, tmp_path)
    assert merge_data.main(["--input", "out.parts", "out", "--output-prefix", "two"]) == 2
    assert "must be a single folder of parts" in capfd.readouterr().err
