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
from megatron.data.preprocess.shards import ShardWriter
from megatron.errors import DataError
from tests.helpers.preprocess_job import GOOD_TEXTS, SUFFIXES, Corpus, json_lines
from tools import merge_data, preprocess_data

CONTENT = json_lines(*GOOD_TEXTS)
UNIT_BYTES = len(CONTENT) // 8 + 1  # eight units


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    corpus = Corpus(tmp_path)
    corpus.write(CONTENT)
    return corpus


def run_shares(
    corpus: Corpus, part_numbers: Sequence[int] = (1, 2, 3), num_jobs: int = 3, **overrides: object
) -> list[int]:
    """Run these parts and return how many units of each were finished before."""
    options = {"unit_bytes": UNIT_BYTES} | overrides
    return [
        corpus.preprocess(share=Share(part_number, num_jobs), **options).num_resumed for part_number in part_numbers
    ]


def join_parts(corpus: Corpus) -> tuple[bytes, ...]:
    """Join the parts under another name and return the three files."""
    joined_prefix = corpus.folder / "joined"
    preprocess.join(corpus.folder / "out.parts", str(joined_prefix))
    return tuple(Path(f"{joined_prefix}{suffix}").read_bytes() for suffix in SUFFIXES)


def run_single_job(corpus: Corpus, folder: Path, **overrides: object) -> tuple[bytes, ...]:
    """Return the three files of one job."""
    single_job = Corpus(folder / "alone")
    single_job.folder.mkdir()
    preprocess.run(corpus.make_job(output_prefix=str(single_job.prefix), **overrides))
    return single_job.read_output()


@pytest.mark.parametrize("num_jobs", [1, 3, pytest.param(11, marks=pytest.mark.slow)])
def test_parts_in_any_order_join_to_single_job_output(corpus: Corpus, tmp_path: Path, num_jobs: int) -> None:
    expected = run_single_job(corpus, tmp_path)
    run_shares(corpus, [*range(num_jobs, 0, -1)], num_jobs)
    assert join_parts(corpus) == expected == join_parts(corpus), "the parts stay, so that they can be joined again"
    assert not corpus.prefix.with_suffix(".bin").exists()


def test_units_are_dealt_to_jobs_round_robin(corpus: Corpus) -> None:
    owned = [[unit for unit in range(10) if Share(part_number, 4).owns(unit)] for part_number in (1, 2, 3, 4)]
    assert owned == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    run_shares(corpus, [2], 4)
    finished = {path.name for path in (corpus.folder / "out.parts").glob("unit-*.json")}
    assert finished == {"unit-000001.json", "unit-000005.json"}


