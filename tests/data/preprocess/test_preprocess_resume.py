"""A job that is cut off goes on with what is finished, whenever that happens."""

from __future__ import annotations

import mmap
import os
import re
import signal
from pathlib import Path

import pytest

from megatron import files, tokenizer
from megatron.data import IndexedDataset
from megatron.data.preprocess import plan, shards
from megatron.errors import DataError, StopRequest
from tests.helpers.preprocess_job import GOOD_TEXTS, Corpus, json_lines
from tests.helpers.token_data import write_documents
from tests.helpers.trap import OLD_IDENTITY, TOKENIZER_PATH

CONTENT = json_lines(*GOOD_TEXTS[:20])
UNIT_BYTES = len(CONTENT) // 3 + 1


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    corpus = Corpus(tmp_path)
    corpus.write(CONTENT)
    return corpus


def run_interrupted_job(corpus: Corpus, after_unit: int = 0, **overrides: object) -> None:
    """Run a job of three units on one worker, which is killed when it begins the one after ``after_unit``."""

    def die(operation: str, path: Path) -> None:
        if operation == "create" and path.name.startswith(f"unit-{after_unit + 1:06d}"):
            os.kill(os.getpid(), signal.SIGKILL)

    files.before_operation, original_hook = die, files.before_operation
    try:
        with pytest.raises(RuntimeError, match="killed by SIGKILL .*--resume continues with them"):
            corpus.preprocess(unit_bytes=UNIT_BYTES, **overrides)
    finally:
        files.before_operation = original_hook


