"""Which corpora flags name, and what they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from megatron.data.blend_paths import BlendPaths, short_names, weighted_prefixes
from megatron.errors import DataError

ALL_SPLITS = (True, True, True)


def test_single_blend_is_used_for_all_splits() -> None:
    corpora = ((0.7, "a"), (0.3, "data/b"))
    assert BlendPaths(data_path="0.7 a.bin 0.3 data/b.idx").corpora((True, False, True)) == [corpora, None, corpora]
    assert BlendPaths(data_path="a").corpora(ALL_SPLITS) == [((1.0, "a"),)] * 3
    assert BlendPaths(data_path="2 a").corpora((True, False, False))[0] == ((2.0, "a"),)


def test_each_split_can_have_separate_paths() -> None:
    paths = BlendPaths(train_data_path="1 a 2 b", valid_data_path="c")
    assert paths.corpora((True, True, False)) == [((1.0, "a"), (2.0, "b")), ((1.0, "c"),), None]
    assert BlendPaths(test_data_path="c").corpora((False, False, True)) == [None, None, ((1.0, "c"),)]


def test_schedule_starts_with_path_weights_and_counts_full_samples() -> None:
    paths = BlendPaths(train_data_path="3 a 1 b", mixture_schedule="1000: 1 1; 1001: 0 1")
    assert paths.schedule(100) == [(0, (3.0, 1.0)), (10, (1.0, 1.0)), (11, (0.0, 1.0))]
    assert BlendPaths(data_path="a").schedule(100) == [(0, (1.0,))]


@pytest.mark.parametrize(
    "options, needed, text",
    [
        ({}, ALL_SPLITS, "--data-path must name token files"),
        ({"data_path": ""}, ALL_SPLITS, "--data-path must name token files"),
        ({"data_path": "a", "valid_data_path": "b"}, ALL_SPLITS, "--data-path a .* cannot be combined"),
        (
            {"train_data_path": "a"},
            ALL_SPLITS,
            r"--valid-data-path must name .*disable the evaluation that needs it \(--eval-iters 0\)",
        ),
        ({"train_data_path": "a", "valid_data_path": "b"}, ALL_SPLITS, "--test-data-path must name token files"),
        ({"valid_data_path": "a"}, ALL_SPLITS, "--train-data-path must name .* got none. Add it.$"),
        ({"train_data_path": "a b"}, (True, False, False), "--train-data-path must be one path, or alternating"),
        (
            {"data_path": "1 d/a 1 ./d/a.bin"},
            ALL_SPLITS,
            "--data-path must name each corpus once, got d/a and ./d/a, which are",
        ),
        ({"data_path": "1 d/a 1 e/../d/a"}, ALL_SPLITS, "--data-path must name each corpus once, got d/a and e/../d/a"),
    ],
)
def test_invalid_paths_are_rejected(options: dict[str, Any], needed: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        BlendPaths(**options).corpora(needed)


def test_symlinked_duplicate_corpus_is_rejected(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="got a/x and b/x, which are the same"):
        weighted_prefixes("1 a/x 1 b/x")


def test_invalid_schedule_is_rejected() -> None:
    with pytest.raises(DataError, match="--mixture-schedule must be entries .* has 1 weights for 2 corpora"):
        BlendPaths(data_path="1 a 1 b", mixture_schedule="5: 1").schedule(10)


@pytest.mark.parametrize(
    "prefixes, names",
    [
        (["data/corpus"], ["corpus"]),
        (["data/en", "data/zh"], ["en", "zh"]),
        (["d/en/x", "d/zh/x", "y"], ["en/x", "zh/x", "y"]),
        (["x", "d/x", "/d/x"], ["x", "d/x", "/d/x"]),
        (["a/b/c", "e/b/c", "e/c"], ["a/b/c", "e/b/c", "e/c"]),
    ],
)
def test_short_names_are_shortest_unique_suffixes(prefixes: list[str], names: list[str]) -> None:
    assert short_names(prefixes) == names
