"""Losses of every form: what is trained on, what is reported, and what is refused."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tds.loss import LossMeter, Weighted, named_losses
from tds.loss_reduction import MAX_LOSSES, MAX_NAME_BYTES, MeanLosses, all_reduce_loss
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine, worst_relative_error

CPU = torch.device("cpu")
Named = namedtuple("Named", ["aux", "loss"])
ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (ONE, ["loss"]),
        (Weighted(ONE, 3), ["loss"]),
        ({"lm": ONE, "aux": TWO}, ["lm", "aux"]),
        ({"aux": TWO, "loss": ONE}, ["loss", "aux"]),
        (Named(TWO, ONE), ["loss", "aux"]),
        ((ONE, TWO, 3.0), ["loss", "loss_1", "loss_2"]),
        ([ONE, Weighted(TWO, 2)], ["loss", "loss_1"]),
    ],
)
def test_loss_named_loss_or_first_is_trained(loss: Any, names: list[str]) -> None:
    named = named_losses(loss, 0)
    assert list(named) == names
    first = named[names[0]]
    assert (first.total if isinstance(first, Weighted) else first) is ONE


def _reduce_losses(*losses: Any, additional: Any = None, nominal: float = 1.0) -> MeanLosses:
    meter = LossMeter(len(losses), nominal, CPU, additional)
    for micro_batch, loss in enumerate(losses):
        meter.add(loss, micro_batch)
    return all_reduce_loss(meter, CPU).means()


def test_gradient_factor_on_device_equals_factor_on_host() -> None:
    for weights, expected in (((3.0, 5.0), 1.0 / 8.0), ((0.0, 0.0), 0.0)):
        meter = LossMeter(len(weights), 1.0, CPU, None)
        for micro_batch, weight in enumerate(weights):
            meter.add(Weighted(torch.tensor(2.0 * weight), torch.tensor(weight)), micro_batch)
        reduction = all_reduce_loss(meter, CPU)
        assert reduction.factor == expected
        assert reduction.factor_on_device.dtype is torch.float64 and reduction.factor_on_device.item() == expected


def test_16_bit_losses_accumulate_in_fp32_and_fp64_losses_in_fp64() -> None:
    half = torch.tensor(1.0, dtype=torch.bfloat16)
    bf16_means = _reduce_losses(*[half] * 300)  # in bf16 the sum would stand still at 256
    assert bf16_means.loss.dtype is torch.float32 and bf16_means.loss == 1.0
    fp64_loss = torch.tensor(1.0 + 2.0**-40, dtype=torch.float64)
    mixed_means = _reduce_losses({"loss": fp64_loss, "aux": half})
    assert (
        mixed_means.loss == fp64_loss
        and mixed_means.loss.dtype is torch.float64
        and mixed_means.additional["aux"].dtype is torch.float32
    )


def test_weighted_losses_average_over_total_count() -> None:
    means = _reduce_losses(Weighted(torch.tensor(6.0), 2), Weighted(torch.tensor(1.0), torch.tensor(5)), nominal=4.0)
    assert means.loss == 1.0
    assert _reduce_losses(Weighted(torch.tensor(0.0), 0)).loss == 0.0


def test_additional_losses_may_be_numbers_without_gradient() -> None:
    means = _reduce_losses(
        {"loss": ONE, "right": torch.tensor(3)}, {"loss": TWO, "right": 4}, additional=lambda: {"of module": 2}
    )
    assert list(means.loss_fn_losses) == ["loss", "right"] and means.loss == 1.5
    assert {name: float(mean) for name, mean in means.additional.items()} == {"right": 3.5, "of module": 2.0}


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([None], "must return a tensor with one element, tds.Weighted(total, count), or a dict"),
        ([None], "got None at micro-batch 0. Run a model without a loss by eval_batch(..., compute_loss="),
        (["1.0"], "got str at micro-batch 0"),
        ([3.0], "got float at"),
        ([{}], "got a dict of 0"),
        ([()], "got a tuple of 0"),
        ([{1: ONE}], "got a dict of 1"),
        ([torch.ones(3, 4)], 'the loss "loss" must be a single number, got a tensor of float32[3, 4] at micro-batch 0'),
        ([{"loss": ONE, "aux": torch.ones(2)}], 'the loss "aux" must be a single number, got a tensor of float32[2]'),
        ([(ONE, (ONE, TWO))], 'the loss "loss_1" must be a single number, got a tuple of 2'),
        ([Weighted(ONE, torch.ones(2))], 'the loss "loss"\'s count must be a single number, got a tensor of float32'),
        ([Weighted(1.0, 2)], 'to train on, "loss", must be a tensor of a floating-point type, got float'),  # type: ignore[arg-type]
        ([torch.tensor(3)], 'to train on, "loss", must be a tensor of a floating-point type, got a tensor of int64[]'),
        ([torch.tensor(1j)], "got a tensor of complex64[]"),
        ([ONE, Weighted(ONE, 1)], "got Weighted at micro-batch 1 after a single number"),
        ([Weighted(ONE, 1), ONE], "got a tensor of float32[] at micro-batch 1 after tds.Weighted"),
        ([{"a": ONE}, {"b": ONE}], "same names in every micro-batch, got ['b'] at micro-batch 1 after ['a']"),
        ([{str(i): ONE for i in range(MAX_LOSSES + 1)}], f"at most {MAX_LOSSES} losses"),
        ([{"x" * MAX_NAME_BYTES: ONE}], f"fewer than {MAX_NAME_BYTES} bytes in total, got {MAX_NAME_BYTES}"),
        ([{"a\nb": ONE}], "no line breaks"),
    ],
)  # fmt: skip
def test_invalid_losses_are_rejected(losses: list[Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        _reduce_losses(*losses)
    assert message in str(raised.value)


def test_additional_loss_names_must_not_repeat_loss_names() -> None:
    with pytest.raises(ValueError, match=r'"loss" of get_additional_losses\(\) is also a loss'):
        _reduce_losses(ONE, additional=lambda: {"loss": TWO})


def _train_with_invalid_losses(rank: int, toy: Toy) -> list[str]:
    engine = make_engine(toy, 1)
    messages = []
    for loss_fn in (lambda o, y: o, lambda o, y: y[0].sum()):
        engine.module.loss_fn = loss_fn
        with pytest.raises((ValueError, RuntimeError)) as raised:
            engine.train_batch(iter(toy.make_batches()))
        messages.append(str(raised.value))
    return messages


def test_train_batch_rejects_non_scalar_or_detached_loss() -> None:
    """Row P10."""
    shape, gradient = run_ranks(1, _train_with_invalid_losses, Toy("chain"))[0]
    assert "must be a single number, got a tensor of float64[3, 4, 6] at micro-batch 0" in shape
    assert "must depend on the parameters, but it requires no gradient at micro-batch 0" in gradient


def _compute_named_losses(output: torch.Tensor, labels: Any) -> dict[str, Any]:
    target, mask = labels
    token_losses = ((output - target) ** 2).mean(-1)
    return {
        "far": token_losses.max(),
        "loss": Weighted((token_losses * mask).sum(), mask.sum()),
        "right": int(mask.sum()),
    }


def _record_collectives(calls: list[str]) -> None:
    for name in ("all_reduce", "broadcast"):
        call = getattr(dist, name)

        def recorded_call(tensor: torch.Tensor, *args: Any, name: str = name, call: Any = call, **kwargs: Any) -> Any:
            calls.append(f"{name} {tensor.dtype}{list(tensor.shape)}")
            return call(tensor, *args, **kwargs)

        setattr(dist, name, recorded_call)


def _train_named(rank: int, toy: Toy) -> dict[str, Any]:
    engine = make_engine(toy, 2)
    engine.module.get_additional_losses = lambda: {"of module": 7.0}
    batches = toy.make_batches(engine.grid.get_data_parallel_rank())
    calls: list[str] = []
    _record_collectives(calls)
    plain = engine.train_batch(iter(batches))
    plain_calls, calls[:] = list(calls), []
    engine.module.loss_fn = _compute_named_losses
    gradients: dict[str, torch.Tensor] = {}
    handle = engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in engine.module.named_parameters()})
    )
    loss = engine.train_batch(iter(batches))
    handle.remove()
    return {
        "plain": plain,
        "loss": loss,
        "others": {name: float(mean) for name, mean in engine.get_additional_losses().items()},
        "collectives": (plain_calls, list(calls)),
        "gradients": gradients,
        "eval": engine.eval_batch(iter(batches)),
    }


def test_named_losses_are_averaged_on_all_ranks() -> None:
    """Two stages x two replicas, unequal masks: means over micro-batches, over tokens, no collective more."""
    toy = Toy("chain")
    expected = _expected_losses(toy, replicas=2)
    for got in run_ranks(4, _train_named, toy):
        assert abs(float(got["loss"]) - expected["loss"]) < 1e-14
        assert list(got["others"]) == ["far", "right", "of module"]
        for name in ("far", "right"):
            assert abs(got["others"][name] - expected[name]) < 1e-14, name
        assert got["others"]["of module"] == 7.0
        assert {name: float(mean) for name, mean in got["eval"].items()} == {
            "loss": float(got["loss"]), "far": got["others"]["far"], "right": got["others"]["right"]
        }  # fmt: skip
        assert got["collectives"][0] == got["collectives"][1]
        assert worst_relative_error(got["gradients"], expected["gradients"]) < 1e-12


def _expected_losses(toy: Toy, replicas: int) -> dict[str, Any]:
    """The same by one process, written down anew."""
    layers = [spec.build() for spec in toy.layer_specs()]
    total, count, far, right = torch.zeros((), dtype=toy.dtype), 0.0, [], []
    for replica in range(replicas):
        for x, (target, mask) in toy.make_batches(replica):
            for layer in layers:
                x = layer(x)
            token_losses = ((x - target) ** 2).mean(-1)
            total = total + (token_losses * mask).sum()
            count += float(mask.sum())
            far.append(float(token_losses.detach().max()))
            right.append(float(mask.sum()))
    (total / count).backward()
    gradients = {f"{i}.{n}": p.grad for i, layer in enumerate(layers) for n, p in layer.named_parameters()}
    return {
        "loss": total.item() / count, "far": sum(far) / len(far), "right": sum(right) / len(right),
        "gradients": gradients,
    }  # fmt: skip


def _train_with_different_names(rank: int, toy: Toy) -> list[Any]:
    engine = make_engine(toy, 2)
    replica = engine.grid.get_data_parallel_rank()
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.optimizer.param_groups[0]["lr"] = 1.0
    engine.module.loss_fn = lambda o, y: {"loss": o.sum(), f"aux {replica}": 1.0}
    with pytest.raises(ValueError, match="same names on each of the 2 replicas") as raised:
        engine.train_batch(iter(toy.make_batches()))
    is_unchanged = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    engine.module.loss_fn = toy.loss_fn
    return [str(raised.value), is_unchanged, float(engine.eval_batch(iter(toy.make_batches())))]


def test_different_loss_names_across_replicas_raise_on_all_ranks() -> None:
    results = run_ranks(4, _train_with_different_names, Toy("chain"))
    assert all(is_unchanged for _, is_unchanged, _ in results)
    assert len({loss for *_, loss in results}) == 1
