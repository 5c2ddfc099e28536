"""``benchmarks/overlap.py`` in toy sizes: both ways have one loss, and what forwards send is seen beside backwards."""

from __future__ import annotations

import pytest

from benchmarks import overlap


def test_spans_of_two_threads_are_cut_with_each_other() -> None:
    assert overlap._covered([(0, 2), (3, 5)]) == 4
    assert overlap._covered([(0, 2), (3, 5)], [(1, 4)]) == 2
    assert overlap._covered([(0, 2), (3, 5)], [(1, 4)], [(0, 1.5)]) == 0.5


@pytest.mark.slow
def test_both_ways_train_to_one_loss(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-layers 4 --hidden-size 16 --seq-length 16 --micro-batches 4 --rounds 2 --delay-ms 2"
    for words in (sizes, f"{sizes} --tensor 2 --schedule 1f1b"):
        assert overlap.main(["--run", *words.split()]) == 0
        found = capsys.readouterr().out
        assert "rank 3: forwards beside backwards are" in found and "times as fast" in found
