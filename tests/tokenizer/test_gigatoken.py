from __future__ import annotations

import importlib.util
import json
import multiprocessing
import pickle
import sys
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import pytest
import tokenizers

from megatron import log, tokenizer
from megatron.errors import DataError
from megatron.tokenizer import gigatoken as tokenizer_gigatoken
from megatron.tokenizer import train, with_gigatoken
from megatron.tokenizer.build import _PROBES
from megatron.tokenizer.gigatoken import GigatokenTokenizer


def write_with_control_tokens(folder: Path, bpe_path: Path) -> Path:
    library = tokenizers.Tokenizer.from_file(str(bpe_path))
    library.add_special_tokens(["<pad>", "<mask>", "<extra_id_0>"])
    library.save(str(folder / "t.json"))
    return folder / "t.json"


def test_ids_equal_library_ids_including_spelled_control_tokens(
    tmp_path: Path, bpe_path: Path, corpus: list[str]
) -> None:
    library_tokenizer = tokenizer.build(tokenizer_path=write_with_control_tokens(tmp_path, bpe_path))
    gigatoken_tokenizer = with_gigatoken(library_tokenizer, corpus[:4], is_required=True)
    assert (
        isinstance(gigatoken_tokenizer, GigatokenTokenizer)
        and gigatoken_tokenizer.identity == library_tokenizer.identity
    )
    texts = [*corpus, "", "a<|endoftext|>b <pad><mask>", "<extra_id_0>"]
    for expected, actual in zip(
        library_tokenizer.encode_arrays(texts), gigatoken_tokenizer.encode_arrays(texts), strict=True
    ):
        assert expected.dtype == actual.dtype and np.array_equal(expected, actual)
    assert [len(array) for array in gigatoken_tokenizer.encode_arrays([])] == [0, 0]
    assert pickle.loads(pickle.dumps(gigatoken_tokenizer)).encode(texts[-2]) == library_tokenizer.encode(texts[-2])


