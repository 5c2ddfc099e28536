"""What the loss holds, in bytes, against the tensors that are alive while it is computed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron import triton_launch
from megatron.config import ModelConfig
from megatron.config.loss_chunk import CPU_CHUNK_TOKENS, DEVICE_CHUNK_TOKENS, UNCHUNKED, tokens_per_chunk
from megatron.costs.memory import loss_bytes
from megatron.models.common.language_model import head_output, model_loss
from megatron.models.common.model_args import model_args_from
from megatron.models.common.parallel_context import ParallelContext
from tests.helpers.alive import LiveMemoryTracker

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=1, vocab_size=4096, max_position_embeddings=64)
TOKENS = 512
H = 768


@pytest.mark.parametrize(
    ("requested", "tokens", "vocab", "is_on_cpu", "expected"),
    [
        (None, 1024, 4096, True, UNCHUNKED),
        (None, 1025, 4096, True, 205),  # five chunks of one size
        (None, 2048, 50257, True, CPU_CHUNK_TOKENS),
        (None, CPU_CHUNK_TOKENS + H, 50257, True, UNCHUNKED),
        (None, 2048, 50257, False, UNCHUNKED),
        (None, DEVICE_CHUNK_TOKENS + H, 50257, False, UNCHUNKED),
        (None, DEVICE_CHUNK_TOKENS + H + 1, 50257, False, (DEVICE_CHUNK_TOKENS + H + 2) // 2),
        (None, 3 * DEVICE_CHUNK_TOKENS, 50257, False, DEVICE_CHUNK_TOKENS),
        (0, 10**6, 50257, True, UNCHUNKED),
        (7, 20, 3, False, 7),
        (100, 20, 3, False, 20),
        (7, 0, 3, False, UNCHUNKED),
    ],
)
def test_chunks_have_equal_size_and_small_logits_have_none(
    requested: int | None, tokens: int, vocab: int, is_on_cpu: bool, expected: int
) -> None:
    assert tokens_per_chunk(requested, tokens, vocab, H, is_on_cpu=is_on_cpu) == expected


@pytest.mark.parametrize("is_on_cpu", [True, False])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("forwards", [1, 4])
def test_automatic_chunks_use_no_more_memory_than_full_logits(
    is_on_cpu: bool, width: int, tensor: int, forwards: int
) -> None:
    """Sizes in use, among them one of 8192 numbers a token and 2048 tokens, where a chunk of all held 5 times more."""
    uses_chunks = []
    for h, tokens, vocab in itertools.product((768, 2048, 8192), (1024, 2048, 4096, 16384, 65536), (30000, 128256)):
        automatic, full = (
            loss_bytes(
                replace(MODEL, hidden_size=h, vocab_size=vocab, loss_chunk_tokens=requested), tokens, tensor, width,
                forwards=forwards, is_on_cpu=is_on_cpu,
            )
            for requested in (None, 0)
        )  # fmt: skip
        assert automatic <= full, (h, tokens, vocab)
        uses_chunks.append(automatic < full)
    assert 0.3 * len(uses_chunks) < sum(uses_chunks) < len(uses_chunks), "chunks are chosen for some and not for all"


def test_automatic_chunks_with_kernels_use_at_most_half_more_than_full_logits() -> None:
    """Kernels save no softmax of full logits. Chunks still have fp32 logits."""
    ratios = []
    for width, tensor, forwards, h, tokens in itertools.product(
        (2, 4), (1, 2), (1, 4), (768, 2048, 8192), (1024, 2048, 4096, 16384, 65536)
    ):
        automatic, full = (
            loss_bytes(
                replace(MODEL, hidden_size=h, vocab_size=30000, loss_chunk_tokens=requested), tokens, tensor, width,
                forwards=forwards, has_kernels=True,
            )
            for requested in (None, 0)
        )  # fmt: skip
        ratios.append(automatic / full)
        assert automatic <= full or width == 2 and tokens <= 2.5 * DEVICE_CHUNK_TOKENS + 2 * h
    assert min(ratios) < 0.3 and 1 < max(ratios) <= 1.5


@pytest.mark.parametrize(
    ("chunk", "dtype"), [(0, torch.float32), (0, torch.bfloat16), (32, torch.float32), (32, torch.bfloat16)]
)
def test_loss_memory_estimate_matches_measured_peak(chunk: int, dtype: torch.dtype) -> None:
    peak, estimate = loss_peak_and_estimate(chunk, dtype, has_kernels=False)
    assert abs(peak - estimate) <= 0.03 * estimate


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize(("chunk", "dtype"), [(0, torch.float32), (0, torch.bfloat16), (32, torch.float32)])
def test_loss_memory_estimate_with_kernels_matches_measured_peak(
    chunk: int, dtype: torch.dtype, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels allocate nothing. tests/cuda measures chunks in bf16, whose products differ on CUDA."""
    kernels: list[str] = []  # without arguments, which would stay in memory
    monkeypatch.setattr(triton_launch, "is_available", lambda device: True)
    monkeypatch.setattr(triton_launch, "launch", lambda kernel, *args, **options: kernels.append(kernel))
    peak, estimate = loss_peak_and_estimate(chunk, dtype, cap, has_kernels=True)
    assert kernels and abs(peak - estimate) <= 0.03 * estimate


def loss_peak_and_estimate(chunk: int, dtype: torch.dtype, cap: float = 0.0, *, has_kernels: bool) -> tuple[int, int]:
    """Return the peak memory of forward and backward of a loss on the CPU and its estimate, in bytes."""
    model: Any = replace(MODEL, loss_chunk_tokens=chunk, final_logit_softcapping=cap)
    x, table = (torch.randn(*shape, 16, dtype=dtype, requires_grad=True) for shape in ((TOKENS, 1), (4096,)))
    labels, mask = torch.zeros(1, TOKENS, dtype=torch.long), torch.ones(1, TOKENS)
    args, parallel = model_args_from(model), ParallelContext()
    with LiveMemoryTracker("cpu") as alive:
        total, _ = model_loss(head_output(x, table, args, parallel), labels, mask, args, parallel)
        total.backward()
    estimate = loss_bytes(
        model, TOKENS, 1, dtype.itemsize, is_on_cpu=not has_kernels, has_cap=cap > 0, has_kernels=has_kernels
    )
    return alive.peak_bytes - x.nbytes - table.nbytes, estimate  # the tracker also sees views of both


def test_only_full_logit_grads_are_retained_per_micro_batch() -> None:
    chunked, full = replace(MODEL, loss_chunk_tokens=32), replace(MODEL, loss_chunk_tokens=0)
    chunked_growth, full_growth = (
        loss_bytes(model, TOKENS, 2, 2, forwards=3) - loss_bytes(model, TOKENS, 2, 2) for model in (chunked, full)
    )
    assert chunked_growth == 2 * (TOKENS * 16 * 2 + 2048 * 16 * 4)
    assert full_growth == 2 * TOKENS * 2048 * 4
