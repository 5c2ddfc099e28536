"""A run that changes its ZeRO stage on the way is, bit for bit, one that never did (rows E07 and K18)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import flags, train_ranks
from tests.training.test_resume import DROPOUT, assert_same_checkpoint, losses


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world_size"), [("", 2), ("--pipe-parallel-size 2", 4)], ids=["1-1-2", "1-2-2"])
@pytest.mark.parametrize(("first", "then"), [(1, 0), (0, 1)])
def test_a_run_goes_on_with_another_stage(
    layout: str, world_size: int, first: int, then: int, corpus: Path, tmp_path: Path
) -> None:
    whole, cut, extra = tmp_path / "whole", tmp_path / "cut", f"{layout} {DROPOUT}"
    assert train_ranks(world_size, flags(corpus, whole, extra))[0] == [0] * world_size
    argv = flags(corpus, cut, f"{extra} --zero-stage {first} --exit-interval 10")
    assert train_ranks(world_size, argv)[0] == [75] * world_size
    argv = flags(corpus, cut, f"{extra} --zero-stage {then} --load {cut}")
    assert train_ranks(world_size, argv)[0] == [0] * world_size
    assert losses(cut) == losses(whole)
    assert_same_checkpoint(whole, cut)
