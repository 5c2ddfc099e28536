"""The adapter passes documents, shared heads and states to fla-core as its functions document them.

A stub with the documented interface computes the values; the kernels themselves need a GPU.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.ops import fla_delta_rule
from megatron.ops.delta_rule import gated_delta_rule
from tests.helpers.recurrent_samples import make_starts
from tests.ops.test_delta_rule import BATCH, make_inputs

TOLERANCE = 1e-12


def stub(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the outputs of the sequences between ``cu_seqlens``, and the final state if requested."""
    assert scale == 1.0 and g.dtype == torch.float32 and q.shape[2] == v.shape[2]
    if cu_seqlens is None:
        output, state = gated_delta_rule(q, k, v, g, beta, initial_state=initial_state)
        return output, state if output_final_state else None
    assert len(q) == 1 and initial_state is None
    bounds = cu_seqlens.tolist()
    sequences = [
        gated_delta_rule(*(x[:, start:stop] for x in (q, k, v, g, beta)))[0]
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    return torch.cat(sequences, dim=1), None


@pytest.fixture(autouse=True)
def stub_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (("gated_delta_rule", "chunk_gated_delta_rule"), ("kda", "chunk_kda")):
        kernels: Any = ModuleType(f"fla.ops.{module}")
        setattr(kernels, name, stub)
        monkeypatch.setitem(sys.modules, f"fla.ops.{module}", kernels)
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))


@pytest.mark.parametrize("has_decay_per_element", [False, True])
def test_documents_are_packed_sequences(has_decay_per_element: bool) -> None:
    query, key, value, log_decay, beta, _ = make_inputs(17, has_decay_per_element)
    inputs = [query[:, :, :1], key[:, :, :1], value, log_decay.float().to(log_decay.dtype), beta]
    starts = make_starts(17, [[0, 5, 6], [0, 1, 16]])
    expected, _ = gated_delta_rule(*inputs, starts=starts)
    output, state = fla_delta_rule.fla_delta_rule(*inputs, starts=starts)
    assert state is None and len(output) == BATCH
    torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("has_decay_per_element", [False, True])
def test_state_is_passed_and_returned(has_decay_per_element: bool) -> None:
    query, key, value, log_decay, beta, initial = make_inputs(9, has_decay_per_element)
    inputs = [query, key, value, log_decay.float().to(log_decay.dtype), beta]
    expected = gated_delta_rule(*inputs, initial_state=initial)
    actual = fla_delta_rule.fla_delta_rule(*inputs, initial_state=initial)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)


def test_kernels_are_for_half_precision_on_cuda() -> None:
    assert not fla_delta_rule.is_available(torch.zeros(1, dtype=torch.bfloat16))
