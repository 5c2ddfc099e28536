"""Launches of the project's Triton kernels as the layers of real models make them, recorded on a CPU.

``CASES`` names functions that run the forward and backward of an operation on tensors with few rows. No kernel runs and
Triton is not imported. ``record`` returns the launches: kernels, arguments and options, from which the test of
ahead-of-time compilation derives what Triton would compile on a GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron import triton_launch
from megatron.mpu import fp8_quantize, fused_cross_entropy, fused_dropout
from megatron.mpu.fused_dropout import Mask
from megatron.ops import fused_norm, fused_rotary, gated_activation
from megatron.ops.positions import Rotary, rotary_cos_sin

ROOT = Path(__file__).resolve().parents[2]
ROWS = 32
"""Tokens of a case: a multiple of 16, as in real runs, because Triton compiles other code for other multiples."""


@dataclass(frozen=True)
class Launch:
    """One call of ``triton_launch.launch``."""

    kernel: str
    args: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record the launches of the block instead of running them; kernels count as available on every device."""
    launches: list[Launch] = []
    originals = triton_launch.launch, triton_launch.is_available

    def launch(kernel: str, grid: tuple[int, ...], *args: Any, writes: Any, updates: Any = (), **options: Any) -> None:
        assert all(size > 0 for size in grid)
        launches.append(Launch(kernel, args, options))

    triton_launch.launch, triton_launch.is_available = launch, lambda device: True
    try:
        yield launches
    finally:
        triton_launch.launch, triton_launch.is_available = originals


def record(case: Callable[[], None]) -> list[Launch]:
    """Return the launches of ``case``."""
    with recorded() as launches:
        case()
    return launches


def defined_kernels() -> dict[str, str]:
    """Return the functions of the source tree with the decorator ``triton.jit``: name -> "module:function"."""
    kernels = {}
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else ()
            if any("triton.jit" in ast.unparse(decorator) for decorator in decorators):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                kernels[node.name] = f"{module}:{node.name}"  # type: ignore[union-attr]
    return kernels


def _leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def _backward(*outputs: torch.Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])


