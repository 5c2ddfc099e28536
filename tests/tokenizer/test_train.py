"""Training a vocabulary: the words that are kept within bounded memory, and what is made of them."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
from collections import Counter
from functools import cache
from itertools import accumulate
from pathlib import Path

import jieba
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron import log
from megatron.tokenizer import train
from megatron.tokenizer.train import BYTE_WORD, WordCounts

PRE_TOKENIZER = pre_tokenizers.ByteLevel(add_prefix_space=False)


@cache
def dictionary() -> tuple[list[str], list[float]]:
    """Return words of jieba's dictionary in an order of their own, and the sum of their weights up to each."""
    with jieba.get_dict_file() as file:
        dictionary_words = [line.split(b" ", 1)[0].decode() for line in file]
    words = random.Random(9).sample(
        [word for word in dictionary_words if 2 <= len(word) <= 4 and not word.isascii()], 30_000
    )
    return words, list(accumulate(1 / rank for rank in range(1, len(words) + 1)))


def chinese_lines(num_bytes: int, seed: int = 0) -> list[str]:
    """Return lines of words of jieba's dictionary, a few of them frequent as words are, with marks as verses have."""
    words, weights, rng = *dictionary(), random.Random(seed)
    lines, num_written = [], 0
    while num_written < num_bytes:
        sampled_text = "".join(rng.choices(words, cum_weights=weights, k=60))
        length = rng.randrange(20, 120)
        phrases = [sampled_text[start : start + rng.choice([5, 7, 14])] for start in range(0, length, 14)]
        lines.append("，".join(phrases) + "。")
        num_written += len(lines[-1].encode())
    return lines


def tokens_per_character(tokenizer_json: bytes, texts: list[str]) -> float:
    library = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    return sum(len(encoding.ids) for encoding in library.encode_batch(texts)) / sum(map(len, texts))


KNOWN_CHARACTERS = st.characters(exclude_categories=["Cn", "Cs"])
"""What this Python's Unicode knows; of later letters it makes words of their own, the library need not."""


@settings(max_examples=30, deadline=None)
@example(text="it's we'll 'x'sb  a1²Ⅷ _a\x85\u3000窗前，（灯）。」x\n\n y\x1c \t")
@given(
    text=st.one_of(
        st.text("ab1²_'s \n\t\u3000\x85\x1c,。，中文é\u0301", max_size=40), st.text(KNOWN_CHARACTERS, max_size=20)
    )
)
def test_counted_words_are_split_like_text(text: str) -> None:
    counted = BYTE_WORD.findall(text)
    assert "".join(counted) == text
    expected = [token for word in counted for token, _ in PRE_TOKENIZER.pre_tokenize_str(word)]
    assert expected == [token for token, _ in PRE_TOKENIZER.pre_tokenize_str(text)]