@pytest.mark.parametrize("step", [14, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_before_any_operation_leaves_valid_pair_and_resumable_job(tmp_path: Path, step: int) -> None:
    reference = Corpus(tmp_path / "whole")
    reference.folder.mkdir()
    reference.preprocess(CONTENT)
    outcomes, num_resumed = [], []
    for kill_at in range(0, 1000, step):
        corpus = Corpus(tmp_path / str(kill_at))
        corpus.folder.mkdir()
        corpus.write(CONTENT)
        old_num_tokens = write_documents(corpus.prefix, [3, 4]).num_tokens
        is_killed = run_killed_job(corpus, kill_at)
        outcomes.append(IndexedDataset(corpus.prefix).num_tokens == old_num_tokens)
        summary = corpus.preprocess(resume=True, unit_bytes=UNIT_BYTES)
        num_resumed.append(summary.num_resumed)
        assert corpus.read_output() == reference.read_output() and corpus.list_leftovers() == []
        if not is_killed:
            break
    assert not is_killed and outcomes == sorted(outcomes, reverse=True) and set(outcomes) == {True, False}
    assert 3 in num_resumed and len(set(num_resumed)) > 2


def run_killed_job(corpus: Corpus, kill_at: int) -> bool:
    """Run a job in a process that is killed with its worker ahead of the k-th operation of both; False if it ends."""
    job_pid = os.fork()
    if not job_pid:
        operation_count, job_pid = mmap.mmap(-1, 8), os.getpid()

        def die(operation: str, path: Path) -> None:
            operation_idx = int.from_bytes(operation_count[:8], "little")
            operation_count[:8] = (operation_idx + 1).to_bytes(8, "little")
            if operation_idx == kill_at:
                os.kill(job_pid, signal.SIGKILL)
                signal.alarm(60)
                signal.pause()  # the worker dies with its job

        files.before_operation = die
        corpus.preprocess(unit_bytes=UNIT_BYTES)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(job_pid, 0)[1]) == -signal.SIGKILL


def test_resume_reencodes_only_damaged_units(corpus: Corpus) -> None:
    corpus.preprocess(unit_bytes=UNIT_BYTES)
    expected = corpus.read_output()
    run_interrupted_job(corpus, after_unit=1)
    folder = corpus.folder / "out.parts"
    assert {path.name for path in folder.glob("*.json")} == {"plan.json", "unit-000000.json", "unit-000001.json"}
    damaged_path = folder / "unit-000001.bin"
    content = bytearray(damaged_path.read_bytes())
    content[5] ^= 1
    damaged_path.write_bytes(content)
    summary = corpus.preprocess(resume=True)
    assert (summary.num_resumed, summary.num_units) == (1, 3)
    assert corpus.read_output() == expected and corpus.list_leftovers() == []


def test_resume_rejects_changed_job_and_names_difference(corpus: Corpus) -> None:
    run_interrupted_job(corpus)
    for overrides, text in (
        ({"append_eod": False}, "--no-append-eod was False, now True"),
        ({"json_keys": ("a", "b")}, "--json-key was text, now a b"),
        ({"unit_bytes": 50}, f"--unit-bytes was {UNIT_BYTES}, now 50"),
        ({"inputs": [corpus.folder / "c.jsonl", corpus.write(b"x", "d.txt")]}, "d.txt is new"),
    ):
        with pytest.raises(DataError, match=f"--resume needs .* of the interrupted job; .*{text}"):
            corpus.preprocess(resume=True, **overrides)
    mtime_ns = os.stat(corpus.folder / "c.jsonl").st_mtime_ns
    os.utime(corpus.folder / "c.jsonl", ns=(mtime_ns, mtime_ns + 2_000_000_000))
    with pytest.raises(DataError, match=r"c.jsonl is 2.0 s newer than before"):
        corpus.preprocess(resume=True)
    corpus.write(CONTENT + b"\n")
    with pytest.raises(DataError, match=rf"c.jsonl had {len(CONTENT)} bytes, now {len(CONTENT) + 1}"):
        corpus.preprocess(resume=True)
    assert (corpus.folder / "out.parts" / "unit-000000.json").exists()


def test_duplicated_input_is_different_job(corpus: Corpus) -> None:
    first, second = corpus.folder / "c.jsonl", corpus.write(json_lines("x"), "d.jsonl")
    run_interrupted_job(corpus, inputs=[first, second])
    for inputs, text in (
        ([first, second, first], "c.jsonl was read 1 times, now 2"),
        ([first, first], "d.jsonl is no longer read; .*c.jsonl was read 1 times, now 2"),
        ([second, first], "the order of --input has changed"),
    ):
        with pytest.raises(DataError, match=f"the interrupted job; .*{text}. Restore"):
            corpus.preprocess(resume=True, inputs=inputs)
    with pytest.raises(DataError, match="--json-key was text, now 'text b'"):
        corpus.preprocess(resume=True, inputs=[first, second], json_keys=["text b"])
    assert corpus.preprocess(resume=True, inputs=[first, second]).num_resumed == 1


def test_resume_rejects_changed_unit_splits_and_versions(corpus: Corpus) -> None:
    for old, new, text in (
        ('"units": "', '"units": "0', "the input is split into other units"),
        ('"format": 2', '"format": 1', "another version of this tool"),
    ):
        corpus.preprocess()
        run_interrupted_job(corpus)
        path = corpus.folder / "out.parts" / shards.PLAN
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(DataError, match=text):
            corpus.preprocess(resume=True)


def test_missing_output_files_are_rebuilt_from_units(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardFolder, "remove", lambda _: None)  # as by a kill behind the commit
        corpus.preprocess(unit_bytes=UNIT_BYTES)
    output = corpus.read_output()
    corpus.prefix.with_suffix(".bin").unlink()
    assert corpus.preprocess(resume=True).num_resumed == 3
    assert corpus.read_output() == output and corpus.list_leftovers() == []


def test_run_without_resume_removes_earlier_units_and_logs(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    run_interrupted_job(corpus)
    assert corpus.preprocess().num_resumed == 0
    assert "removing the finished units of an earlier job" in capsys.readouterr().err
    assert corpus.preprocess(resume=True).num_resumed == 0 and corpus.list_leftovers() == []
    assert "starts from the beginning" in capsys.readouterr().err


def test_foreign_file_in_units_folder_is_not_deleted(corpus: Corpus) -> None:
    (corpus.folder / "out.parts").mkdir()
    (corpus.folder / "out.parts" / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match="out.parts must contain only parts, got thesis.txt"):
        corpus.preprocess()
    assert (corpus.folder / "out.parts" / "thesis.txt").exists()


def test_job_plan_is_deleted_last(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []

    def record(operation: str, path: Path) -> None:
        if operation == "remove" and path.parent.name == "out.parts":
            removed.append(path.name)

    monkeypatch.setattr(files, "before_operation", record)
    corpus.preprocess(unit_bytes=UNIT_BYTES)
    units = [f"unit-{unit_idx:06d}.{suffix}" for unit_idx in range(3) for suffix in ("bad", "bin", "json", "len")]
    assert removed == [*units, shards.PLAN, shards.LOCK]


def test_resume_with_other_limits_reuses_finished_units(corpus: Corpus) -> None:
    corpus.write(CONTENT + b"x\n")
    with pytest.raises(DataError, match="got 1 so far") as error:
        corpus.preprocess(unit_bytes=UNIT_BYTES)
    num_finished = re.search(
        r"([23]) of 3 units are finished and saved; --resume continues with them", str(error.value)
    )
    assert num_finished, "the last one may have been finished before its worker was ended"
    summary = corpus.preprocess(resume=True, max_bad_lines=1)
    assert (summary.num_resumed, summary.num_bad) == (int(num_finished[1]), 1)


def test_stopped_job_reports_how_to_resume(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    job_pid = os.getpid()

    def stop(operation: str, path: Path) -> None:
        if path.name.startswith("unit-000002") and operation == "create":
            os.kill(job_pid, signal.SIGINT)
            signal.pause()

    monkeypatch.setattr(files, "before_operation", stop)
    with pytest.raises(StopRequest, match="stopped; 2 of 3 units are finished and saved; --resume"):
        corpus.preprocess(unit_bytes=UNIT_BYTES)
    monkeypatch.undo()
    assert corpus.preprocess(resume=True).num_resumed == 2


def test_input_changed_during_job_is_rejected(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(operation: str, path: Path) -> None:
        if path.name == "unit-000002.json":
            os.utime(corpus.folder / "c.jsonl", ns=(1, 1))

    monkeypatch.setattr(files, "before_operation", change)
    text = "must not change while it is read; .*c.jsonl is .* s older than before.* No units are saved."
    with pytest.raises(DataError, match=text):
        corpus.preprocess(unit_bytes=UNIT_BYTES)
    assert corpus.list_leftovers() == []


def test_units_without_readable_plan_are_discarded(corpus: Corpus) -> None:
    run_interrupted_job(corpus)
    (corpus.folder / "out.parts" / shards.PLAN).write_text("{")
    assert corpus.preprocess(resume=True).num_resumed == 0 and corpus.list_leftovers() == []


def test_resumed_job_keeps_original_eod_token_and_plan(tmp_path: Path) -> None:
    first_tokenizer = tokenizer.build(tokenizer_path=TOKENIZER_PATH, eod_token="</s>")
    saved_plan = plan.JobPlan(
        inputs=[], units="", options={}, tokenizer={"identity": OLD_IDENTITY}, eod_id=first_tokenizer.eod_id
    )
    resumed_tokenizer = tokenizer.build(tokenizer_path=TOKENIZER_PATH)
    assert resumed_tokenizer.eod_name == "<eos>"
    plan._reuse_eod(saved_plan, resumed_tokenizer, tmp_path)
    assert (
        resumed_tokenizer.eod_name == "</s>"
        and plan._tokenizer_properties(resumed_tokenizer, saved_plan)["identity"] == OLD_IDENTITY
    )
    with pytest.raises(DataError, match=r"end with </s> \(id 291\), but --eod-token is <eos> \(id 1\)"):
        plan._reuse_eod(saved_plan, tokenizer.build(tokenizer_path=TOKENIZER_PATH, eod_token="<eos>"), tmp_path)