def test_gpt2_vocabulary_files_are_supported(tmp_path: Path, bpe_path: Path, corpus: list[str]) -> None:
    model = json.loads(bpe_path.read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    library_tokenizer = tokenizer.build(vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt")
    gigatoken_tokenizer = with_gigatoken(library_tokenizer, corpus[:2], is_required=True)
    assert isinstance(gigatoken_tokenizer, GigatokenTokenizer) and gigatoken_tokenizer.encode_batch(
        corpus
    ) == library_tokenizer.encode_batch(corpus)


def test_gigatoken_works_in_forked_process(bpe_path: Path, corpus: list[str]) -> None:
    gigatoken_tokenizer = with_gigatoken(tokenizer.build(tokenizer_path=bpe_path), corpus[:2])
    expected = gigatoken_tokenizer.encode(corpus[0])
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(gigatoken_tokenizer.encode(corpus[0])))
    process.start()
    assert receiver.poll(30) and receiver.recv() == expected
    process.join(30)


def test_differing_id_is_named_and_gigatoken_is_disabled(
    bpe_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library_tokenizer = tokenizer.build(tokenizer_path=bpe_path)
    original_encode = tokenizer_gigatoken._encode

    def encode_wrongly(fast: Any, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths = original_encode(fast, texts)
        tokens[-1:] += texts[-1:] == [corpus[-1].encode()]  # the last token of the sample alone
        return tokens, lengths

    messages: list[str] = []
    monkeypatch.setattr(tokenizer_gigatoken, "_encode", encode_wrongly)
    monkeypatch.setattr(log, "warning", messages.append)
    assert with_gigatoken(library_tokenizer, corpus, is_required=True) is library_tokenizer
    last_ids = library_tokenizer.encode(corpus[-1])
    assert f"token {len(last_ids) - 1} of the text starting with {corpus[-1][:40]!r}" in messages[0]
    assert f"is [{last_ids[-1] + 1}] rather than [{last_ids[-1]}]" in messages[0]
    assert "continuing without gigatoken" in messages[0]


def test_unsupported_vocabulary_raises_only_if_gigatoken_is_required(
    bpe_path: Path, cpm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(log, "warning", messages.append)
    unigram_tokenizer = tokenizer.build(tokenizer_path=cpm_folder / "chinese_vocab.model")
    assert (
        with_gigatoken(unigram_tokenizer, []) is unigram_tokenizer
        and "(BPE), this one is SentencePieceTokenizer" in messages[0]
    )
    with pytest.raises(DataError, match="byte-pair vocabularies"):
        with_gigatoken(unigram_tokenizer, [], is_required=True)
    bpe_tokenizer = tokenizer.build(tokenizer_path=bpe_path)
    monkeypatch.setattr(tokenizer_gigatoken, "gigatoken_version_of", lambda tokenizer: json.loads("not JSON"))
    assert with_gigatoken(bpe_tokenizer, []) is bpe_tokenizer and "does not support this vocabulary" in messages[1]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert with_gigatoken(bpe_tokenizer, []) is bpe_tokenizer
    with pytest.raises(DataError, match=r"pip install -e '.\[gigatoken\]'"):
        with_gigatoken(bpe_tokenizer, [], is_required=True)


def test_missing_gigatoken_dependency_is_named(bpe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(log, "warning", messages.append)
    monkeypatch.setitem(sys.modules, "awkward", None)  # its import fails as if it were not there
    monkeypatch.delitem(sys.modules, "megatron.tokenizer.gigatoken")
    bpe_tokenizer = tokenizer.build(tokenizer_path=bpe_path)
    assert with_gigatoken(bpe_tokenizer, []) is bpe_tokenizer
    assert "gigatoken needs awkward, which cannot be imported" in messages[0] and "vocabulary" not in messages[0]
    with pytest.raises(DataError, match=r"gigatoken needs awkward, .*pip install -e '.\[gigatoken\]'"):
        with_gigatoken(bpe_tokenizer, [], is_required=True)


def test_word_cache_is_cleared_without_changing_ids(
    bpe_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built_texts: list[str] = []
    original_from_json = gigatoken.Tokenizer.from_json
    monkeypatch.setattr(
        gigatoken.Tokenizer, "from_json", lambda text: built_texts.append(text) or original_from_json(text)
    )
    monkeypatch.setattr(tokenizer_gigatoken, "_MAX_BYTES", 5000)
    gigatoken_tokenizer = with_gigatoken(tokenizer.build(tokenizer_path=bpe_path), [])
    num_built, expected = len(built_texts), tokenizer.build(tokenizer_path=bpe_path).encode_batch(corpus)
    assert [gigatoken_tokenizer.encode(text) for text in corpus] == expected
    assert 3 <= len(built_texts) - num_built < len(corpus)


def test_probes_are_compared_without_sample(bpe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library_tokenizer = tokenizer.build(tokenizer_path=bpe_path)
    monkeypatch.setattr(log, "warning", lambda text: None)
    monkeypatch.setattr(
        tokenizer_gigatoken, "_encode", lambda fast, texts: (np.zeros(0, np.int32), np.zeros(len(texts), np.int64))
    )
    assert with_gigatoken(library_tokenizer, []) is library_tokenizer and len(_PROBES) > 5


def test_texts_spelling_control_tokens_use_library(
    tmp_path: Path, bpe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_tokenizer = tokenizer.build(tokenizer_path=write_with_control_tokens(tmp_path, bpe_path))
    original_encode = tokenizer_gigatoken._encode

    def encode_wrongly_at_split(fast: Any, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths = original_encode(fast, texts)
        return tokens + any(text[-1:] == b"<" or text[:4] == b"pad>" for text in texts), lengths

    monkeypatch.setattr(tokenizer_gigatoken, "_encode", encode_wrongly_at_split)
    gigatoken_tokenizer = with_gigatoken(library_tokenizer, ["a <pad> b"], is_required=True)
    assert isinstance(gigatoken_tokenizer, GigatokenTokenizer)
    texts = ["", "one", "a<pad>b <pad>", "two", "<pad>", ""]
    assert gigatoken_tokenizer.encode_batch(texts) == library_tokenizer.encode_batch(texts)
    assert gigatoken_tokenizer.encode_chunks(texts).tolist() == library_tokenizer.encode_chunks(texts).tolist()
    assert pickle.loads(pickle.dumps(gigatoken_tokenizer)).encode_batch(texts) == library_tokenizer.encode_batch(texts)


def test_merges_across_control_token_allow_gigatoken(tmp_path: Path) -> None:
    tokenizer_json = train.train_bpe(["a<|endoftext|>b <|endoftext|"] * 50, 280)
    (tmp_path / "t.json").write_bytes(tokenizer_json)
    library_tokenizer = tokenizer.build(tokenizer_path=tmp_path / "t.json")
    assert len(library_tokenizer.encode("<|endoftext|>")) < 8
    gigatoken_tokenizer = with_gigatoken(library_tokenizer, ["x <|endoftext|> y"], is_required=True)
    assert isinstance(gigatoken_tokenizer, GigatokenTokenizer) and gigatoken_tokenizer.encode(
        "x<|endoftext|>"
    ) == library_tokenizer.encode("x<|endoftext|>")
