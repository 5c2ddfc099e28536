"""Runs on text: the losses of runs on token files, in every format, with several ranks, a resume, and failures."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import pretrain_gpt2
import pretrain_t5
from examples.bert import pretrain_bert
from megatron.data import preprocess
from megatron.errors import DataError
from megatron.tokenizer import build
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import ROOT, TOKENIZER, launch_script, make_flags, train_ranks

WINDOW_FLAGS = "--shuffle-window 8 --split 100,0,0 --eval-iters 0 --train-iters 4"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "texts.jsonl"
    sources = sorted((ROOT / "examples" / "corpus").glob("*/*.txt"))
    path.write_text("".join(json.dumps({"text": source.read_text(encoding="utf-8")}) + "\n" for source in sources))
    return path


@pytest.fixture(scope="module")
def token_files(text: Path) -> Path:
    prefix = text.with_name("tokens")
    job = preprocess.Job(
        inputs=[text], output_prefix=str(prefix), make_tokenizer=lambda: build(tokenizer_path=TOKENIZER)
    )
    preprocess.run(job)
    return prefix


def write_folder(text: Path, folder: Path) -> Path:
    """Write the lines into two files, one of them compressed."""
    lines = text.read_text().splitlines(keepends=True)
    path = folder / "corpus"
    path.mkdir()
    (path / "a.jsonl").write_text("".join(lines[:5]))
    (path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[5:]).encode()))
    return path


def write_parquet(text: Path, folder: Path) -> Path:
    path = folder / "corpus.parquet"
    texts = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=4)
    return path


def write_zst(text: Path, folder: Path) -> Path:
    path = folder / "corpus.jsonl.zst"
    path.write_bytes(zstandard.compress(text.read_bytes()))
    return path


def write_gz(text: Path, folder: Path) -> Path:
    path = folder / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(text.read_bytes()))
    return path


ENCODER_FAULT = """
import errno, os, signal, sys
if "megatron.data.text_encoder" in sys.orig_argv:
    from megatron import files
    encoder, action = os.getpid(), os.environ["ENCODER_FAULT"]
    def fail(operation, path):
        name = os.path.relpath(path, os.environ["ENCODER_FOLDER"]).partition("/")[2]
        is_unit, is_error = name.startswith("tokens.parts/unit-"), "error.json" in name
        if action == "kill" and operation == "rename" and name.endswith("unit-000002.json"):
            if not os.path.exists(os.environ["ENCODER_MARK"]):
                open(os.environ["ENCODER_MARK"], "w").close()
                os.kill(encoder, signal.SIGKILL)
        is_full = is_unit or is_error if action == "full in units" else "tokens.parts" not in name
        if action.startswith("full") and is_full and operation in ("create", "write", "copy", "fsync"):
            raise OSError(errno.ENOSPC, "No space left on device")
    files.before_operation = fail
"""
"""sitecustomize.py, which injects a fault into the encoding process."""


@pytest.fixture
def inject_encoder_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that injects a fault of ``ENCODER_FAULT`` into encoding processes that start later."""

    def inject(action: str) -> None:
        (tmp_path / "fault").mkdir()
        (tmp_path / "fault" / "sitecustomize.py").write_text(ENCODER_FAULT)
        for name, value in {
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "fault"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "ENCODER_FAULT": action,
            "ENCODER_FOLDER": str(tmp_path / "encoded-text"),
            "ENCODER_MARK": str(tmp_path / "killed"),
        }.items():
            monkeypatch.setenv(name, value)

    return inject


