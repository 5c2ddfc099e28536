"""What a program sees of the engine: evaluation, data, counters, errors."""

from __future__ import annotations

import os
import signal
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe.module import PipelineError

import tds
from tds.engine.data_consistency import DataEnded
from tds.gradients import GradientBucket
from tds.p2p.boundary import BoundaryError
from tds.partition import PartitionError
from tds.pipe import PipelineModule
from tests.helpers.harness import fork_ranks, run_ranks
from tests.helpers.toys import (
    TiedEmbedding,
    Toy,
    check_equal,
    grad_norm,
    make_engine,
    output_head,
    train_batch,
    train_reference,
)


def _change_shapes(rank: int, toy: Toy) -> list[Any]:
    engine = make_engine(toy, 3)
    seen: list[int] = []
    engine.on_micro_batch = seen.append
    results = []
    for rows in (3, 5, 2):
        engine.eval_batch(iter([toy.make_batch(0, rows + 1)] * toy.num_micro_batches))
        results.append(train_batch(engine, toy, [toy.make_batch(i, rows) for i in range(toy.num_micro_batches)]))
        engine.reset_activation_shape()
    return [results, seen]


def test_shapes_may_change_between_calls() -> None:
    toy = Toy("many")
    ranks = run_ranks(3, _change_shapes, toy)
    for index, rows in enumerate((3, 5, 2)):
        expected_toy = Toy("many", micro_batch_size=rows)
        check_equal([results[index] for results, _ in ranks], expected_toy, tolerance=1e-12)
    assert all(seen == [0, 1, 2, 3] * 3 for _, seen in ranks)


def _change_shape_within_call(rank: int, toy: Toy) -> None:
    make_engine(toy, 2).train_batch(iter([toy.make_batch(i, 3 if i < 2 else 4) for i in range(4)]))


def test_shape_change_within_call_raises_before_send() -> None:
    codes, _, reports = fork_ranks(2, _change_shape_within_call, Toy("many"))
    assert codes == [1, 1]
    assert "BoundaryError" in reports[0] and "stage 0 output 0" in reports[0]
    assert "[3, 4, 6], got float64[4, 4, 6] at micro-batch 2" in reports[0]
    assert "stage 1 lost stage 0 (rank 0)" in reports[1]


def _kill_peer(rank: int, toy: Toy) -> str:
    engine = make_engine(toy, 2)

    def kill(index: int) -> None:
        if index == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    engine.on_micro_batch = kill
    try:
        engine.train_batch(iter(toy.make_batches()))
    except RuntimeError as error:
        os.write(2, str(error).encode())
        return str(error)
    return "trained"


def test_dead_peer_error_names_action_and_micro_batch() -> None:
    codes, results, reports = fork_ranks(2, _kill_peer, Toy("chain"))
    assert codes[1] == -signal.SIGKILL
    message = (results[0] or "") + reports[0]
    assert "stage 0 lost stage 1 (rank 1) while" in message and "micro-batch" in message


def _die_in_all_reduce(rank: int, toy: Toy) -> None:
    engine = make_engine(toy, 1)
    if rank == 1:
        GradientBucket.start_all_reduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    engine.train_batch(iter(toy.make_batches()))


def test_peer_death_in_all_reduce_is_reported() -> None:
    codes, _, reports = fork_ranks(2, _die_in_all_reduce, Toy("chain"))
    assert codes == [1, -signal.SIGKILL]
    assert "stage 0 lost a rank while" in reports[0]


def _stop_at_loss(rank: int, toy: Toy) -> Any:
    engine = make_engine(toy, 2)
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.optimizer.param_groups[0]["lr"] = 1.0

    def stop(loss: torch.Tensor) -> None:
        raise ArithmeticError(float(loss).hex())

    engine.on_loss = stop
    with pytest.raises(ArithmeticError) as raised:
        engine.train_batch(iter(toy.make_batches()))
    return str(raised.value), all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))


def test_on_loss_error_stops_all_ranks_before_step() -> None:
    toy = Toy("chain")
    assert run_ranks(2, _stop_at_loss, toy) == [(float(train_reference(toy)[0]).hex(), True)] * 2


def _train_without_iterator(rank: int, toy: Toy) -> list[Any]:
    engine = make_engine(toy, 3)
    batch_args: list[Any] = []
    data = iter(toy.make_batches())

    def batch_fn(batch: Any) -> Any:
        batch_args.append(batch)
        return next(data)

    engine.set_batch_fn(batch_fn)
    loss = engine.train_batch(None)
    return [loss, batch_args]


def test_batch_function_gets_none_without_iterator() -> None:
    toy = Toy("chain")
    loss, _ = train_reference(toy)
    results = run_ranks(3, _train_without_iterator, toy)
    assert [len(batch_args) for _, batch_args in results] == [4, 0, 4]
    assert all(float(got - loss) == 0 and not any(batch_args) for got, batch_args in results)


