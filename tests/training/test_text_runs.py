"""Runs on text: the losses of runs on token files, with several ranks, a resume, and T5 and BERT."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

import pretrain_gpt2
import pretrain_t5
from examples.bert import pretrain_bert
from megatron.data import preprocess
from megatron.errors import DataError
from megatron.tokenizer import build
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import ROOT, TOKENIZER, make_flags, train_ranks

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
