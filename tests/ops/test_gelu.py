"""GELU in a compiled graph on a CPU: the exact one is torch's kernel, the approximation the logistic function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.ops import activations
from megatron.ops.activations import gelu
from tests.helpers.whole import random


def outcome(function: Any, approximate: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return output and gradient, for small numbers and for large ones."""
    x = (random(1, 3, 40) * torch.tensor([[0.1], [1.0], [20.0]])).to(dtype).requires_grad_()
    y = function(x, approximate=approximate)
    y.backward(random(2, 3, 40).to(dtype))
    assert x.grad is not None
    return [y.detach(), x.grad]


def compiled(seen: list[str]) -> Any:
    """Return our GELU in a graph of its own, whose operators go to ``seen``."""

    def keep(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    return torch.compile(gelu, backend=keep, dynamic=False)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_it_is_torchs_compiled_or_not(approximate: str) -> None:
    seen: list[str] = []
    wanted = outcome(F.gelu, approximate)
    assert all(torch.equal(*pair) for pair in zip(outcome(gelu, approximate), wanted, strict=True))
    for own, torchs in zip(outcome(compiled(seen), approximate), wanted, strict=True):
        torch.testing.assert_close(own, torchs, rtol=1e-12, atol=1e-14)
    assert any("megatron_tds.gelu" in name for name in seen) == (approximate == "none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_once_when_compiled(dtype: torch.dtype) -> None:
    for own, torchs in zip(outcome(compiled([]), "tanh", dtype), outcome(F.gelu, "tanh", dtype), strict=True):
        torch.testing.assert_close(own, torchs, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_the_operator_is_what_torch_wants_of_one() -> None:
    for x in (random(1, 3, 4), random(1, 3, 4).t(), random(1, 3, 4)[:, ::2]):
        torch.library.opcheck(activations._gelu, (x.requires_grad_(),))