def _train_on_training_data(rank: int, toy: Toy) -> torch.Tensor:
    tds.init_distributed("gloo", verbose=False)
    module = PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=lambda out, y: ((out - y) ** 2).mean())
    data = [tuple(t[0] for t in (x, y)) for x, (y, _) in (toy.make_batch(i, 1) for i in range(5))]
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}
    engine, _, loader, _ = tds.initialize(
        model=module, optimizer=torch.optim.SGD(module.parameters(), 0.1), training_data=data, config=config
    )
    return torch.stack([engine.train_batch() for _ in range(3)])


def test_training_data_is_read_and_repeated() -> None:
    first, second = run_ranks(2, _train_on_training_data, Toy("chain"))
    assert torch.equal(first, second) and first[-1] < first[0]


def _collect_errors(rank: int) -> dict[str, str]:
    messages: dict[str, str] = {}
    toy = Toy("chain", num_layers=4)

    def record_error(name: str, error_types: Any, call: Any) -> None:
        with pytest.raises(error_types) as raised:
            call()
        messages[name] = str(raised.value)

    engine = make_engine(toy, 2)
    for name in ("forward", "backward", "step"):
        record_error(name, PipelineError, getattr(engine, name))
    record_error("data", RuntimeError, engine.train_batch) if engine.is_first_stage() else None
    record_error("schedule", ValueError, lambda: make_engine(Toy(pipeline={"schedule": "zb-h9"}), 2))
    chunked = {"schedule": "interleaved", "chunks": 2}
    plain = deepspeed.PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=toy.loss_fn)
    record_error("plain", ValueError, lambda: make_engine(Toy(pipeline=chunked), 2, module=plain))
    record_error("chunks", ValueError, lambda: make_engine(Toy(pipeline=chunked), 2))
    record_error("interleaved", ValueError, lambda: make_engine(Toy(pipeline={"schedule": "interleaved"}), 2))
    record_error(
        "whole", ValueError, lambda: make_engine(Toy(options={"chunks": 2}, pipeline={"schedule": "gpipe"}), 2)
    )
    record_error("thin", ValueError, lambda: make_engine(Toy(num_layers=3, options={"chunks": 2}), 2))
    record_error("key", ValueError, lambda: make_engine(Toy(pipeline={"shedule": "gpipe", "use_reentrant": False}), 2))
    record_error("bounds", ValueError, lambda: make_engine(toy, 2, partition_method=[0, 2, 3]))
    record_error("bounds twice", ValueError, lambda: make_engine(toy, 2, partition_method=[0, 3, 2, 4]))
    record_error("empty", ValueError, lambda: make_engine(toy, 2, partition_method=[0, 0, 4]))
    record_error("few", ValueError, lambda: make_engine(Toy(num_layers=1), 2))
    record_error("type", PartitionError, lambda: make_engine(toy, 2, partition_method="type:transformer"))
    module = PipelineModule(toy.layer_specs(), num_stages=2)
    record_error("mpu", ValueError, lambda: tds.initialize(model=module, mpu=object(), config={"train_batch_size": 1}))
    module._input_grad = [True, True]
    module._input_type = ["float"]
    record_error("lists", BoundaryError, lambda: make_engine(toy, 2, module=module))
    with torch.no_grad():
        record_error("no_grad", RuntimeError, engine.train_batch)
    record_error("divide", ValueError, lambda: engine.set_train_batch_size(toy.micro_batch_size * 4 + 1))
    return messages


def test_user_errors_suggest_fixes() -> None:
    messages = run_ranks(2, _collect_errors)[0]
    assert "train_batch(data_iter)" in messages["forward"] and "train_batch" in messages["step"]
    assert "pass an iterator" in messages["data"]
    assert "'1f1b'" in messages["schedule"] and "zb-h1" in messages["schedule"]
    assert (
        "tds.PipelineModule(..., chunks=c)" in messages["plain"] and "chunks=1 in PipelineModule" in messages["chunks"]
    )
    assert (
        "chunks" in messages["interleaved"]
        and "interleaved" in messages["whole"]
        and "in each chunk" in messages["thin"]
    )
    assert 'no "shedule" (did you mean "schedule"?). Its keys are stages, partition,' in messages["key"]
    assert "[0, 2, 3]" in messages["bounds"] and "4 layers" in messages["bounds"]
    assert "none on stage 0" in messages["empty"] and "1 layers, 2 stages" in messages["few"]
    classes = ", ".join(dict.fromkeys(spec.typename.__name__ for spec in Toy("chain", num_layers=4).layer_specs()))
    assert "'type:transformer' matches no layer; the classes are " + classes + ". Write type:" in messages["type"]
    assert "equal lengths" in messages["lists"] and "Remove it" in messages["mpu"]


