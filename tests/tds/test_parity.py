"""A pipeline gives the loss, every gradient and the gradient norm of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.tds.toys import Toy, check_equal, run_toys

SCHEDULES = ("1f1b", "gpipe")


def _compare(toys: list[Toy], ranks: int, num_stages: int, tolerance: float | None, **more: Any) -> None:
    results = run_ranks(ranks, run_toys, toys, num_stages, more)
    replicas = ranks // num_stages
    for index, toy in enumerate(toys):
        check_equal([each[index] for each in results], toy, replicas, tolerance)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_fp32_equals_one_process_to_the_bit(num_stages: int) -> None:
    """Untied, any number of micro-batches, both schedules."""
    toys = [
        Toy(kind, micro_batches=m, dtype=torch.float32, pipeline={"schedule": schedule})
        for kind, m, schedule in itertools.product(("chain", "many"), (1, 4, 7), SCHEDULES)
    ]
    _compare(toys, num_stages, num_stages, None)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_fp64_tied_weights_equal_one_process(num_stages: int) -> None:
    toys = [
        Toy("tied", micro_batches=m, loss=loss, pipeline={"schedule": schedule, "use_reentrant": False})
        for m, loss, schedule in itertools.product((1, 7), ("scalar", "pair"), SCHEDULES)
    ]
    _compare(toys, num_stages, num_stages, 1e-12)


def test_two_replicas_equal_one_process_over_both_their_batches() -> None:
    """Pairs (sum, count) are averaged over tokens: the masks of micro-batches and replicas differ."""
    toys = [
        Toy(kind, micro_batches=m, loss=loss)
        for kind, m, loss in itertools.product(("chain", "many", "tied"), (1, 3), ("scalar", "pair"))
    ]
    _compare(toys, 4, 2, 1e-12)


def test_uneven_bounds_equal_one_process() -> None:
    for bounds in ([0, 1, 5], [0, 4, 5]):
        _compare([Toy("chain", dtype=torch.float32), Toy("many")], 2, 2, 1e-12, partition_method=bounds)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_changes_no_bit(use_reentrant: bool) -> None:
    toys = [
        Toy(
            kind,
            dtype=torch.float32,
            options={"activation_checkpoint_interval": interval},
            pipeline={"use_reentrant": use_reentrant},
        )
        for kind, interval in itertools.product(("chain", "many"), (0, 1, 2))
    ]
    _compare(toys, 2, 2, None)
