"""Matrix products with FP8 operands, whose scales do not depend on the layout.

``use_fp8`` selects FP8 products for a weight. ``tds.linear_function`` and the layers then call them for the output and
the input gradient. Weight gradients are computed from unquantized operands.

| product | rows of the left operand | rows of the right operand | sharded inner dimension |
|---|---|---|---|
| output ``x W^T`` | tokens of x | rows of W | of a row-parallel weight |
| input gradient ``g W`` | tokens of g | columns of W | of a column-parallel weight |

A scale belongs to one row of an operand and does not depend on other rows. Micro-batches, pipeline stages, and data,
context and sequence shards therefore have the same scales as one process. If the inner dimension is sharded over tensor
ranks, the row maxima of both operands are all-reduced in one message, so the quantized shards also equal those of one
process. The partial products of the ranks are then summed as in other number formats.

The micro-batches of a step share the quantized weights (``megatron.mpu.fp8_weights``).

With blocks of 128 elements (recipe "blockwise"), the scales need no message if shards start at multiples of 128. The
products of blocks are emulated: scales are powers of two, so bf16 represents the quantized values exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron import device
from megatron.mpu import fp8_weights
from megatron.mpu.fp8_quantize import (
    column_maxima,
    expand_blocks,
    expand_row_blocks,
    quantize_blocks,
    quantize_columns,
    quantize_row_blocks,
    quantize_rows,
    row_maxima,
    scales_of,
)
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.mappings import all_reduce
from tds.param_info import info_of, set_info

ROWWISE, BLOCKWISE = "rowwise", "blockwise"
ROWS, COLUMNS, BLOCKS = "rows", "columns", "blocks"
"""Forms of a quantized weight: scales for rows, for columns (transposed), and for blocks."""
FP8_CAPABILITY = (8, 9)
"""Lowest compute capability with ``torch._scaled_mm`` of e4m3 and scales per row."""
GROUPED_CAPABILITIES = ((9, 0), (9, 9))
"""Lowest and highest compute capability with ``torch._scaled_grouped_mm`` of e4m3 (torch 2.11 and 2.13): its kernel has
instructions of sm_90a only. torch does not reject 10.0, but does not test it either."""
USES_SCALED_MM: bool | None = None
"""Use ``torch._scaled_mm`` instead of fp32 products; set by tests. None: use it on CUDA only."""


def use_fp8(weight: torch.Tensor, recipe: str, group: Group, partition_dim: int | None) -> None:
    """Compute products of ``weight`` [output_size, input_size] in FP8.

    Args:
        recipe: ``ROWWISE`` or ``BLOCKWISE``.
        group: the tensor-parallel group that the weight is sharded over.
        partition_dim: 0: sharded by output rows, 1: by input columns, None: not sharded.
    """
    products: RowwiseProducts | BlockwiseProducts = BlockwiseProducts()
    if recipe == ROWWISE:
        groups = (group if partition_dim == 1 else SINGLE, group if partition_dim == 0 else SINGLE)
        products = RowwiseProducts(*groups)
    set_info(weight, replace(info_of(weight), products=products))


def has_fp8_products(device_type: str, *, of_experts: bool = False) -> bool:
    """Return True if the device computes products with scales per row in FP8, or emulates them (CPUs).

    Args:
        of_experts: grouped products are needed, too.
    """
    if device_type == "cpu":
        return True
    capability = device.compute_capability(device_type) if device_type == "cuda" else None
    if capability is None or capability < FP8_CAPABILITY:
        return False
    lowest, highest = GROUPED_CAPABILITIES
    return not of_experts or lowest <= capability <= highest


@dataclass(frozen=True)
class RowwiseProducts:
    """Products with a scale per row of each operand; implements ``tds.param_info.WeightProducts``.

    Args:
        input_group: the group that the input dimension is sharded over.
        output_group: the group that the output dimension is sharded over.
    """

    input_group: Group = SINGLE
    output_group: Group = SINGLE

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        a, b = quantized_factors(rows, weight, ROWS, self.input_group)
        out = x.new_empty(*x.shape[:-1], len(weight))  # owns its storage: the caller reduces it in place
        scaled_product(a.values, b.values, a.scales, b.scales, out.view(-1, len(weight)))
        return out

    def input_grad(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a, b = quantized_factors(grad, weight, COLUMNS, self.output_group)
        return scaled_product(a.values, b.values, a.scales, b.scales, grad.new_empty(len(grad), weight.shape[1]))

    def grouped_forward(self, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        a, b = quantized_factors(x, weights, ROWS, self.input_group)
        out = x.new_empty(len(x), weights.shape[1])
        return scaled_grouped_product(a.values, b.values, a.scales, b.scales, ends, out)

    def grouped_input_grad(self, grad: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        a, b = quantized_factors(grad, weights, COLUMNS, self.output_group)
        out = grad.new_empty(len(grad), weights.shape[2])
        return scaled_grouped_product(a.values, b.values, a.scales, b.scales, ends, out)


@dataclass(frozen=True)
class Quantized:
    """An operand of a product: e4m3 values, contiguous, and fp32 scales, one for each row of ``values``."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def quantized_factors(x: torch.Tensor, weight: torch.Tensor, form: str, group: Group) -> tuple[Quantized, Quantized]:
    """Quantize both operands of a product. Collective over ``group``, which the inner dimension is sharded over.

    The weight's values are read from ``fp8_weights`` if an earlier micro-batch of the step has saved them.

    Args:
        form: ``ROWS``: scales for the rows of the weight; ``COLUMNS``: for its columns, and the values are transposed.

    Shapes:
        x [m, k]; weight [n, k] or [E, n, k] with ``ROWS``, [k, n] or [E, k, n] with ``COLUMNS``
        values [m, k], [n, k] or [E, n, k]; scales [m], [n] or [E n]
    """
    saved: Quantized | None = fp8_weights.find(weight, form)
    if saved is not None:
        (x_maxima,) = _reduced([row_maxima(x)], group)
        return Quantized(quantize_rows(x, x_maxima), scales_of(x_maxima)), saved
    weight_rows = weight.flatten(0, -2)
    weight_maxima = row_maxima(weight_rows) if form == ROWS else column_maxima(weight).flatten()
    x_maxima, weight_maxima = _reduced([row_maxima(x), weight_maxima], group)
    if form == ROWS:
        values = quantize_rows(weight_rows, weight_maxima).view(weight.shape)
    else:
        values = quantize_columns(weight, weight_maxima.view(*weight.shape[:-2], -1))
    quantized_weight = Quantized(values, scales_of(weight_maxima))
    fp8_weights.save(weight, form, quantized_weight)
    return Quantized(quantize_rows(x, x_maxima), scales_of(x_maxima)), quantized_weight