def losses_of(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


def train(prefix: Path, folder: Path, extra: str, *, num_ranks: int = 1, script: ModuleType = pretrain_gpt2) -> int:
    codes, _ = train_ranks(num_ranks, make_flags(prefix, folder, extra, script), script=script)
    assert len(set(codes)) == 1
    return codes[0]


@pytest.mark.slow
def test_run_from_text_resumes_from_text_and_from_its_token_files(
    text: Path, token_files: Path, tmp_path: Path
) -> None:
    """Two replicas start while the text is encoded; the losses are those of one run on finished token files."""
    assert train(token_files, tmp_path / "files" / "run", WINDOW_FLAGS, num_ranks=2) == 0
    folder = tmp_path / "text" / "run"
    assert train(text, folder, f"{WINDOW_FLAGS} --exit-interval 1", num_ranks=2) == 75
    (cached,) = (tmp_path / "text" / "encoded-text").glob("texts-*")
    assert train(text, folder, f"{WINDOW_FLAGS} --exit-interval 3 --load {folder}", num_ranks=2) == 75
    # a run without a window ends the encoding, which the runs above may have stopped
    assert train(text, tmp_path / "text" / "whole", "--train-iters 1 --split 100,0,0 --eval-iters 0") == 0
    assert train(cached / "tokens", folder, f"{WINDOW_FLAGS} --load {folder}", num_ranks=2) == 0
    assert losses_of(folder) == losses_of(tmp_path / "files" / "run")


@pytest.mark.slow
@pytest.mark.parametrize("script", [pretrain_gpt2, pretrain_t5, pretrain_bert])
def test_text_is_encoded_before_a_run_without_a_window(
    script: ModuleType, text: Path, token_files: Path, tmp_path: Path
) -> None:
    flags = "--train-iters 2 --split 80,10,10 --eval-iters 0"
    for name, prefix in (("text", text), ("files", token_files)):
        assert train(prefix, tmp_path / name / "run", flags, script=script) == 0
    assert losses_of(tmp_path / "text" / "run") == losses_of(tmp_path / "files" / "run")


@pytest.mark.slow
def test_bad_lines_end_the_run_with_a_list(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text.read_text() + "not json\n" + '{"body": 1}\n')
    with pytest.raises((AssertionError, DataError), match="max-bad-lines"):
        train(path, tmp_path / "run", "--train-iters 1 --eval-iters 0")
    assert train(path, tmp_path / "run", "--train-iters 1 --eval-iters 0 --max-bad-lines 2") == 0


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_folder, write_parquet, write_zst, write_gz])
def test_every_format_has_the_losses_of_its_token_files(
    write: Callable[[Path, Path], Path], text: Path, tmp_path: Path
) -> None:
    """The sibling without a run: tests/data/preprocess/test_sources.py."""
    path, flags = write(text, tmp_path), "--train-iters 3 --split 100,0,0 --eval-iters 0"
    job = preprocess.Job(
        inputs=[path], output_prefix=str(tmp_path / "tokens"), make_tokenizer=lambda: build(tokenizer_path=TOKENIZER)
    )
    preprocess.run(job)
    assert train(path, tmp_path / "text" / "run", flags, num_ranks=2) == 0
    assert train(tmp_path / "tokens", tmp_path / "files" / "run", flags, num_ranks=2) == 0
    losses = losses_of(tmp_path / "text" / "run")
    assert len(losses) == 3 and losses == losses_of(tmp_path / "files" / "run")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["full in units", "full in output"])
def test_full_disk_while_text_is_encoded_ends_every_rank(
    action: str,
    text: Path,
    token_files: Path,
    tmp_path: Path,
    inject_encoder_fault: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing half-written counts as complete: the next start encodes the corpus and has the losses of token files."""
    flags, log = "--train-iters 2 --split 100,0,0 --eval-iters 0", tmp_path / "log"
    argv = make_flags(text, tmp_path / "run", flags)
    with monkeypatch.context():
        inject_encoder_fault(action)
        assert launch_script(2, argv, log) == [2, 2], log.read_text()
    message = log.read_text()
    assert "there is no space for the output in" in message and "Free disk space" in message
    (cached,) = (tmp_path / "encoded-text").glob("texts-*")
    assert not list(cached.glob("tokens.idx")) and not list(cached.glob("tokens.meta.json"))
    monkeypatch.undo()
    assert launch_script(2, argv, log) == [0, 0], log.read_text()
    assert train(token_files, tmp_path / "files" / "run", flags, num_ranks=2) == 0
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "files" / "run")


@pytest.mark.slow
def test_killed_encoder_is_restarted_and_continues_with_its_units(
    text: Path, token_files: Path, tmp_path: Path, inject_encoder_fault: Callable[[str], None]
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for idx, line in enumerate(text.read_text().splitlines(keepends=True)):
        (corpus / f"{idx:03d}.jsonl").write_text(line)
    flags, log = "--train-iters 2 --split 100,0,0 --eval-iters 0", tmp_path / "log"
    inject_encoder_fault("kill")
    assert launch_script(2, make_flags(corpus, tmp_path / "run", flags), log) == [0, 0], log.read_text()
    assert (tmp_path / "killed").exists()
    finished = re.search(r"(\d+) of (\d+) units were finished before", log.read_text())
    assert finished is not None and 0 < int(finished[1]) < int(finished[2])
    assert train(token_files, tmp_path / "files" / "run", flags, num_ranks=2) == 0
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "files" / "run")


@pytest.mark.slow
def test_documents_are_excluded_while_text_is_encoded(text: Path, token_files: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("0-1\n7\n30-40\n")
    flags = f"{WINDOW_FLAGS} --exclude {tmp_path / 'ids.txt'}"
    assert train(text, tmp_path / "text" / "run", flags) == 0
    assert train(token_files, tmp_path / "files" / "run", flags) == 0
    assert train(token_files, tmp_path / "plain" / "run", WINDOW_FLAGS) == 0
    losses = losses_of(tmp_path / "text" / "run")
    assert losses == losses_of(tmp_path / "files" / "run") != losses_of(tmp_path / "plain" / "run")
