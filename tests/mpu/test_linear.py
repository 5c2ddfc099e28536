"""A product with a bias that is added by itself in a compiled graph on a CPU, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.mpu import layers
from megatron.mpu.layers import linear, plus_bias
from tests.helpers.whole import random


def compiled(function: Any, seen: list[str]) -> Any:
    """Return ``function`` in a graph of its own; the operators of forward and backward go to ``seen``."""
    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return nop(graph, inputs)

    return torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), dynamic=False)


def outcome(function: Any, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the output and the gradient of each input."""
    inputs = [random(number, *shape).requires_grad_() for number, shape in enumerate(shapes)]
    y = function(*inputs)
    y.backward(random(7, *y.shape))
    return [y.detach(), *(each.grad for each in inputs if each.grad is not None)]


def test_it_is_torchs_product_compiled_or_not() -> None:
    shapes = (5, 2, 4), (3, 4), (3,)
    wanted = outcome(F.linear, *shapes)
    assert all(torch.equal(*pair) for pair in zip(outcome(linear, *shapes), wanted, strict=True))
    seen: list[str] = []
    found = outcome(compiled(linear, seen), *shapes)
    assert len(found) == len(wanted) == 4
    for own, torchs in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, torchs, rtol=1e-12, atol=1e-14)
    assert not any("addmm" in name or "aten.sum" in name for name in seen), "a copied bias, or the compiler's sum"
    assert any("megatron_tds.in_every_row" in name for name in seen)


def test_without_a_bias_it_is_the_product_alone() -> None:
    seen: list[str] = []
    shapes = (5, 2, 4), (3, 4)
    for own, torchs in zip(outcome(compiled(linear, seen), *shapes), outcome(F.linear, *shapes), strict=True):
        torch.testing.assert_close(own, torchs, rtol=1e-12, atol=1e-14)
    assert not any("in_every_row" in name for name in seen)


def test_in_16_bits_the_product_rounds_with_the_bias() -> None:
    x, weight, bias = (random(number, *shape).bfloat16() for number, shape in enumerate([(5, 2, 64), (32, 64), (32,)]))
    seen: list[str] = []
    assert torch.equal(compiled(linear, seen)(x, weight, bias), F.linear(x, weight, bias))
    assert any("addmm" in name for name in seen)


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(trained: int) -> None:
    inputs = [random(number, *shape) for number, shape in enumerate([(5, 2, 4), (3, 4), (3,)])]
    inputs[trained].requires_grad_()
    found, wanted = (
        [torch.autograd.grad(f(*inputs).sum(), inputs[trained])[0]] for f in (compiled(linear, []), F.linear)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_the_gradient_of_a_bias_added_after_a_sum_over_ranks_is_a_product_too() -> None:
    seen: list[str] = []
    shapes = (5, 2, 3), (3,)
    for own, torchs in zip(outcome(compiled(plus_bias, seen), *shapes), outcome(torch.add, *shapes), strict=True):
        torch.testing.assert_close(own, torchs, rtol=1e-12, atol=1e-14)
    assert not any("aten.sum" in name for name in seen)


def test_the_operator_is_what_torch_wants_of_one() -> None:
    for bias in (random(1, 4), random(1, 8)[::2]):
        torch.library.opcheck(layers._in_every_row, (bias.requires_grad_(), (3, 2, 4)))
