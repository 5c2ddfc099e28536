"""The adapter for mamba-ssm, against a function with its documented interface. The package itself needs a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.ops import mamba_ssm
from megatron.ops.state_space import state_space_scan
from tests.helpers.recurrent_samples import worst_difference

TOLERANCE = 1e-12


def documented_scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunk_size: int,
    D: Any = None, z: Any = None, dt_bias: Any = None, initial_states: Any = None, seq_idx: torch.Tensor | None = None,
    cu_seqlens: Any = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False, return_varlen_states: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute the outputs token by token; a token with another ``seq_idx`` than the previous one starts from zeros."""
    assert (D, z, dt_bias, initial_states, cu_seqlens, dt_softplus, return_final_states) == (None,) * 5 + (False,) * 2
    B, C = (y.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for y in (B, C))
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[3])
    outputs = []
    for i in range(x.shape[1]):
        if seq_idx is not None and i:
            is_new = (seq_idx[:, i] != seq_idx[:, i - 1])[:, None, None, None]
            state = torch.where(is_new, torch.zeros_like(state), state)
        decay = (A * dt[:, i]).exp()[..., None, None]
        state = decay * state + (dt[:, i, :, None] * x[:, i]).unsqueeze(-1) * B[:, i].unsqueeze(-2)
        outputs.append((state @ C[:, i].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, dim=1)


@pytest.fixture
def _documented_package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(mamba_ssm.MODULE)
    module.mamba_chunk_scan_combined = documented_scan  # type: ignore[attr-defined]
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, mamba_ssm.MODULE, module)


@pytest.mark.usefixtures("_documented_package")
@pytest.mark.parametrize("starts", [None, [[0, 0, 2, 2, 4], [-1, -1, -1, 3, 3]]], ids=["one document", "documents"])
def test_adapter_matches_our_scan(starts: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 5, 4, 3), (2, 5, 4), (4,), (2, 5, 2, 6), (2, 5, 2, 6)
    value, time_step, rates, b_t, c_t = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    time_step, rates = time_step.exp(), -rates.exp()
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    expected, _ = state_space_scan(value * time_step.unsqueeze(-1), rates * time_step, b_t, c_t, starts=starts)
    actual = mamba_ssm.scan(value, time_step, rates, b_t, c_t, starts)
    assert worst_difference([actual], [expected]) <= TOLERANCE


def test_cpu_tensors_use_our_scan() -> None:
    assert not mamba_ssm.is_supported(torch.zeros(1))
