"""Perplexity and bits per byte: of files, JSON lines and token files, comparable over vocabularies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from megatron.evaluation import texts
from megatron.evaluation.texts import Domain, TextScore, documents, score_domains, together
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.huggingface import from_json_files
from tests.helpers import small_corpora
from tests.helpers.evaluation import Model

TEXTS = ["the lamp stood in the window", "灯在窗前", "", "of the house"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    vocabulary = small_corpora.make_tokenizer(folder)
    small_corpora.write(folder / "corpus", [text for text in TEXTS if text], vocabulary)
    lines = [json.dumps({"q": text}, ensure_ascii=False) for text in TEXTS]
    (folder / "lines.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    (folder / "whole.txt").write_text(TEXTS[1] + "\n" + TEXTS[0], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return from_json_files(folder / "t.json")


def test_each_kind_of_file_has_its_documents(folder: Path, tokenizer: Tokenizer) -> None:
    wanted = [(tokenizer.encode(text), len(text.encode())) for text in TEXTS if text]
    for name, field in (("lines.jsonl", "q"), ("corpus", "text")):
        found = [(list(one.tokens), one.num_bytes) for one in documents(folder / name, tokenizer, field)]
        assert found == wanted, "without their ends, and bytes, not characters"
    (whole,) = documents(folder / "whole.txt", tokenizer)
    assert whole.num_bytes == len((TEXTS[1] + "\n" + TEXTS[0]).encode())
    assert whole.num_bytes > len(TEXTS[1] + "\n" + TEXTS[0])


def test_a_domain_has_the_sum_over_its_documents(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = Model(tokenizer, 3)
    domains = [Domain.of(f"a={folder / 'lines.jsonl'}"), Domain.of(str(folder / "corpus"))]
    first, second = score_domains(model, domains, field="q")
    ids = [tokenizer.encode(text) for text in TEXTS if text]
    assert first == TextScore("a", 3, sum(map(len, ids)), sum(len(text.encode()) for text in TEXTS), first.nats)
    assert first.nats == second.nats == float(sum(map(sum, ids))) and second.name == "corpus"
    assert all(row.tokens[0] == tokenizer.eod_id for row in (model.rows[0], model.rows[-1]))
    monkeypatch.setattr(texts, "TOKENS_AT_ONCE", 2)
    assert score_domains(model, domains, field="q") == [first, second], "in portions, too"
    (few,) = score_domains(model, domains[:1], field="q", limit=1)
    assert (few.documents, few.tokens) == (1, len(ids[0]))


def test_numbers_follow_from_nats_tokens_and_bytes() -> None:
    one, other = TextScore("a", 1, 10, 40, 20.0), TextScore("b", 2, 30, 40, 10.0)
    assert one.perplexity == math.exp(2) and one.bits_per_byte == 0.5 / math.log(2) and one.bytes_per_token == 4
    assert together([one, other]) == TextScore("all", 3, 40, 80, 30.0)
    assert math.isnan(TextScore("none", 0, 0, 0, 0.0).perplexity)


def test_what_cannot_be_read_is_named(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def problem(path: Path, field: str = "text") -> str:
        with pytest.raises(DataError) as caught:
            list(documents(path, tokenizer, field))
        return str(caught.value)

    assert "lines.jsonl:1: each line must be a JSON object with a string" in problem(folder / "lines.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text": 3}\n')
    assert "bad.jsonl:2: " in problem(tmp_path / "bad.jsonl") and "not a string" in problem(tmp_path / "bad.jsonl")
    assert "must be a file, or the PREFIX of PREFIX.bin and PREFIX.idx, got neither" in problem(tmp_path / "none")
    assert "is one of the two files of a token file" in problem(folder / "corpus.bin")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xff")
    assert "must be UTF-8 text" in problem(tmp_path / "bad.txt")
