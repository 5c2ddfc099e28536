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
from tests.helpers.preprocess_job import GOOD, Corpus, lines
from tests.helpers.token_data import write
from tests.helpers.trap import FORMER_IDENTITY, TRAP

CONTENT = lines(*GOOD[:20])
UNIT_BYTES = len(CONTENT) // 3 + 1


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    found = Corpus(tmp_path)
    found.write(CONTENT)
    return found


def cut_off(corpus: Corpus, after_unit: int = 0, **changed: object) -> None:
    """Run a job of three units on one worker, which is killed when it begins the one after ``after_unit``."""

    def die(operation: str, path: Path) -> None:
        if operation == "create" and path.name.startswith(f"unit-{after_unit + 1:06d}"):
            os.kill(os.getpid(), signal.SIGKILL)

    files.before_operation, before = die, files.before_operation
    try:
        with pytest.raises(RuntimeError, match="killed by SIGKILL .*--resume continues with them"):
            corpus.run(unit_bytes=UNIT_BYTES, **changed)
    finally:
        files.before_operation = before


@pytest.mark.parametrize("step", [14, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_before_any_operation_leaves_the_old_or_the_new_pair_and_a_job_that_goes_on(
    tmp_path: Path, step: int
) -> None:
    whole = Corpus(tmp_path / "whole")
    whole.folder.mkdir()
    whole.run(CONTENT)
    outcomes, kept = [], []
    for kth in range(0, 1000, step):
        corpus = Corpus(tmp_path / str(kth))
        corpus.folder.mkdir()
        corpus.write(CONTENT)
        old = write(corpus.prefix, [3, 4]).num_tokens
        died = run_and_die(corpus, kth)
        outcomes.append(IndexedDataset(corpus.prefix).num_tokens == old)
        summary = corpus.run(resume=True, unit_bytes=UNIT_BYTES)
        kept.append(summary.num_resumed)
        assert corpus.output() == whole.output() and corpus.names() == []
        if not died:
            break
    assert not died and outcomes == sorted(outcomes, reverse=True) and set(outcomes) == {True, False}
    assert 3 in kept and len(set(kept)) > 2


def run_and_die(corpus: Corpus, kth: int) -> bool:
    """Run a job in a process that is killed with its worker ahead of the k-th operation of both; False if it ends."""
    job = os.fork()
    if not job:
        count, job = mmap.mmap(-1, 8), os.getpid()

        def die(operation: str, path: Path) -> None:
            number = int.from_bytes(count[:8], "little")
            count[:8] = (number + 1).to_bytes(8, "little")
            if number == kth:
                os.kill(job, signal.SIGKILL)
                signal.alarm(60)
                signal.pause()  # the worker dies with its job

        files.before_operation = die
        corpus.run(unit_bytes=UNIT_BYTES)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]) == -signal.SIGKILL


def test_finished_units_are_not_encoded_again_and_damaged_ones_are(corpus: Corpus) -> None:
    corpus.run(unit_bytes=UNIT_BYTES)
    expected = corpus.output()
    cut_off(corpus, after_unit=1)
    folder = corpus.folder / "out.parts"
    assert {path.name for path in folder.glob("*.json")} == {"plan.json", "unit-000000.json", "unit-000001.json"}
    damaged = folder / "unit-000001.bin"
    content = bytearray(damaged.read_bytes())
    content[5] ^= 1
    damaged.write_bytes(content)
    summary = corpus.run(resume=True)
    assert (summary.num_resumed, summary.num_units) == (1, 3)
    assert corpus.output() == expected and corpus.names() == []


def test_a_job_that_differs_is_refused_and_the_difference_named(corpus: Corpus) -> None:
    cut_off(corpus)
    for changed, text in (
        ({"append_eod": False}, "--no-append-eod was False, now True"),
        ({"json_keys": ("a", "b")}, "--json-key was text, now a b"),
        ({"unit_bytes": 50}, f"--unit-bytes was {UNIT_BYTES}, now 50"),
        ({"inputs": [corpus.folder / "c.jsonl", corpus.write(b"x", "d.txt")]}, "d.txt is new"),
    ):
        with pytest.raises(DataError, match=f"--resume needs .* of the interrupted job; .*{text}"):
            corpus.run(resume=True, **changed)
    time = os.stat(corpus.folder / "c.jsonl").st_mtime_ns
    os.utime(corpus.folder / "c.jsonl", ns=(time, time + 2_000_000_000))
    with pytest.raises(DataError, match=r"c.jsonl is 2.0 s newer than before"):
        corpus.run(resume=True)
    corpus.write(CONTENT + b"\n")
    with pytest.raises(DataError, match=rf"c.jsonl had {len(CONTENT)} bytes, now {len(CONTENT) + 1}"):
        corpus.run(resume=True)
    assert (corpus.folder / "out.parts" / "unit-000000.json").exists()


def test_an_input_that_is_read_once_more_is_another_job(corpus: Corpus) -> None:
    one, two = corpus.folder / "c.jsonl", corpus.write(lines("x"), "d.jsonl")
    cut_off(corpus, inputs=[one, two])
    for inputs, text in (
        ([one, two, one], "c.jsonl was read 1 times, now 2"),
        ([one, one], "d.jsonl is no longer read; .*c.jsonl was read 1 times, now 2"),
        ([two, one], "the order of --input has changed"),
    ):
        with pytest.raises(DataError, match=f"the interrupted job; .*{text}. Restore"):
            corpus.run(resume=True, inputs=inputs)
    with pytest.raises(DataError, match="--json-key was text, now 'text b'"):
        corpus.run(resume=True, inputs=[one, two], json_keys=["text b"])
    assert corpus.run(resume=True, inputs=[one, two]).num_resumed == 1


