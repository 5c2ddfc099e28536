from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from megatron import tokenizer
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer, train

TEXTS = [
    "The lamp stood in the window.\n\tTwo  spaces, and a tab.",
    "窗前有一盏灯。灯亮着。",
    "def f(x):\n    return x + 1\n",
] * 20
DIFFICULT_TEXTS = [
    "a<|endoftext|>b",
    "<|endoftext|>",
    "<|endoftext|><|endoftext|> x",
    "窗 café 🙂\r\n\n  end ",
    "nothing new",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "tokenizer.json").write_bytes(train.train_bpe(TEXTS, 300))
    (folder / "unigram.model").write_bytes(train.train_unigram(TEXTS, 300))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    return folder


@pytest.fixture(params=["json", "folder", "gpt2", "sentencepiece"])
def any_tokenizer(request: pytest.FixtureRequest, folder: Path) -> Tokenizer:
    return {
        "json": lambda: tokenizer.build(tokenizer_path=folder / "tokenizer.json"),
        "folder": lambda: tokenizer.build("TokenizersJSON", tokenizer_path=folder),
        "gpt2": lambda: tokenizer.build(vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt"),
        "sentencepiece": lambda: tokenizer.build(tokenizer_path=folder / "unigram.model"),
    }[request.param]()


def test_any_text_round_trips_without_control_token(any_tokenizer: Tokenizer) -> None:
    for text, ids in zip(
        DIFFICULT_TEXTS + TEXTS[:3], any_tokenizer.encode_batch(DIFFICULT_TEXTS + TEXTS[:3]), strict=True
    ):
        assert any_tokenizer.encode(text) == ids and any_tokenizer.decode(ids) == text
        assert any_tokenizer.eod_id not in ids and max(ids) < any_tokenizer.vocab_size
    assert any_tokenizer.eod_name == "<|endoftext|>" and any_tokenizer.encode("") == []


def test_gpt2_files_and_json_of_same_vocabulary_agree(folder: Path) -> None:
    from_json = tokenizer.build(tokenizer_path=folder / "tokenizer.json")
    from_files = tokenizer.build("GPT2BPETokenizer", vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt")
    assert from_json.encode_batch(DIFFICULT_TEXTS + TEXTS) == from_files.encode_batch(DIFFICULT_TEXTS + TEXTS)
    assert from_json.vocab_size == from_files.vocab_size == 300 and from_json.identity != from_files.identity


@pytest.mark.parametrize("is_special", [True, False])
def test_added_control_token_in_text_is_escaped(folder: Path, tmp_path: Path, is_special: bool) -> None:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    add_tokens = library.add_special_tokens if is_special else library.add_tokens
    add_tokens(["<eod>"])
    library.save(str(tmp_path / "t.json"))
    fields = json.loads((tmp_path / "t.json").read_text())
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] == "<eod>"]
    fields["model"]["vocab"]["!end!"] = fields["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "t.json").write_text(json.dumps(fields))
    built = tokenizer.build(tokenizer_path=tmp_path / "t.json")
    assert built.eod_name == "<eod>" and built.eod_id not in built.encode("a<eod>b<eod>")
    assert built.decode(built.encode("a<eod>b<eod>")) == "a<eod>b<eod>"


def test_missing_eod_token_raises_when_accessed(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    library.save(str(tmp_path / "t.json"))
    built = tokenizer.build(tokenizer_path=tmp_path / "t.json")
    assert not built.has_eod and built.encode("aa") == [0, 0]
    with pytest.raises(DataError, match="must have an end-of-document token.*t.json has none.*--no-append-eod"):
        _ = built.eod_id


def test_sentinels_and_padding_are_found_by_name(folder: Path, tmp_path: Path) -> None:
    unigram_tokenizer = tokenizer.build(tokenizer_path=folder / "unigram.model")
    assert unigram_tokenizer.sentinel_ids == () and unigram_tokenizer.pad_id is None
    for name_format, first_sentinel_id in (("<extra_id_{}>", 302), ("<s_{}>", 302)):
        library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.add_special_tokens([name_format.format(sentinel_idx) for sentinel_idx in (2, 1, 0, 9)] + ["<pad>"])
        library.save(str(tmp_path / "t.json"))
        built = tokenizer.build(tokenizer_path=tmp_path / "t.json")
        assert (
            built.sentinel_ids == (first_sentinel_id, first_sentinel_id - 1, first_sentinel_id - 2)
            and built.pad_id == 304
            and built.vocab_size == 305
        )
        assert not set(built.encode(f"a {name_format.format(0)} <pad>")) & {300, 301, 302, 304}


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({}, "a tokenizer is required"),
        ({"tokenizer_type": "WordPiece", "tokenizer_path": "x"}, "--tokenizer-type must be one of .* got WordPiece"),
        ({"tokenizer_path": "gone.json"}, "gone.json does not exist"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__}, "needs --merge-file"),
        ({"vocab_file": __file__, "merge_file": __file__}, "must be GPT-2's vocab.json and merges.txt"),
        ({"tokenizer_path": __file__}, "must be a JSON file of the `tokenizers` library"),
        ({"tokenizer_type": "SentencePiece", "tokenizer_path": __file__}, "must be a SentencePiece .model"),
        ({"tokenizer_type": "CPM1", "tokenizer_path": __file__}, "must be a SentencePiece .model"),
        ({"tokenizer_type": "CPM1", "tokenizer_path": str(Path(__file__).parent)}, "a folder with chinese_vocab.model"),
        ({"tokenizer_type": "CPM2", "tokenizer_path": str(Path(__file__).parent)}, "CPM2 needs vocab.txt, a folder"),
        ({"tokenizer_type": "CPM2"}, "--tokenizer-type CPM2 needs --tokenizer-path"),
    ],
)
def test_invalid_tokenizer_flags_are_rejected(arguments: dict[str, str], text: str) -> None:
    with pytest.raises(DataError, match=text):
        tokenizer.build(**arguments)


def test_training_is_deterministic_and_rejects_invalid_sizes(folder: Path) -> None:
    assert train.train_bpe(TEXTS, 300) == (folder / "tokenizer.json").read_bytes()
    with pytest.raises(DataError, match="--vocab-size must be at least 257"):
        train.train_bpe(TEXTS, 256)
    with pytest.raises(DataError, match="--vocab-size 100000 cannot be trained"):
        train.train_unigram(TEXTS, 100_000)


def test_importing_package_imports_no_tokenizer_library() -> None:
    libraries = ["tokenizers", "sentencepiece", "jieba", "rjieba", "gigatoken", "torch"]
    code = f"import sys, megatron.tokenizer; print([name for name in {libraries} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("package", ["jieba", "rjieba"])
@pytest.mark.parametrize("tokenizer_type", ["CPM1", "CPM2"])
def test_missing_jieba_error_names_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer_type: str, package: str
) -> None:
    """And nothing else needs them: GPU machines have neither."""
    monkeypatch.delitem(sys.modules, "megatron.tokenizer.cpm", raising=False)
    monkeypatch.delitem(sys.modules, "megatron.tokenizer.chinese_words", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        DataError, match=f"--tokenizer-type {tokenizer_type} needs {package}, .* Run: pip install {package}$"
    ):
        tokenizer.build(tokenizer_type, tokenizer_path=tmp_path)