def _reduced(maxima: Sequence[torch.Tensor], group: Group) -> Sequence[torch.Tensor]:
    """All-reduce the maxima over ``group`` in one message. NaN is replaced by infinity, which MAX propagates."""
    if group.size == 1:
        return maxima
    infinity = float("inf")
    packed = all_reduce(
        torch.cat([part.nan_to_num(infinity, posinf=infinity) for part in maxima]), group, dist.ReduceOp.MAX
    )
    return packed.split([len(part) for part in maxima])


def scaled_product(
    a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Write ``(a * a_scales) (b * b_scales)^T`` to ``out``, accumulated in fp32 and rounded once, and return it.

    In fp64 runs the product is accumulated in fp64, so that comparisons of layouts are exact.

    Shapes:
        a [m, k], a_scales [m]; b [n, k], b_scales [n]; out [m, n], bf16 on CUDA
    """
    if _uses_scaled_mm(a) and out.dtype != torch.float64 and len(a):
        a_column, b_row = a_scales.unsqueeze(1), b_scales.unsqueeze(0)
        return torch._scaled_mm(a, b.t(), scale_a=a_column, scale_b=b_row, out_dtype=out.dtype, out=out)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    return out.copy_(a.to(wide).mm(b.to(wide).t()) * a_scales.unsqueeze(1) * b_scales)


def scaled_grouped_product(
    x: torch.Tensor, weights: torch.Tensor, x_scales: torch.Tensor, weight_scales: torch.Tensor, ends: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write the ``scaled_product`` of each weight with its rows of ``x`` to ``out``, and return it.

    On CUDA the host does not wait for ``ends``. Rows of ``out`` after the last weight's rows are undefined.

    Shapes:
        x [m, k], x_scales [m]; weights [E, n, k], weight_scales [E n]; ends [E]; out [m, n], bf16 on CUDA
    """
    scales = weight_scales.view(weights.shape[:2])
    if _uses_scaled_mm(x):
        return torch._scaled_grouped_mm(x, weights.transpose(1, 2), x_scales, scales, offs=ends, out_dtype=out.dtype)
    start = 0
    for end, weight, row_scales in zip(ends.tolist(), weights, scales, strict=True):
        scaled_product(x[start:end], weight, x_scales[start:end], row_scales, out[start:end])
        start = end
    return out


def _uses_scaled_mm(x: torch.Tensor) -> bool:
    return x.device.type == "cuda" if USES_SCALED_MM is None else USES_SCALED_MM


@dataclass(frozen=True)
class BlockwiseProducts:
    """Emulated products with a scale per 128 elements of a row, and per 128 x 128 elements of a weight."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = dequantized_rows(x.reshape(-1, x.shape[-1]))
        out = x.new_empty(*x.shape[:-1], len(weight))  # owns its storage: the caller reduces it in place
        out.view(-1, len(weight)).copy_(F.linear(rows, dequantized_weight(weight)))
        return out

    def input_grad(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return dequantized_rows(grad).mm(dequantized_weight(weight)).to(grad.dtype)

    def grouped_forward(self, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        factors = dequantized_weight(weights).transpose(1, 2)
        return F.grouped_mm(dequantized_rows(x), factors, offs=ends).to(x.dtype)

    def grouped_input_grad(self, grad: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(dequantized_rows(grad), dequantized_weight(weights), offs=ends).to(grad.dtype)


def dequantized_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return ``dequantized_blocks`` of a weight [m, n], or of each of several weights [E, m, n].

    The values are read from ``fp8_weights`` if an earlier product of the step has saved them.
    """
    values: torch.Tensor | None = fp8_weights.find(weight, BLOCKS)
    if values is None:
        is_single = weight.dim() == 2
        values = dequantized_blocks(weight) if is_single else torch.stack([dequantized_blocks(w) for w in weight])
        fp8_weights.save(weight, BLOCKS, values)
    return values


def dequantized_rows(x: torch.Tensor) -> torch.Tensor:
    """Quantize ``x`` [m, n] with a scale per 128 columns, and return the quantized values."""
    quantized, scales = quantize_row_blocks(x)
    return _dequantize(quantized, expand_row_blocks(scales, x.shape[1]), x)


def dequantized_blocks(x: torch.Tensor) -> torch.Tensor:
    """Quantize ``x`` [m, n] with a scale per 128 x 128 elements, and return the quantized values."""
    quantized, scales = quantize_blocks(x)
    return _dequantize(quantized, expand_blocks(scales, x.shape), x)


def _dequantize(quantized: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``quantized * scales``: in bf16 on CUDA, whose products accumulate in fp32; otherwise in fp32 or fp64."""
    dtype = torch.bfloat16 if x.device.type == "cuda" else torch.float32
    return (quantized.float() * scales).to(torch.float64 if x.dtype == torch.float64 else dtype)
