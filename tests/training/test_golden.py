"""The losses of a fixed run are those in a text file, in one process and in a pipeline of tensor slices."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import pretrain_gpt2
import pretrain_t5
from tests.golden.make_losses import golden_losses, read_golden

GRID = 4, "--model-parallel-size 2 --pipe-parallel-size 2"


@pytest.mark.parametrize(
    ("script", "num_ranks", "layout"),
    [
        pytest.param(pretrain_gpt2, 1, "", marks=pytest.mark.slow),
        (pretrain_gpt2, *GRID),
        (pretrain_t5, 1, ""),
        pytest.param(pretrain_t5, *GRID, marks=pytest.mark.slow),
    ],
    ids=["pretrain_gpt2-1", "pretrain_gpt2-2x2", "pretrain_t5-1", "pretrain_t5-2x2"],
)
def test_losses_match_golden_file(script: ModuleType, num_ranks: int, layout: str, tmp_path: Path) -> None:
    losses = golden_losses(script, num_ranks, layout, tmp_path)
    assert losses == pytest.approx(read_golden(script), abs=1e-9, rel=0)
    assert losses[-1] < losses[0]
