"""Quantization to FP8 (e4m3) with a scale per row, per column or per block.

A scale s is fp32, and a quantized element is ``q = e4m3(clamp(x / s, -448, 448))``, so that ``x ≈ q s``. The clamp
comes before the cast: beyond 448, e4m3 casts return NaN or 448, depending on the version of torch. NaN and infinity in
a row make all its products NaN.

| recipe | scales of the left operand | scales of the weight | value of a scale |
|---|---|---|---|
| rowwise | one per row | one per row, or per column for the input gradient | maximum / 448 |
| blockwise | one per row and 128 columns | one per 128 x 128 elements | maximum / 448, rounded up to a power of two |

On CUDA, Triton kernels quantize rows and columns. They compute the same bytes as the torch operators.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; torchao's recipe "rowwise_with_gw_hp"; DeepSeek-AI
2024, "DeepSeek-V3 technical report", section 3.3 (blocks).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from megatron import triton_launch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MIN_MAXIMUM = 1e-12
"""Lower bound of a row's maximum, also used for rows of zeros. It keeps ``448 / maximum`` finite."""
BLOCK_SIZE = 128
KERNELS = "megatron.mpu.fp8_kernels"
ROW_BLOCK = 4096
"""Largest number of elements of a row that a program processes at a time."""
TILE = 64
"""Rows and columns of the tile that a program quantizes and transposes."""
COLUMN_ROWS = 512
"""Rows over which a program computes column maxima."""


def row_maxima(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row of ``x`` [m, n], fp32 [m]; 0 if n is 0."""
    if not x.shape[1]:
        return x.new_zeros(len(x), dtype=torch.float32)
    if not triton_launch.is_available(x.device):
        return x.abs().amax(1).float()
    x, maxima = x.contiguous(), x.new_empty(len(x), dtype=torch.float32)
    if len(x):
        triton_launch.launch(
            f"{KERNELS}:row_maxima_kernel", (len(x),), x, maxima, x.shape[1], writes=(maxima,), BLOCK=_row_block(x)
        )
    return maxima


def column_maxima(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each column of ``x`` [m, n], fp32 [n]; 0 if m is 0. Also for [E, m, n]."""
    *batch, num_rows, width = x.shape
    if not num_rows:
        return torch.zeros(*batch, width, device=x.device)
    if not triton_launch.is_available(x.device):
        return x.abs().amax(-2).float()
    x, bits = x.contiguous(), torch.zeros(*batch, width, dtype=torch.int32, device=x.device)
    if x.numel():
        grid = (-(-width // TILE), -(-num_rows // COLUMN_ROWS), math.prod(batch))
        triton_launch.launch(
            f"{KERNELS}:column_maxima_kernel", grid, x, bits, num_rows, width,
            writes=(), updates=(bits,), ROWS=COLUMN_ROWS, TILE=TILE,
        )  # fmt: skip
    return bits.view(torch.float32)


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """Return the scales that map ``maxima`` to 448, fp32."""
    return maxima.clamp(min=MIN_MAXIMUM) * (1 / E4M3_MAX)  # CUDA divides by a number in this way, and CPUs do not


def quantize_rows(x: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Quantize ``x`` [m, n] with a scale per row, given ``maxima`` [m].

    Returns:
        e4m3 [m, n]
    """
    if not triton_launch.is_available(x.device):
        return _cast(x, maxima.unsqueeze(1))
    x, out = x.contiguous(), torch.empty(x.shape, dtype=E4M3, device=x.device)
    if out.numel():
        triton_launch.launch(
            f"{KERNELS}:quantize_rows_kernel", (len(x),), x, maxima, out, x.shape[1],
            writes=(out,), BLOCK=_row_block(x),
        )  # fmt: skip
    return out


def quantize_columns(x: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Quantize ``x`` [m, n] with a scale per column, given ``maxima`` [n], and transpose it. Also for [E, m, n].

    Returns:
        e4m3 [n, m] or [E, n, m], contiguous
    """
    if not triton_launch.is_available(x.device):
        return _cast(x, maxima.unsqueeze(-2)).transpose(-2, -1).contiguous()
    *batch, num_rows, width = x.shape
    x, out = x.contiguous(), torch.empty(*batch, width, num_rows, dtype=E4M3, device=x.device)
    if out.numel():
        grid = (-(-num_rows // TILE), -(-width // TILE), math.prod(batch))
        triton_launch.launch(
            f"{KERNELS}:quantize_columns_kernel", grid, x, maxima.contiguous(), out, num_rows, width,
            writes=(out,), TILE=TILE,
        )  # fmt: skip
    return out


def _cast(x: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    bounded = maxima.clamp(min=MIN_MAXIMUM)
    inverse = torch.full_like(bounded, E4M3_MAX) / bounded  # number / tensor would round twice, unlike the kernels
    return (x.float() * inverse).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _row_block(x: torch.Tensor) -> int:
    return min(triton_launch.power_of_two(x.shape[1]), ROW_BLOCK)


# Blocks. Their scales are powers of two, so bf16 represents ``q s`` exactly and bf16 products emulate FP8 products.


def quantize_row_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` [m, n] with a scale per row and block of 128 columns.

    Returns:
        e4m3 [m, n] and scales, fp32 [m, ceil(n / 128)]
    """
    maxima = _pad(x.abs(), (1, BLOCK_SIZE)).unflatten(1, (-1, BLOCK_SIZE)).amax(2).float()
    scales = power_of_two_scales(maxima)
    return _divide_and_cast(x, expand_row_blocks(scales, x.shape[1])), scales


def quantize_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` [m, n] with a scale per block of 128 x 128 elements.

    Returns:
        e4m3 [m, n] and scales, fp32 [ceil(m / 128), ceil(n / 128)]
    """
    padded = _pad(x.abs(), (BLOCK_SIZE, BLOCK_SIZE))
    blocks = padded.unflatten(0, (-1, BLOCK_SIZE)).unflatten(2, (-1, BLOCK_SIZE))  # [m/128, 128, n/128, 128]
    scales = power_of_two_scales(blocks.amax((1, 3)).float())
    return _divide_and_cast(x, expand_blocks(scales, x.shape)), scales


def power_of_two_scales(maxima: torch.Tensor) -> torch.Tensor:
    """Return the smallest powers of two that map ``maxima`` to at most 448, fp32; NaN for a NaN."""
    fraction, exponent = torch.frexp(scales_of(maxima))  # fraction in [0.5, 1), NaN or infinity
    scales = torch.ldexp(torch.ones_like(maxima), torch.where(fraction == 0.5, exponent - 1, exponent))
    return torch.where(maxima.isfinite(), scales, torch.nan)


def expand_row_blocks(scales: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Expand ``scales`` [m, ceil(n / 128)] to [m, n]."""
    return scales.repeat_interleave(BLOCK_SIZE, 1)[:, :num_columns]


def expand_blocks(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Expand ``scales`` [ceil(m / 128), ceil(n / 128)] to ``shape`` [m, n]."""
    return expand_row_blocks(scales, shape[1]).repeat_interleave(BLOCK_SIZE, 0)[: shape[0]]


def _pad(x: torch.Tensor, multiples: tuple[int, int]) -> torch.Tensor:
    """Pad the rows and columns of ``x`` with zeros to these multiples."""
    rows, columns = (-size % multiple for size, multiple in zip(x.shape, multiples, strict=True))
    return F.pad(x, (0, columns, 0, rows))


def _divide_and_cast(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (x.float() / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
