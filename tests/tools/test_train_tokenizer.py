"""tools/train_tokenizer.py: what it trains, on what, and what it says; tools/make_big_corpus.py."""

from __future__ import annotations

import gzip
import json
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from megatron import tokenizer
from megatron.data.preprocess import BadRecord, tokenizer_corpus
from megatron.data.preprocess.tokenizer_corpus import SampledDocument, sample
from megatron.errors import DataError
from megatron.tokenizer import train_progress
from tests.helpers.fake_store import make_empty_store
from tools import make_big_corpus, train_tokenizer

ENGLISH = "The lamp stood in the window of the house by the river. "
CHINESE = "窗前有一盏灯。灯亮着。"
CODE = "def f(x):\n    return {x: [x + 1]}\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    with open(path, "wb") as file:
        for idx in range(900):
            text = [ENGLISH, CHINESE, CODE][idx % 3] * (idx % 7 + 1) + str(idx)
            file.write(orjson.dumps({"text": text, "meta": {"text": "m" * idx}}) + b"\n")
    return path


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """Run the tool in this process; returns its exit code, the file, and what it printed."""

    def run(*args: object, name: str = "t.json") -> tuple[int, Path, str]:
        monkeypatch.setattr(tokenizer_corpus, "HELD_OUT_STEP", 1 << 9)
        path = tmp_path / name
        command = ["train_tokenizer.py", "--output", path, *args]
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        code = train_tokenizer.main()
        captured = capsys.readouterr()
        return code, path, captured.out + captured.err

    return run


def test_control_tokens_are_first_and_training_is_deterministic(train: Callable[..., tuple], corpus: Path) -> None:
    flags = ["--special-tokens", "<fim_prefix>", "<fim_middle>", "--num-sentinels", 3]
    code, path, printed = train("--input", corpus, "--vocab-size", 400, *flags)
    assert code == 0 and "trained on 896 documents, 0.1 MB" in printed and "0 bad skipped, 4 held out" in printed, (
        printed
    )
    vocab = tokenizer.build(tokenizer_path=path)
    assert vocab.eod_id == 0 and vocab.token_to_id("<fim_middle>") == 2 and vocab.sentinel_ids == (3, 4, 5)
    assert vocab.decode(vocab.encode(CHINESE + CODE + "\x07é")) == CHINESE + CODE + "\x07é"
    first = path.read_bytes()
    assert train("--input", corpus, "--vocab-size", 400, *flags)[1].read_bytes() == first
    rows = [line.split("│")[1:-1] for line in printed.splitlines() if "│" in line]
    assert [row[0].strip() for row in rows] == ["Latin", "code or other", "Han", "all"]
    assert all(row[-1].strip() == "0.000%" for row in rows) and rows[2][5].strip() == "-"


