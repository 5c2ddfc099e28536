"""What rearranging documents for fill-in-the-middle must keep, for any documents, rates and key."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.fim import NAMES, Fim, fim_from
from megatron.data.permutation import random_words
from megatron.errors import ConfigError, DataError

EOD, PREFIX, MIDDLE, SUFFIX = 0, 1_000_001, 1_000_002, 1_000_003
FIM = Fim(0.7, 0.5, prefix_id=PREFIX, middle_id=MIDDLE, suffix_id=SUFFIX, eod_id=EOD)


def reference(fim: Fim, text: list[int], sizes: list[int], *key: int) -> list[int]:
    """The same with lists and plain numbers, one document after the other."""
    ends = {sum(sizes[: i + 1]) for i in range(len(sizes))} | {i + 1 for i, t in enumerate(text) if t == fim.eod_id}
    result: list[int] = []
    for number, end in enumerate(sorted(ends)):
        document = text[len(result) : end]
        eod = document[-1:] if document[-1] == fim.eod_id else []
        document = document[: len(document) - len(eod)]
        moved, spm, *cuts = random_words(4 * number + 4, "fim", *key)[-4:].tolist()
        if len(document) < 6 or (moved >> 11) / 2**53 >= fim.rate:
            result += document + eod
            continue
        document = document[:-3]
        low, high = sorted((cut >> 32) * (len(document) + 1) >> 32 for cut in cuts)
        before, between, behind = document[:low], document[low:high], document[high:]
        if (spm >> 11) / 2**53 < fim.spm_rate:
            result += [PREFIX, SUFFIX, *behind, MIDDLE, *before, *between, *eod]
        else:
            result += [PREFIX, *before, SUFFIX, *behind, MIDDLE, *between, *eod]
    return result


def undone(document: list[int]) -> tuple[str, list[int]]:
    """Return the order of a document and its text in the old order, as a reader would put it together."""
    if document[:1] != [PREFIX]:
        return "as it was", document
    suffix, middle = document.index(SUFFIX), document.index(MIDDLE)
    order = "SPM or no prefix" if suffix == 1 else "PSM"
    return order, document[1:suffix] + document[middle + 1 :] + document[suffix + 1 : middle]


@st.composite
def texts(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    sizes = draw(st.lists(st.one_of(st.integers(1, 9), st.integers(1, 80)), min_size=1, max_size=12))
    text = np.arange(100, 100 + sum(sizes))
    text[draw(st.lists(st.integers(0, len(text) - 1), max_size=6))] = EOD
    return text, sizes


@settings(max_examples=60, deadline=None)
@given(texts(), st.sampled_from([0.0, 0.3, 0.7, 1.0]), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2**40))
def test_equal_to_a_loop(drawn: tuple[np.ndarray, list[int]], rate: float, spm_rate: float, key: int) -> None:
    text, sizes = drawn
    fim, before = replace(FIM, rate=rate, spm_rate=spm_rate), text.copy()
    result = fim.apply(text, sizes, key, 5)
    assert result.dtype == np.int64 and result.tolist() == reference(fim, text.tolist(), sizes, key, 5)
    assert np.array_equal(text, before) and (rate > 0 or result is text)


@settings(max_examples=40, deadline=None)
@given(texts(), st.integers(0, 2**40))
def test_undoing_gives_each_document_but_for_its_last_three_tokens(
    drawn: tuple[np.ndarray, list[int]], key: int
) -> None:
    text, sizes = drawn
    fim = replace(FIM, rate=1.0)
    result = fim.apply(text, sizes, key)
    assert len(result) == len(text) and np.array_equal(result == EOD, text == EOD), "ends of documents stay in place"
    ends = sorted({*np.cumsum(sizes).tolist(), *(np.flatnonzero(text == EOD) + 1).tolist()})
    for start, end in zip([0, *ends], ends, strict=False):
        old = [token for token in text[start:end].tolist() if token != EOD]
        _, new = undone([token for token in result[start:end].tolist() if token != EOD])
        assert new == (old[:-3] if len(old) >= 6 else old)


def test_shares_of_documents_and_orders_are_as_asked_and_cuts_reach_both_ends() -> None:
    """4,000 documents of 24 tokens: shares within five standard deviations, cuts at all of 22 places."""
    text = np.arange(100, 100 + 24 * 4000)
    documents = replace(FIM, spm_rate=0.25).apply(text, [24] * 4000, 3).reshape(-1, 24).tolist()
    orders = Counter(undone(document)[0] for document in documents)
    assert orders == {"as it was": 1162, "PSM": 1921, "SPM or no prefix": 917}, "written down"
    empty_prefix = 1 - (21 / 22) ** 2  # of two cuts at 22 places, one is at the start
    spm = 0.25 + 0.75 * empty_prefix
    assert orders["as it was"] == pytest.approx(4000 * 0.3, abs=5 * (4000 * 0.3 * 0.7) ** 0.5)
    assert orders["SPM or no prefix"] == pytest.approx(2838 * spm, abs=5 * (2838 * spm * (1 - spm)) ** 0.5)
    middles = Counter(24 - document.index(MIDDLE) - 1 for document in documents if undone(document)[0] == "PSM")
    assert set(middles) == set(range(21))


def test_without_an_end_of_document_token_the_index_tells_documents_apart() -> None:
    fim = replace(FIM, rate=1.0, eod_id=None)
    text = np.array([0, *range(200, 230)])
    assert sorted(fim.apply(text, [31], 7)) != sorted(text) and 0 in fim.apply(text, [31], 7)
    result = fim.apply(text, [11, 20], 7)
    assert set(result[:11]) - set(text[:11]) == set(result[11:]) - set(text[11:]) == {PREFIX, MIDDLE, SUFFIX}


def test_it_is_the_same_for_ever() -> None:
    assert (
        replace(FIM, rate=1.0).apply(np.array([*range(10, 30), EOD, *range(40, 55)]), [21, 15], 1234, 5).tolist()
        == FIXED
    )


FIXED = [
    *(PREFIX, 10, 11, 12, 13, SUFFIX, 23, 24, 25, 26, MIDDLE, 14, 15, 16, 17, 18, 19, 20, 21, 22, EOD),
    *(PREFIX, SUFFIX, 49, 50, 51, MIDDLE, 40, 41, 42, 43, 44, 45, 46, 47, 48),
]


class Vocabulary:
    def __init__(self, *names: str, has_eod: bool = True) -> None:
        self.names, self.has_eod = names, has_eod

    @property
    def eod_id(self) -> int:
        assert self.has_eod
        return 7

    def token_to_id(self, token: str) -> int | None:
        return self.names.index(token) + 10 if token in self.names else None


@pytest.mark.parametrize("names", NAMES)
def test_tokens_are_found_under_each_spelling(names: tuple[str, str, str]) -> None:
    assert fim_from(Vocabulary(*names), 0.5, 0.25) == Fim(0.5, 0.25, 10, 11, 12, 7)
    assert fim_from(Vocabulary(*names, has_eod=False), 0.5, 0.25) == Fim(0.5, 0.25, 10, 11, 12, None)
    assert fim_from(Vocabulary(), 0.0, 0.25) is None


def test_a_vocabulary_without_the_tokens_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        DataError, match=r"<fim_prefix> <fim_middle> <fim_suffix> or .*train_tokenizer.py --special-tokens '<fim_p"
    ):
        fim_from(Vocabulary(*NAMES[0][:2], NAMES[1][2]), 0.5, 0.5)


@pytest.mark.parametrize(("rate", "spm_rate", "flag"), [(1.5, 0.5, "--fim-rate"), (0.0, -0.1, "--fim-spm-rate")])
def test_a_rate_outside_0_to_1_is_refused(rate: float, spm_rate: float, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} must be from 0 to 1, got"):
        fim_from(Vocabulary(*NAMES[0]), rate, spm_rate)
