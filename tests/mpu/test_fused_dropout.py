"""Dropout by a kernel, and as an operator of compiled layers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megatron.mpu import fused_dropout
from megatron.mpu.random import DropoutKey, DropoutStreams
from tests.helpers.runs import ROOT
from tests.mpu.interpreted import PLACE

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install -e '.[triton]'"
)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", ["masks", "keys", "operator"])
def test_the_kernel_gives_what_torch_gives(name: str) -> None:
    """In a process of its own: see ``tests/mpu/interpreted.py``."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mpu.interpreted", name],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_operator_has_the_bits_of_a_generator_on_a_cpu(dtype: torch.dtype) -> None:
    streams = DropoutStreams(3)
    streams.position = DropoutKey(4, 2)
    x = torch.randn(6, 2, 10).to(dtype).requires_grad_()
    wanted = streams.dropout(x, 0.2, training=True, **PLACE)
    place = torch.tensor([4, 2]), torch.tensor(5), [3, 0, -1], "mlp output", 0.2, False
    found, _ = fused_dropout.keyed_dropout(x, *place)
    grads = [torch.autograd.grad(each.square().sum(), x)[0] for each in (wanted, found)]
    assert torch.equal(found, wanted) and torch.equal(*grads)
    torch.library.opcheck(fused_dropout.keyed_dropout, (x.detach(), *place))


def test_a_residual_is_added_to_what_is_left() -> None:
    streams = DropoutStreams(3)
    x, residual = torch.randn(6, 2, 10), torch.randn(6, 2, 10)
    for training in (False, True):
        alone = streams.dropout(x, 0.5, training=training, **PLACE)
        assert torch.equal(streams.dropout(x, 0.5, training=training, residual=residual, **PLACE), residual + alone)
    assert torch.equal(alone, F.dropout(x, 0.0) * (alone != 0) * 2)


def test_the_kernel_is_for_cuda_and_not_for_numbers_that_it_would_round(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda(torch.Tensor):
        device = torch.device("cuda")  # type: ignore[assignment]

    monkeypatch.setattr(fused_dropout, "is_there", lambda: True)
    assert not DropoutStreams().by_kernel(torch.ones(2))
    assert DropoutStreams().by_kernel(torch.ones(2).as_subclass(OnCuda))
    assert not DropoutStreams().by_kernel(torch.ones(2, dtype=torch.float64).as_subclass(OnCuda))
    monkeypatch.setattr(fused_dropout, "is_there", lambda: False)
    assert not DropoutStreams().by_kernel(torch.ones(2).as_subclass(OnCuda))
