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
from tests.helpers.runs import combine_injectors, launch_script, make_flags, write_corpus

TOLERANCE = 1e-12
COMMON_FLAGS = "--fp64 --batch-size 1 --train-iters 3 --eval-iters 1 --eval-interval 2 --clip-grad 0.3"
DROPOUT_FLAGS = "--hidden-dropout 0.1 --attention-dropout 0.1 --layout-independent-dropout"


def set_max_ranks(num_ranks: int) -> Callable[[int], None]:
    """Return a plant: the job may have two to so many ranks."""
    return lambda rank: os.environ.update({VARIABLE: f"2:{num_ranks}"})


def use_mean_losses(rank: int) -> None:
    """Let the loss of a micro-batch be a mean, as a user's own may be, and not a sum with its weight."""
    original_as_weighted = loss_forms.as_weighted

    def mean_loss(loss: Any) -> Any:
        weighted_loss = original_as_weighted(loss)
        return weighted_loss.total / weighted_loss.count if isinstance(weighted_loss, Weighted) else weighted_loss

    loss_forms.as_weighted = single_stage_engine.as_weighted = mean_loss  # type: ignore[assignment]


def read_records(folder: Path) -> list[tuple[str, int, float, float]]:
    """Return (kind, step, loss, gradient norm) of all records of a run's metrics."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] in ("train", "valid", "test")]
    return [(r["kind"], r["step"], r["loss"], r.get("grad_norm", 0.0)) for r in records]


def check_equals_one_process(
    folder: Path,
    num_ranks: int,
    max_ranks: int,
    num_micro_batches: int,
    layout: str,
    *injectors: Callable[[int], None],
    extra_flags: str = "",
) -> str:
    """Train on ``num_ranks`` of ``max_ranks`` and in one process, and return the log lines.

    Args:
        extra_flags: flags of both runs.
    """
    corpus, replica_size = write_corpus(folder), 2 if "parallel-size 2" in layout else 1
    assert not num_micro_batches % (max_ranks // replica_size)
    runs = {"one": (1, f"--gas {num_micro_batches}", injectors), "cut": (
        num_ranks,
        f"--gas {num_micro_batches // (max_ranks // replica_size)} {layout}",
        (set_max_ranks(max_ranks), *injectors),
    )}  # fmt: skip
    for name, (world_size, run_flags, run_injectors) in runs.items():
        argv = make_flags(corpus, folder / name, f"{COMMON_FLAGS} {DROPOUT_FLAGS} {extra_flags} {run_flags}")
        codes = launch_script(world_size, argv, folder / f"{name}.log", combine_injectors(*run_injectors))
        assert codes == [0] * world_size, (folder / f"{name}.log").read_text()
    reference_records, unequal_records = read_records(folder / "one"), read_records(folder / "cut")
    assert [record[:2] for record in unequal_records] == [record[:2] for record in reference_records]
    assert {record_type for record_type, *_ in reference_records} == {"train", "valid", "test"}
    for actual, expected in zip(unequal_records, reference_records, strict=True):
        assert actual[2:] == pytest.approx(expected[2:], abs=TOLERANCE, rel=TOLERANCE), actual
    return (folder / "cut.log").read_text()


def test_two_replicas_of_three_micro_batches_equal_one_process(tmp_path: Path) -> None:
    output = check_equals_one_process(tmp_path, 2, 3, 3, "--zero-stage 1")
    assert "2 of 3 ranks: 2 of 3 replicas, each with 1 or 2 micro-batches of 1 per step, the same 3 samples" in output
    assert "micro-batch 1 x 1 or 2 micro-batches x" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "max_ranks", "num_micro_batches", "layout"),
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
    num_ranks: int, max_ranks: int, num_micro_batches: int, layout: str, tmp_path: Path
) -> None:
    check_equals_one_process(tmp_path, num_ranks, max_ranks, num_micro_batches, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "--pipe-parallel-size 2"])
def test_mean_losses_are_weighted_correctly_on_unequal_replicas(layout: str, tmp_path: Path) -> None:
    check_equals_one_process(
        tmp_path, 4 if layout else 3, 6 if layout else 4, 9 if layout else 8, layout, use_mean_losses
    )


EXPERT_FLAGS = (
    "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "--pipe-parallel-size 2"])
@pytest.mark.parametrize("extra_flags", ["", EXPERT_FLAGS])
@pytest.mark.parametrize("loss_average", ["token", "micro-batch"])
def test_loss_averages_equal_one_process_on_unequal_replicas(
    loss_average: str, extra_flags: str, layout: str, tmp_path: Path
) -> None:
    """With experts the divisor of the routers' losses is that of the mean share, not of a replica's own."""
    num_ranks, max_ranks, num_micro_batches = (4, 6, 9) if layout else (3, 11, 11)
    extra_flags = f"--loss-average {loss_average} --eod-mask-loss {extra_flags}"
    check_equals_one_process(tmp_path, num_ranks, max_ranks, num_micro_batches, layout, extra_flags=extra_flags)