def test_object_store_input_equals_local_input(
    train: Callable[..., tuple], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_empty_store(monkeypatch, 50_000).pipe("/b/c.jsonl", corpus.read_bytes())
    expected = train("--input", corpus, "--vocab-size", 300)[1].read_bytes()
    code, path, printed = train("--input", "memory://b/c.jsonl", "--vocab-size", 300, name="other.json")
    assert code == 0 and path.read_bytes() == expected, printed


def test_unigram_and_wordpiece_are_trained_and_loaded(train: Callable[..., tuple], corpus: Path) -> None:
    inputs = ["--input", corpus, corpus, "--num-sentinels", 2]
    code, path, printed = train(*inputs, "--vocab-size", 320, "--model", "unigram", name="t.model")
    assert code == 0 and "trained on 1790 documents" in printed and "Latin" not in printed, printed
    unigram = tokenizer.build(tokenizer_path=path)
    assert len(unigram.sentinel_ids) == 2 and unigram.decode(unigram.encode(CODE)) == CODE
    code, path, printed = train(*inputs, "--vocab-size", 120, "--model", "wordpiece")
    assert code == 0, printed
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>", "<extra_id_0>", "<extra_id_1>"]
    assert [vocabulary[name] for name in names] == list(range(8)) and len(vocabulary) <= 120
    wordpiece = tokenizer.build(tokenizer_path=path)
    assert 1 in wordpiece.encode("龍") and 1 not in wordpiece.encode("lamp 窗")
    assert train(*inputs, "--vocab-size", 120, "--model", "wordpiece")[1].read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--vocab-size", 257, "--special-tokens", "<a>"], "--vocab-size must be at least 258 (256 bytes and <|endo"),
        (["--vocab-size", 300, "--special-tokens", "a b"], "--special-tokens must be names without blanks, got 'a b'"),
        (["--vocab-size", 300, "--special-tokens", "<a>", "<a>"], "must differ from each other"),
        (["--vocab-size", 9999, "--model", "unigram"], "--vocab-size 9999 cannot be trained on this text"),
        (["--vocab-size", 300, "--json-key", "txt"], "900 of 900 records are bad; at most 0 (--max-bad"),
        (
            ["--vocab-size", 300, "--json-key", "txt", "--max-bad-fraction", 0.9],
            "at most 0.9 of all lines (--max-bad-f",
        ),
        (
            ["--vocab-size", 120, "--model", "wordpiece", "--max-token-length", 9],
            "--max-token-length (9) is not supported with --model wordpiece",
        ),
        (["--vocab-size", 300, "--json-key", "txt", "--model", "unigram"], "c.jsonl:1 (byte 0): has no key 'txt'"),
        (["--vocab-size", 300, "--json-key", "txt", "--max-bad-lines", 1000], "no documents to train on (900 bad)"),
        (
            ["--vocab-size", 7, "--model", "wordpiece"],
            "--vocab-size must be at least 8 (2 characters and [PAD], [UNK],",
        ),
        (["--vocab-size", 300, "--sample-bytes", 9, "--input", "-"], "--sample-bytes needs files"),
    ],
)
def test_invalid_arguments_exit_with_code_2(
    train: Callable[..., tuple], corpus: Path, arguments: list[object], text: str
) -> None:
    name = "t.model" if "unigram" in arguments else "t.json"
    code, path, printed = train("--input", corpus, *arguments, name=name)
    assert code == 2 and text in printed and not path.exists(), printed


@pytest.mark.parametrize(
    "model, name, text",
    [
        ("bpe", "t.model", "must be a .json file with --model bpe"),
        ("wordpiece", "t", "must be a .json file with --model wordpiece"),
        ("unigram", "t.json", "must be a .model file with --model unigram"),
        ("bpe", "file/t.json", "must be in a writable folder"),
    ],
)
def test_invalid_output_is_rejected_before_training(
    train: Callable[..., tuple],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    name: str,
    text: str,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(train_tokenizer.train, "MODELS", dict.fromkeys(train_tokenizer.train.MODELS))
    code, _, printed = train("--input", corpus, "--vocab-size", 400, "--model", model, name=name)
    assert code == 2 and text in " ".join(printed.split()), printed
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("model", ["bpe", "wordpiece"])
def test_smaller_vocabulary_than_requested_is_reported(
    train: Callable[..., tuple], tmp_path: Path, corpus: Path, model: str
) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "the lamp, the river"}) + "\n")
    code, path, printed = train("--input", tmp_path / "c.jsonl", "--vocab-size", 5000, "--model", model)
    size = tokenizer.build(tokenizer_path=path).vocab_size
    assert code == 0 and f"the text yields only {size} of the 5000 tokens of --vocab-size" in " ".join(printed.split())
    assert "yields only" not in train("--input", corpus, "--vocab-size", 300, "--model", "bpe")[2]


def test_memory_limit_bounds_words_and_is_logged(
    train: Callable[..., tuple], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_tokenizer.train, "_BYTES_FOR_A_BYTE", 80_000)
    rng = random.Random(0)
    lines = ["".join(chr(0x4E00 + rng.randrange(900)) for _ in range(6)) for _ in range(300)]
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "\n".join(lines)}) + "\n")
    code, _, printed = train("--input", tmp_path / "c.jsonl", "--vocab-size", 300, "--memory-bytes", "2e7")
    printed = " ".join(printed.split())
    assert code == 0 and "do not fit into 20 MB of memory" in printed and "% of the rare" in printed, printed
    assert (
        "different words" not in train("--input", tmp_path / "c.jsonl", "--vocab-size", 300, "--memory-bytes", "1e9")[2]
    )


def test_ctrl_c_prints_one_line(train: Callable[..., tuple], corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_tokenizer.train, "MODELS", {"bpe": interrupted})
    code, path, printed = train("--input", corpus, "--vocab-size", 400)
    assert code == 130 and "stopped by Ctrl-C" in printed and not path.exists()
    assert len(printed.splitlines()) == 1