def split_and_rotate(num_heads: int, num_groups: int, head_size: int, percent: float = 1.0) -> None:
    """Run rotary positions of packed queries, keys and values."""
    groups = _leaf(ROWS, 2, num_groups, num_heads // num_groups + 2, head_size)
    x = groups[:, :, :, 0].permute(1, 2, 0, 3)
    cosine, sine = rotary_cos_sin(Rotary(head_size=head_size, percent=percent), x)
    _backward(*fused_rotary.split_and_rotate(groups, cosine, sine))


def rotate_normed_heads(num_heads: int, num_groups: int, head_size: int) -> None:
    """Run rotary positions of queries and keys that a norm has written."""
    query, key = _leaf(2, num_heads, ROWS, head_size), _leaf(2, num_groups, ROWS, head_size)
    positions = torch.zeros(2, ROWS, dtype=torch.int64)
    cosine, sine = rotary_cos_sin(Rotary(head_size=head_size), query, positions)
    _backward(*fused_rotary.rotate(query, key, cosine, sine))


def gate(name: str, size: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Run a gated activation."""
    _backward(gated_activation.gated_activation(name, *gated_activation.split(_leaf(ROWS, 2, 2 * size, dtype=dtype))))


def norm(width: int, *, is_centred: bool, has_branch: bool, is_offset: bool = False) -> None:
    """Run a norm, with a bias if it is a LayerNorm."""
    x, weight = _leaf(ROWS, 2, width), _leaf(width)
    branch, bias = _leaf(ROWS, 2, width) if has_branch else None, _leaf(width) if is_centred else None
    _backward(*fused_norm.add_and_norm(x, branch, weight, bias, 1e-5, is_centred=is_centred, is_offset=is_offset))


def dropout(shape: tuple[int, ...], *, is_attention: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    """Run dropout of hidden states with a residual connection, or of probabilities."""
    residual = None if is_attention else _leaf(*shape, dtype=dtype)
    mask = Mask(2**40 + 1, 0.1, is_attention=is_attention)
    _backward(fused_dropout.drop(_leaf(*shape, dtype=dtype), residual, mask))


def cross_entropy(
    num_columns: int, width: int, *, has_bias: bool = False, cap: float = 0.0, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Run both passes over the logits of a shard of the vocabulary, padded to ``width`` columns.

    Args:
        dtype: dtype of the logits: fp32 in the chunked loss on CUDA; their gradient is bf16.
    """
    logits, gradient = torch.zeros(ROWS, width, dtype=dtype), torch.zeros(ROWS, width, dtype=torch.bfloat16)
    targets = torch.zeros(ROWS, dtype=torch.int64)
    bias = torch.zeros(width, dtype=torch.bfloat16) if has_bias else None
    statistics = fused_cross_entropy.row_statistics(logits, targets, num_columns, bias=bias, cap=cap)
    factors = statistics.unbind()
    fused_cross_entropy.logits_gradient(logits, targets, num_columns, *factors, gradient, bias=bias, cap=cap)


def fp8(num_rows: int, width: int) -> None:
    """Quantize the rows and the columns of a factor."""
    x = torch.zeros(num_rows, width, dtype=torch.bfloat16)
    fp8_quantize.quantize_rows(x, fp8_quantize.row_maxima(x))
    fp8_quantize.quantize_columns(x, fp8_quantize.column_maxima(x))


CASES: dict[str, Callable[[], None]] = {
    "rotary, LLaMA 7B": partial(split_and_rotate, 32, 32, 128),
    "rotary, Llama 3 8B": partial(split_and_rotate, 32, 8, 128),
    "rotary, GPT-NeoX 20B (a quarter)": partial(split_and_rotate, 64, 64, 96, 0.25),
    "rotary after norms, Qwen 3 8B": partial(rotate_normed_heads, 32, 8, 128),
    "gated-silu, LLaMA 7B": partial(gate, "gated-silu", 11008),
    "gated-silu in fp32": partial(gate, "gated-silu", 11008, torch.float32),
    "gated-gelu, Gemma 2 9B": partial(gate, "gated-gelu", 14336),
    "RMSNorm, LLaMA 7B": partial(norm, 4096, is_centred=False, has_branch=False),
    "residual and RMSNorm, LLaMA 7B": partial(norm, 4096, is_centred=False, has_branch=True),
    "residual and RMSNorm, LLaMA 70B": partial(norm, 8192, is_centred=False, has_branch=True),
    "residual and RMSNorm, Gemma 2 9B": partial(norm, 3584, is_centred=False, has_branch=True, is_offset=True),
    "residual and LayerNorm, GPT-2 1.3B": partial(norm, 2048, is_centred=True, has_branch=True),
    "residual and LayerNorm, MPT 30B": partial(norm, 7168, is_centred=True, has_branch=True),
    "cross-entropy, GPT-2": partial(cross_entropy, 50257, 50304),
    "cross-entropy, Llama 3 8B": partial(cross_entropy, 128256, 128256),
    "cross-entropy with soft-cap, Gemma 2": partial(cross_entropy, 256000, 256000, cap=30.0),
    "cross-entropy with bias, BERT": partial(cross_entropy, 30522, 30528, has_bias=True),
    "cross-entropy of fp32 logits, GPT-2": partial(cross_entropy, 50257, 50304, dtype=torch.float32),
    "cross-entropy of fp32 logits, Llama 3 8B": partial(cross_entropy, 128256, 128256, dtype=torch.float32),
    "cross-entropy of fp32 logits with soft-cap, Gemma 2": partial(
        cross_entropy, 256000, 256000, cap=30.0, dtype=torch.float32
    ),
    "cross-entropy of fp32 logits with bias, BERT": partial(
        cross_entropy, 30522, 30528, has_bias=True, dtype=torch.float32
    ),
    "dropout and residual, GPT-2 1.3B": partial(dropout, (ROWS, 2, 2048), is_attention=False),
    "FP8, LLaMA 7B": partial(fp8, ROWS, 4096),
    "FP8, Llama 3 8B, feed-forward": partial(fp8, ROWS, 14336),
    "dropout of probabilities": partial(dropout, (2, 4, ROWS, 512), is_attention=True),
}  # fmt: skip
"""Operation and model -> function that launches its kernels."""
