"""Which corpora flags name, and what they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from megatron.data.blend_paths import BlendPaths, short_names, weighted_prefixes
from megatron.errors import DataError

ALL = (True, True, True)


def test_one_mixture_is_cut_into_three_splits() -> None:
    corpora = ((0.7, "a"), (0.3, "data/b"))
    assert BlendPaths(data_path="0.7 a.bin 0.3 data/b.idx").corpora((True, False, True)) == [corpora, None, corpora]
    assert BlendPaths(data_path="a").corpora(ALL) == [((1.0, "a"),)] * 3
    assert BlendPaths(data_path="2 a").corpora((True, False, False))[0] == ((2.0, "a"),)


def test_each_split_may_have_its_own() -> None:
    paths = BlendPaths(train_data_path="1 a 2 b", valid_data_path="c")
    assert paths.corpora((True, True, False)) == [((1.0, "a"), (2.0, "b")), ((1.0, "c"),), None]
    assert BlendPaths(test_data_path="c").corpora((False, False, True)) == [None, None, ((1.0, "c"),)]


def test_a_schedule_starts_with_the_weights_of_the_path_and_counts_whole_samples() -> None:
    paths = BlendPaths(train_data_path="3 a 1 b", mixture_schedule="1000: 1 1; 1001: 0 1")
    assert paths.schedule(100) == [(0, (3.0, 1.0)), (10, (1.0, 1.0)), (11, (0.0, 1.0))]
    assert BlendPaths(data_path="a").schedule(100) == [(0, (1.0,))]


@pytest.mark.parametrize(
    "given, needed, text",
    [
        ({}, ALL, "--data-path must name token files"),
        ({"data_path": ""}, ALL, "--data-path must name token files"),
        ({"data_path": "a", "valid_data_path": "b"}, ALL, "--data-path a .* cannot be combined"),
        (
            {"train_data_path": "a"},
            ALL,
            r"--valid-data-path must name .*disable the evaluation that needs it \(--eval-iters 0\)",
        ),
        ({"train_data_path": "a", "valid_data_path": "b"}, ALL, "--test-data-path must name token files"),
        ({"valid_data_path": "a"}, ALL, "--train-data-path must name .* got none. Add it.$"),
        ({"train_data_path": "a b"}, (True, False, False), "--train-data-path must be one path, or alternating"),
        (
            {"data_path": "1 d/a 1 ./d/a.bin"},
            ALL,
            "--data-path must name each corpus once, got d/a and ./d/a, which are",
        ),
        ({"data_path": "1 d/a 1 e/../d/a"}, ALL, "--data-path must name each corpus once, got d/a and e/../d/a"),
    ],
)
def test_what_cannot_be_used_is_refused(given: dict[str, Any], needed: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        BlendPaths(**given).corpora(needed)


def test_a_link_to_a_corpus_is_that_corpus(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="got a/x and b/x, which are the same"):
        weighted_prefixes("1 a/x 1 b/x")


def test_a_wrong_schedule_is_refused() -> None:
    with pytest.raises(DataError, match="--mixture-schedule must be steps .* has 1 weights for 2 corpora"):
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
def test_names_are_the_last_parts_that_tell_corpora_apart(prefixes: list[str], names: list[str]) -> None:
    assert short_names(prefixes) == names