def test_vocabulary_equals_library_if_words_fit_in_memory(corpus: list[str]) -> None:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = PRE_TOKENIZER, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[train.EOD],
        initial_alphabet=sorted(PRE_TOKENIZER.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(corpus, trainer)
    assert train.train_bpe(corpus, 900) == library.to_str(pretty=True).encode() + b"\n"


def test_sampled_words_represent_all_words_within_memory_bound() -> None:
    bound_bytes, lines = 1e6, chinese_lines(200_000)
    counts = WordCounts(BYTE_WORD, bound_bytes, bound_bytes, 0)
    exact: Counter[str] = Counter()
    for line in lines:
        counts.add(line)
        exact.update(BYTE_WORD.findall(line))
        assert counts.held_bytes <= bound_bytes
    sampled_counts = dict(counts.items())
    expected_bytes = sum(
        train._BYTES_FOR_A_WORD + train._BYTES_FOR_A_BYTE * len(word.encode()) for word in sampled_counts
    )
    assert (
        counts.held_bytes == expected_bytes > bound_bytes / 2
        and counts.rate < 0.2
        and len(sampled_counts) == len(counts)
    )
    assert abs(sum(sampled_counts.values()) / exact.total() - 1) < 0.05, "the sum is right on average"
    for word, count in exact.most_common(2):
        assert count > 1000 and abs(sampled_counts[word] / count - 1) < 0.05, word
    repeated = WordCounts(BYTE_WORD, bound_bytes, bound_bytes, 0)
    for line in lines:
        repeated.add(line)
    assert dict(repeated.items()) == sampled_counts
    single_document = WordCounts(BYTE_WORD, bound_bytes, bound_bytes, 0)
    single_document.add("\n".join(lines))
    assert single_document.held_bytes <= bound_bytes, "one long document is bounded too"


def test_memory_bound_grows_with_text_within_limits() -> None:
    counts = WordCounts(BYTE_WORD, 1000, 100, 2.0)
    bounds = []
    for length in (10, 190, 9999):
        counts.add("a" * length)
        bounds.append(counts.bound)
    assert bounds == [100, 400, 1000]


@pytest.mark.slow
def test_word_sampling_barely_changes_vocabulary_quality(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(log, "info", messages.append)
    lines, held_out = chinese_lines(300_000), chinese_lines(60_000, seed=1)
    full_vocabulary, sampled_vocabulary = (
        train.train_bpe(lines, 1500),
        train.train_bpe(lines, 1500, memory_bytes=10_000_000),
    )
    assert len(messages) == 1 and "do not fit into 10 MB of memory" in messages[0]
    assert train.train_bpe(lines, 1500, memory_bytes=10_000_000) == sampled_vocabulary
    full_ratio = tokens_per_character(full_vocabulary, held_out)
    assert abs(tokens_per_character(sampled_vocabulary, held_out) / full_ratio - 1) < 0.01


def _measure_training_peak(lines: list[str], folder: Path) -> None:
    """Write what training takes beyond what this process, a fork with the text, has already."""
    initial_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    (folder / "t.json").write_bytes(train.train_bpe(lines, 8192))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / "taken").write_text(str(peak_bytes - initial_bytes))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_training_memory_is_below_six_times_text_size(tmp_path: Path) -> None:
    """The sibling of the tests of the bound, at a size where the trainer's memory is nearly all of the process."""
    lines = chinese_lines(40_000_000)
    num_bytes = sum(len(line.encode()) for line in lines)
    process = multiprocessing.get_context("fork").Process(target=_measure_training_peak, args=(lines, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
    used_bytes = int((tmp_path / "taken").read_text())
    assert num_bytes < used_bytes < 6 * num_bytes, f"{used_bytes / num_bytes:.1f} times the text"


def test_wordpiece_on_chinese_fills_vocabulary_and_includes_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    characters = [chr(0x4E00 + 5 * rank) for rank in range(1600)]
    weights = [1 / rank for rank in range(1, 1601)]
    texts = ["".join(rng.choices(characters, weights, k=50)) + "，lamp 12。\x07" for _ in range(4000)]
    trained = json.loads(train.train_wordpiece(texts[100:], 1500))
    assert len(trained["model"]["vocab"]) == 1500
    library = tokenizers.Tokenizer.from_str(json.dumps(trained))
    ids = [token for encoding in library.encode_batch(texts[:100]) for token in encoding.ids]
    assert ids.count(library.token_to_id("[UNK]")) < 0.01 * len(ids)
    wide_vocabulary = json.loads(train.train_wordpiece(texts[100:], 1800))["model"]["vocab"]
    assert len(wide_vocabulary) <= 1800 and set(characters) - set(wide_vocabulary) <= set(characters) - set(
        "".join(texts[100:])
    )
    assert "\x07" not in wide_vocabulary, "what BERT drops takes no place"
    assert train.train_wordpiece(texts[100:], 1500) == train.train_wordpiece(texts[100:], 1500)
    monkeypatch.setattr(train, "_MAX_UNKNOWN_SHARE", 0.5)
    assert len(json.loads(train.train_wordpiece(texts[100:], 1500))["model"]["vocab"]) == 1500, "what is left is filled"


def test_wordpiece_includes_characters_before_joining_words(corpus: list[str]) -> None:
    characters = [chr(0x4E00 + 5 * idx) for idx in range(700)]
    vocabulary = json.loads(train.train_wordpiece([*corpus[9:], "".join(characters) * 100], 1000))["model"]["vocab"]
    assert len(vocabulary) == 1000 and set(characters) < set(vocabulary) and "the" in vocabulary


def test_wordpiece_reserves_half_of_vocabulary_for_words(corpus: list[str]) -> None:
    english = corpus[9:]
    vocabulary = json.loads(train.train_wordpiece(english, 600))["model"]["vocab"]
    assert len(vocabulary) == 600 and sum(len(token.removeprefix("##")) > 1 for token in vocabulary) > 300


def test_unigram_warns_if_text_exceeds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(log, "warning", messages.append)
    texts = ["the lamp stood in the window"] * 100
    assert list(train._warn_if_too_large(texts, 28 * 20 * 50)) == texts
    assert len(messages) == 1 and "Set --sample-bytes 1428" in messages[0]
    assert list(train._warn_if_too_large(texts, 10**9)) == texts and len(messages) == 1


def test_free_memory_is_minimum_of_node_and_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_CONTROL_GROUPS", ())
    node_bytes = train.free_memory_bytes()
    assert node_bytes > 10**8
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 30000\n")
    (tmp_path / "memory.current").write_text("70000\n")
    control_group = (str(tmp_path / "memory.max"), str(tmp_path / "memory.current"), "inactive_file")
    monkeypatch.setattr(train, "_CONTROL_GROUPS", (control_group, ("/gone", "/gone", "")))
    (tmp_path / "memory.max").write_text("100000\n")
    assert train.free_memory_bytes() == 60000
    (tmp_path / "memory.max").write_text("max\n")
    assert train.free_memory_bytes() > 10**8
