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

PARTS = pre_tokenizers.ByteLevel(add_prefix_space=False)


@cache
def dictionary() -> tuple[list[str], list[float]]:
    """Return words of jieba's dictionary in an order of their own, and the sum of their weights up to each."""
    with jieba.get_dict_file() as file:
        listed = [line.split(b" ", 1)[0].decode() for line in file]
    words = random.Random(9).sample([word for word in listed if 2 <= len(word) <= 4 and not word.isascii()], 30_000)
    return words, list(accumulate(1 / place for place in range(1, len(words) + 1)))


def chinese(num_bytes: int, seed: int = 0) -> list[str]:
    """Return lines of words of jieba's dictionary, a few of them frequent as words are, with marks as verses have."""
    words, weights, draw = *dictionary(), random.Random(seed)
    lines, size = [], 0
    while size < num_bytes:
        found = "".join(draw.choices(words, cum_weights=weights, k=60))
        length = draw.randrange(20, 120)
        parts = [found[start : start + draw.choice([5, 7, 14])] for start in range(0, length, 14)]
        lines.append("，".join(parts) + "。")
        size += len(lines[-1].encode())
    return lines


def tokens_per_character(trained: bytes, texts: list[str]) -> float:
    library = tokenizers.Tokenizer.from_str(trained.decode())
    return sum(len(encoding.ids) for encoding in library.encode_batch(texts)) / sum(map(len, texts))


KNOWN = st.characters(exclude_categories=["Cn", "Cs"])
"""What this Python's Unicode knows; of later letters it makes words of their own, the library need not."""


@settings(max_examples=30, deadline=None)
@example(text="it's we'll 'x'sb  a1²Ⅷ _a\x85\u3000窗前，（灯）。」x\n\n y\x1c \t")
@given(text=st.one_of(st.text("ab1²_'s \n\t\u3000\x85\x1c,。，中文é\u0301", max_size=40), st.text(KNOWN, max_size=20)))
def test_words_that_are_counted_are_parted_by_the_library_as_the_text_is(text: str) -> None:
    counted = BYTE_WORD.findall(text)
    assert "".join(counted) == text
    parts = [part for word in counted for part, _ in PARTS.pre_tokenize_str(word)]
    assert parts == [part for part, _ in PARTS.pre_tokenize_str(text)]


