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


def with_control_tokens(folder: Path, bpe_path: Path) -> Path:
    library = tokenizers.Tokenizer.from_file(str(bpe_path))
    library.add_special_tokens(["<pad>", "<mask>", "<extra_id_0>"])
    library.save(str(folder / "t.json"))
    return folder / "t.json"


def test_ids_are_the_same_for_text_and_for_spelled_control_tokens(
    tmp_path: Path, bpe_path: Path, corpus: list[str]
) -> None:
    slow = tokenizer.build(tokenizer_path=with_control_tokens(tmp_path, bpe_path))
    fast = with_gigatoken(slow, corpus[:4], is_required=True)
    assert isinstance(fast, GigatokenTokenizer) and fast.identity == slow.identity
    texts = [*corpus, "", "a<|endoftext|>b <pad><mask>", "<extra_id_0>"]
    for expected, got in zip(slow.encode_arrays(texts), fast.encode_arrays(texts), strict=True):
        assert expected.dtype == got.dtype and np.array_equal(expected, got)
    assert [len(array) for array in fast.encode_arrays([])] == [0, 0]
    assert pickle.loads(pickle.dumps(fast)).encode(texts[-2]) == slow.encode(texts[-2])


def test_gpt2_files_are_encoded_too(tmp_path: Path, bpe_path: Path, corpus: list[str]) -> None:
    model = json.loads(bpe_path.read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    slow = tokenizer.build(vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt")
    fast = with_gigatoken(slow, corpus[:2], is_required=True)
    assert isinstance(fast, GigatokenTokenizer) and fast.encode_batch(corpus) == slow.encode_batch(corpus)


def test_a_forked_process_encodes(bpe_path: Path, corpus: list[str]) -> None:
    fast = with_gigatoken(tokenizer.build(tokenizer_path=bpe_path), corpus[:2])
    expected = fast.encode(corpus[0])
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(fast.encode(corpus[0])))
    process.start()
    assert receiver.poll(30) and receiver.recv() == expected
    process.join(30)


def test_one_differing_id_is_named_and_gigatoken_is_dropped(
    bpe_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tokenizer.build(tokenizer_path=bpe_path)
    right = tokenizer_gigatoken._encode

    def wrong(fast: Any, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        tokens, sizes = right(fast, texts)
        tokens[-1:] += texts[-1:] == [corpus[-1].encode()]  # the last token of the sample alone
        return tokens, sizes

    messages: list[str] = []
    monkeypatch.setattr(tokenizer_gigatoken, "_encode", wrong)
    monkeypatch.setattr(log, "warning", messages.append)
    assert with_gigatoken(slow, corpus, is_required=True) is slow
    last = slow.encode(corpus[-1])
    assert f"token {len(last) - 1} of the text starting with {corpus[-1][:40]!r}" in messages[0]
    assert f"is [{last[-1] + 1}] rather than [{last[-1]}]" in messages[0]
    assert "continuing without gigatoken" in messages[0]


def test_what_it_cannot_do_is_an_error_only_when_it_was_asked_for(
    bpe_path: Path, cpm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(log, "warning", messages.append)
    unigram = tokenizer.build(tokenizer_path=cpm_folder / "chinese_vocab.model")
    assert with_gigatoken(unigram, []) is unigram and "(BPE), this one is SentencePieceTokenizer" in messages[0]
    with pytest.raises(DataError, match="byte-pair vocabularies"):
        with_gigatoken(unigram, [], is_required=True)
    bpe = tokenizer.build(tokenizer_path=bpe_path)
    monkeypatch.setattr(tokenizer_gigatoken, "standing_in_for", lambda tokenizer: json.loads("not JSON"))
    assert with_gigatoken(bpe, []) is bpe and "does not support this vocabulary" in messages[1]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert with_gigatoken(bpe, []) is bpe
    with pytest.raises(DataError, match=r"pip install -e '.\[gigatoken\]'"):
        with_gigatoken(bpe, [], is_required=True)


def test_a_dependency_of_gigatokens_own_that_is_missing_is_named(
    bpe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(log, "warning", messages.append)
    monkeypatch.setitem(sys.modules, "awkward", None)  # its import fails as if it were not there
    monkeypatch.delitem(sys.modules, "megatron.tokenizer.gigatoken")
    bpe = tokenizer.build(tokenizer_path=bpe_path)
    assert with_gigatoken(bpe, []) is bpe
    assert "gigatoken needs awkward, which cannot be imported" in messages[0] and "vocabulary" not in messages[0]
    with pytest.raises(DataError, match=r"gigatoken needs awkward, .*pip install -e '.\[gigatoken\]'"):
        with_gigatoken(bpe, [], is_required=True)


def test_words_seen_long_ago_are_forgotten_without_a_change(
    bpe_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    build = gigatoken.Tokenizer.from_json
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda text: made.append(text) or build(text))
    monkeypatch.setattr(tokenizer_gigatoken, "_MOST_BYTES", 5000)
    fast = with_gigatoken(tokenizer.build(tokenizer_path=bpe_path), [])
    before, expected = len(made), tokenizer.build(tokenizer_path=bpe_path).encode_batch(corpus)
    assert [fast.encode(text) for text in corpus] == expected
    assert 3 <= len(made) - before < len(corpus)


def test_the_probes_are_compared_even_without_a_sample(bpe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tokenizer.build(tokenizer_path=bpe_path)
    monkeypatch.setattr(log, "warning", lambda text: None)
    monkeypatch.setattr(
        tokenizer_gigatoken, "_encode", lambda fast, texts: (np.zeros(0, np.int32), np.zeros(len(texts), np.int64))
    )
    assert with_gigatoken(slow, []) is slow and len(_PROBES) > 5


def test_texts_that_spell_a_control_token_are_left_to_the_library(
    tmp_path: Path, bpe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tokenizer.build(tokenizer_path=with_control_tokens(tmp_path, bpe_path))
    right = tokenizer_gigatoken._encode

    def otherwise_where_cut(fast: Any, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        tokens, sizes = right(fast, texts)
        return tokens + any(text[-1:] == b"<" or text[:4] == b"pad>" for text in texts), sizes

    monkeypatch.setattr(tokenizer_gigatoken, "_encode", otherwise_where_cut)
    fast = with_gigatoken(slow, ["a <pad> b"], is_required=True)
    assert isinstance(fast, GigatokenTokenizer)
    texts = ["", "one", "a<pad>b <pad>", "two", "<pad>", ""]
    assert fast.encode_batch(texts) == slow.encode_batch(texts)
    assert fast.encode_pieces(texts).tolist() == slow.encode_pieces(texts).tolist()
    assert pickle.loads(pickle.dumps(fast)).encode_batch(texts) == slow.encode_batch(texts)


def test_merges_across_a_control_token_do_not_keep_gigatoken_out(tmp_path: Path) -> None:
    trained = train.train_bpe(["a<|endoftext|>b <|endoftext|"] * 50, 280)
    (tmp_path / "t.json").write_bytes(trained)
    slow = tokenizer.build(tokenizer_path=tmp_path / "t.json")
    assert len(slow.encode("<|endoftext|>")) < 8
    fast = with_gigatoken(slow, ["x <|endoftext|> y"], is_required=True)
    assert isinstance(fast, GigatokenTokenizer) and fast.encode("x<|endoftext|>") == slow.encode("x<|endoftext|>")
