"""Perplexity and bits per byte: of files, JSON lines and token files, comparable over vocabularies."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from megatron.evaluation import texts
from megatron.evaluation.texts import Domain, TextScore, combine_scores, read_documents, score_domains
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.huggingface import from_json_files
from tests.helpers import small_corpora
from tests.helpers.evaluation import FakeModel

TEXTS = ["the lamp stood in the window", "灯在窗前", "", "of the house"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    vocabulary = small_corpora.make_tokenizer(folder)
    small_corpora.write_token_files(folder / "corpus", [text for text in TEXTS if text], vocabulary)
    lines = [json.dumps({"q": text}, ensure_ascii=False) for text in TEXTS]
    (folder / "lines.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    (folder / "whole.txt").write_text(TEXTS[1] + "\n" + TEXTS[0], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return from_json_files(folder / "t.json")


def test_each_file_format_yields_its_documents(folder: Path, tokenizer: Tokenizer) -> None:
    expected = [(tokenizer.encode(text), len(text.encode())) for text in TEXTS if text]
    for name, field in (("lines.jsonl", "q"), ("corpus", "text")):
        found = [
            (list(document.tokens), document.num_bytes) for document in read_documents(folder / name, tokenizer, field)
        ]
        assert found == expected, "without their ends, and bytes, not characters"
    (text_document,) = read_documents(folder / "whole.txt", tokenizer)
    assert text_document.num_bytes == len((TEXTS[1] + "\n" + TEXTS[0]).encode())
    assert text_document.num_bytes > len(TEXTS[1] + "\n" + TEXTS[0])


def test_token_file_of_another_program_ends_documents_with_the_eod_of_the_tokenizer(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Without PREFIX.meta.json, which names the end-of-document token of our files."""
    for suffix in (".bin", ".idx"):
        shutil.copy(folder / f"corpus{suffix}", tmp_path)
    documents = [list(document.tokens) for document in read_documents(tmp_path / "corpus", tokenizer)]
    assert documents == [tokenizer.encode(text) for text in TEXTS if text]


def test_domain_score_sums_over_documents(folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = FakeModel(tokenizer, 3)
    domains = [Domain.from_argument(f"a={folder / 'lines.jsonl'}"), Domain.from_argument(str(folder / "corpus"))]
    first, second = score_domains(model, domains, field="q")
    ids = [tokenizer.encode(text) for text in TEXTS if text]
    assert first == TextScore("a", 3, sum(map(len, ids)), sum(len(text.encode()) for text in TEXTS), first.nats)
    assert first.nats == second.nats == float(sum(map(sum, ids))) and second.name == "corpus"
    assert all(row.tokens[0] == tokenizer.eod_id for row in (model.rows[0], model.rows[-1]))
    monkeypatch.setattr(texts, "TOKENS_PER_CALL", 2)
    assert score_domains(model, domains, field="q") == [first, second], "in portions, too"
    (limited_score,) = score_domains(model, domains[:1], field="q", limit=1)
    assert (limited_score.documents, limited_score.tokens) == (1, len(ids[0]))


def test_metrics_follow_from_nats_tokens_and_bytes() -> None:
    first, second = TextScore("a", 1, 10, 40, 20.0), TextScore("b", 2, 30, 40, 10.0)
    assert first.perplexity == math.exp(2) and first.bits_per_byte == 0.5 / math.log(2) and first.bytes_per_token == 4
    assert combine_scores([first, second]) == TextScore("all", 3, 40, 80, 30.0)
    assert math.isnan(TextScore("none", 0, 0, 0, 0.0).perplexity)


def test_unreadable_texts_are_named(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def error_of(path: Path, field: str = "text") -> str:
        with pytest.raises(DataError) as raised:
            list(read_documents(path, tokenizer, field))
        return str(raised.value)

    assert "lines.jsonl:1: each line must be a JSON object with a string" in error_of(folder / "lines.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text": 3}\n')
    assert "bad.jsonl:2: " in error_of(tmp_path / "bad.jsonl") and "not a string" in error_of(tmp_path / "bad.jsonl")
    assert "must be a file, or the PREFIX of PREFIX.bin and PREFIX.idx, got neither" in error_of(tmp_path / "none")
    assert "is one of the two files of a token file" in error_of(folder / "corpus.bin")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xff")
    assert "must be UTF-8 text" in error_of(tmp_path / "bad.txt")
