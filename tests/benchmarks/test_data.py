"""The benchmark of the data pipeline compares contenders that write the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import data
from benchmarks.data import OURS
from benchmarks.turns import Bar, rates_in_turns, ratio_quartiles
from megatron.data import IndexedDataset


def encode_letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def make_letter_encoder() -> data.Encode:
    return encode_letters


def test_turns_rotate_and_ratios_are_per_round() -> None:
    order = ""

    def run_turn(name: str, rates: list[float]) -> float:
        nonlocal order
        order += name
        return rates[order.count(name) - 1]

    ours, reference = [10.0, 1.0, 10.0], [5.0, 0.5, 5.0]  # the machine was slow in the second round
    rates = rates_in_turns({"a": lambda: run_turn("a", ours), "b": lambda: run_turn("b", reference)}, 3)
    assert order == "abbaab" and rates == {"a": ours, "b": reference}
    assert ratio_quartiles(rates["a"], rates["b"]) == (2.0, 2.0, 2.0)
    assert Bar("x", (1.0, 2.0, 3.0), at_least=2.0).is_met and Bar("x", (1.0, 2.0, 3.0), at_most=2.0).is_met
    assert "NOT MET" in Bar("x", (1.0, 2.0, 3.0), at_least=2.1).text


def test_corpus_depends_on_seed_and_has_three_languages(tmp_path: Path) -> None:
    texts = list(data.documents(60_000, 1))
    assert texts == list(data.documents(60_000, 1)) != list(data.documents(60_000, 2))
    assert any("。" in text for text in texts) and any("def " in text for text in texts)
    path = data.write_corpus(tmp_path / "c.jsonl", 60_000, 1)
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == texts


def test_reference_writes_readable_files(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n')
    encoder = data.Encoder(make_letter_encoder, 7)
    data.run_reference(tmp_path / "c.jsonl", tmp_path / "c", encoder, num_workers=1, chunk_size=1)
    file = IndexedDataset(tmp_path / "c")
    assert [file.read(idx).tolist() for idx in range(2)] == [[97, 98, 7], [99, 7]]


def test_contenders_must_write_equal_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c").write_bytes(b" " * 2_000_000)
    hashes = {"ours": "x", "reference": "x"}
    seconds = {"ours": 0.5, "reference": 2.0}
    monkeypatch.setattr(
        data, "run_in_process", lambda job, vocabulary, name, contender, *args: (seconds[contender], hashes[contender])
    )
    rates, bars = data.measure_preprocessing(tmp_path, {"bpe": tmp_path / "c"}, [1, 2], 1, tmp_path)
    assert rates[f"bpe, 1 worker, {OURS}"] == [4.0] and len(rates) == 4  # MB/s
    assert [(bar.quartiles[1], bar.is_met) for bar in bars] == [(4.0, True)] * 2
    hashes["reference"] = "y"
    with pytest.raises(RuntimeError, match="the same tokens"):
        data.measure_preprocessing(tmp_path, {"bpe": tmp_path / "c"}, [1], 1, tmp_path)


@pytest.mark.slow
def test_smoke_run_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = data.main(f"--smoke --tokenizers bpe --ranks 1 --json {tmp_path}/out.json".split())
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["preprocessing"]["bars"][0]["name"] == "bpe, 1 worker, ours / reference"
    assert len(written["preprocessing"]["megabytes_per_s"]) == 2
    assert all(seconds > 0 for seconds, _ in result["start"].values())
    assert "met" in capsys.readouterr().out.lower()
