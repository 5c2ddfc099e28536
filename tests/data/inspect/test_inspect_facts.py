"""What is told of token files is what is in them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import IndexedDataset
from megatron.data.inspect import Lengths, collect_stats, statistics
from megatron.data.inspect.view import TokenFormatter
from megatron.errors import DataError
from tests.helpers import small_corpora
from tests.helpers.token_data import write_documents, write_megatron_files


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 12), max_size=20), share=st.floats(0, 1))
def test_lengths_statistics_match_for_any_block_size(sizes: list[int], share: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_BLOCK", 3)
        stats = Lengths.from_lengths(np.array(sizes, np.int32))
    assert stats.num_documents == len(sizes) and stats.num_empty == sizes.count(0)
    if not sizes:
        assert math.isnan(stats.mean)
        with pytest.raises(ValueError, match="at least one document"):
            stats.quantile(share)
        return
    assert stats.mean == pytest.approx(sum(sizes) / len(sizes))
    quantile = stats.quantile(share)
    assert sum(size <= quantile for size in sizes) >= share * len(sizes)
    assert quantile == min(sizes) or sum(size < quantile for size in sizes) < share * len(sizes)
    bounds = np.array([0, 1, 5, 13])
    assert stats.histogram(bounds).tolist() == np.histogram(sizes, [0, 0.5, 4.5, 13])[0].tolist()


@settings(max_examples=20)
@given(longest=st.integers(1, 10**9))
def test_histogram_bins_count_every_length_once(longest: int) -> None:
    bounds = statistics.bin_bounds(longest)
    assert bounds[0] == 1 and bounds[-1] > longest and (np.diff(bounds) > 0).all()
    assert Lengths.from_lengths(np.array([1, longest])).histogram(bounds).sum() == 2


def test_plot_handles_several_and_empty_corpora(tmp_path: Path) -> None:
    corpora = {"a": Lengths.from_lengths(np.array([1, 5, 0])), "b": Lengths.from_lengths(np.zeros(0, np.int32))}
    statistics.plot_lengths(corpora, tmp_path / "new" / "l.png")
    assert (tmp_path / "new" / "l.png").read_bytes().startswith(b"\x89PNG")


def test_sidecar_skips_scan_and_end_tokens_are_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(statistics, "find_largest_id", lambda _: pytest.fail("the sidecar knows it"))
    facts = collect_stats(write_documents(tmp_path / "c", [3, 1, 4], eod_id=0))
    assert (facts.num_documents, facts.num_tokens, facts.dtype, facts.bin_bytes) == (3, 8, "uint16", 16)
    assert (facts.eod_id, facts.eod_share, facts.num_examined_ends, facts.max_token_id) == (0, 1.0, 3, 7)
    assert facts.sidecar is not None and facts.sidecar.tokenizer == "t"


def test_megatron_files_without_sidecar_are_scanned(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(statistics, "_BLOCK", 3)
    write_megatron_files(
        tmp_path / "c", [2, 0, 3, 1], [0, 2, 3, 4]
    )  # documents of 2 + 0, 3 and 1 tokens: 0 1, 2 3 4, 5
    file = IndexedDataset(tmp_path / "c")
    assert collect_stats(file).eod_share is None
    facts = collect_stats(file, eod_id=4)
    assert facts.eod_share == pytest.approx(1 / 3) and facts.max_token_id == 5 and facts.sidecar is None
    assert statistics.count_ids(file).tolist() == [1] * 6
    rows = dict(statistics.statistics_rows(collect_stats(file), None))
    assert rows["end of document"].startswith("unknown") and rows["vocabulary"].startswith("unknown")


def test_empty_documents_are_counted_without_end_token(tmp_path: Path) -> None:
    write_megatron_files(tmp_path / "c", [2, 0, 1], [0, 1, 2, 3])
    facts = collect_stats(IndexedDataset(tmp_path / "c"), eod_id=1)
    assert facts.lengths.num_empty == 1 and facts.num_examined_ends == 2 and facts.eod_share == 0.5


def test_end_tokens_are_sampled_across_entire_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(statistics, "MAX_EXAMINED_ENDS", 3)
    write_megatron_files(tmp_path / "c", [1] * 5, [0, 1, 2, 3, 4, 5])  # document i is the token i
    file = IndexedDataset(tmp_path / "c")
    for eod_id, share in ((0, 1 / 3), (2, 1 / 3), (4, 1 / 3), (1, 0.0)):
        assert collect_stats(file, eod_id).eod_share == pytest.approx(share)


def test_negative_token_ids_raise_with_min_and_max(tmp_path: Path) -> None:
    write_megatron_files(tmp_path / "c", [4], [0, 1])
    index = tmp_path / "c.idx"
    index.write_bytes(index.read_bytes()[:17] + bytes([3]) + index.read_bytes()[18:])  # int16
    (tmp_path / "c.bin").write_bytes(np.array([1, -2, 3, 4], "<i2").tobytes())
    with pytest.raises(DataError, match="-2 ... 4"):
        statistics.count_ids(IndexedDataset(tmp_path / "c"))


def test_tokenizer_mismatch_is_reported(tmp_path: Path) -> None:
    vocabulary = small_corpora.make_tokenizer(tmp_path)
    small_corpora.write_token_files(tmp_path / "own", small_corpora.TEXTS, vocabulary)
    write_documents(tmp_path / "other", [3])
    write_megatron_files(tmp_path / "unknown", [400], [0, 1])
    rows = {}
    for name in ("own", "other", "unknown"):
        stats = collect_stats(IndexedDataset(tmp_path / name))
        rows[name] = dict(statistics.statistics_rows(stats, vocabulary))["vocabulary"]
    assert "the given tokenizer is the same" in rows["own"]
    assert "DIFFERENT" in rows["other"]
    assert "too small" in rows["unknown"]


def test_token_labels_use_control_name_text_or_partial_character(tmp_path: Path) -> None:
    vocabulary = small_corpora.make_tokenizer(tmp_path)
    words = TokenFormatter(vocabulary)
    assert words.format_cell(vocabulary.eod_id) == "<|endoftext|>"
    assert words.format_cell(vocabulary.encode("\n")[0]) == "'\\n'"
    assert words.format_cell(vocabulary.encode("窗")[0]) == "(part of a character)"
    assert words.is_control(vocabulary.vocab_size) and words.name(999) == "<id 999>"
