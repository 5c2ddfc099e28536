"""A product with a bias that is added by itself in a compiled graph on a CPU, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.mpu import layers
from megatron.mpu.layers import add_bias, linear
from tests.helpers.whole import random_tensor


def compile_recording(function: Any, operators: list[str]) -> Any:
    """Return ``function`` in a graph of its own; the operators of forward and backward go to ``operators``."""
    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd

    def record(graph: Any, inputs: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return nop(graph, inputs)

    return torch.compile(function, backend=aot_autograd(fw_compiler=record, bw_compiler=record), dynamic=False)


def run_with_gradients(function: Any, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the output and the gradient of each input."""
    inputs = [random_tensor(seed, *shape).requires_grad_() for seed, shape in enumerate(shapes)]
    y = function(*inputs)
    y.backward(random_tensor(7, *y.shape))
    return [y.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def test_linear_matches_torch_eager_and_compiled() -> None:
    shapes = (5, 2, 4), (3, 4), (3,)
    torch_results = run_with_gradients(F.linear, *shapes)
    assert all(torch.equal(*pair) for pair in zip(run_with_gradients(linear, *shapes), torch_results, strict=True))
    operators: list[str] = []
    compiled_results = run_with_gradients(compile_recording(linear, operators), *shapes)
    assert len(compiled_results) == len(torch_results) == 4
    for actual, expected in zip(compiled_results, torch_results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert not any("addmm" in name or "aten.sum" in name for name in operators), "a copied bias, or the compiler's sum"
    assert any("megatron_tds.in_every_row" in name for name in operators)


def test_linear_without_bias_is_plain_matmul() -> None:
    operators: list[str] = []
    shapes = (5, 2, 4), (3, 4)
    for actual, expected in zip(
        run_with_gradients(compile_recording(linear, operators), *shapes),
        run_with_gradients(F.linear, *shapes),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert not any("in_every_row" in name for name in operators)


def test_16_bit_product_rounds_once_with_bias() -> None:
    x, weight, bias = (
        random_tensor(seed, *shape).bfloat16() for seed, shape in enumerate([(5, 2, 64), (32, 64), (32,)])
    )
    operators: list[str] = []
    assert torch.equal(compile_recording(linear, operators)(x, weight, bias), F.linear(x, weight, bias))
    assert any("addmm" in name for name in operators)


@pytest.mark.parametrize("trained_idx", [0, 1, 2])
def test_frozen_inputs_get_no_gradient(trained_idx: int) -> None:
    inputs = [random_tensor(seed, *shape) for seed, shape in enumerate([(5, 2, 4), (3, 4), (3,)])]
    inputs[trained_idx].requires_grad_()
    actual, expected = (
        [torch.autograd.grad(f(*inputs).sum(), inputs[trained_idx])[0]]
        for f in (compile_recording(linear, []), F.linear)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_bias_gradient_after_all_reduce_is_a_product() -> None:
    operators: list[str] = []
    shapes = (5, 2, 3), (3,)
    for actual, expected in zip(
        run_with_gradients(compile_recording(add_bias, operators), *shapes),
        run_with_gradients(torch.add, *shapes),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert not any("aten.sum" in name for name in operators)


def test_operator_passes_opcheck() -> None:
    for bias in (random_tensor(1, 4), random_tensor(1, 8)[::2]):
        torch.library.opcheck(layers._expand_bias, (bias.requires_grad_(), (3, 2, 4)))
