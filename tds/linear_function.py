"""linear: ``x W^T + b`` whose weight gradient can be deferred, or accumulated in place by the matrix product.

Layers call ``linear(x, weight, bias)``. If ``ParamInfo.products`` of the weight is set, it computes the output and the
input gradient, for example in FP8. Autograd computes the weight gradient, with two exceptions:

* A schedule that splits backward passes (``tds.engine.weight_grad_store``) is active: the input and the gradient of
  the output are saved until the ``BackwardWeight`` action.
* The optimizer has set ``ParamInfo.add_product``: one matrix product adds to the accumulated gradient,
  ``accumulated.addmm_(grad^T, x)``; for the first micro-batch, it overwrites the old value. Autograd would instead
  allocate a new tensor for each micro-batch's gradient and add it to the accumulated gradient in a second pass over
  memory.

In both cases, the weight stays in autograd's graph and its gradient from the product is None. Its ``AccumulateGrad``
node and its hooks run once per backward pass, after all its products, so the all-reduce over the replicas
(``tds.bucket_reducer``) starts at the usual time. The node still accumulates the weight's other gradients, such as the
gradient from a lookup in a tied embedding table.

``C + A B`` in one product rounds differently from a product and a sum, so losses with and without ``add_product``
differ by rounding. They do not differ between schedules, because a deferred product is the same product.

Source: Megatron-LM's ``gradient_accumulation_fusion``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from tds.param_info import AddProduct, WeightProducts, info_of
from tds.torch_api import base_of


class WeightGradDeferral(Protocol):
    """The ``WeightGradStore`` method that ``linear`` calls to make its weight gradient deferrable."""

    def split_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute ``x W^T + b``. The backward saves the tensors that the gradients of ``weight`` and ``bias`` need."""


_deferral: WeightGradDeferral | None = None  # global, because recompute runs layers in autograd's threads


@contextmanager
def deferring_weight_grads(deferral: WeightGradDeferral) -> Iterator[None]:
    """Make ``linear`` call ``deferral.split_linear`` in the block."""
    global _deferral
    outer, _deferral = _deferral, deferral
    try:
        yield
    finally:
        _deferral = outer


def is_deferring_weight_grads() -> bool:
    """Return True if a schedule that splits backward passes is active."""
    return _deferral is not None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, fuse: bool = True
) -> torch.Tensor:
    """Compute ``x W^T + b``. The backward pass defers the weight gradient or accumulates it in place if possible.

    Args:
        fuse: accumulate the weight gradient by ``ParamInfo.add_product``, if the optimizer has set it.

    Shapes:
        x      [..., input_size]
        weight [output_size, input_size], bias [output_size]
        output [..., output_size]
    """
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    info = info_of(weight)
    add_product = info.add_product if fuse else None
    if _deferral is None and add_product is None and info.products is None:
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return multiply(x, weight, bias)
    is_plain = is_plain_product(x, weight, bias)
    if _deferral is not None and is_plain:
        return _deferral.split_linear(x, weight, bias)
    if info.products is None and not is_plain:
        return F.linear(x, weight, bias)
    product: torch.Tensor = _Linear.apply(x, weight, bias, add_product if is_plain else None)
    return product


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``x W^T + b`` by ``ParamInfo.products`` of the weight, or by torch, without a gradient."""
    products = info_of(weight).products
    if products is None:
        return F.linear(x, weight, bias)
    product = products.forward(x, weight)
    return product if bias is None else product + bias


def multiply_grad(grad: torch.Tensor, weight: torch.Tensor, products: WeightProducts | None) -> torch.Tensor:
    """Compute the input gradient ``grad W``, [n, input_size], from the output gradient [n, output_size]."""
    return grad.mm(weight) if products is None else products.input_grad(grad, weight)


def accumulates_in_place(weight: torch.Tensor) -> bool:
    """Return True if products accumulate the gradient of ``weight`` in place; always False in a compiled layer."""
    return not torch.compiler.is_compiling() and info_of(weight).add_product is not None


def is_plain_product(x: Any, weight: Any, bias: Any) -> bool:
    """Return True if the gradient of ``weight`` can be computed later than the gradient of ``x``.

    ``weight`` must be a trainable matrix with the dtype of ``x``, outside of autocast and of compiled layers. It is a
    leaf, or a view of a leaf such as the gate's rows of a weight with interleaved rows. ``bias`` is a leaf, such a view
    or None.
    """
    are_tensors = isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
    if not are_tensors or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
        return False
    if not (leaf_of(weight) is not None and weight.requires_grad and weight.dim() == 2 and x.dtype == weight.dtype):
        return False
    return bias is None or (isinstance(bias, torch.Tensor) and leaf_of(bias) is not None)


def leaf_of(weight: torch.Tensor) -> torch.Tensor | None:
    """Return ``weight`` if it is a leaf, the leaf that it is a view of, or None."""
    leaf = weight if weight.is_leaf else base_of(weight)
    return leaf if leaf is not None and leaf.is_leaf else None


def can_add_products(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if matrix products in the dtype of ``weight`` can accumulate in ``dtype``.

    The dtypes must be equal, except that 16-bit products on CUDA can accumulate in a wider dtype.
    """
    is_wide = weight.device.type == "cuda" and weight.dtype.itemsize == 2
    return weight.dim() == 2 and (is_wide or weight.dtype == dtype)


def percentage_of(selected: Collection[torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> tuple[str, str]:
    """Return (percentage of the trainable elements in ``parameters`` that are in ``selected``, names of the others).

    At most four names are listed, the largest parameters first; "" if all trainable parameters are in ``selected``.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    others = {name: parameter.numel() for name, parameter in trained.items() if parameter not in selected}
    total = sum(parameter.numel() for parameter in trained.values())
    names = sorted(others, key=lambda name: -others[name])
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{100 * (1 - sum(others.values()) / max(total, 1)):.1f}", listed


@torch.no_grad()
def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, is_first: bool) -> None:
    """Add ``a @ b`` to ``out`` in place, or overwrite ``out`` with ``a @ b`` if ``is_first``.

    Shapes:
        out [m, n], a [m, k], b [k, n]; or all three batched, [batch, ...]
    """
    multiply_add: Any = torch.addmm if out.dim() == 2 else torch.baddbmm
    dtype_args = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    multiply_add(out, a, b, beta=0 if is_first else 1, out=out, **dtype_args)


class _Linear(torch.autograd.Function):
    """``multiply``; the weight gradient is accumulated by ``add_product``, or returned if that is None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add_product: AddProduct | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.add_product, ctx.products = add_product, info_of(weight).products
        return multiply(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])  # [n, output_size]
        x_grad = multiply_grad(rows, weight, ctx.products).view(x.shape) if ctx.needs_input_grad[0] else None
        weight_grad = None
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            if ctx.add_product is None:
                weight_grad = rows.t().mm(inputs)
            else:
                ctx.add_product(rows, inputs)
        return x_grad, weight_grad, rows.sum(0) if ctx.needs_input_grad[2] else None, None
