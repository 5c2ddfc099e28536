"""The losses of a fixed run are those in a text file, in one process and in a pipeline of tensor slices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.make_losses import golden_losses, read_golden


@pytest.mark.parametrize(
    ("num_ranks", "layout"), [(1, ""), (4, "--model-parallel-size 2 --pipe-parallel-size 2")], ids=["1", "2x2"]
)
def test_losses_are_the_golden_ones(num_ranks: int, layout: str, tmp_path: Path) -> None:
    losses = golden_losses(num_ranks, layout, tmp_path)
    assert losses == pytest.approx(read_golden(), abs=1e-9, rel=0)
    assert losses[-1] < losses[0]