def test_a_text_whose_words_fit_gives_the_librarys_own_vocabulary(corpus: list[str]) -> None:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = PARTS, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[train.EOD],
        initial_alphabet=sorted(PARTS.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(corpus, trainer)
    assert train.train_bpe(corpus, 900) == library.to_str(pretty=True).encode() + b"\n"


def test_words_that_do_not_fit_are_sampled_and_stand_for_all() -> None:
    bound, lines = 1e6, chinese(200_000)
    counts = WordCounts(BYTE_WORD, bound, bound, 0)
    exact: Counter[str] = Counter()
    for line in lines:
        counts.add(line)
        exact.update(BYTE_WORD.findall(line))
        assert counts.held_bytes <= bound
    found = dict(counts.items())
    held = sum(train._BYTES_FOR_A_WORD + train._BYTES_FOR_A_BYTE * len(word.encode()) for word in found)
    assert counts.held_bytes == held > bound / 2 and counts.rate < 0.2 and len(found) == len(counts)
    assert abs(sum(found.values()) / exact.total() - 1) < 0.05, "the sum is right on average"
    for word, count in exact.most_common(2):
        assert count > 1000 and abs(found[word] / count - 1) < 0.05, word
    again = WordCounts(BYTE_WORD, bound, bound, 0)
    for line in lines:
        again.add(line)
    assert dict(again.items()) == found
    one = WordCounts(BYTE_WORD, bound, bound, 0)
    one.add("\n".join(lines))
    assert one.held_bytes <= bound, "one long document is bounded too"


def test_the_bound_grows_with_the_text_between_the_least_and_the_most() -> None:
    counts = WordCounts(BYTE_WORD, 1000, 100, 2.0)
    bounds = []
    for length in (10, 190, 9999):
        counts.add("a" * length)
        bounds.append(counts.bound)
    assert bounds == [100, 400, 1000]


@pytest.mark.slow
def test_a_sample_of_the_words_makes_nearly_as_good_a_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(log, "info", messages.append)
    lines, unseen = chinese(300_000), chinese(60_000, seed=1)
    whole, sampled = train.train_bpe(lines, 1500), train.train_bpe(lines, 1500, memory_bytes=10_000_000)
    assert len(messages) == 1 and "do not fit into 10 MB of memory" in messages[0]
    assert train.train_bpe(lines, 1500, memory_bytes=10_000_000) == sampled
    before = tokens_per_character(whole, unseen)
    assert abs(tokens_per_character(sampled, unseen) / before - 1) < 0.01


def _peak_of_training(lines: list[str], folder: Path) -> None:
    """Write what training takes beyond what this process, a fork with the text, has already."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    (folder / "t.json").write_bytes(train.train_bpe(lines, 8192))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / "taken").write_text(str(peak - before))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_peak_of_memory_is_below_six_times_the_text(tmp_path: Path) -> None:
    """The sibling of the tests of the bound, at a size where the trainer's memory is nearly all of the process."""
    lines = chinese(40_000_000)
    num_bytes = sum(len(line.encode()) for line in lines)
    process = multiprocessing.get_context("fork").Process(target=_peak_of_training, args=(lines, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
    taken = int((tmp_path / "taken").read_text())
    assert num_bytes < taken < 6 * num_bytes, f"{taken / num_bytes:.1f} times the text"


def test_wordpiece_on_chinese_fills_the_vocabulary_and_knows_the_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    characters = [chr(0x4E00 + 5 * place) for place in range(1600)]
    weights = [1 / place for place in range(1, 1601)]
    texts = ["".join(draw.choices(characters, weights, k=50)) + "，lamp 12。\x07" for _ in range(4000)]
    trained = json.loads(train.train_wordpiece(texts[100:], 1500))
    assert len(trained["model"]["vocab"]) == 1500
    library = tokenizers.Tokenizer.from_str(json.dumps(trained))
    ids = [token for encoding in library.encode_batch(texts[:100]) for token in encoding.ids]
    assert ids.count(library.token_to_id("[UNK]")) < 0.01 * len(ids)
    wide = json.loads(train.train_wordpiece(texts[100:], 1800))["model"]["vocab"]
    assert len(wide) <= 1800 and set(characters) - set(wide) <= set(characters) - set("".join(texts[100:]))
    assert "\x07" not in wide, "what BERT drops takes no place"
    assert train.train_wordpiece(texts[100:], 1500) == train.train_wordpiece(texts[100:], 1500)
    monkeypatch.setattr(train, "_MOST_UNKNOWN", 0.5)
    assert len(json.loads(train.train_wordpiece(texts[100:], 1500))["model"]["vocab"]) == 1500, "what is left is filled"


def test_wordpiece_knows_the_characters_before_it_joins_words(corpus: list[str]) -> None:
    characters = [chr(0x4E00 + 5 * place) for place in range(700)]
    vocabulary = json.loads(train.train_wordpiece([*corpus[9:], "".join(characters) * 100], 1000))["model"]["vocab"]
    assert len(vocabulary) == 1000 and set(characters) < set(vocabulary) and "the" in vocabulary


def test_wordpiece_leaves_half_of_the_room_to_words_where_characters_are_rare(corpus: list[str]) -> None:
    english = corpus[9:]
    vocabulary = json.loads(train.train_wordpiece(english, 600))["model"]["vocab"]
    assert len(vocabulary) == 600 and sum(len(token.removeprefix("##")) > 1 for token in vocabulary) > 300


def test_unigram_warns_where_the_text_takes_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(log, "warning", messages.append)
    texts = ["the lamp stood in the window"] * 100
    assert list(train._weighed(texts, 28 * 20 * 50)) == texts
    assert len(messages) == 1 and "Give --sample-bytes 1428" in messages[0]
    assert list(train._weighed(texts, 10**9)) == texts and len(messages) == 1


def test_free_memory_is_that_of_the_smaller_of_node_and_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_CONTROL_GROUPS", ())
    node = train.free_memory_bytes()
    assert node > 10**8
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 30000\n")
    (tmp_path / "memory.current").write_text("70000\n")
    group = (str(tmp_path / "memory.max"), str(tmp_path / "memory.current"), "inactive_file")
    monkeypatch.setattr(train, "_CONTROL_GROUPS", (group, ("/gone", "/gone", "")))
    (tmp_path / "memory.max").write_text("100000\n")
    assert train.free_memory_bytes() == 60000
    (tmp_path / "memory.max").write_text("max\n")
    assert train.free_memory_bytes() > 10**8
