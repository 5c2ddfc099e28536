"""The project's Triton kernels in torch, so that the short tests can run the functions that launch them.

Each emulation takes the arguments of its kernel by name and obeys the strides that it is given.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from megatron import triton_launch
from tests.kernels.launches import ROOT

Emulation = Callable[..., None]


@contextmanager
def emulated() -> Iterator[list[str]]:
    """Run the emulations in place of kernels, on every device; yield the names of the kernels launched so far."""
    names: list[str] = []
    originals = triton_launch.launch, triton_launch.is_available

    def launch(kernel: str, grid: Any, *args: Any, writes: Any, updates: Any = (), **options: Any) -> None:
        name = kernel.partition(":")[2]
        names.append(name)
        with torch.no_grad():
            options.pop("num_warps", None)
            EMULATIONS[name](**dict(zip(parameter_names(kernel), args, strict=False)), **options)

    triton_launch.launch, triton_launch.is_available = launch, lambda device: True
    try:
        yield names
    finally:
        triton_launch.launch, triton_launch.is_available = originals


def parameter_names(kernel: str) -> list[str]:
    """Return the names of the parameters of ``kernel``, "module:function", which is not imported."""
    module, _, name = kernel.partition(":")
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [argument.arg for argument in functions[name].args.args]


def rotary_kernel(
    cosine: torch.Tensor, sine: torch.Tensor, batch_size: int, angle_s: int, angle_b: int, NUM_GROUPS: int,
    HEADS_PER_GROUP: int, HEAD_SIZE: int, NUM_PAIRS: int, IS_INVERSE: bool, HAS_VALUE: bool, **other: Any,
) -> None:  # fmt: skip
    """Emulate the kernel of rotary positions."""
    length = other["query"].shape[0]

    def heads_of(name: str) -> torch.Tensor:  # [s, b, g, heads per group, d]
        x, num_heads = other[name], HEADS_PER_GROUP if "query" in name else 1
        strides = [other[f"{name}_{letter}"] for letter in "sbg"] + [other.get(f"{name}_a", 0), 1]
        shape = (length, batch_size, NUM_GROUPS, num_heads, HEAD_SIZE)
        return x.as_strided(shape, strides, x.storage_offset())

    angle_shape, angle_strides = (length, batch_size, 1, 1, NUM_PAIRS), (angle_s, angle_b, 0, 0, 1)
    cos, sin = (x.as_strided(angle_shape, angle_strides, x.storage_offset()) for x in (cosine, sine))
    sin = -sin if IS_INVERSE else sin
    for name in ("query", "key"):
        x, out = heads_of(name), heads_of(f"{name}_out")
        first, second = x[..., : 2 * NUM_PAIRS].float().chunk(2, dim=-1)
        out[..., :NUM_PAIRS] = first * cos - second * sin
        out[..., NUM_PAIRS : 2 * NUM_PAIRS] = second * cos + first * sin
        out[..., 2 * NUM_PAIRS :] = x[..., 2 * NUM_PAIRS :]
    if HAS_VALUE:
        heads_of("value_out").copy_(heads_of("value"))


def _gate(pairs: torch.Tensor, is_gelu: bool) -> tuple[torch.Tensor, torch.Tensor]:
    gate, value = pairs.flatten().float().view(-1, 2).unbind(1)
    return (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)), value


def gated_forward_kernel(pairs: torch.Tensor, out: torch.Tensor, num_outputs: int, IS_GELU: bool, BLOCK: int) -> None:
    """Emulate the forward of gated activations."""
    activated, value = _gate(pairs, IS_GELU)
    out.view(num_outputs).copy_(activated * value)


def gated_backward_kernel(
    grad: torch.Tensor, pairs: torch.Tensor, pairs_grad: torch.Tensor, num_outputs: int, IS_GELU: bool, BLOCK: int
) -> None:
    """Emulate the backward of gated activations."""
    with torch.enable_grad():
        leaf = pairs.float().requires_grad_()
        activated, value = _gate(leaf, IS_GELU)
        (result,) = torch.autograd.grad(activated * value, leaf, grad.float().view(num_outputs))
    pairs_grad.copy_(result)


def _norm(total: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, **flags: bool) -> Any:
    scale = weight.float() + 1.0 if flags["IS_OFFSET"] else weight.float()
    if flags["IS_CENTRED"]:
        return F.layer_norm(total, scale.shape, scale, bias, epsilon)
    normed = F.rms_norm(total, scale.shape, scale, epsilon)
    return normed if bias is None else normed + bias


def norm_forward_kernel(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, total: torch.Tensor,
    out: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, width: int, epsilon: float, HAS_BRANCH: bool,
    HAS_BIAS: bool, IS_CENTRED: bool, IS_OFFSET: bool, BLOCK: int,
) -> None:  # fmt: skip
    """Emulate the forward of norms."""
    if HAS_BRANCH:
        torch.add(x, branch, out=total)
    wide = (total if HAS_BRANCH else x).float()
    centred = wide - wide.mean(-1, keepdim=True) if IS_CENTRED else wide
    if IS_CENTRED:
        mean.copy_(wide.mean(-1).flatten())
    rstd.copy_((centred.square().mean(-1) + epsilon).rsqrt().flatten())
    fp32_bias = bias.float() if HAS_BIAS else None
    out.copy_(_norm(wide, weight, fp32_bias, epsilon, IS_CENTRED=IS_CENTRED, IS_OFFSET=IS_OFFSET))


def norm_backward_kernel(
    grad: torch.Tensor, total_grad: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor,
    rstd: torch.Tensor, x_grad: torch.Tensor, weight_grads: torch.Tensor, bias_grads: torch.Tensor, num_rows: int,
    width: int, HAS_TOTAL_GRAD: bool, IS_CENTRED: bool, IS_OFFSET: bool, HAS_BIAS: bool, ROWS: int, BLOCK: int,
) -> None:  # fmt: skip
    """Emulate the backward of norms, from the saved statistics."""
    rows, out_grad = total.float().view(num_rows, width), grad.float().view(num_rows, width)
    normed = ((rows - mean[:, None]) if IS_CENTRED else rows) * rstd[:, None]
    normed_grad = out_grad * (weight.float() + 1.0 if IS_OFFSET else weight.float())
    result = normed_grad - normed * (normed_grad * normed).mean(-1, keepdim=True)
    result = (result - normed_grad.mean(-1, keepdim=True) if IS_CENTRED else result) * rstd[:, None]
    result = result + total_grad.float().view(num_rows, width) if HAS_TOTAL_GRAD else result
    x_grad.view(num_rows, width).copy_(result)
    for grads, products in ((weight_grads, out_grad * normed), (bias_grads, out_grad))[: 1 + HAS_BIAS]:
        for program, chunk in enumerate(products.split(ROWS)):
            grads[program] = chunk.sum(0)


def _load_logits(
    logits: torch.Tensor, bias: torch.Tensor, row_stride: int, num_columns: int, cap: float, *, has_bias: bool
) -> torch.Tensor:
    """Return the first ``num_columns`` of all rows in fp32, with bias and soft-cap."""
    loaded = logits.as_strided((len(logits), num_columns), (row_stride, 1), logits.storage_offset()).float()
    loaded = loaded + bias[:num_columns].float() if has_bias else loaded
    return cap * torch.tanh(loaded / cap) if cap else loaded


def statistics_kernel(
    logits: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, statistics: torch.Tensor, num_rows: int,
    row_stride: int, width: int, num_columns: int, cap: float, HAS_BIAS: bool, HAS_CAP: bool, BLOCK: int,
) -> None:  # fmt: skip
    """Emulate the first pass of the cross-entropy."""
    loaded = _load_logits(logits, bias, row_stride, num_columns, cap, has_bias=HAS_BIAS)
    statistics[0] = loaded.amax(1)
    statistics[1] = (loaded - statistics[0].unsqueeze(1)).exp().sum(1)
    is_local = (targets >= 0) & (targets < num_columns)
    statistics[2] = loaded.gather(1, targets.where(is_local, 0).unsqueeze(1)).squeeze(1).where(is_local, 0.0)


def gradient_kernel(
    logits: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, maxima: torch.Tensor, exp_factors: torch.Tensor,
    factors: torch.Tensor, gradient: torch.Tensor, row_stride: int, gradient_stride: int, width: int,
    num_columns: int, cap: float, HAS_BIAS: bool, HAS_CAP: bool, BLOCK: int,
) -> None:  # fmt: skip
    """Emulate the second pass of the cross-entropy."""
    loaded = _load_logits(logits, bias, row_stride, num_columns, cap, has_bias=HAS_BIAS)
    grad = (loaded - maxima.unsqueeze(1)).exp() * exp_factors.unsqueeze(1)
    is_target = torch.arange(num_columns, device=targets.device) == targets.unsqueeze(1)
    grad -= is_target * factors.unsqueeze(1)
    grad = grad * (1 - (loaded / cap).square()) if HAS_CAP else grad
    gradient.as_strided((len(gradient), width), (gradient_stride, 1), gradient.storage_offset()).copy_(
        F.pad(grad, (0, width - num_columns))
    )


def row_maxima_kernel(x: torch.Tensor, maxima: torch.Tensor, width: int, BLOCK: int) -> None:
    """Emulate the maxima of rows."""
    torch.amax(x.abs().float(), 1, out=maxima)


def column_maxima_kernel(
    x: torch.Tensor, maxima_bits: torch.Tensor, num_rows: int, width: int, ROWS: int, TILE: int
) -> None:
    """Emulate the maxima of columns."""
    torch.amax(x.abs().float(), -2, out=maxima_bits.view(torch.float32))


def quantize_rows_kernel(x: torch.Tensor, maxima: torch.Tensor, out: torch.Tensor, width: int, BLOCK: int) -> None:
    """Emulate the quantization of rows."""
    inverse = torch.full_like(maxima, 448.0) / maxima.clamp(min=1e-12)  # rounded once
    out.copy_((x.float() * inverse.unsqueeze(1)).clamp(-448.0, 448.0))


def quantize_columns_kernel(
    x: torch.Tensor, maxima: torch.Tensor, out: torch.Tensor, num_rows: int, width: int, TILE: int
) -> None:
    """Emulate the quantization and transposition of columns."""
    inverse = torch.full_like(maxima, 448.0) / maxima.clamp(min=1e-12)
    scaled = x.float() * inverse.unsqueeze(-2)
    out.copy_(scaled.clamp(-448.0, 448.0).transpose(-2, -1))


EMULATIONS: dict[str, Emulation] = {
    function.__name__: function
    for function in (
        rotary_kernel,
        gated_forward_kernel,
        gated_backward_kernel,
        norm_forward_kernel,
        norm_backward_kernel,
        statistics_kernel,
        gradient_kernel,
        row_maxima_kernel,
        column_maxima_kernel,
        quantize_rows_kernel,
        quantize_columns_kernel,
    )
}
