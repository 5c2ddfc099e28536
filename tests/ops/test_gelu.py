"""GELU in a compiled graph on a CPU: the exact one is torch's kernel, the approximation the logistic function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.ops import activations
from megatron.ops.activations import gelu
from tests.helpers.whole import random_tensor


def run_with_gradient(function: Any, approximate: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return output and gradient, for small numbers and for large ones."""
    x = (random_tensor(1, 3, 40) * torch.tensor([[0.1], [1.0], [20.0]])).to(dtype).requires_grad_()
    y = function(x, approximate=approximate)
    y.backward(random_tensor(2, 3, 40).to(dtype))
    assert x.grad is not None
    return [y.detach(), x.grad]


def compile_gelu(operators: list[str]) -> Any:
    """Return our GELU in a graph of its own, whose operators go to ``operators``."""

    def record(graph: Any, _: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    return torch.compile(gelu, backend=record, dynamic=False)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_matches_torch_eager_and_compiled(approximate: str) -> None:
    operators: list[str] = []
    torch_results = run_with_gradient(F.gelu, approximate)
    assert all(torch.equal(*pair) for pair in zip(run_with_gradient(gelu, approximate), torch_results, strict=True))
    for actual, expected in zip(run_with_gradient(compile_gelu(operators), approximate), torch_results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert any("megatron_tds.gelu" in name for name in operators) == (approximate == "none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_16_bit_gelu_rounds_once(dtype: torch.dtype) -> None:
    for actual, expected in zip(
        run_with_gradient(compile_gelu([]), "tanh", dtype), run_with_gradient(F.gelu, "tanh", dtype), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_operator_passes_opcheck() -> None:
    for x in (random_tensor(1, 3, 4), random_tensor(1, 3, 4).t(), random_tensor(1, 3, 4)[:, ::2]):
        torch.library.opcheck(activations._gelu, (x.requires_grad_(),))
