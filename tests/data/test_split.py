from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import split_documents
from megatron.errors import DataError


def test_documents_are_split_by_weights() -> None:
    assert split_documents(1000, "949,50,1") == [(0, 949), (949, 999), (999, 1000)]
    assert split_documents(1000, "949/50/1") == split_documents(1000, " 94.9, 5 ,0.1 ")
    assert split_documents(10, "1") == [(0, 10), (10, 10), (10, 10)]
    assert split_documents(10, "1,1") == [(0, 5), (5, 10), (10, 10)]


@settings(deadline=None)
@given(st.integers(0, 10**12), st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any))
def test_splits_cover_all_documents_without_overlap(num_documents: int, weights: list[int]) -> None:
    splits = split_documents(num_documents, ",".join(map(str, weights)))
    assert splits[0][0] == 0 and splits[2][1] == num_documents
    for (start, stop), next_split in zip(splits, [*splits[1:], (num_documents, None)], strict=True):
        assert start <= stop == next_split[0]
    for (start, stop), weight in zip(splits, weights, strict=True):
        assert abs((stop - start) - num_documents * weight / sum(weights)) <= 1 + num_documents * 1e-12


@pytest.mark.parametrize("split", ["", "a", "1,2,3,4", "-1,2,3", "0,0,0", "nan", "inf,1,1", "1,,1"])
def test_invalid_split_is_rejected(split: str) -> None:
    with pytest.raises(DataError, match="--split must be one to three weights"):
        split_documents(10, split)
