"""Embedding lookup whose gradient accumulates repeated rows in fp32.

On a CPU, torch's embedding backward accumulates in the table's dtype. In bf16 the gradient of a row that is looked up
2,000 times stops growing after a few hundred terms and ends up far too small. On GPUs, and in compiled code, torch
accumulates in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

HALF_PRECISION = (torch.bfloat16, torch.float16)


def embedding_lookup(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return ``table[ids]``.

    The table's gradient is dense, in the table's dtype. Repeated rows are accumulated in fp32 (fp64 for fp64 tables).

    Shapes:
        ids    [...] int64, below v
        table  [v, h]
        output [..., h]

    Raises:
        IndexError: an id is negative or not below v.
    """
    if table.dtype in HALF_PRECISION and table.device.type == "cpu" and not torch.compiler.is_compiling():
        rows: torch.Tensor = _HalfPrecisionLookup.apply(ids, table)
        return rows
    return F.embedding(ids, table)


def accumulate_rows(ids: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum gradients by id; return the distinct ids in ascending order and the fp32 sums.

    Memory is needed only for the rows that occur in ``ids``, not for a full table in fp32.

    Shapes:
        ids    [n]
        grads  [n, h]
        output [m], [m, h]
    """
    unique_ids, row_of_id = ids.unique(return_inverse=True)
    row_grads = torch.ops.aten.embedding_dense_backward(grads.float(), row_of_id, len(unique_ids), -1, False)
    return unique_ids, row_grads


class _HalfPrecisionLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.table_shape = table.shape
        return F.embedding(ids, table)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if not ctx.needs_input_grad[1]:
            return None, None
        (ids,) = ctx.saved_tensors
        unique_ids, row_grads = accumulate_rows(ids.flatten(), grads[0].reshape(-1, ctx.table_shape[1]))
        grad = grads[0].new_zeros(ctx.table_shape)
        return None, grad.index_copy_(0, unique_ids, row_grads.to(grad.dtype))
