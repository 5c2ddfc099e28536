"""GELU in a compiled graph is torch's kernel, with its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.ops import gelu as module
from megatron.ops.gelu import gelu
from tests.mpu.whole import random


def outcome(function: Any, approximate: str) -> list[torch.Tensor]:
    """Return output and gradient."""
    x = random(1, 3, 40).float().requires_grad_()
    y = function(x, approximate=approximate)
    y.backward(random(2, 3, 40).float())
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_it_has_torchs_bits_compiled_or_not(approximate: str) -> None:
    seen = []

    def keep(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    wanted = outcome(F.gelu, approximate)
    for function in (gelu, torch.compile(gelu, backend=keep, dynamic=False)):
        for own, torchs in zip(outcome(function, approximate), wanted, strict=True):
            assert torch.equal(own, torchs)
    assert len(seen) == 1 and "megatron_tds.gelu" in seen[0]


def test_the_operator_is_what_torch_wants_of_one() -> None:
    for x in (random(1, 3, 4), random(1, 3, 4).t(), random(1, 3, 4)[:, ::2]):
        torch.library.opcheck(module._gelu, (x.requires_grad_(), "tanh"))
