"""fused_linear: a linear layer whose backward adds the gradient of its weight to where gradients lie, by the product.

Autograd makes a gradient as a tensor of its own, which is then added to the sum over micro-batches: a product and a
pass over three tensors of the weight's size, of which one is there for a moment only. Here the product itself adds:
``sum.addmm_(grad^T, x)``, that of the first micro-batch writes.

| what | who says so |
|---|---|
| where the gradient of a weight lies | whoever holds the gradients: ``weight.add_product = f``, f(rows, inputs) adds |
| that a product is fused | the layer, which calls ``fused_linear`` for a weight with ``add_product`` |
| that a gradient is final | autograd: the weight stays in its graph, and gets None |

The ``AccumulateGrad`` node of such a weight runs behind all its products, and its hooks with it, once in a backward. So
what starts sums over replicas (``tds.gradient_reducer``) hears at the same moment as ever that a gradient is final.
What reaches the weight in another way (a lookup in a tied table) comes through the node and is added as ever.

``C + A B`` in one product is not to the bit the sum of ``C`` and a product, so losses differ from those without it by
rounding, and not between schedules: halves of a backward (``tds.engine.weight_grad_store``) take the same products.

Source: Megatron-LM's ``gradient_accumulation_fusion``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F

_OWN_LINEAR = F.linear


def fused_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x W^T + b``; a backward hands the gradient of ``weight`` to its ``add_product`` where it can.

    A schedule that splits backwards swaps ``F.linear``: it must see the call, and does the same later.
    """
    if F.linear is not _OWN_LINEAR or not torch.is_grad_enabled() or not is_plain_product(x, weight, bias):
        return F.linear(x, weight, bias)
    product: torch.Tensor = _FusedLinear.apply(x, weight, bias)
    return product


def is_plain_product(x: Any, weight: Any, bias: Any) -> bool:
    """True if the gradient of ``weight`` can be computed apart from that of ``x``: of a leaf, and as it stands here."""
    plain = isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
    if not plain or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
        return False
    if not (weight.is_leaf and weight.requires_grad and weight.dim() == 2 and x.dtype == weight.dtype):
        return False
    return bias is None or (isinstance(bias, torch.Tensor) and bias.is_leaf)


def can_add_products(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether products of the type of ``weight`` can be added to a sum in ``dtype``: on CUDA to a wider one."""
    is_wide = weight.device.type == "cuda" and weight.dtype.itemsize == 2
    return weight.dim() == 2 and (is_wide or weight.dtype == dtype)


def share_of(some: Collection[torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> tuple[str, str]:
    """Return the share in percent that ``some`` have of the numbers in the trained ``parameters``, and the other names.

    The largest come first, four of them; "" where there are no others.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    others = {name: parameter.numel() for name, parameter in trained.items() if parameter not in some}
    every = sum(parameter.numel() for parameter in trained.values())
    names = sorted(others, key=lambda name: -others[name])
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{100 * (1 - sum(others.values()) / max(every, 1)):.1f}", listed


@torch.no_grad()
def add_product(place: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, is_first: bool) -> None:
    """Let ``place`` be ``place + a b``, or ``a b`` where ``is_first``: it may hold anything then.

    Shapes:
        place [m, n], a [m, k], b [k, n]; or all of them [number, ...]
    """
    product: Any = torch.addmm if place.dim() == 2 else torch.baddbmm
    wide = {} if place.dtype == a.dtype else {"out_dtype": place.dtype}
    product(place, a, b, beta=0 if is_first else 1, out=place, **wide)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leaf = weight  # itself: recompute hands back a detached copy of what is saved
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])  # [n, output_size]
        of_x = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            ctx.leaf.add_product(rows, x.reshape(-1, x.shape[-1]))
        return of_x, None, rows.sum(0) if ctx.needs_input_grad[2] else None
