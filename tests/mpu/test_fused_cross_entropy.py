"""The kernels of the cross-entropy, and the losses that use them.

The short tests replace each kernel by its formula in torch. The slow tests run the kernels in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron import triton_launch
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.fused_cross_entropy import uses_kernels
from megatron.mpu.groups import SINGLE
from tests.helpers.harness import run_ranks
from tests.helpers.runs import ROOT
from tests.mpu.fused_cross_entropy_cases import (
    CASES,
    EMPTY_SHARD_CASES,
    Case,
    check_result,
    compute_losses,
    run_loss,
    run_rank,
    small_blocks,
)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install -e '.[triton]'"
)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", ["kernels", "one_rank", "two_ranks", "four_ranks"])
def test_triton_kernels_match_formula(name: str) -> None:
    """In a process of its own: see ``tests/mpu/interpreted_cross_entropy.py``."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.mpu.interpreted_cross_entropy", name],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def bias_and_cap(
    logits: torch.Tensor, bias: torch.Tensor, num_columns: int, cap: float, options: dict[str, Any]
) -> torch.Tensor:
    logits = logits[:, :num_columns].float()
    logits = logits + bias[:num_columns].float() if options["HAS_BIAS"] else logits
    return cap * torch.tanh(logits / cap) if options["HAS_CAP"] else logits


def write_statistics(
    logits: torch.Tensor,
    bias: torch.Tensor,
    targets: torch.Tensor,
    statistics: torch.Tensor,
    *args: Any,
    **options: Any,
) -> None:
    _, row_stride, width, num_columns, cap = args
    assert row_stride == logits.stride(0) and width == logits.shape[1]
    values = bias_and_cap(logits, bias, num_columns, cap, options)
    padded = torch.cat([values, values.new_full((len(values), 1), -3.4e38)], dim=1)
    is_local = (targets >= 0) & (targets < num_columns)
    target_logits = padded.gather(1, targets.masked_fill(~is_local, num_columns).unsqueeze(1)).squeeze(1)
    statistics[0] = padded.amax(dim=1)
    statistics[1] = (values - statistics[0].unsqueeze(1)).exp().sum(dim=1)
    statistics[2] = target_logits.where(is_local, 0.0)


def write_gradient(
    logits: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, maxima: torch.Tensor, exp_factors: torch.Tensor,
    factors: torch.Tensor, gradient: torch.Tensor, *args: Any, **options: Any,
) -> None:  # fmt: skip
    _, gradient_stride, _, num_columns, cap = args
    assert gradient_stride == gradient.stride(0)
    values = bias_and_cap(logits, bias, num_columns, cap, options)
    grad = (values - maxima.unsqueeze(1)).exp() * exp_factors.unsqueeze(1)
    grad -= (torch.arange(num_columns) == targets.unsqueeze(1)) * factors.unsqueeze(1)
    grad = grad * (1.0 - (values / cap).square()) if options["HAS_CAP"] else grad
    gradient.zero_()[:, :num_columns].copy_(grad)


FORMULAS: dict[str, Callable[..., None]] = {"statistics_kernel": write_statistics, "gradient_kernel": write_gradient}


@contextmanager
def formulas_as_kernels() -> Iterator[list[str]]:
    """Replace the kernels by their formulas; yields the names of the launched kernels."""
    launched: list[str] = []

    def launch(kernel: str, grid: tuple[int, ...], *args: Any, writes: Any, updates: Any = (), **options: Any) -> None:
        assert all(grid)
        name = kernel.partition("megatron.mpu.triton_cross_entropy:")[2]
        launched.append(name)
        FORMULAS[name](*args, **options)

    with small_blocks() as patch:
        patch.setattr(triton_launch, "launch", launch)
        yield launched


def name_of(case: Case) -> str:
    return f"{case.vocab}-{case.chunk_tokens}-{str(case.dtype)[6:]}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_loss_and_gradients_match_formula_with_and_without_kernels(case: Case) -> None:
    with formulas_as_kernels() as launched:
        result = run_loss(case, SINGLE)
        num_launches = len(launched)
        check_result(case, run_loss(case, SINGLE, has_kernels=False), SINGLE)
        assert len(launched) == num_launches, "--fused-kernels torch"
    check_result(case, result, SINGLE)
    num_chunks = -(-11 // case.chunk_tokens) if case.chunk_tokens else 1
    assert launched == ["statistics_kernel", "gradient_kernel"] * num_chunks, "two passes over each chunk's logits"


def test_sharded_loss_and_gradients_match_formula() -> None:
    run_ranks(2, run_rank, 2, formulas_as_kernels, CASES)
    run_ranks(4, run_rank, 4, formulas_as_kernels, EMPTY_SHARD_CASES)


def test_no_gradient_pass_without_gradients() -> None:
    for case in (CASES[0], CASES[5]):
        with formulas_as_kernels() as launched, torch.no_grad():
            compute_losses(case, SINGLE)
        assert set(launched) == {"statistics_kernel"}


def test_kernels_require_cuda_and_exclude_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not uses_kernels(torch.ones(2), True)
    monkeypatch.setattr(triton_launch, "is_available", lambda device: True)
    assert uses_kernels(torch.ones(2), True) and not uses_kernels(torch.ones(2), False)
    assert not uses_kernels(torch.ones(2, dtype=torch.float64), True)


def test_fused_loss_supports_second_backward_and_strided_logits() -> None:
    """The logits stay unchanged in memory. Logits with a column stride are copied."""
    logits, targets = torch.randn(13, 6).t().requires_grad_(), torch.arange(6)
    with formulas_as_kernels():
        loss = vocab_parallel_cross_entropy(logits, targets, vocab_size=13).sum()
        first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    expected = logits.detach().softmax(dim=-1) - torch.eye(13)[:6]
    assert torch.equal(first, second) and torch.allclose(first, expected, atol=1e-6)
