"""Replicas of an elastic job that take unequal numbers of micro-batches train as one process does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.utils.tensorboard  # noqa: F401 - imported once, not by every fork

from megatron.config.elastic import VARIABLE
from megatron.training import loss_forms, single_stage_engine
from megatron.training.callbacks.metrics_writer import read_metrics
from tds.loss import Weighted
from tests.helpers.runs import flags, start_script, together, write_corpus

BOUND = 1e-12
FIXED = "--fp64 --batch-size 1 --train-iters 3 --eval-iters 1 --eval-interval 2 --clip-grad 0.3"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --layout-independent-dropout"


def of_at_most(ranks: int) -> Callable[[int], None]:
    """Return a plant: the job may have two to so many ranks."""
    return lambda rank: os.environ.update({VARIABLE: f"2:{ranks}"})


def with_plain_losses(rank: int) -> None:
    """Let the loss of a micro-batch be a mean, as a user's own may be, and not a sum with its weight."""
    weighted = loss_forms.as_weighted

    def mean(loss: Any) -> Any:
        found = weighted(loss)
        return found.total / found.count if isinstance(found, Weighted) else found

    loss_forms.as_weighted = single_stage_engine.as_weighted = mean  # type: ignore[assignment]


def numbers(folder: Path) -> list[tuple[str, int, float, float]]:
    """Return (kind, step, loss, gradient norm) of all records of a run's metrics."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] in ("train", "valid", "test")]
    return [(r["kind"], r["step"], r["loss"], r.get("grad_norm", 0.0)) for r in records]


def check(
    place: Path, ranks: int, most: int, total: int, layout: str, *plants: Callable[[int], None], common: str = ""
) -> str:
    """Train with ``total`` micro-batches a step on ``ranks`` of ``most`` and in one process; return what was said.

    Args:
        common: flags of both runs.
    """
    corpus, replica = write_corpus(place), 2 if "parallel-size 2" in layout else 1
    assert not total % (most // replica)
    runs = {"one": (1, f"--gas {total}", plants), "cut": (
        ranks, f"--gas {total // (most // replica)} {layout}", (of_at_most(most), *plants),
    )}  # fmt: skip
    for name, (number, extra, every) in runs.items():
        argv = flags(corpus, place / name, f"{FIXED} {DROPOUT} {common} {extra}")
        codes = start_script(number, argv, place / f"{name}.log", together(*every))
        assert codes == [0] * number, (place / f"{name}.log").read_text()
    one, cut = numbers(place / "one"), numbers(place / "cut")
    assert [each[:2] for each in cut] == [each[:2] for each in one]
    assert {kind for kind, *_ in one} == {"train", "valid", "test"}
    for mine, whole in zip(cut, one, strict=True):
        assert mine[2:] == pytest.approx(whole[2:], abs=BOUND, rel=BOUND), mine
    return (place / "cut.log").read_text()


def test_two_replicas_of_three_micro_batches_equal_one_process(tmp_path: Path) -> None:
    said = check(tmp_path, 2, 3, 3, "--zero-stage 1")
    assert "2 of 3 ranks: 2 of 3 replicas, each with 1 or 2 micro-batches of 1 per step, the same 3 samples" in said
    assert "micro-batch 1 x 1 or 2 micro-batches x" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "most", "total", "layout"),
    [
        (3, 4, 8, ""),
        (3, 4, 8, "--zero-stage 1 --no-overlap-grad-reduce"),
        (3, 4, 4, ""),
        (5, 6, 12, "--zero-stage 1"),
        (4, 6, 9, "--pipe-parallel-size 2"),
        (4, 6, 3, "--pipe-parallel-size 2 --zero-stage 1"),
        (4, 6, 9, "--pipe-parallel-size 2 --pipeline-schedule zb-h1"),
        (4, 6, 9, "--pipe-parallel-size 2 --pipeline-schedule auto"),
        (4, 6, 9, "--model-parallel-size 2"),
        (4, 6, 9, "--context-parallel-size 2"),
    ],
)
def test_layouts_with_unequal_replicas_equal_one_process(
    ranks: int, most: int, total: int, layout: str, tmp_path: Path
) -> None:
    check(tmp_path, ranks, most, total, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "--pipe-parallel-size 2"])
def test_plain_means_of_micro_batches_weigh_the_same_on_unequal_replicas(layout: str, tmp_path: Path) -> None:
    check(tmp_path, 4 if layout else 3, 6 if layout else 4, 9 if layout else 8, layout, with_plain_losses)


EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "--pipe-parallel-size 2"])
@pytest.mark.parametrize("common", ["", EXPERTS])
@pytest.mark.parametrize("average", ["token", "micro-batch"])
def test_both_averages_of_losses_are_right_on_unequal_replicas(
    average: str, common: str, layout: str, tmp_path: Path
) -> None:
    """With experts the divisor of the routers' losses is that of the mean share, not of a replica's own."""
    ranks, most, total = (4, 6, 9) if layout else (3, 11, 11)
    common = f"--loss-average {average} --eod-mask-loss {common}"
    check(tmp_path, ranks, most, total, layout, common=common)
