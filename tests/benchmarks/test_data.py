"""The benchmark of the data compares what does the same, and its arithmetic is right."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import data, data_preprocessing
from benchmarks.data_preprocessing import OURS, REFERENCE, Contender, Done, Kind
from benchmarks.turns import Bar, rates_in_turns, ratio_quartiles
from megatron.data import IndexedDataset

TEXT = np.arange(100, 100 + data.RAW_LENGTH)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def make_letters() -> data_preprocessing.Encode:
    return letters


@pytest.mark.parametrize("number", [0, 7])
def test_spans_in_python_are_ours_to_the_bit(number: int) -> None:
    ours, same = data.ours(TEXT, number), data.same(TEXT, number)
    assert set(ours) == set(same)
    for key in ours:
        assert ours[key].dtype == same[key].dtype and np.array_equal(ours[key], same[key]), key


@pytest.mark.parametrize("cut", data.CONTENDERS.values(), ids=["ours", "usual", "same"])
def test_inputs_and_targets_of_each_contender_give_back_the_text(cut: data.Cut) -> None:
    sample = cut(TEXT, 3)
    first = data.TOKENS.text_vocab_size
    inputs, targets = (row[row >= 100].tolist() for row in (sample["inputs"], sample["targets"]))
    starts = [place for place, token in enumerate(targets) if token >= first]
    cut_out = {targets[a]: targets[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(targets)], strict=True)}
    text = [token for place in inputs for token in (cut_out[place] if place >= first else [place])]
    length = min(len(text), 500)  # of more spans than usual the inputs are cut
    assert text[:length] == TEXT[:length].tolist() and len(text) > 500
    assert sum(map(len, cut_out.values())) == pytest.approx(85, abs=4) and 20 <= len(cut_out) <= 45


def test_turns_rotate_and_ratios_are_taken_within_rounds() -> None:
    seen = ""

    def turn(name: str, rates: list[float]) -> float:
        nonlocal seen
        seen += name
        return rates[seen.count(name) - 1]

    ours, theirs = [10.0, 1.0, 10.0], [5.0, 0.5, 5.0]  # the second round was slow for both
    rates = rates_in_turns({"a": lambda: turn("a", ours), "b": lambda: turn("b", theirs)}, 3)
    assert seen == "abbaab" and rates == {"a": ours, "b": theirs}
    assert ratio_quartiles(rates["a"], rates["b"]) == (2.0, 2.0, 2.0)
    assert Bar("x", 2.0, (1.0, 2.0, 3.0)).is_met and not Bar("x", 2.1, (1.0, 2.0, 3.0)).is_met
    assert "NOT MET" in Bar("x", 2.1, (1.0, 2.0, 3.0), by_cpu=1.5).text


def test_the_corpus_is_that_of_its_seed_and_mixes_three_kinds(tmp_path: Path) -> None:
    texts = list(data_preprocessing.documents(60_000, 1))
    assert texts == list(data_preprocessing.documents(60_000, 1)) != list(data_preprocessing.documents(60_000, 2))
    assert any("。" in text for text in texts) and any("def " in text for text in texts)
    size = data_preprocessing.write(tmp_path / "c.jsonl", 60_000, 1)
    lines = (tmp_path / "c.jsonl").read_text().splitlines()
    assert size > 60_000 and [json.loads(line)["text"] for line in lines] == texts


def test_the_reference_writes_files_that_open(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n')
    encoder = data_preprocessing.Encoder(make_letters, 7)
    data_preprocessing.run_reference(tmp_path / "c.jsonl", tmp_path / "c", encoder, num_workers=1, chunk_size=1)
    file = IndexedDataset(tmp_path / "c")
    assert [file.read(number).tolist() for number in range(2)] == [[97, 98, 7], [99, 7]]


def test_contenders_of_a_tokenizer_must_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c").write_bytes(b" " * 2_000_000)
    done = {OURS: Done(0.5, 1.0, "x"), REFERENCE: Done(2.0, 2.0, "x")}
    monkeypatch.setattr(data_preprocessing, "in_process", lambda job, kind, contender, *rest: done[contender.who])
    kinds = {"bpe": Kind(make_tokenizer=None, make_encode=None, bar=3.0, bar_workers=(1,))}  # type: ignore[arg-type]
    rates, bars = data_preprocessing.measure(kinds, {"bpe": tmp_path / "c"}, [1, 2], 1, tmp_path)
    assert rates[Contender("bpe", OURS, 1).name] == [4.0] and len(rates) == 4  # MB/s
    assert [(bar.quartiles[1], bar.by_cpu, bar.is_met) for bar in bars] == [(4.0, 2.0, True)]
    done[REFERENCE] = Done(2.0, 2.0, "y")
    with pytest.raises(RuntimeError, match="the same tokens"):
        data_preprocessing.measure(kinds, {"bpe": tmp_path / "c"}, [1], 1, tmp_path)


def test_a_job_within_a_clock_tick_has_taken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c").write_text('{"text": "ab"}\n')
    kind = Kind(make_tokenizer=lambda: SimpleNamespace(eod_id=0), make_encode=make_letters)  # type: ignore[arg-type,return-value]
    turn = partial(data_preprocessing.job, kind, Contender("bpe", REFERENCE, 1), tmp_path / "c", tmp_path / "out")
    monkeypatch.setattr(data_preprocessing, "_cpu_s", lambda: 3.0)
    assert turn().cpu_s == data_preprocessing.TICK_S == 1 / os.sysconf("SC_CLK_TCK")
    counted = iter([3.0, 5.5])
    monkeypatch.setattr(data_preprocessing, "_cpu_s", lambda: next(counted))
    assert turn().cpu_s == 2.5


def test_reading_is_held_against_ten_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "tokens_per_s", lambda family, *rest: {"gpt2": 1024.0, "t5": 626.0}[family])
    monkeypatch.setattr(data, "read", lambda prefix, family, *rest: {"gpt2": 5.0, "t5": 20.0}[family])
    _, bars, facts = data.measure_reading(tmp_path, 1000, 8, 1, 1, "cpu", "fork")
    assert facts["needed_samples_per_s"] == {"gpt2": 10.0, "t5": 10.0}
    assert {bar.quartiles[1] for bar in bars if "gpt2" in bar.name} == {0.5} and len(bars) == 8
    assert {bar.is_met for bar in bars if "t5" in bar.name} == {True}


@pytest.mark.parametrize("family, reader, num_workers", [("gpt2", "mmap", 0), ("t5", "pread", 0), ("gpt2", "pread", 1)])
def test_samples_are_read_in_each_way(tmp_path: Path, family: str, reader: str, num_workers: int) -> None:
    data.write_tokens(tmp_path / "c", 20_000)
    assert data.read(tmp_path / "c", family, reader, num_workers, 8) > 0.0


def test_a_smoke_run_tells_each_part_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--smoke --parts preprocessing spans --tokenizers bpe --json {tmp_path}/out.json"
    result = data.main(line.split(), start_method="fork")
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["bars"][0]["name"] == result["bars"][0]["name"] == "bpe, 1 worker, ours / reference"
    assert len(told["rates"]["preprocessing, MB/s"]) == 2 and "met" in capsys.readouterr().out.lower()


@pytest.mark.slow
def test_a_smoke_run_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    result = data.main(["--smoke"], start_method="fork")
    assert len(result["rates"]) == 3 and len(result["bars"]) == 3 + 8 + 1
    assert "tokens/s of a step" in capsys.readouterr().out
