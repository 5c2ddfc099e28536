from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.tokenizer import chinese_words
from megatron.tokenizer.chinese_words import MARK, mark_words
from tests.tokenizer.conftest import SPLIT_WORDS

Segment = Callable[[str], list[str]]

DIFFICULT_TEXTS = [
    "",
    "a",
    "灯",
    "\r\n \n\t\u3000\u2028\x1c\x85",
    "a-b a_b a.b 9.1A 99.b 3.5% 50% 1.2.3 x=-1 --flag=v_1.0 end. e.g. C++ c# AT&T++ aQQb+c%",
    "T恤B超AA制IP地址 K歌之王3D打印2019年5月1日GPT-2的词表",
    "㐀㐀灯鿖鿖灯豈灯𠀀𠀀灯𪜀a丽.b〇",
    "常在修",  # the difference of two paths is smaller than rjieba's rounding
    "义军军事机密麻麻麻风趣横生生利利二世俗社会会议厅厅局级级差差错控制制药厂桥桥墩下下载方式电流氓阿飞飞砂",  # a tie
    "上变上" * 9 + "八八八九七楼和",
    "丟並乂乄乆乑" * 12,  # characters without a probability: all paths are equal
    "，。「１２３ＡＢＣ」🙂👩‍👩‍👧é\u0301\x00\x01\ufdd0",
]
"""Each of these is cut otherwise by rjieba, or by a word cut that leaves out one of its rules."""
ALPHABET = "的一是在有我他这中大来上个国灯窗麻八常修丟並乂㐀鿖𠀀abzAZ019+#&._%- \r\n\t，。🙂"


def test_words_equal_jieba(jieba_segment: Segment, corpus: list[str]) -> None:
    texts = DIFFICULT_TEXTS + [text[:1500] for text in corpus]
    assert mark_words(texts) == [MARK.join(jieba_segment(text)) for text in texts]
    assert mark_words([]) == []


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.one_of(st.text(ALPHABET, max_size=60), st.text(max_size=12)), max_size=3))
def test_words_equal_jieba_for_any_text(jieba_segment: Segment, texts: list[str]) -> None:
    assert mark_words(texts) == [MARK.join(jieba_segment(text)) for text in texts]


@pytest.mark.slow
@settings(max_examples=6000, deadline=None)
@given(texts=st.lists(st.one_of(st.text(ALPHABET, max_size=200), st.text(max_size=40)), max_size=4))
def test_words_equal_jieba_for_many_texts(jieba_segment: Segment, texts: list[str]) -> None:
    assert mark_words(texts) == [MARK.join(jieba_segment(text)) for text in texts]


def test_split_word_stays_split_next_to_run_containing_it(jieba_segment: Segment) -> None:
    """In `1玉人` probability joins the two characters; alone they are a word that the route did not take."""
    for text in SPLIT_WORDS:
        assert mark_words([f"1{text}"]) != [f"1{MARK}{MARK.join(text)}"], "else it shows nothing"
        for texts in ([f"1{text}", text], [text, f"{text}2"], [text], [f"a{text}", f"{text}。", text]):
            chinese_words._known_runs.clear()
            assert mark_words(texts) == mark_words(texts) == [MARK.join(jieba_segment(item)) for item in texts]


def test_ties_between_routes_are_resolved_like_jieba(jieba_segment: Segment, corpus: list[str]) -> None:
    """Of three equal characters two are a word: the first two or the last, by the rounding of all that follows."""
    sentences = [sentence for text in corpus[:9] for sentence in text.replace("\n", "").split("，")]
    ties = ["麻麻麻", "八八八", "上变上", "丁税政", "一一一", "下冲下"]
    texts = [
        sentence[:9] + ties[idx % 6] + "㐀" * (idx % 2) + sentence[9:40] for idx, sentence in enumerate(sentences[:400])
    ]
    assert mark_words(texts) == [MARK.join(jieba_segment(text)) for text in texts]


def test_words_are_independent_of_word_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mark_words(DIFFICULT_TEXTS)
    monkeypatch.setattr(chinese_words, "_MAX_KNOWN_RUNS", 0)
    assert mark_words(DIFFICULT_TEXTS) == expected and mark_words(DIFFICULT_TEXTS[4:6]) == expected[4:6]
