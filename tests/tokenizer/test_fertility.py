from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from megatron.tokenizer.fertility import Fertility, language_of, measure


@pytest.mark.parametrize(
    "text, language",
    [
        ("The lamp stood in the window of the house by the river (as ever).", "Latin"),
        ("Été à Łódź", "Latin"),
        ("窗前有一盏灯。灯亮着，GPU 也亮着。", "Han"),
        ("東京の夜は静かだ。", "Kana"),
        ("漢字漢字漢字漢字漢字の", "Han"),
        ("한국어 문장입니다", "Hangul"),
        ("Лампа стояла у окна", "Cyrillic"),
        ("def f(x):\n    return {x: [x]}", "code or other"),
        ("12:30 17.5 — 88", "code or other"),
        ("नमस्ते दुनिया", "code or other"),
        (" \n", "code or other"),
    ],
)
def test_the_language_follows_from_the_characters(text: str, language: str) -> None:
    assert language_of(text) == language


class _Letters:
    """A token for each letter; what is no small letter is unknown."""

    unk_id = 0

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [ord(letter) - 96 if "a" <= letter <= "z" else 0 for text in texts for letter in text]
        return np.array(ids, np.int32), np.array([len(text) for text in texts], np.int64)


def test_counts_are_of_all_documents_of_a_group() -> None:
    groups = {"a": ["ab cd", "窗"] * 100, "none": [], "b": ["x"]}
    a, b, both = measure(_Letters(), groups)  # type: ignore[arg-type]
    assert a == Fertility("a", 200, 800, 600, 300, 600, 200)
    assert (a.bytes_per_token, a.tokens_per_char, a.tokens_per_word) == (800 / 600, 1.0, 2.0)
    assert a.unknown_rate == 200 / 600
    assert b == Fertility("b", 1, 1, 1, 1, 1, 0) and both == Fertility("all", 201, 801, 601, 301, 601, 200)
    assert measure(_Letters(), {"b": ["x"]}) == [b]  # type: ignore[arg-type]
