"""What rearranging documents for fill-in-the-middle must keep, for any documents, rates and key."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.fim import TOKEN_NAMES, Fim, fim_from
from megatron.data.permutation import random_words
from megatron.errors import ConfigError, DataError

EOD, PREFIX, MIDDLE, SUFFIX = 0, 1_000_001, 1_000_002, 1_000_003
FIM = Fim(0.7, 0.5, prefix_id=PREFIX, middle_id=MIDDLE, suffix_id=SUFFIX, eod_id=EOD)


def reference_fim(fim: Fim, text: list[int], lengths: list[int], *key: int) -> list[int]:
    """The same with lists and plain numbers, one document after the other."""
    ends = {sum(lengths[: idx + 1]) for idx in range(len(lengths))} | {
        idx + 1 for idx, token in enumerate(text) if token == fim.eod_id
    }
    result: list[int] = []
    for document_idx, end in enumerate(sorted(ends)):
        document = text[len(result) : end]
        eod = document[-1:] if document[-1] == fim.eod_id else []
        document = document[: len(document) - len(eod)]
        fim_word, spm_word, *cut_words = random_words(4 * document_idx + 4, "fim", *key)[-4:].tolist()
        if len(document) < 6 or (fim_word >> 11) / 2**53 >= fim.rate:
            result += document + eod
            continue
        document = document[:-3]
        start, stop = sorted((word >> 32) * (len(document) + 1) >> 32 for word in cut_words)
        prefix, middle, suffix = document[:start], document[start:stop], document[stop:]
        if (spm_word >> 11) / 2**53 < fim.spm_rate:
            result += [PREFIX, SUFFIX, *suffix, MIDDLE, *prefix, *middle, *eod]
        else:
            result += [PREFIX, *prefix, SUFFIX, *suffix, MIDDLE, *middle, *eod]
    return result


def undo_fim(document: list[int]) -> tuple[str, list[int]]:
    """Return the order of a document and its text in the old order, as a reader would put it together."""
    if document[:1] != [PREFIX]:
        return "as it was", document
    suffix, middle = document.index(SUFFIX), document.index(MIDDLE)
    order = "SPM or no prefix" if suffix == 1 else "PSM"
    return order, document[1:suffix] + document[middle + 1 :] + document[suffix + 1 : middle]


@st.composite
def documents_and_lengths(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    lengths = draw(st.lists(st.one_of(st.integers(1, 9), st.integers(1, 80)), min_size=1, max_size=12))
    text = np.arange(100, 100 + sum(lengths))
    text[draw(st.lists(st.integers(0, len(text) - 1), max_size=6))] = EOD
    return text, lengths


@settings(max_examples=60, deadline=None)
@given(
    documents_and_lengths(),
    st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2**40),
)
def test_fim_matches_loop(
    text_and_lengths: tuple[np.ndarray, list[int]], rate: float, spm_rate: float, key: int
) -> None:
    text, lengths = text_and_lengths
    fim, original = replace(FIM, rate=rate, spm_rate=spm_rate), text.copy()
    result = fim.apply(text, lengths, key, 5)
    assert result.dtype == np.int64 and result.tolist() == reference_fim(fim, text.tolist(), lengths, key, 5)
    assert np.array_equal(text, original) and (rate > 0 or result is text)


@settings(max_examples=40, deadline=None)
@given(documents_and_lengths(), st.integers(0, 2**40))
def test_undoing_fim_restores_document_except_last_three_tokens(
    text_and_lengths: tuple[np.ndarray, list[int]], key: int
) -> None:
    text, lengths = text_and_lengths
    fim = replace(FIM, rate=1.0)
    result = fim.apply(text, lengths, key)
    assert len(result) == len(text) and np.array_equal(result == EOD, text == EOD), "ends of documents stay in place"
    ends = sorted({*np.cumsum(lengths).tolist(), *(np.flatnonzero(text == EOD) + 1).tolist()})
    for start, end in zip([0, *ends], ends, strict=False):
        original = [token for token in text[start:end].tolist() if token != EOD]
        _, restored = undo_fim([token for token in result[start:end].tolist() if token != EOD])
        assert restored == (original[:-3] if len(original) >= 6 else original)


def test_fim_rates_match_and_cuts_reach_both_ends() -> None:
    """4,000 documents of 24 tokens: shares within five standard deviations, cuts at all of 22 places."""
    text = np.arange(100, 100 + 24 * 4000)
    documents = replace(FIM, spm_rate=0.25).apply(text, [24] * 4000, 3).reshape(-1, 24).tolist()
    orders = Counter(undo_fim(document)[0] for document in documents)
    assert orders == {"as it was": 1162, "PSM": 1921, "SPM or no prefix": 917}, "written down"
    empty_prefix = 1 - (21 / 22) ** 2  # of two cuts at 22 places, one is at the start
    spm_rate = 0.25 + 0.75 * empty_prefix
    assert orders["as it was"] == pytest.approx(4000 * 0.3, abs=5 * (4000 * 0.3 * 0.7) ** 0.5)
    assert orders["SPM or no prefix"] == pytest.approx(
        2838 * spm_rate, abs=5 * (2838 * spm_rate * (1 - spm_rate)) ** 0.5
    )
    middles = Counter(24 - document.index(MIDDLE) - 1 for document in documents if undo_fim(document)[0] == "PSM")
    assert set(middles) == set(range(21))


def test_document_lengths_separate_documents_without_eod_token() -> None:
    fim = replace(FIM, rate=1.0, eod_id=None)
    text = np.array([0, *range(200, 230)])
    assert sorted(fim.apply(text, [31], 7)) != sorted(text) and 0 in fim.apply(text, [31], 7)
    result = fim.apply(text, [11, 20], 7)
    assert set(result[:11]) - set(text[:11]) == set(result[11:]) - set(text[11:]) == {PREFIX, MIDDLE, SUFFIX}


def test_fim_output_is_stable() -> None:
    assert (
        replace(FIM, rate=1.0).apply(np.array([*range(10, 30), EOD, *range(40, 55)]), [21, 15], 1234, 5).tolist()
        == EXPECTED
    )


EXPECTED = [
    *(PREFIX, 10, 11, 12, 13, SUFFIX, 23, 24, 25, 26, MIDDLE, 14, 15, 16, 17, 18, 19, 20, 21, 22, EOD),
    *(PREFIX, SUFFIX, 49, 50, 51, MIDDLE, 40, 41, 42, 43, 44, 45, 46, 47, 48),
]


class FakeVocabulary:
    def __init__(self, *names: str, has_eod: bool = True) -> None:
        self.names, self.has_eod = names, has_eod

    @property
    def eod_id(self) -> int:
        assert self.has_eod
        return 7

    def token_to_id(self, token: str) -> int | None:
        return self.names.index(token) + 10 if token in self.names else None


@pytest.mark.parametrize("names", TOKEN_NAMES)
def test_fim_tokens_are_found_under_each_spelling(names: tuple[str, str, str]) -> None:
    assert fim_from(FakeVocabulary(*names), 0.5, 0.25) == Fim(0.5, 0.25, 10, 11, 12, 7)
    assert fim_from(FakeVocabulary(*names, has_eod=False), 0.5, 0.25) == Fim(0.5, 0.25, 10, 11, 12, None)
    assert fim_from(FakeVocabulary(), 0.0, 0.25) is None


def test_vocabulary_without_fim_tokens_is_rejected_with_instructions() -> None:
    with pytest.raises(
        DataError, match=r"<fim_prefix> <fim_middle> <fim_suffix> or .*train_tokenizer.py --special-tokens '<fim_p"
    ):
        fim_from(FakeVocabulary(*TOKEN_NAMES[0][:2], TOKEN_NAMES[1][2]), 0.5, 0.5)


@pytest.mark.parametrize(("rate", "spm_rate", "flag"), [(1.5, 0.5, "--fim-rate"), (0.0, -0.1, "--fim-spm-rate")])
def test_rate_outside_unit_interval_is_rejected(rate: float, spm_rate: float, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} must be from 0 to 1, got"):
        fim_from(FakeVocabulary(*TOKEN_NAMES[0]), rate, spm_rate)