def test_unit_split_is_independent_of_machine(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on machines of 1 and 3 cores cut the input alike."""
    monkeypatch.setattr(plan, "_MIN_UNIT_BYTES", 100)
    monkeypatch.setattr(plan, "_UNITS_PER_WORKER", 1)
    for part_number, num_workers in ((1, 1), (2, 3)):
        run_shares(corpus, [part_number], 2, num_workers=num_workers, unit_bytes=None)
    assert join_parts(corpus)


def test_rerun_part_resumes_and_preserves_other_parts(corpus: Corpus, tmp_path: Path) -> None:
    expected = run_single_job(corpus, tmp_path)
    run_shares(corpus)
    folder = corpus.folder / "out.parts"
    mtimes = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert run_shares(corpus, [2]) == [3] and run_shares(corpus, [1], resume=True) == [3]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == mtimes
    (folder / "unit-000004.bin").write_bytes(b"cut short")
    (folder / "unit-000007.bin.tmp-elsewhere-1").write_bytes(b"left by a kill")
    (folder / "unit-000007.json").unlink()
    assert run_shares(corpus, [2]) == [1] and not list(folder.glob("*.tmp-*"))
    assert join_parts(corpus) == expected


def test_missing_damaged_and_mixed_parts_are_named(corpus: Corpus, tmp_path: Path) -> None:
    folder, other_job = corpus.folder / "out.parts", corpus.folder / "other"
    run_shares(corpus)
    folder.rename(other_job)
    run_shares(corpus, [1, 3], append_eod=False)

    def join_error() -> str:
        with pytest.raises(DataError) as error:
            join_parts(corpus)
        assert not (corpus.folder / "joined.bin").exists()
        return str(error.value)

    text = "out.parts must contain all 8 units of 3 parts; missing: part 2/3 (units 1, 4, 7). Run again: --part 2/3."
    assert join_error().endswith(text)
    for unit in (1, 4):
        for suffix in ("bin", "len", "bad", "json"):
            shutil.copy(other_job / f"unit-{unit:06d}.{suffix}", folder)
    (folder / "unit-000003.len").unlink()
    (folder / "unit-000005.bin").write_bytes(b"")
    (folder / "unit-000099.json").write_bytes(b"{}")
    assert join_error().endswith(
        "missing: part 2/3 (units 7); damaged: part 1/3 (units 3), part 3/3 (units 5); of another job: part 2/3 (units "
        "1, 4); of another job: unit 99, which the plan does not have. Run again: --part 1/3, --part 2/3, --part 3/3. "
        f"Remove the files of other jobs from {folder}."
    )
    (folder / "unit-000099.json").unlink()
    assert run_shares(corpus, append_eod=False) == [2, 0, 1]
    assert join_parts(corpus) == run_single_job(corpus, tmp_path, append_eod=False)


def test_parts_with_other_options_or_count_are_rejected(corpus: Corpus) -> None:
    run_shares(corpus, [1])
    for overrides, text in (
        ({"append_eod": False}, "--no-append-eod was False, now True"),
        ({"share": Share(2, 4)}, r"the output was divided among 3 jobs \(--part\), now 4 jobs \(--part\)"),
        ({"inputs": [corpus.folder / "c.jsonl"] * 2}, "c.jsonl was read 1 times, now 2"),
    ):
        with pytest.raises(DataError, match=f"--part ./.: .*out.parts has the parts of a different job; .*{text}"):
            corpus.preprocess(**{"share": Share(2, 3), "unit_bytes": UNIT_BYTES} | overrides)
    for resume, text in ((False, "contains the parts of jobs with --part. Merge"), (True, "among 3 jobs .* one job")):
        with pytest.raises(DataError, match=text):
            corpus.preprocess(resume=resume, unit_bytes=UNIT_BYTES)
    assert run_shares(corpus, [1]) == [3], "nothing is lost by what was refused"
    (corpus.folder / "out.parts" / shards.PLAN).write_text("{")
    with pytest.raises(DataError, match="plan.json cannot be read. Remove"):
        run_shares(corpus, [2])
    with pytest.raises(DataError, match="it has no readable plan.json"):
        join_parts(corpus)


def test_folder_of_job_without_parts_is_not_joined(corpus: Corpus) -> None:
    def stop(operation: str, path: Path) -> None:
        if path.name.startswith("unit-000003"):
            raise OSError(5, "broken")

    files.before_operation, original_hook = stop, files.before_operation
    try:
        with pytest.raises(OSError, match="broken"):
            corpus.preprocess(unit_bytes=UNIT_BYTES)
    finally:
        files.before_operation = original_hook
    with pytest.raises(DataError, match="got a job without --part, which --resume continues"):
        join_parts(corpus)
    with pytest.raises(DataError, match=r"the output was divided among one job, now 3 jobs \(--part\)"):
        run_shares(corpus, [1])
    assert corpus.preprocess(resume=True, unit_bytes=UNIT_BYTES).num_resumed == 3


def test_bad_line_limit_is_per_part_and_report_is_joined(corpus: Corpus, tmp_path: Path) -> None:
    corpus.write(b"x\n" + CONTENT + b"y\n")
    with pytest.raises(DataError, match=r"(?s)at most 0 bad lines .*c.jsonl:1 .*the same command continues"):
        run_shares(corpus, [1])
    report = corpus.folder / "out.part-1-of-3.bad.jsonl"
    assert report.exists()
    run_shares(corpus, max_bad_lines=1)
    assert not report.exists() and len(join_parts(corpus)) == 3
    text = (corpus.folder / "joined.bad.jsonl").read_text()
    assert [int(line) for line in re.findall(r'"line":(\d+)', text)] == [1, 62]
    assert join_parts(corpus) == run_single_job(corpus, tmp_path, max_bad_lines=2)


def test_changed_or_empty_input_is_rejected(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    run_shares(corpus, [1])

    def change(operation: str, path: Path) -> None:
        if path.name == "unit-000001.json":
            os.utime(corpus.folder / "c.jsonl", ns=(1, 1))

    with monkeypatch.context() as patch:
        patch.setattr(files, "before_operation", change)
        with pytest.raises(DataError, match="must not change until all parts are finished; .*c.jsonl is "):
            run_shares(corpus, [2])
    assert len(list((corpus.folder / "out.parts").glob("unit-*.json"))) == 3, "only its own are given up"
    shutil.rmtree(corpus.folder / "out.parts")
    corpus.write(b"\n\n")
    run_shares(corpus, num_jobs=3)
    with pytest.raises(DataError, match="no documents in any part"):
        join_parts(corpus)
    with pytest.raises(DataError, match="--part needs input that can be read again"):
        run_shares(corpus, inputs=["-"])


def test_concurrent_jobs_share_one_plan(corpus: Corpus) -> None:
    """Ten processes put their plan into one folder: nobody reads half of one, and the one that differs is refused."""
    folder = corpus.folder / "out.parts"
    folder.mkdir()
    plans = [
        plan.JobPlan(inputs=[], units="u" * 50_000, options={"--part": 2 + (job_idx == 4)}, tokenizer={})
        for job_idx in range(10)
    ]
    children = []
    for job_plan in plans:
        children.append(os.fork())
        if not children[-1]:
            published = job_plan.publish(folder)
            os._exit(9 if published is None else int(bool(job_plan.describe_differences(published))))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes in ([0] * 4 + [1] + [0] * 5, [1] * 4 + [0] + [1] * 5)
    assert [path.name for path in folder.iterdir()] == [shards.PLAN]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_writers_of_one_unit_leave_it_complete(corpus: Corpus, order: tuple[int, int]) -> None:
    """One was taken for lost and goes on, the other begins while it writes: whoever ends first, both leave it whole."""
    run_shares(corpus, [1], 1)
    folder = corpus.folder / "out.parts"
    job_plan = plan.read_plan(folder)
    assert job_plan is not None
    shard_folder = plan.make_shard_folder(folder, job_plan, is_shared=True)
    content = shard_folder.path(0, "bin").read_bytes()
    shard_folder.path(0, "json").unlink()
    writers = [ShardWriter(shard_folder, 0), ShardWriter(shard_folder, 0)]
    for writer in writers:
        writer.__enter__()
        writer._files["bin"].write(content)
    for writer_idx in order:
        writers[writer_idx].finish()
        assert (
            isinstance(shard_folder.verify_unit(0), shards.Shard)
            and shard_folder.path(0, "bin").read_bytes() == content
        )


@pytest.mark.parametrize(
    "argument, text",
    [
        ("0/16", "must be from 1/16 to 16/16, got 0/16; start the SLURM array at 1: --array=1-16"),
        ("17/16", "must be from 1/16 to 16/16, got 17/16"),
        ("3", "such as 3/16, got '3'"),
        ("3/", "such as 3/16"),
    ],
)
def test_invalid_part_argument_is_rejected(capsys: pytest.CaptureFixture[str], argument: str, text: str) -> None:
    with pytest.raises(SystemExit):
        preprocess_data.parse_args(["--input", "c", "--output-prefix", "o", "--part", argument])
    assert text in capsys.readouterr().err


def test_command_line_tools_run_and_merge_parts(corpus: Corpus, tmp_path: Path, capfd, monkeypatch) -> None:
    from tests.helpers.preprocess_job import make_small_tokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preprocess_data, "tokenizer_factory", lambda args: make_small_tokenizer)
    for part_number in (2, 1):
        arguments = ["--input", "c.jsonl", "--output-prefix", "out", "--unit-bytes", "1024", "--workers", "1"]
        preprocess_data.preprocess_corpus(preprocess_data.parse_args([*arguments, "--part", f"{part_number}/2"]))
    assert "part 1/2 of out: " in capfd.readouterr().err
    assert merge_data.main(["--input", "out.parts", "--output-prefix", "out"]) == 0
    assert "out.bin: 60 documents" in capfd.readouterr().err
    assert corpus.read_output() == run_single_job(corpus, tmp_path)
    assert merge_data.main(["--input", "out.parts", "out", "--output-prefix", "two"]) == 2
    assert "must be a single folder of parts" in capfd.readouterr().err
