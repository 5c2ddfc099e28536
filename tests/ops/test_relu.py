"""ReLU in a compiled graph on a CPU: torch's kernel, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron.ops import activations
from megatron.ops.activations import relu
from tests.helpers.whole import random


def outcome(function: Any) -> list[torch.Tensor]:
    """Return output and gradient; one number is 0, of which torch's gradient is 0."""
    x = random(1, 3, 40)
    x[1, 7] = 0.0
    x.requires_grad_()
    y = function(x)
    y.backward(random(2, 3, 40))
    assert x.grad is not None
    return [y.detach(), x.grad]


def test_it_is_torchs_compiled_or_not() -> None:
    seen: list[str] = []

    def keep(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    wanted = outcome(F.relu)
    for function in (relu, torch.compile(relu, backend=keep, dynamic=False)):
        assert all(torch.equal(*pair) for pair in zip(outcome(function), wanted, strict=True))
    assert any("megatron_tds.relu" in name for name in seen)


def test_the_operator_is_what_torch_wants_of_one() -> None:
    for x in (random(1, 3, 4), random(1, 3, 4).t(), random(1, 3, 4)[:, ::2]):
        torch.library.opcheck(activations._relu, (x.requires_grad_(),))
