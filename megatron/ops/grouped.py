"""Rows sorted by the expert that they go to, and the products of each run of them with a weight of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

# Where rows go, and back.
#
# | function | forward | backward |
# |---|---|---|
# | `send_rows` | row of each slot, a row once for each of its k choices | sums of the k |
# | `return_rows` | result of each choice, zeros where it was dropped | slot by slot |
#
# Both are looked up in the forward and in the backward, never added up by index: so sums over choices have one order.


@dataclass(frozen=True)
class Slots:
    """Choices [n k] of experts in the order of experts, and of rows within one.

    Attributes:
        order: choice of each slot, [m]; m is n k without those that were dropped.
        place: slot of each choice, [n k]; m for one that was dropped.
        counts: slots of each expert, [E], int64.
        choices: k of a row.
    """

    order: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor
    choices: int

    @classmethod
    def of(cls, experts: torch.Tensor, num_experts: int, *, drops: bool = False) -> Slots:
        """Return the slots of ``experts`` [n, k]; with ``drops`` one may be ``num_experts``, which is none.

        With ``drops`` the host waits for the device.
        """
        flat = experts.reshape(-1)
        order = flat.sort(dim=0, stable=True).indices
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        counts = count(flat, num_experts + drops)[:num_experts]
        if drops:
            kept = int(counts.sum())
            order, place = order[:kept], place.clamp(max=kept)
        return cls(order, place, counts, experts.shape[-1])


def count(experts: torch.Tensor, number: int) -> torch.Tensor:
    """Return how often each of ``number`` experts stands in ``experts``: int64 [number]; nobody waits for a device."""
    flat = experts.reshape(-1)
    return torch.zeros(number, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def send_rows(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Return the row [m, h] of each slot, of ``x`` [n, h]."""
    return _Send.apply(x, slots)


def return_rows(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Return the result [n, k, h] of each choice, of those ``x`` [m, h] of each slot."""
    return _Return.apply(x, slots)


def _looked_up(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    if slots.order.numel() < slots.place.numel():
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return x.index_select(0, slots.place).view(-1, slots.choices, x.shape[1])


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slots: Slots) -> torch.Tensor:
        ctx.slots = slots
        return x.index_select(0, slots.order // slots.choices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _looked_up(grads[0], ctx.slots).sum(1), None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slots: Slots) -> torch.Tensor:
        ctx.slots = slots
        return _looked_up(x, slots)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].reshape(-1, grads[0].shape[-1]).index_select(0, ctx.slots.order), None


# Products of runs of rows with a weight each.
#
# | way | products | counts |
# |---|---|---|
# | loop | one for each expert with rows | on the host, which waits for a device |
# | grouped | ``torch.nn.functional.grouped_mm``; the weights are laid side by side first | on the device |
#
# Which of them runs. fp64 has no grouped product.

LOOP, GROUPED = "loop", "grouped"
WAY: str | None = None
"""The way to take, of tests and measurements; None: grouped on a GPU in 16 bits, else the loop."""


def way_of(x: torch.Tensor) -> str:
    """Return how ``grouped_linear`` computes."""
    if x.dtype == torch.float64 or not hasattr(F, "grouped_mm"):
        return LOOP
    if WAY is not None:
        return WAY
    return GROUPED if x.device.type == "cuda" and x.dtype == torch.bfloat16 else LOOP


Delayed = Callable[[], None]
"""What adds the gradients of the weights of one call to their ``grad``."""


def grouped_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], counts: torch.Tensor, delayed: list[Delayed] | None = None
) -> torch.Tensor:
    """Return ``x W_e^T`` for each run of rows; one without rows leaves a gradient of zeros.

    Args:
        delayed: where the backward leaves the work for the weights instead of doing it; None: it does it.

    Shapes:
        x       [m, input_size], the rows of the first weight first
        weights [output_size, input_size] each
        counts  int64, rows of each weight; they add up to m
        output  [m, output_size]
    """
    return _GroupedLinear.apply(x, counts, delayed, *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, counts: torch.Tensor, delayed: list[Delayed] | None, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.way, ctx.delayed, ctx.leaves = way_of(x), delayed, weights if delayed is not None else ()
        ctx.save_for_backward(x, counts, *weights)
        if ctx.way == GROUPED:
            return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=_ends(counts))
        made = x.new_empty(len(x), weights[0].shape[0])
        for rows, out, weight in zip(*_runs(counts, x, made), weights, strict=True):
            if len(rows):
                torch.mm(rows, weight.t(), out=out)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, counts, *weights = ctx.saved_tensors
        grad, way, is_wanted = grads[0].contiguous(), ctx.way, ctx.needs_input_grad[3:]
        back = _of_input(grad, weights, counts, way) if ctx.needs_input_grad[0] else None
        if ctx.delayed is None:
            return back, None, None, *_of_weights(x, grad, counts, is_wanted, way)
        leaves = ctx.leaves  # themselves: recompute hands back detached copies of what is saved

        def add() -> None:
            for leaf, made in zip(leaves, _of_weights(x, grad, counts, is_wanted, way), strict=True):
                if made is not None:
                    leaf.grad = made if leaf.grad is None else leaf.grad + made

        ctx.delayed.append(add)
        return back, None, None, *[None] * len(weights)


def _of_input(grad: torch.Tensor, weights: Sequence[torch.Tensor], counts: torch.Tensor, way: str) -> torch.Tensor:
    if way == GROUPED:
        return F.grouped_mm(grad, torch.stack(tuple(weights)), offs=_ends(counts))
    back = grad.new_empty(len(grad), weights[0].shape[1])
    for of_rows, out, weight in zip(*_runs(counts, grad, back), weights, strict=True):
        if len(of_rows):
            torch.mm(of_rows, weight, out=out)
    return back


def _of_weights(
    x: torch.Tensor, grad: torch.Tensor, counts: torch.Tensor, is_wanted: Sequence[bool], way: str
) -> Sequence[torch.Tensor | None]:
    if not any(is_wanted):
        return [None] * len(is_wanted)
    if way == GROUPED:
        return F.grouped_mm(grad.t(), x, offs=_ends(counts)).unbind()
    runs = zip(*_runs(counts, x, grad), is_wanted, strict=True)
    return [of_rows.t().mm(rows) if wanted else None for rows, of_rows, wanted in runs]


def _ends(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0).to(torch.int32)


def _runs(counts: torch.Tensor, *every: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    sizes = counts.tolist()
    return [x.split(sizes) for x in every]
