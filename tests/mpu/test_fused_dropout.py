"""Dropout by a kernel, and as an operator of compiled layers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megatron import triton_launch
from megatron.mpu import fused_dropout
from megatron.mpu.random import DropoutKey, DropoutStreams
from tests.helpers.runs import ROOT
from tests.mpu.interpreted import DROPOUT_SITE

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install -e '.[triton]'"
)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", ["masks", "keys", "operator"])
def test_triton_kernel_matches_torch(name: str) -> None:
    """In a process of its own: see ``tests/mpu/interpreted.py``."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.mpu.interpreted", name],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_operator_is_bitwise_equal_to_cpu_generator(dtype: torch.dtype) -> None:
    streams = DropoutStreams(3)
    streams.position = DropoutKey(4, 2)
    x = torch.randn(6, 2, 10).to(dtype).requires_grad_()
    expected = streams.dropout(x, 0.2, training=True, **DROPOUT_SITE)
    op_args = torch.tensor([4, 2]), torch.tensor(5), [3, 0, -1], "mlp output", 0.2, False
    actual, _ = fused_dropout.keyed_dropout(x, *op_args)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (expected, actual)]
    assert torch.equal(actual, expected) and torch.equal(*grads)
    torch.library.opcheck(fused_dropout.keyed_dropout, (x.detach(), *op_args))


def test_residual_is_added_after_dropout() -> None:
    streams = DropoutStreams(3)
    x, residual = torch.randn(6, 2, 10), torch.randn(6, 2, 10)
    for training in (False, True):
        dropped = streams.dropout(x, 0.5, training=training, **DROPOUT_SITE)
        assert torch.equal(
            streams.dropout(x, 0.5, training=training, residual=residual, **DROPOUT_SITE), residual + dropped
        )
    assert torch.equal(dropped, F.dropout(x, 0.0) * (dropped != 0) * 2)


def test_kernel_requires_cuda_and_excludes_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda(torch.Tensor):
        device = torch.device("cuda")  # type: ignore[assignment]

    monkeypatch.setattr(triton_launch, "has_triton", lambda: True)
    assert not DropoutStreams().uses_kernel(torch.ones(2))
    assert DropoutStreams().uses_kernel(torch.ones(2).as_subclass(OnCuda))
    assert not DropoutStreams().uses_kernel(torch.ones(2, dtype=torch.float64).as_subclass(OnCuda))
    monkeypatch.setattr(triton_launch, "has_triton", lambda: False)
    assert not DropoutStreams().uses_kernel(torch.ones(2).as_subclass(OnCuda))
