"""Evaluation gives one process's loss and leaves training alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

import tds
from tds.deepspeed.engine import PipelineEngine
from tds.pipe import LayerSpec, PipelineModule
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine, train_batch, train_reference


def _with_dropout(toy: Toy, num_stages: int) -> PipelineModule:
    """Layers with dropout: random numbers that evaluation drew would show in the next gradients."""
    specs = [spec for layer in toy.layer_specs() for spec in (layer, LayerSpec(nn.Dropout, 0.3))]
    return PipelineModule(
        specs, num_stages=num_stages, loss_fn=toy.loss_fn, partition_method="uniform", seed_layers=True
    )


class Noise(nn.Module):
    """Adds random numbers in evaluation, too, which ``nn.Dropout`` does not draw there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.rand_like(x)


def _draw_before_batches(batches: list[Any]) -> Iterator[Any]:
    """Yield ``batches``, each after a number that is drawn as a data set's own may be."""
    for batch in batches:
        torch.rand(1)
        yield batch


def _evaluate_and_draw(rank: int, toy: Toy) -> list[tuple[bool, float]]:
    """Return whether the generator's state is as before each evaluation, and what that came to."""
    specs = [spec for layer in toy.layer_specs() for spec in (layer, LayerSpec(Noise))]
    engine = make_engine(toy, 2, module=PipelineModule(specs, 2, loss_fn=toy.loss_fn, partition_method="uniform"))
    train_batch(engine, toy)
    results = []
    for num_batches in (1, 3):
        before = torch.get_rng_state()
        loss = engine.eval_batch(
            _draw_before_batches([toy.make_batch(i, 2) for i in range(num_batches)]), num_micro_batches=num_batches
        )
        results.append((torch.equal(before, torch.get_rng_state()), float(loss)))
        torch.rand(1)
    return results


def test_evaluation_preserves_rng_state() -> None:
    ranks = run_ranks(2, _evaluate_and_draw, Toy("chain"))
    assert all(is_unchanged for results in ranks for is_unchanged, _ in results)


def _train_eval_train(rank: int, toy: Toy, num_stages: int, batch_counts: list[int]) -> list[Any]:
    engine = make_engine(toy, num_stages, module=_with_dropout(toy, num_stages))
    engine.optimizer.param_groups[0]["lr"] = 0.1
    torch.manual_seed(5)
    results = [train_batch(engine, toy)]
    for num_batches in batch_counts:
        engine.eval_batch(
            iter([toy.make_batch(i, 2 + num_batches) for i in range(num_batches)]), num_micro_batches=num_batches
        )
        results.append(train_batch(engine, toy))
    return [results, torch.rand(3), engine.module.micro_offset, engine.global_steps, engine.micro_steps]


def _train_only(rank: int, toy: Toy, num_stages: int, batch_counts: list[int]) -> list[Any]:
    original_eval_batch = PipelineEngine.eval_batch
    PipelineEngine.eval_batch = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    try:
        return _train_eval_train(rank, toy, num_stages, batch_counts)
    finally:
        PipelineEngine.eval_batch = original_eval_batch  # type: ignore[method-assign]


@pytest.mark.parametrize(("num_stages", "micro_batches"), [pytest.param(3, 1, marks=pytest.mark.slow), (2, 4)])
def test_evaluation_between_steps_does_not_affect_training(num_stages: int, micro_batches: int) -> None:
    """Row P09: other counts and shapes, accumulation off, fewer micro-batches than stages; to the bit."""
    toy = Toy("chain", num_micro_batches=micro_batches)
    args = (toy, num_stages, [1, 5, 2])
    plain, mixed = run_ranks(num_stages, _train_only, *args), run_ranks(num_stages, _train_eval_train, *args)
    for before, after in zip(plain, mixed, strict=True):
        for plain_result, mixed_result in zip(before[0], after[0], strict=True):
            assert float(plain_result[0]).hex() == float(mixed_result[0]).hex()
            assert all(torch.equal(plain_result[1][name], mixed_result[1][name]) for name in plain_result[1])
        assert torch.equal(before[1], after[1])
        assert before[2:] == after[2:]
        assert after[3:] == [4, 4 * micro_batches]


def _evaluate(rank: int, toy: Toy) -> dict[str, Any]:
    engine = make_engine(toy, 2)
    data = toy.make_batches(engine.grid.get_data_parallel_rank())
    loss, logits = engine.eval_batch(iter(data), return_logits=True)
    return {
        "loss": loss,
        "logits": logits,
        "only last": engine.eval_batch(iter(data), bcast_loss=False),
        "each": engine.eval_batch(iter(data), reduce_output=None),
        "outputs": engine.eval_batch(iter(data), compute_loss=False, reduce_output=None),
        "is last": engine.is_last_stage(),
        "mean": engine.eval_batch(iter(data), compute_loss=False),
        "wrong": _collect_errors(engine, data),
    }


