"""A pipeline gives the loss, every gradient and the gradient norm of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tds.schedule import Action, Backward, BackwardInput, BackwardWeight, Forward, ScheduleError
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, check_equal, make_engine, run_toys, train_batch

SCHEDULES = ("1f1b", "gpipe", "zb-h1")
CHUNK_SCHEDULES = ("interleaved", "zb-h1")


def _compare(toys: list[Toy], ranks: int, num_stages: int, tolerance: float | None, **kwargs: Any) -> None:
    results = run_ranks(ranks, run_toys, toys, num_stages, kwargs)
    replicas = ranks // num_stages
    for index, toy in enumerate(toys):
        check_equal([rank_results[index] for rank_results in results], toy, replicas, tolerance)


@pytest.mark.parametrize(
    "num_stages",
    [
        pytest.param(1, marks=pytest.mark.slow),
        2,
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_fp32_equals_one_process_bitwise(num_stages: int) -> None:
    """Untied, any number of micro-batches, every schedule (row E10)."""
    toys = [
        Toy(model, num_micro_batches=m, dtype=torch.float32, pipeline={"schedule": schedule})
        for model, m, schedule in itertools.product(("chain", "many"), (1, 4, 7), SCHEDULES)
    ]
    _compare(toys, num_stages, num_stages, None)


@pytest.mark.slow  # chunks with replicas, below, are the quick ones
@pytest.mark.parametrize(("num_stages", "chunks"), [(2, 2), (3, 2), (2, 3)])
def test_chunks_equal_one_process_bitwise(num_stages: int, chunks: int) -> None:
    """Below, at and above whole rounds of micro-batches."""
    toys = [
        Toy(model, 7, num_micro_batches=m, dtype=torch.float32, options={"chunks": chunks}, pipeline={"schedule": name})
        for model, m, name in itertools.product(("chain", "many"), (1, 2, 3, 7), CHUNK_SCHEDULES)
    ]
    _compare(toys, num_stages, num_stages, None)


def test_chunks_with_replicas_tied_weights_and_recompute_equal_one_process() -> None:
    toys = [
        Toy(
            model, 7, num_micro_batches=m, loss_type=loss, options={"chunks": 2, **recompute},
            pipeline={"schedule": name, "use_reentrant": False},
        )
        for model, loss, m in (("tied", "pair", 3), ("many", "scalar", 5))
        for recompute in ({}, {"activation_checkpoint_interval": 2})
        for name in CHUNK_SCHEDULES
    ]  # fmt: skip
    _compare(toys, 4, 2, 1e-12)


@pytest.mark.parametrize(("num_stages", "replicas"), [pytest.param(2, 2, marks=pytest.mark.slow), (3, 1)])
def test_v_placement_equals_one_process(num_stages: int, replicas: int) -> None:
    """To the bit where the first stage has no weight in both chunks, for one that is tied to the last digits."""
    toys = [
        Toy(
            model, 7, num_micro_batches=m, loss_type=loss, options={"chunks": 2, "placement": "v", **recompute},
            pipeline={"schedule": name, "use_reentrant": False},
        )
        for model, loss, m in (("tied", "pair", 3), ("many", "scalar", 7), ("sharing", "pair", 1))
        for recompute, name in (({}, "zb-v"), ({"activation_checkpoint_interval": 2}, "dualpipev"))
    ]  # fmt: skip
    _compare(toys, num_stages * replicas, num_stages, 1e-12)
    exact = [
        Toy(model, 7, num_micro_batches=5, dtype=torch.float32, options=toys[0].options, pipeline={"schedule": name})
        for model, name in (("chain", "zb-v"), ("many", "dualpipev"))
    ]
    if replicas == 1:
        _compare(exact, num_stages, num_stages, None)


def test_user_schedule_equals_one_process_and_rejects_invalid_order() -> None:
    """Two forwards ahead of two backwards, half of them split."""

    def in_pairs(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
        actions: list[Action] = []
        for i in range(0, num_micro_batches, 2):
            actions += [Forward(i), Forward(i + 1), BackwardInput(i), BackwardWeight(i), Backward(i + 1)]
        return actions

    toys = [Toy(model, num_micro_batches=4, dtype=torch.float32) for model in ("chain", "many")]
    for toy, rank_results in zip(toys, zip(*run_ranks(2, _train_with_order, toys, in_pairs), strict=True), strict=True):
        check_equal([result for result, _ in rank_results], toy)
        assert "in_pairs cannot run" in rank_results[0][1], rank_results


def _train_with_order(rank: int, toys: list[Toy], order: Any) -> list[Any]:
    results = []
    for toy in toys:
        engine = make_engine(toy, 2)
        engine.set_schedule(order)
        result = train_batch(engine, toy)
        engine.set_train_batch_size(toy.micro_batch_size * 3)
        with pytest.raises(ScheduleError) as raised:
            engine.train_batch(iter(toy.make_batches()))
        results.append((result, str(raised.value)))
    return results


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_fp64_tied_weights_equal_one_process(num_stages: int) -> None:
    toys = [
        Toy("tied", num_micro_batches=m, loss_type=loss, pipeline={"schedule": schedule, "use_reentrant": False})
        for m, loss, schedule in itertools.product((1, 7), ("scalar", "pair"), SCHEDULES)
    ]
    _compare(toys, num_stages, num_stages, 1e-12)


def test_two_replicas_equal_one_process() -> None:
    """Pairs (sum, count) are averaged over tokens: the masks of micro-batches and replicas differ."""
    toys = [
        Toy(model, num_micro_batches=m, loss_type=loss, pipeline={"schedule": schedule})
        for model, m, loss in itertools.product(("chain", "many", "tied"), (1, 3), ("scalar", "pair"))
        for schedule in ("1f1b", "zb-h1")
    ]
    _compare(toys, 4, 2, 1e-12)


def test_uneven_bounds_equal_one_process() -> None:
    for bounds in ([0, 1, 5], [0, 4, 5]):
        _compare([Toy("chain", dtype=torch.float32), Toy("many")], 2, 2, 1e-12, partition_method=bounds)


@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_recompute_is_bitwise_identical(use_reentrant: bool) -> None:
    toys = [
        Toy(
            model,
            dtype=torch.float32,
            options={"activation_checkpoint_interval": interval},
            pipeline={"use_reentrant": use_reentrant, "schedule": schedule},
        )
        for model, interval, schedule in itertools.product(("chain", "many"), (0, 1, 2), ("1f1b", "zb-h1"))
    ]
    _compare(toys, 2, 2, None)