def test_parts_cut_in_another_way_or_of_another_version_are_refused(corpus: Corpus) -> None:
    for old, new, text in (
        ('"units": "', '"units": "0', "the input is split into other units"),
        ('"format": 2', '"format": 1', "another version of this tool"),
    ):
        corpus.run()
        cut_off(corpus)
        path = corpus.folder / "out.parts" / shards.PLAN
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(DataError, match=text):
            corpus.run(resume=True)


def test_finished_files_that_are_gone_are_made_again(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardFolder, "remove", lambda _: None)  # as by a kill behind the commit
        corpus.run(unit_bytes=UNIT_BYTES)
    output = corpus.output()
    corpus.prefix.with_suffix(".bin").unlink()
    assert corpus.run(resume=True).num_resumed == 3
    assert corpus.output() == output and corpus.names() == []


def test_without_resume_earlier_parts_go_with_a_line(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    cut_off(corpus)
    assert corpus.run().num_resumed == 0
    assert "removing the finished units of an earlier job" in capsys.readouterr().err
    assert corpus.run(resume=True).num_resumed == 0 and corpus.names() == []
    assert "starts from the beginning" in capsys.readouterr().err


def test_a_foreign_file_among_the_parts_is_not_deleted(corpus: Corpus) -> None:
    (corpus.folder / "out.parts").mkdir()
    (corpus.folder / "out.parts" / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match="out.parts must contain only parts, got thesis.txt"):
        corpus.run()
    assert (corpus.folder / "out.parts" / "thesis.txt").exists()


def test_the_plan_is_deleted_last(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []

    def note(operation: str, path: Path) -> None:
        if operation == "remove" and path.parent.name == "out.parts":
            removed.append(path.name)

    monkeypatch.setattr(files, "before_operation", note)
    corpus.run(unit_bytes=UNIT_BYTES)
    units = [f"unit-{number:06d}.{kind}" for number in range(3) for kind in ("bad", "bin", "json", "len")]
    assert removed == [*units, shards.PLAN, shards.LOCK]


def test_other_limits_go_on_with_what_was_finished(corpus: Corpus) -> None:
    corpus.write(CONTENT + b"x\n")
    with pytest.raises(DataError, match="got 1 so far") as error:
        corpus.run(unit_bytes=UNIT_BYTES)
    kept = re.search(r"([23]) of 3 units are finished and saved; --resume continues with them", str(error.value))
    assert kept, "the last one may have been finished before its worker was ended"
    summary = corpus.run(resume=True, max_bad_lines=1)
    assert (summary.num_resumed, summary.num_bad) == (int(kept[1]), 1)


def test_a_stopped_job_says_how_it_goes_on(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    job = os.getpid()

    def stop(operation: str, path: Path) -> None:
        if path.name.startswith("unit-000002") and operation == "create":
            os.kill(job, signal.SIGINT)
            signal.pause()

    monkeypatch.setattr(files, "before_operation", stop)
    with pytest.raises(StopRequest, match="stopped; 2 of 3 units are finished and saved; --resume"):
        corpus.run(unit_bytes=UNIT_BYTES)
    monkeypatch.undo()
    assert corpus.run(resume=True).num_resumed == 2


def test_input_that_changes_while_it_is_read_is_refused(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(operation: str, path: Path) -> None:
        if path.name == "unit-000002.json":
            os.utime(corpus.folder / "c.jsonl", ns=(1, 1))

    monkeypatch.setattr(files, "before_operation", change)
    text = "must not change while it is read; .*c.jsonl is .* s older than before.* No units are saved."
    with pytest.raises(DataError, match=text):
        corpus.run(unit_bytes=UNIT_BYTES)
    assert corpus.names() == []


def test_parts_without_a_plan_are_none(corpus: Corpus) -> None:
    cut_off(corpus)
    (corpus.folder / "out.parts" / shards.PLAN).write_text("{")
    assert corpus.run(resume=True).num_resumed == 0 and corpus.names() == []


def test_a_job_that_goes_on_keeps_the_token_and_the_plan_with_which_it_was_begun(tmp_path: Path) -> None:
    built = tokenizer.build(tokenizer_path=TRAP, eod_token="</s>")
    begun = plan.JobPlan(inputs=[], units="", options={}, tokenizer={"identity": FORMER_IDENTITY}, eod_id=built.eod_id)
    again = tokenizer.build(tokenizer_path=TRAP)
    assert again.eod_name == "<eos>"
    plan._keep_eod(begun, again, tmp_path)
    assert again.eod_name == "</s>" and plan._tokenizer_facts(again, begun)["identity"] == FORMER_IDENTITY
    with pytest.raises(DataError, match=r"end with </s> \(id 291\), but --eod-token is <eos> \(id 1\)"):
        plan._keep_eod(begun, tokenizer.build(tokenizer_path=TRAP, eod_token="<eos>"), tmp_path)
