"""Rows sorted by expert, and the products of each expert's rows with its weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron.ops.stacked_weights import stacked
from tds.param_info import WeightProducts, info_of

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
    """The n k expert choices, sorted by expert and then by row. Dropped choices have the last slots.

    The number of dropped choices is known on the device only, so that the host does not wait. Functions therefore
    accept tensors with all n k slots as well as tensors without the slots of dropped choices.

    Attributes:
        order: choice in each slot, int32 [n k].
        slot_of_choice: slot of each choice, int32 [n k]; n k for a dropped choice.
        counts: slots per expert, [E], int64; dropped choices are not counted.
        num_choices: choices per row, k.
        has_dropped: whether choices may have been dropped.
    """

    order: torch.Tensor
    slot_of_choice: torch.Tensor
    counts: torch.Tensor
    num_choices: int
    has_dropped: bool = False

    @classmethod
    def from_experts(cls, experts: torch.Tensor, num_experts: int, *, has_dropped: bool = False) -> Slots:
        """Sort ``experts`` [n, k] into slots.

        Args:
            has_dropped: an expert index equal to ``num_experts`` marks a dropped choice.
        """
        keys = experts.reshape(-1).to(_key_dtype(num_experts))
        sorted_keys, order = keys.sort(dim=0, stable=True)
        slots = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
        slot_of_choice = torch.empty_like(slots).scatter_(0, order, slots)
        starts = torch.searchsorted(sorted_keys, torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device))
        if has_dropped:
            slot_of_choice = slot_of_choice.masked_fill_(keys == num_experts, keys.numel())
        return cls(order.to(torch.int32), slot_of_choice, starts.diff(), experts.shape[-1], has_dropped)


def _key_dtype(num_experts: int) -> torch.dtype:
    """Choose the smallest dtype for indices up to ``num_experts``: a GPU sorts one byte of the keys per pass.

    The sort of up to 255 experts is therefore one counting pass. It moves less memory than cumulative sums of one-hot
    vectors, which have E elements per choice.
    """
    if num_experts <= torch.iinfo(torch.uint8).max:
        return torch.uint8
    return torch.int16 if num_experts <= torch.iinfo(torch.int16).max else torch.int32


def count_rows(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count rows by expert, int64 [num_experts]. The host does not wait."""
    flat = experts.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def dispatch_rows(x: torch.Tensor, slots: Slots, num_slots: int | None = None) -> torch.Tensor:
    """Copy rows ``x`` [n, h] to slots [m, h].

    Args:
        num_slots: number of slots m, if the slots of dropped choices are excluded; None: all slots.
    """
    return _Dispatch.apply(x, slots, num_slots)


