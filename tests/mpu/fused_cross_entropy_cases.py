"""Cross-entropy by kernels against a formula in fp64, for any way to run the kernels on a CPU.

``test_fused_cross_entropy`` runs the cases with the kernels' formulas in torch; ``interpreted_cross_entropy`` runs them
with the kernels in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from megatron import triton_launch
from megatron.mpu import fused_cross_entropy
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.groups import Group
from megatron.mpu.layers import vocab_range
from megatron.mpu.linear_cross_entropy import linear_cross_entropy
from megatron.mpu.mappings import copy_to_tensor_region
from tests.helpers.whole import group_of_all_ranks, random_tensor

N, H = 11, 8
PADDING = 50.0
"""Value of padding rows and columns: if the softmax included them, they would get all probability."""
UPSTREAM = 64.0
"""Gradient of the loss."""


class Case(NamedTuple):
    """A loss. With ``chunk_tokens`` 0, the logits of all tokens are in memory."""

    vocab: int
    dtype: torch.dtype
    chunk_tokens: int = 4
    divisible_by: int = 1
    has_bias: bool = False
    cap: float = 0.0
    z_loss: float = 0.0


CASES = (
    Case(101, torch.float32),
    Case(101, torch.bfloat16, divisible_by=16, has_bias=True, cap=6.0, z_loss=0.1),
    Case(64, torch.float16, has_bias=True),
    Case(64, torch.float32, chunk_tokens=20, has_bias=True, cap=2.0),
    Case(67, torch.bfloat16, z_loss=0.1),
    Case(101, torch.float32, chunk_tokens=0, divisible_by=16, z_loss=0.1),
    Case(67, torch.bfloat16, chunk_tokens=0, has_bias=True),
    Case(64, torch.float16, chunk_tokens=0),
)
EMPTY_SHARD_CASES = (
    Case(5, torch.float32, has_bias=True, cap=3.0),
    Case(5, torch.bfloat16, z_loss=0.1),
    Case(5, torch.float32, chunk_tokens=0, z_loss=0.1),
)
"""Of 5 words on 4 ranks, the last rank has none."""

Result = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]
"""Cross-entropy, z-loss, and gradients of hidden states, table and bias."""


def make_inputs(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return x [n, h], table [v, h] and bias [v] in the case's dtype; targets [n]; weights [n].

    The tokens without weight have targets outside of the vocabulary. Some logits are far apart, so that a missing
    subtraction of the maximum shows.
    """
    tensors = random_tensor(1, N, H), random_tensor(2, case.vocab, H) * 4.0, random_tensor(3, case.vocab)
    targets = torch.randint(0, case.vocab, (N,), generator=torch.Generator().manual_seed(5))
    weights = torch.arange(N) % 4 / 2.0
    targets[0], targets[4] = -100, case.vocab + 7
    return [tensor.to(case.dtype) for tensor in tensors], targets, weights


def run_reference(case: Case) -> Result:
    """Return the result of the formula in fp64 for the rounded inputs."""
    inputs, targets, weights = make_inputs(case)
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if case.has_bias else None)
    logits = case.cap * torch.tanh(logits / case.cap) if case.cap else logits
    log_z = logits.exp().sum(-1).log()
    losses = log_z - logits.gather(-1, targets.clamp(0, case.vocab - 1).unsqueeze(-1)).squeeze(-1)
    total, z_total = (losses * weights).sum(), (case.z_loss * log_z.square() * weights).sum()
    ((total + z_total) * UPSTREAM).backward()
    return total.detach(), z_total.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def compute_losses(
    case: Case, group: Group, *, has_kernels: bool = True
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return cross-entropy, z-loss, and the leaves x, table and bias; table and bias are this rank's padded shards."""
    (x, table, bias), targets, weights = make_inputs(case)
    if not has_kernels and not case.chunk_tokens:
        targets = targets.clamp(0, case.vocab - 1)  # torch's gather requires valid indices, also for tokens of weight 0
    num_rows, start, num_real = vocab_range(case.vocab, group, case.divisible_by)
    shards = [torch.full((num_rows, *tensor.shape[1:]), PADDING, dtype=case.dtype) for tensor in (table, bias)]
    for shard, tensor in zip(shards, (table, bias), strict=True):
        shard[:num_real] = tensor[start : start + num_real]
    leaves = [tensor.requires_grad_() for tensor in (x, *shards)]
    options: dict[str, Any] = {
        "vocab_size": case.vocab, "divisible_by": case.divisible_by, "group": group, "z_loss": case.z_loss,
        "has_kernels": has_kernels,
    }  # fmt: skip
    x, bias_shard = copy_to_tensor_region(leaves[0], group), leaves[2] if case.has_bias else None
    if case.chunk_tokens:
        total = linear_cross_entropy(
            x, leaves[1], targets, weights, chunk_tokens=case.chunk_tokens, bias=bias_shard, cap=case.cap, **options
        )
        total, z_total = total if case.z_loss else (total, torch.zeros(()))
        return total, z_total, leaves
    losses = vocab_parallel_cross_entropy(F.linear(x, leaves[1], bias_shard), targets, **options)
    losses, z_losses = losses if case.z_loss else (losses, torch.zeros(N))
    return (losses * weights).sum(), (z_losses * weights).sum(), leaves


def run_loss(case: Case, group: Group, *, has_kernels: bool = True) -> Result:
    """Return the losses and the gradients of the case."""
    total, z_total, leaves = compute_losses(case, group, has_kernels=has_kernels)
    (total * UPSTREAM).backward()
    return total.detach(), z_total.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def check_result(case: Case, result: Result, group: Group) -> None:
    """Compare this rank's result with the formula in fp64."""
    total, z_total, (x_grad, *word_grads) = run_reference(case)
    actual_total, actual_z_total, (actual_x_grad, *actual_word_grads) = result
    # without chunks, and with chunks on a CPU, 16-bit logits are rounded
    tolerance = 4 * max(torch.finfo(case.dtype).eps, 1e-6)
    assert actual_total.dtype == torch.float32
    assert abs(actual_total - total) <= tolerance * total and abs(actual_z_total - z_total) <= tolerance * z_total
    assert actual_x_grad.dtype == case.dtype
    assert (actual_x_grad - x_grad).abs().max() <= tolerance * x_grad.abs().max(), case
    _, start, num_real = vocab_range(case.vocab, group, case.divisible_by)
    for actual, full_grad in zip(actual_word_grads, word_grads, strict=True):
        expected = full_grad[start : start + num_real]
        assert ((actual[:num_real] - expected).abs() <= tolerance * full_grad.abs().max()).all(), case
        assert actual[num_real:].count_nonzero() == 0, case


def run_rank(rank: int, size: int, run_kernels: Callable[[], Any], cases: tuple[Case, ...]) -> None:
    group = group_of_all_ranks(rank, size)
    for case in cases:
        with run_kernels():
            result = run_loss(case, group)
        check_result(case, result, group)


@contextmanager
def small_blocks() -> Iterator[pytest.MonkeyPatch]:
    """Permit kernels on a CPU, with several blocks in a row and with additional columns, as on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch, "is_available", lambda device: True)
        patch.setattr(fused_cross_entropy, "MAX_BLOCK", 32)
        patch.setattr("megatron.mpu.linear_cross_entropy.aligned_width", lambda columns, device: -(-columns // 8) * 8)
        yield patch
