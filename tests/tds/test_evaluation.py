"""Evaluation gives one process's loss and leaves training alone."""

from __future__ import annotations

from typing import Any

import torch

from tests.harness import run_ranks
from tests.tds.toys import Toy, make_engine, reference, train


def _train_eval_train(rank: int, toy: Toy, evaluates: bool) -> list[Any]:
    engine = make_engine(toy, 2)
    torch.manual_seed(5)
    results = [train(engine, toy)]
    if evaluates:
        for number in (1, 3):
            engine.eval_batch(iter(toy.batches()), num_micro_batches=number)
    results.append(train(engine, toy))
    return [*results, torch.rand(3), engine.module.micro_offset, engine.global_steps, engine.global_samples]


def test_evaluation_changes_nothing_in_training() -> None:
    toy = Toy("many", options={"seed_layers": True})
    plain, mixed = run_ranks(2, _train_eval_train, toy, False), run_ranks(2, _train_eval_train, toy, True)
    for before, after in zip(plain, mixed, strict=True):
        for one, two in zip(before[:2], after[:2], strict=True):
            assert torch.equal(one[0], two[0])
            assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])
        assert torch.equal(before[2], after[2])
        assert before[3:] == after[3:]
        assert after[4:] == [2, 2 * toy.rows * toy.micro_batches]


def _evaluate(rank: int, toy: Toy) -> dict[str, Any]:
    engine = make_engine(toy, 2)
    data = toy.batches(engine.grid.get_data_parallel_rank())
    loss, logits = engine.eval_batch(iter(data), return_logits=True)
    return {
        "loss": loss,
        "logits": logits,
        "only last": engine.eval_batch(iter(data), bcast_loss=False),
        "each": engine.eval_batch(iter(data), reduce_output=None),
        "outputs": engine.eval_batch(iter(data), compute_loss=False, reduce_output=None),
        "is last": engine.is_last_stage(),
    }


def test_eval_batch_has_deepspeeds_arguments() -> None:
    toy = Toy("many", loss="pair")
    loss, _ = reference(toy, replicas=2)
    for got in run_ranks(4, _evaluate, toy):
        assert abs(float(got["loss"] - loss)) < 1e-14
        if got["is last"]:
            assert torch.equal(got["only last"], got["loss"])
            assert len(got["each"]) == len(got["outputs"]) == toy.micro_batches
            assert torch.equal(got["outputs"][-1], got["logits"])
        else:
            assert got["only last"] is got["each"] is got["outputs"] is got["logits"] is None