def combine_rows(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Arrange slot results ``x`` [m, h] by choice, [n, k, h].

    Dropped choices have zero results; their slots, if ``x`` has them, are not read.
    """
    return _Combine.apply(x, slots)


def _look_up(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    slot_of_choice = slots.slot_of_choice
    if slots.has_dropped:
        slot_of_choice = slot_of_choice.clamp(max=len(x))
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return x.index_select(0, slot_of_choice).view(-1, slots.num_choices, x.shape[1])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slots: Slots, num_slots: int | None) -> torch.Tensor:
        ctx.slots = slots
        return x.index_select(0, slots.order[:num_slots] // slots.num_choices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _look_up(grads[0], ctx.slots).sum(1), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slots: Slots) -> torch.Tensor:
        ctx.slots, ctx.num_slots = slots, len(x)
        return _look_up(x, slots)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        return rows.index_select(0, ctx.slots.order[: ctx.num_slots]), None


# Products of the rows of each expert with its weight. fp64 has no grouped product.
#
# | implementation | products | counts |
# |---|---|---|
# | loop | one for each expert with rows | on the host, which waits for the device unless it knows them |
# | grouped | ``torch.nn.functional.grouped_mm`` of the stacked weights | on the device |
#
# ``grouped_mm`` returns gradients in the dtype of its factors and cannot add them to a tensor. The weights' gradients
# are therefore accumulated by autograd, also with --gradient-accumulation-fusion.

LOOP, GROUPED = "loop", "grouped"
IMPLEMENTATION: str | None = None
"""Implementation for tests and measurements; None: the one that ``select_implementation`` describes."""
ALIGNED_ELEMENTS = 8
"""Rows of the factors of a grouped product must be multiples of 16 bytes long: 8 elements of bf16."""


def select_implementation(x: torch.Tensor, output_size: int) -> str:
    """Choose an implementation to multiply ``x`` [m, input_size] with weights of ``output_size`` rows.

    The grouped product is used for bf16 on CUDA if ``x`` has rows and both sizes are multiples of
    ``ALIGNED_ELEMENTS``, which CUDA's kernel requires.
    """
    return GROUPED if len(x) and is_grouped(x, x.shape[1], output_size) else LOOP


def is_grouped(tensor: torch.Tensor, input_size: int, output_size: int) -> bool:
    """Return True if products of rows with the dtype and device of ``tensor`` are grouped."""
    if tensor.dtype == torch.float64 or not hasattr(F, "grouped_mm"):
        return False
    if input_size % ALIGNED_ELEMENTS or output_size % ALIGNED_ELEMENTS:
        return False
    if IMPLEMENTATION is not None:
        return IMPLEMENTATION == GROUPED
    return tensor.device.type == "cuda" and tensor.dtype == torch.bfloat16


DeferredGrad = Callable[[], None]
"""A function that adds the weights' gradients of one call to their ``grad``."""


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: torch.Tensor,
    deferred: list[DeferredGrad] | None = None,
    row_counts: list[int] | None = None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``x W_e^T`` for the rows of each weight. A weight without rows gets a zero gradient.

    Rows after the last weight's rows (slots of dropped choices) have undefined results and gradients.

    Args:
        deferred: list to which backward appends a function that computes the weight gradients; None: backward computes
            them.
        row_counts: ``counts`` on the host, if known; otherwise the loop waits for the device.
        ends: ``ends_of(counts)``, if known.

    Shapes:
        x       [m, input_size], sorted by weight
        weights [output_size, input_size] each
        counts  int64, rows per weight, with a sum of at most m
        output  [m, output_size]
    """
    implementation, products = select_implementation(x, weights[0].shape[0]), info_of(weights[0]).products
    if implementation == GROUPED:
        ends = ends_of(counts) if ends is None else ends
        return _GroupedLinear.apply(x, ends, None, products, deferred, *weights)
    row_counts = counts.tolist() if row_counts is None else row_counts
    return _GroupedLinear.apply(x, None, row_counts, products, deferred, *weights)


def ends_of(counts: torch.Tensor) -> torch.Tensor:
    """Return the index after each expert's last row, int32 [E], given the row counts."""
    return counts.cumsum(0).to(torch.int32)


class _GroupedLinear(torch.autograd.Function):
    """The products of ``grouped_linear``: grouped if ``ends`` is given, otherwise a loop over ``row_counts``.

    ``products`` computes output and input gradient, for example in FP8; None: torch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ends: torch.Tensor | None,
        row_counts: list[int] | None,
        products: WeightProducts | None,
        deferred: list[DeferredGrad] | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.ends, ctx.row_counts, ctx.products = ends, row_counts, products
        ctx.deferred, ctx.leaves = deferred, weights if deferred is not None else ()
        ctx.save_for_backward(x, *weights)
        if row_counts is None:
            assert ends is not None
            if products is not None:
                return products.grouped_forward(x, stacked(weights), ends)
            return F.grouped_mm(x, stacked(weights).transpose(1, 2), offs=ends)
        outputs = x.new_empty(len(x), weights[0].shape[0])
        for rows, out, weight in zip(*_split_by_expert(row_counts, x, outputs), weights, strict=True):
            if len(rows) and products is not None:
                out.copy_(products.forward(rows, weight))
            elif len(rows):
                torch.mm(rows, weight.t(), out=out)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        grad, ends, row_counts, is_wanted = grads[0].contiguous(), ctx.ends, ctx.row_counts, ctx.needs_input_grad[5:]
        x_grad = _input_grad(grad, weights, ends, row_counts, ctx.products) if ctx.needs_input_grad[0] else None
        if ctx.deferred is None:
            weight_grads = _weight_grads(x, grad, is_wanted, ends, row_counts)
            return x_grad, None, None, None, None, *weight_grads
        leaves = ctx.leaves  # the parameters themselves: under recompute, saved_tensors are detached copies

        def add() -> None:
            weight_grads = _weight_grads(x, grad, is_wanted, ends, row_counts)
            for leaf, weight_grad in zip(leaves, weight_grads, strict=True):
                if weight_grad is not None:
                    leaf.grad = weight_grad if leaf.grad is None else leaf.grad + weight_grad

        ctx.deferred.append(add)
        return x_grad, None, None, None, None, *[None] * len(weights)


def _input_grad(
    grad: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ends: torch.Tensor | None,
    row_counts: list[int] | None,
    products: WeightProducts | None,
) -> torch.Tensor:
    """Compute the input gradient, [m, input_size], by a grouped product if ``row_counts`` is None."""
    if row_counts is None:
        assert ends is not None
        if products is not None:
            return products.grouped_input_grad(grad, stacked(weights), ends)
        return F.grouped_mm(grad, stacked(weights), offs=ends)
    x_grad = grad.new_empty(len(grad), weights[0].shape[1])
    for row_grads, out, weight in zip(*_split_by_expert(row_counts, grad, x_grad), weights, strict=True):
        if len(row_grads) and products is not None:
            out.copy_(products.input_grad(row_grads, weight))
        elif len(row_grads):
            torch.mm(row_grads, weight, out=out)
    return x_grad


def _weight_grads(
    x: torch.Tensor,
    grad: torch.Tensor,
    is_wanted: Sequence[bool],
    ends: torch.Tensor | None,
    row_counts: list[int] | None,
) -> Sequence[torch.Tensor | None]:
    """Compute the weight gradients for which ``is_wanted`` is True; the others may be None."""
    if not any(is_wanted):
        return [None] * len(is_wanted)
    if row_counts is None:
        return F.grouped_mm(grad.t(), x, offs=ends).unbind()
    rows_by_expert = zip(*_split_by_expert(row_counts, x, grad), is_wanted, strict=True)
    return [row_grads.t().mm(rows) if wanted else None for rows, row_grads, wanted in rows_by_expert]


def _split_by_expert(row_counts: list[int], *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Split the rows of each tensor by expert; rows of dropped choices, at the end, are left out."""
    return [x[: sum(row_counts)].split(row_counts) for x in tensors]


def add_grouped_bias(
    x: torch.Tensor, biases: Sequence[torch.Tensor], counts: torch.Tensor, row_counts: list[int] | None = None
) -> torch.Tensor:
    """Add each expert's bias to the expert's rows. An expert without rows gets a zero gradient.

    The host does not wait for the device. Rows after the last expert's rows are returned unchanged.

    Args:
        row_counts: ``counts`` on the host, if known.

    Shapes:
        x, output [m, size], sorted by expert
        biases    [size] each
        counts    int64 [E], rows per expert, with a sum of at most m
    """
    total: torch.Tensor = _AddGroupedBias.apply(x, counts, row_counts, *biases)
    return total


class _AddGroupedBias(torch.autograd.Function):
    """Backward sums the rows of an expert in a fixed order: by slices, or by a product with a matrix of 0 and 1."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, counts: torch.Tensor, row_counts: list[int] | None, *biases: torch.Tensor
    ) -> torch.Tensor:
        ctx.counts, ctx.row_counts, ctx.dtype = counts, row_counts, biases[0].dtype
        if row_counts is None:
            table = torch.stack([*biases, torch.zeros_like(biases[0])])  # the last row is for dropped choices
            return x + table.index_select(0, _experts_of_rows(counts, len(x)))
        y = x.clone()
        for rows, bias in zip(_split_by_expert(row_counts, y)[0], biases, strict=True):
            rows += bias
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, counts, row_counts = grads[0], ctx.counts, ctx.row_counts
        if row_counts is None:
            experts = torch.arange(len(counts), device=grad.device).unsqueeze(1)
            is_row_of_expert = _experts_of_rows(counts, len(grad)) == experts  # [E, m]
            sums = is_row_of_expert.to(grad.dtype) @ grad
        else:
            sums = torch.stack([rows.sum(0) for rows in _split_by_expert(row_counts, grad)[0]])
        return grad, None, None, *sums.to(ctx.dtype)


def _experts_of_rows(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Map rows to experts, int64 [m]; E for rows after the last expert's rows."""
    return torch.searchsorted(counts.cumsum(0), torch.arange(num_rows, device=counts.device), right=True)
