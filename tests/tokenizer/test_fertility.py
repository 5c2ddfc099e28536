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
def test_language_follows_from_characters(text: str, language: str) -> None:
    assert language_of(text) == language


class _LetterTokenizer:
    """A token for each letter; what is no small letter is unknown."""

    unk_id = 0

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [ord(letter) - 96 if "a" <= letter <= "z" else 0 for text in texts for letter in text]
        return np.array(ids, np.int32), np.array([len(text) for text in texts], np.int64)


def test_statistics_cover_all_documents_of_group() -> None:
    groups = {"a": ["ab cd", "窗"] * 100, "none": [], "b": ["x"]}
    first, second, total = measure(_LetterTokenizer(), groups)  # type: ignore[arg-type]
    assert first == Fertility("a", 200, 800, 600, 300, 600, 200)
    assert (first.bytes_per_token, first.tokens_per_char, first.tokens_per_word) == (800 / 600, 1.0, 2.0)
    assert first.unknown_rate == 200 / 600
    assert second == Fertility("b", 1, 1, 1, 1, 1, 0) and total == Fertility("all", 201, 801, 601, 301, 601, 200)
    assert measure(_LetterTokenizer(), {"b": ["x"]}) == [second]  # type: ignore[arg-type]