def _train_with_overflow(rank: int, toy: Toy) -> list[Any]:
    """An optimizer of our own with everything of the protocol, that overflows at its first step."""
    tds.init_distributed("gloo", verbose=False)
    module = PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=toy.loss_fn)

    class ScalingOptimizer(torch.optim.SGD):
        loss_scale, overflow, _global_grad_norm, steps = 8.0, False, 2.5, 0

        def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
            return parameter.grad

        def step(self, closure: Any = None) -> None:
            self.steps += 1
            self.overflow = self.steps == 1
            self.seen = grad_norm({str(i): p.grad for i, p in enumerate(self.param_groups[0]["params"])})

    optimizer = ScalingOptimizer(module.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    config = {
        "train_micro_batch_size_per_gpu": toy.micro_batch_size,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1e-9,
    }
    engine = tds.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]
    lrs = []
    for _ in range(2):
        engine.train_batch(iter(toy.make_batches()))
        lrs.append(engine.get_lr()[0])
    return [engine.skipped_steps, engine.global_steps, lrs, engine.get_global_grad_norm(), optimizer.seen]


def test_self_scaling_optimizer_is_not_clipped_by_engine() -> None:
    toy = Toy("chain")
    expected = grad_norm(train_reference(toy)[1])
    results = run_ranks(2, _train_with_overflow, toy)
    for skipped, steps, lrs, norm, _ in results:
        assert (skipped, steps, lrs, norm) == (1, 2, [1.0, 0.5], 2.5)
    assert sum(result[-1] ** 2 for result in results) ** 0.5 == pytest.approx(8 * expected, rel=1e-12)


def _train_with_unused_input(rank: int) -> list[Any]:
    toy = Toy("chain", num_layers=2)

    class Ignore(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(toy.hidden_size, dtype=toy.dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight.expand(x.shape) * 2

    tds.init_distributed("gloo", verbose=False)
    module = PipelineModule(
        [toy.layer_specs()[0], Ignore()], num_stages=2, partition_method="uniform", loss_fn=toy.loss_fn
    )
    _, gradients, _ = train_batch(make_engine(toy, 2, module=module), toy)
    return [float(g.abs().max()) for g in gradients.values()]


def test_unused_input_gets_zero_gradient() -> None:
    first, last = run_ranks(2, _train_with_unused_input)
    assert first == [0.0, 0.0] and last[0] > 0


def test_toy_head_uses_tied_embedding() -> None:
    words = TiedEmbedding(1, 5, 3, torch.float64)
    assert output_head(words, torch.ones(2, 3, dtype=torch.float64)).shape == (2, 5)


class _Planted(RuntimeError):
    pass


def _continue_after_errors(rank: int, num_stages: int) -> tuple[str, list[Any]]:
    """An iterator that ends between two batches, one that ends within, then an error in the middle."""
    toy = Toy("chain")
    engine = make_engine(toy, num_stages)
    with pytest.raises(StopIteration):
        engine.train_batch(iter([]))
    gradients = [train_batch(engine, toy)[1]]
    with pytest.raises(DataEnded):
        engine.train_batch(iter(toy.make_batches()[:2]))
    gradients.append(train_batch(engine, toy)[1])

    def raise_error(micro_batch: int) -> None:
        if micro_batch == 2 - rank:  # where neither waits for the other
            raise _Planted

    engine.on_micro_batch = raise_error
    with pytest.raises(_Planted):
        engine.train_batch(iter(toy.make_batches()))
    engine.on_micro_batch = None
    if num_stages == 1:
        return "", [*gradients, train_batch(engine, toy)[1]]
    with pytest.raises(RuntimeError) as raised:
        engine.train_batch(iter(toy.make_batches()))
    return str(raised.value), gradients


@pytest.mark.parametrize("num_stages", [1, 2])
def test_error_within_step_leaves_no_gradients_for_next_batch(num_stages: int) -> None:
    _, expected = train_reference(Toy("chain"))
    for message, gradients in run_ranks(num_stages, _continue_after_errors, num_stages):
        assert ("_Planted" in message and "End the program" in message) == (num_stages > 1), message
        assert len(gradients) == (3 if num_stages == 1 else 2)
        for name, gradient in [item for step_gradients in gradients for item in step_gradients.items()]:
            assert torch.allclose(gradient, expected[name], rtol=1e-11, atol=1e-15), name


def _raise_in_step(rank: int) -> tuple[list[Any], list[Any]]:
    """What an engine says of itself after a step that raised, and the gradients of the batch after it."""
    toy = Toy("chain")
    engine = make_engine(toy, 2)
    step, engine.optimizer.step = engine.optimizer.step, _raise
    with pytest.raises(_Planted):
        engine.train_batch(iter(toy.make_batches()))
    engine.optimizer.step = step
    counters = [engine.is_gradient_accumulation_boundary(), engine.micro_steps, engine.global_steps]
    return counters, [train_batch(engine, toy)[1]]


def _raise(*_: Any, **__: Any) -> None:
    raise _Planted("Current loss scale already at minimum")


def test_failed_step_is_not_counted_and_leaves_no_gradients() -> None:
    """DeepSpeed's loss scaler does so; a program may catch it, and run backwards of its own."""
    _, expected = train_reference(Toy("chain"))
    for counters, gradients in run_ranks(2, _raise_in_step):
        assert counters == [False, 0, 0]
        for name, gradient in gradients[0].items():
            assert torch.allclose(gradient, expected[name], rtol=1e-11, atol=1e-15), name
