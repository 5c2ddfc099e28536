"""Rows sorted by expert, and the products of each expert's rows with its weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

# Routing of rows to slots and of results back to choices.
#
# | function | forward | backward |
# |---|---|---|
# | `dispatch_rows` | the row of each slot; a row is copied for each of its k choices | the sum over the choices |
# | `combine_rows` | the result of each choice, zeros if it was dropped | the gradient of each slot |
#
# Forward and backward look up rows by index and never accumulate by index, so that sums over choices have a fixed
# order.


@dataclass(frozen=True)
class Slots:
    """The n k choices of experts, sorted by expert and then by row.

    Attributes:
        order: choice in each slot, [m]; m is n k minus the number of dropped choices.
        slot_of_choice: slot of each choice, [n k]; m for a dropped choice.
        counts: number of slots of each expert, [E], int64.
        num_choices: number k of choices per row.
    """

    order: torch.Tensor
    slot_of_choice: torch.Tensor
    counts: torch.Tensor
    num_choices: int

    @classmethod
    def from_experts(cls, experts: torch.Tensor, num_experts: int, *, has_dropped: bool = False) -> Slots:
        """Return the slots of ``experts`` [n, k].

        Args:
            has_dropped: an expert index equal to ``num_experts`` marks a dropped choice. The host then waits for the
                device.
        """
        flat = experts.reshape(-1)
        order = flat.sort(dim=0, stable=True).indices
        slot_of_choice = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        counts = count_rows(flat, num_experts + has_dropped)[:num_experts]
        if has_dropped:
            num_slots = int(counts.sum())
            order, slot_of_choice = order[:num_slots], slot_of_choice.clamp(max=num_slots)
        return cls(order, slot_of_choice, counts, experts.shape[-1])


def count_rows(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the number of occurrences of each expert, int64 [num_experts]. The host does not wait."""
    flat = experts.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def dispatch_rows(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Return the row of each slot, [m, h], given rows ``x`` [n, h]."""
    return _Dispatch.apply(x, slots)


def combine_rows(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Return the result of each choice, [n, k, h], given results ``x`` [m, h] of the slots."""
    return _Combine.apply(x, slots)


def _look_up(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    if slots.order.numel() < slots.slot_of_choice.numel():
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return x.index_select(0, slots.slot_of_choice).view(-1, slots.num_choices, x.shape[1])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slots: Slots) -> torch.Tensor:
        ctx.slots = slots
        return x.index_select(0, slots.order // slots.num_choices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _look_up(grads[0], ctx.slots).sum(1), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slots: Slots) -> torch.Tensor:
        ctx.slots = slots
        return _look_up(x, slots)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].reshape(-1, grads[0].shape[-1]).index_select(0, ctx.slots.order), None


# Products of the rows of each expert with its weight. fp64 has no grouped product.
#
# | implementation | products | counts |
# |---|---|---|
# | loop | one for each expert with rows | on the host, which waits for the device |
# | grouped | ``torch.nn.functional.grouped_mm`` after stacking the weights | on the device |

LOOP, GROUPED = "loop", "grouped"
IMPLEMENTATION: str | None = None
"""Implementation for tests and measurements; None: grouped for bf16 on CUDA, otherwise the loop."""


def select_implementation(x: torch.Tensor) -> str:
    """Return the implementation of ``grouped_linear`` for ``x``."""
    if x.dtype == torch.float64 or not hasattr(F, "grouped_mm"):
        return LOOP
    if IMPLEMENTATION is not None:
        return IMPLEMENTATION
    return GROUPED if x.device.type == "cuda" and x.dtype == torch.bfloat16 else LOOP


DeferredGrad = Callable[[], None]
"""A function that adds the weights' gradients of one call to their ``grad``."""


def grouped_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], counts: torch.Tensor, deferred: list[DeferredGrad] | None = None
) -> torch.Tensor:
    """Return ``x W_e^T`` for the rows of each weight. A weight without rows gets a gradient of zeros.

    Args:
        deferred: list to which backward appends a function that computes the weights' gradients; None: backward
            computes them.

    Shapes:
        x       [m, input_size], sorted by weight
        weights [output_size, input_size] each
        counts  int64, number of rows of each weight; their sum is m
        output  [m, output_size]
    """
    return _GroupedLinear.apply(x, counts, deferred, *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, counts: torch.Tensor, deferred: list[DeferredGrad] | None, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.way, ctx.delayed, ctx.leaves = select_implementation(x), deferred, weights if deferred is not None else ()
        ctx.save_for_backward(x, counts, *weights)
        if ctx.way == GROUPED:
            return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=_ends(counts))
        outputs = x.new_empty(len(x), weights[0].shape[0])
        for rows, out, weight in zip(*_split_by_expert(counts, x, outputs), weights, strict=True):
            if len(rows):
                torch.mm(rows, weight.t(), out=out)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, counts, *weights = ctx.saved_tensors
        grad, implementation, is_wanted = grads[0].contiguous(), ctx.way, ctx.needs_input_grad[3:]
        x_grad = _input_grad(grad, weights, counts, implementation) if ctx.needs_input_grad[0] else None
        if ctx.delayed is None:
            return x_grad, None, None, *_weight_grads(x, grad, counts, is_wanted, implementation)
        leaves = ctx.leaves  # the parameters themselves: under recompute, saved_tensors are detached copies

        def add() -> None:
            for leaf, weight_grad in zip(
                leaves, _weight_grads(x, grad, counts, is_wanted, implementation), strict=True
            ):
                if weight_grad is not None:
                    leaf.grad = weight_grad if leaf.grad is None else leaf.grad + weight_grad

        ctx.delayed.append(add)
        return x_grad, None, None, *[None] * len(weights)


def _input_grad(
    grad: torch.Tensor, weights: Sequence[torch.Tensor], counts: torch.Tensor, implementation: str
) -> torch.Tensor:
    """Return the gradient of the input, [m, input_size]."""
    if implementation == GROUPED:
        return F.grouped_mm(grad, torch.stack(tuple(weights)), offs=_ends(counts))
    x_grad = grad.new_empty(len(grad), weights[0].shape[1])
    for row_grads, out, weight in zip(*_split_by_expert(counts, grad, x_grad), weights, strict=True):
        if len(row_grads):
            torch.mm(row_grads, weight, out=out)
    return x_grad


def _weight_grads(
    x: torch.Tensor, grad: torch.Tensor, counts: torch.Tensor, is_wanted: Sequence[bool], implementation: str
) -> Sequence[torch.Tensor | None]:
    """Return the gradient of each weight that requires one (``is_wanted``), otherwise None."""
    if not any(is_wanted):
        return [None] * len(is_wanted)
    if implementation == GROUPED:
        return F.grouped_mm(grad.t(), x, offs=_ends(counts)).unbind()
    rows_by_expert = zip(*_split_by_expert(counts, x, grad), is_wanted, strict=True)
    return [row_grads.t().mm(rows) if wanted else None for rows, row_grads, wanted in rows_by_expert]


def _ends(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0).to(torch.int32)


def _split_by_expert(counts: torch.Tensor, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    row_counts = counts.tolist()
    return [x.split(row_counts) for x in tensors]
