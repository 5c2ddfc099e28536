"""ReLU in a compiled graph on a CPU: torch's kernel, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron.ops import activations
from megatron.ops.activations import relu
from tests.helpers.whole import random_tensor


def run_with_gradient(function: Any) -> list[torch.Tensor]:
    """Return output and gradient; one number is 0, of which torch's gradient is 0."""
    x = random_tensor(1, 3, 40)
    x[1, 7] = 0.0
    x.requires_grad_()
    y = function(x)
    y.backward(random_tensor(2, 3, 40))
    assert x.grad is not None
    return [y.detach(), x.grad]


def test_relu_matches_torch_eager_and_compiled() -> None:
    operators: list[str] = []

    def record(graph: Any, _: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    expected = run_with_gradient(F.relu)
    for function in (relu, torch.compile(relu, backend=record, dynamic=False)):
        assert all(torch.equal(*pair) for pair in zip(run_with_gradient(function), expected, strict=True))
    assert any("megatron_tds.relu" in name for name in operators)


def test_operator_passes_opcheck() -> None:
    for x in (random_tensor(1, 3, 4), random_tensor(1, 3, 4).t(), random_tensor(1, 3, 4)[:, ::2]):
        torch.library.opcheck(activations._relu, (x.requires_grad_(),))