def test_bad_lines_within_limit_are_skipped(train: Callable[..., tuple], tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "a b c"}\n{"text": 1}\n\n{"text": "\xff"}\n{"text": "d"}\n')
    code, _, printed = train("--input", tmp_path / "c.jsonl", "--vocab-size", 260, "--max-bad-lines", "2")
    assert code == 0 and "trained on 2 documents" in printed and "(2 bad skipped, 0 held out)" in printed, printed
    assert "skipped" in printed and "c.jsonl:4 (byte 31): not UTF-8" in printed
    assert "the text is too small" in printed


def write_bad_corpus(path: Path, num_good: int, num_bad: int) -> Path:
    """Write good lines with the bad ones spread over them."""
    lines = [json.dumps({"text": f"line {idx}"}) for idx in range(num_good)]
    for idx in range(num_bad):
        lines.insert(idx * (num_good + num_bad) // num_bad, '{"text": 1}')
    path.write_text("\n".join(lines) + "\n")
    return path


def test_all_bad_lines_are_listed(train: Callable[..., tuple], tmp_path: Path) -> None:
    path = write_bad_corpus(tmp_path / "c.jsonl", 9, 3)
    code, model_path, printed = train("--input", path, "--vocab-size", 260)
    assert code == 2 and not model_path.exists()
    expected = "3 of 12 records are bad; at most 0 (--max-bad-lines) are allowed. Correct them, or skip them with --max"
    assert expected in printed
    assert all(f"c.jsonl:{line} (byte " in printed for line in (1, 5, 9)) and printed.count("(byte ") == 3
    for limit in (
        ["--max-bad-lines", 3],
        ["--max-bad-fraction", 0.25],
        ["--max-bad-lines", 3, "--max-bad-fraction", 1],
    ):
        assert train("--input", path, "--vocab-size", 260, *limit)[0] == 0
    for limit in (
        ["--max-bad-lines", 2],
        ["--max-bad-fraction", 0.24],
        ["--max-bad-lines", 2, "--max-bad-fraction", 1],
    ):
        assert train("--input", path, "--vocab-size", 260, *limit)[0] == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c.jsonl", "t.json"]


def test_many_bad_lines_are_written_to_file(
    train: Callable[..., tuple], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, listed = write_bad_corpus(tmp_path / "c.jsonl", 99, 33), tmp_path / "t.bad.jsonl"
    code, _, printed = train("--input", path, "--vocab-size", 260)
    assert code == 2 and printed.count("(byte ") == 20 and "and 13 more" in printed
    assert f"33 bad lines; {listed} lists all of them" in " ".join(printed.split())
    bad = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [record["line"] for record in bad] == [idx * 4 + 1 for idx in range(33)]
    code, _, printed = train("--input", path, "--vocab-size", 260, "--max-bad-lines", 33)
    assert code == 0 and listed.exists() and "(byte " not in printed
    assert train("--input", write_bad_corpus(path, 9, 1), "--vocab-size", 260, "--max-bad-lines", 1)[0] == 0
    assert not listed.exists(), "of an earlier run"
    monkeypatch.setattr(tokenizer_corpus, "_STOP_AT_NUM_BAD", 10)
    code, _, printed = train("--input", write_bad_corpus(path, 20, 400), "--vocab-size", 260)
    assert code == 2 and "and reading was stopped" in printed and "check --input, --format and --json-key" in printed
    assert "10 of 10 records" in printed or "11 of 11 records" in printed


def test_max_token_length_is_respected(train: Callable[..., tuple], corpus: Path, tmp_path: Path) -> None:
    text = {"text": "山上的小路通向河边的房子 understanding 山上的小路 understanding\n" * 50}
    (tmp_path / "c.jsonl").write_text(json.dumps(text) + "\n")
    longest = {}
    for model, name, path, size in (("bpe", "t.json", tmp_path / "c.jsonl", 300), ("unigram", "t.model", corpus, 320)):
        for limit in (None, 6 if model == "bpe" else 3):
            limit_flags = [] if limit is None else ["--max-token-length", limit]
            inputs = ["--input", path, "--vocab-size", size, "--model", model]
            _, model_path, printed = train(*inputs, *limit_flags, name=name)
            vocab = tokenizer.build(tokenizer_path=model_path)
            tokens = [vocab.piece(token_id) or "" for token_id in range(vocab.vocab_size)]
            control = set(vocab.control_tokens)
            longest[model, limit] = max(
                len(text_of_token)
                for text_of_token in tokens
                if text_of_token not in control and text_of_token[:3] != "<0x"
            )
    assert longest["bpe", 6] == 6  # characters of a byte-level piece stand for bytes
    assert longest["unigram", 3] <= 3
    assert longest["bpe", None] > 12 and longest["unigram", None] > 3


def test_progress_is_logged_for_every_model(
    train: Callable[..., tuple], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_progress, "INTERVAL_S", 0.01)
    for model, name in (("bpe", "t.json"), ("wordpiece", "t.json"), ("unigram", "t.model")):
        code, _, printed = train("--input", corpus, "--vocab-size", 320, "--model", model, name=name)
        assert code == 0 and f": training a vocabulary of 320 tokens ({model}) on 896 documents, 0.1 MB" in printed


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_sample_is_even_and_deterministic(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_corpus, "SAMPLE_CHUNK_BYTES", 1 << 10)
    texts = [f"{idx:06d}" + "x" * (idx % 100) for idx in range(1000)]
    total = sum(map(len, texts))
    content = b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts)
    (tmp_path / f"c.jsonl{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    for num_bytes in (8_000, 30_000):
        documents = list(sample([tmp_path], None, ["text"], num_bytes))
        assert documents == list(sample([tmp_path], None, ["text"], num_bytes))
        sampled_texts = [document.text for document in documents if isinstance(document.text, str)]
        assert 0.95 * num_bytes < sum(map(len, sampled_texts)) < num_bytes + 106
        positions = [int(text[:6]) for text in sampled_texts]
        assert positions == sorted(set(positions))
        quarters = [sum(len(text) for text in sampled_texts if int(text[:6]) // 250 == quarter) for quarter in range(4)]
        assert max(quarters) - min(quarters) < 2 * tokenizer_corpus.SAMPLE_CHUNK_BYTES
    assert len(list(sample([tmp_path], None, ["text"], 10 * total))) == 1000
    assert [document.text for document in sample([tmp_path], None, ["text"])] == texts


def test_sample_counts_text_bytes_of_files_and_columns(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"{idx:06d}" + "x" * 94 for idx in range(400)]
    table = arrow.table({"text": texts, "other": ["unread" * 50] * 400})
    parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    for idx, text in enumerate(texts):
        (tmp_path / f"t{idx:03d}.txt").write_text(text)
    documents = list(sample([tmp_path], None, ["text"], 20_000))
    from_rows = sum(document.path.endswith("parquet") for document in documents)
    assert 190 <= len(documents) <= 210 and 90 <= from_rows <= 110
    assert not any(isinstance(document.text, BadRecord) for document in documents)


@pytest.mark.slow
def test_big_corpus_has_requested_size_and_depends_on_seed(tmp_path: Path) -> None:
    outputs = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        arguments = ["--bytes", "3e5", "--output", str(tmp_path / f"{name}.jsonl"), "--seed", seed]
        assert make_big_corpus.main(arguments) == 0
        outputs.append((tmp_path / f"{name}.jsonl").read_bytes())
    assert outputs[0] == outputs[1] != outputs[2] and 3e5 <= len(outputs[0]) < 3e5 + make_big_corpus.MAX_BYTES
    texts = [orjson.loads(line)["text"] for line in outputs[0].splitlines()]
    assert len(set(map(len, texts))) > 20 and any("。" in text for text in texts)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    with pytest.raises(DataError, match="must contain examples/corpus"):
        make_big_corpus.load_snippets(tmp_path)


def test_tool_runs_as_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "argv", ["train_tokenizer.py", "--input", "gone", "--vocab-size", "1e3", "--output", "t.json"]
    )
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(train_tokenizer.__file__, run_name="__main__")
    assert "--input gone does not exist" in capsys.readouterr().err


def test_held_out_documents_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_corpus, "HELD_OUT_STEP", 100)
    documents = [SampledDocument("ab"[idx % 2], f"{idx:03d}" + "x" * (idx % 50), 0) for idx in range(400)]
    text = tokenizer_corpus.TrainingText(documents, lambda path: path, 0.1, max_bad_lines=0)
    trained = list(text)
    held_out = [document for group in text.held_out.values() for document in group]
    assert sorted(trained + held_out) == sorted(
        document.text for document in documents if isinstance(document.text, str)
    )
    assert {group: {int(document[:3]) % 2 for document in texts} for group, texts in text.held_out.items()} == {
        "a": {0},
        "b": {1},
    }
    share = sum(map(len, held_out)) / text.num_bytes
    assert 0.08 < share <= 0.11 and max(map(len, held_out)) > 40 and min(map(len, held_out)) < 20
