"""What is told of token files is what is in them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import IndexedDataset
from megatron.data.inspect import Lengths, facts_of, statistics
from megatron.data.inspect.view import Words
from megatron.errors import DataError
from tests.helpers import small_corpora
from tests.helpers.token_data import write, write_megatron


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 12), max_size=20), share=st.floats(0, 1))
def test_lengths_are_counted_alike_in_blocks_of_any_size(sizes: list[int], share: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_BLOCK", 3)
        found = Lengths.of(np.array(sizes, np.int32))
    assert found.num_documents == len(sizes) and found.num_empty == sizes.count(0)
    if not sizes:
        assert math.isnan(found.mean)
        with pytest.raises(ValueError, match="at least one document"):
            found.quantile(share)
        return
    assert found.mean == pytest.approx(sum(sizes) / len(sizes))
    quantile = found.quantile(share)
    assert sum(size <= quantile for size in sizes) >= share * len(sizes)
    assert quantile == min(sizes) or sum(size < quantile for size in sizes) < share * len(sizes)
    bounds = np.array([0, 1, 5, 13])
    assert found.histogram(bounds).tolist() == np.histogram(sizes, [0, 0.5, 4.5, 13])[0].tolist()


@settings(max_examples=20)
@given(longest=st.integers(1, 10**9))
def test_the_bins_of_the_picture_hold_each_length_once(longest: int) -> None:
    bounds = statistics.bounds(longest)
    assert bounds[0] == 1 and bounds[-1] > longest and (np.diff(bounds) > 0).all()
    assert Lengths.of(np.array([1, longest])).histogram(bounds).sum() == 2


def test_a_picture_is_drawn_of_several_corpora_and_of_an_empty_one(tmp_path: Path) -> None:
    corpora = {"a": Lengths.of(np.array([1, 5, 0])), "b": Lengths.of(np.zeros(0, np.int32))}
    statistics.draw(corpora, tmp_path / "new" / "l.png")
    assert (tmp_path / "new" / "l.png").read_bytes().startswith(b"\x89PNG")


def test_with_a_sidecar_nothing_is_scanned_and_ends_are_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(statistics, "largest", lambda _: pytest.fail("the sidecar knows it"))
    found = facts_of(write(tmp_path / "c", [3, 1, 4], eod_id=0))
    assert (found.num_documents, found.num_tokens, found.dtype, found.bin_bytes) == (3, 8, "uint16", 16)
    assert (found.eod_id, found.eod_share, found.ends_looked_at, found.max_token_id) == (0, 1.0, 3, 7)
    assert found.sidecar is not None and found.sidecar.tokenizer == "t"


def test_megatrons_files_are_looked_through(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(statistics, "_BLOCK", 3)
    write_megatron(tmp_path / "c", [2, 0, 3, 1], [0, 2, 3, 4])  # documents of 2 + 0, 3 and 1 tokens: 0 1, 2 3 4, 5
    file = IndexedDataset(tmp_path / "c")
    assert facts_of(file).eod_share is None
    found = facts_of(file, eod_id=4)
    assert found.eod_share == pytest.approx(1 / 3) and found.max_token_id == 5 and found.sidecar is None
    assert statistics.counts(file).tolist() == [1] * 6
    rows = dict(statistics.statistics_rows(facts_of(file), None))
    assert rows["end of document"].startswith("unknown") and rows["vocabulary"].startswith("unknown")


def test_empty_documents_are_counted_and_have_no_end(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", [2, 0, 1], [0, 1, 2, 3])
    found = facts_of(IndexedDataset(tmp_path / "c"), eod_id=1)
    assert found.lengths.num_empty == 1 and found.ends_looked_at == 2 and found.eod_share == 0.5


def test_ends_are_looked_at_over_the_whole_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(statistics, "ENDS_LOOKED_AT", 3)
    write_megatron(tmp_path / "c", [1] * 5, [0, 1, 2, 3, 4, 5])  # document i is the token i
    file = IndexedDataset(tmp_path / "c")
    for eod_id, share in ((0, 1 / 3), (2, 1 / 3), (4, 1 / 3), (1, 0.0)):
        assert facts_of(file, eod_id).eod_share == pytest.approx(share)


def test_ids_that_no_vocabulary_has_are_refused_with_both_ends(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", [4], [0, 1])
    index = tmp_path / "c.idx"
    index.write_bytes(index.read_bytes()[:17] + bytes([3]) + index.read_bytes()[18:])  # int16
    (tmp_path / "c.bin").write_bytes(np.array([1, -2, 3, 4], "<i2").tobytes())
    with pytest.raises(DataError, match="-2 ... 4"):
        statistics.counts(IndexedDataset(tmp_path / "c"))


def test_another_tokenizer_than_that_of_the_data_is_told(tmp_path: Path) -> None:
    vocabulary = small_corpora.make_tokenizer(tmp_path)
    small_corpora.write(tmp_path / "own", small_corpora.TEXTS, vocabulary)
    write(tmp_path / "other", [3])
    write_megatron(tmp_path / "unknown", [400], [0, 1])
    rows = {name: dict(statistics.statistics_rows(facts_of(IndexedDataset(tmp_path / name)), vocabulary))["vocabulary"]
            for name in ("own", "other", "unknown")}  # fmt: skip
    assert "the given tokenizer is the same" in rows["own"]
    assert "DIFFERENT" in rows["other"]
    assert "too small" in rows["unknown"]


def test_tokens_are_told_by_name_by_text_or_as_parts_of_characters(tmp_path: Path) -> None:
    vocabulary = small_corpora.make_tokenizer(tmp_path)
    words = Words(vocabulary)
    assert words.short(vocabulary.eod_id) == "<|endoftext|>"
    assert words.short(vocabulary.encode("\n")[0]) == "'\\n'"
    assert words.short(vocabulary.encode("窗")[0]) == "(part of a character)"
    assert words.is_control(vocabulary.vocab_size) and words.name(999) == "<id 999>"