def _collect_errors(engine: Any, data: list[Any]) -> str:
    messages = []
    for kwargs in ({"reduce_output": "sum"}, {"num_micro_batches": 0}):
        with pytest.raises((NotImplementedError, ValueError)) as raised:
            engine.eval_batch(iter(data), **kwargs)
        messages.append(str(raised.value))
    return "; ".join(messages)


def test_eval_batch_supports_deepspeed_arguments() -> None:
    toy = Toy("many", loss_type="pair")
    loss, _ = train_reference(toy, num_replicas=2)
    ranks = run_ranks(4, _evaluate, toy)
    outputs = [output for got in ranks if got["is last"] for output in got["outputs"]]
    for got in ranks:
        assert "reduce_output must be \"avg\" or None, got 'sum'; num_micro_batches must be" in got["wrong"]
        assert abs(float(got["loss"] - loss)) < 1e-14
        if got["is last"]:
            assert torch.equal(got["only last"], got["loss"])
            assert len(got["each"]) == len(got["outputs"]) == toy.num_micro_batches
            assert torch.equal(got["outputs"][-1], got["logits"])
            assert (got["mean"] - torch.stack(outputs).mean(0)).abs().max() < 1e-14
        else:
            assert got["only last"] is got["each"] is got["outputs"] is got["logits"] is got["mean"] is None


class Outputs(nn.Module):
    """The last layer's tensor as a dict of several."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": x, "more": (x.sum(-1), x > 0)}


def _evaluate_structures(rank: int, toy: Toy) -> dict[str, Any]:
    module = PipelineModule([*toy.layer_specs(), LayerSpec(Outputs)], num_stages=2, partition_method="uniform")
    module.loss_fn = lambda output, labels: {"aux": output["x"].sum(), "loss": toy.loss_fn(output["x"], labels)}
    engine = make_engine(toy, 2, module=module)
    data = toy.make_batches()
    trained = train_batch(engine, toy)[0]
    return {
        "trained": trained,
        "losses": engine.eval_batch(iter(data)),
        "only last": engine.eval_batch(iter(data), bcast_loss=False),
        "each": engine.eval_batch(iter(data), reduce_output=None),
        "mean": engine.eval_batch(iter(data), compute_loss=False),
        "with logits": engine.eval_batch(iter(data), return_logits=True)[1],
    }


def test_eval_batch_returns_named_losses_and_nested_outputs() -> None:
    toy = Toy("chain")
    first, last = run_ranks(2, _evaluate_structures, toy)
    assert list(first["losses"]) == ["loss", "aux"] and first["losses"] == last["losses"] == last["only last"]
    assert torch.equal(first["losses"]["loss"], last["trained"])
    assert first["only last"] is first["each"] is first["mean"] is first["with logits"] is None
    assert [sorted(losses) for losses in last["each"]] == [["aux", "loss"]] * toy.num_micro_batches
    assert last["mean"]["x"].shape == last["with logits"]["x"].shape
    assert torch.allclose(last["mean"]["more"][0], last["mean"]["x"].sum(-1))
    assert torch.equal(last["with logits"]["more"][1], last["with logits"]["x"] > 0)


class SelfCheckpointing(nn.Module):
    """A layer that calls DeepSpeed's checkpoint function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpointing.checkpoint(self.inner, x + 1)


def _evaluate_with_contiguous_buffers(rank: int, specs: list[Any], interval: int) -> tuple[float, float]:
    tds.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    toy = Toy("chain")
    module = PipelineModule(specs, num_stages=2, loss_fn=toy.loss_fn, activation_checkpoint_interval=interval)
    engine = make_engine(toy, 2, module=module)
    expected = float(engine.eval_batch(iter(toy.make_batches())))
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    return expected, float(engine.eval_batch(iter(toy.make_batches())))


@pytest.mark.parametrize(
    ("specs", "interval"), [([LayerSpec(SelfCheckpointing)] * 4, 0), (Toy("chain", 4).layer_specs(), 1)]
)
def test_evaluation_reuses_contiguous_checkpoint_buffers(specs: list[Any], interval: int) -> None:
    """Two layers of a stage fill the two places for inputs; there are four micro-batches, and no backward."""
    for expected, got in run_ranks(2, _evaluate_with_contiguous_buffers, specs, interval):
        assert expected == got
