"""LayerNorm, RMSNorm and the norms of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.per_head_norm import PerHeadNorm
from megatron.mpu.embedding_lookup import HALF_PRECISION
from megatron.mpu.groups import Group
from megatron.mpu.layers import divide
from megatron.mpu.mappings import copy_to_tensor_region, reduce_from_tensor_region
from megatron.mpu.shard import Shard, set_partial, set_shard
from megatron.ops import fused_norm

# Root-mean-square normalisation.


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension, computed in fp32 for 16-bit inputs.

    Shapes:
        x, output [..., h]
        weight    [h]

    Source: Zhang and Sennrich 2019, "Root mean square layer normalization".
    """
    if x.device.type == "cpu":
        return _RMSNorm.apply(x, weight, epsilon)
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one value per row for backward. PyTorch has a fused kernel only on GPUs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        upcast = x.to(dtype)
        norm = torch.linalg.vector_norm(upcast, dim=-1, keepdim=True)
        factor = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, factor)
        return (upcast * factor).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, factor = ctx.saved_tensors
        upcast, upcast_weight, grad = (y.to(factor.dtype) for y in (x, weight, grads[0]))
        products = (grad * upcast).flatten(0, -2)  # [rows, h]
        grad_weight = products.t() @ factor.flatten()
        # gradient through the factor
        scale_grad = (products @ upcast_weight).view_as(factor).mul_(factor.pow(3)).div_(-x.shape[-1])
        grad_x = (grad * upcast_weight).mul_(factor).addcmul_(upcast, scale_grad)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


# LayerNorm, and the modules of both norms.


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Return ``x`` normalised over its last dimension, times ``weight``, plus ``bias`` unless it is None.

    The gradients of ``weight`` and ``bias`` are accumulated in fp32 for 16-bit inputs.

    Shapes:
        x, output    [..., h]
        weight, bias [h]
    """
    is_half_on_cpu = x.device.type == "cpu" and x.dtype in HALF_PRECISION
    if is_half_on_cpu and weight.dtype == x.dtype and not torch.compiler.is_compiling():
        normalized: torch.Tensor = _HalfPrecisionLayerNorm.apply(x, weight, bias, epsilon)
        return normalized
    return F.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)


class _HalfPrecisionLayerNorm(torch.autograd.Function):
    """LayerNorm of 16-bit tensors on a CPU, where PyTorch accumulates the gradients of weight and bias in 16 bits.

    The output is bitwise equal to ``F.layer_norm``. The mean and the inverse standard deviation are saved in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
    ) -> torch.Tensor:
        fp32_bias = None if bias is None else bias.float()
        shape = (x.shape[-1],)
        output, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight.float(), fp32_bias, epsilon)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        fp32_bias = None if bias is None else bias.float()
        output_mask = (*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2])
        fp32_grads = torch.ops.aten.native_layer_norm_backward(
            grads[0].float(), x.float(), (x.shape[-1],), mean, rstd, weight.float(), fp32_bias, output_mask
        )
        return (*(None if grad is None else grad.to(x.dtype) for grad in fp32_grads), None)


class LayerNorm(nn.Module):
    """Layer normalization over the last dimension, with scale and optional shift. Every rank holds the full weights.

    Shapes:
        input, output [..., h]

    Args:
        bias: add a learned shift.
        is_offset: the weight is the scale minus 1, initialised to 0.

    Attributes:
        kernel: the function that computes the norm: ``layer_norm`` or one with the same signature.

    Source: Ba et al. 2016, "Layer normalization".
    """

    kernel: Callable[..., torch.Tensor] = staticmethod(layer_norm)

    def __init__(self, hidden_size: int, epsilon: float, bias: bool = True, is_offset: bool = False) -> None:
        super().__init__()
        self.epsilon, self.is_offset = epsilon, is_offset
        self.weight = nn.Parameter(torch.zeros(hidden_size) if is_offset else torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_offset:
            upcast, weight = upcast_with_offset(x, self.weight)
            bias = None if self.bias is None else self.bias.to(upcast.dtype)
            return self.kernel(upcast, weight, bias, self.epsilon).to(x.dtype)
        return self.kernel(x, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last dimension, with scale. Every rank holds the full weights.

    Shapes:
        input, output [..., h]

    Args:
        is_offset: the weight is the scale minus 1, initialised to 0.

    Attributes:
        kernel: the function that computes the norm: ``rms_norm`` or one with the same signature.

    Source: Zhang and Sennrich 2019, "Root mean square layer normalization".
    """

    kernel: Callable[..., torch.Tensor] = staticmethod(rms_norm)

    def __init__(self, hidden_size: int, epsilon: float, is_offset: bool = False) -> None:
        super().__init__()
        self.epsilon, self.is_offset = epsilon, is_offset
        self.weight = nn.Parameter(torch.zeros(hidden_size) if is_offset else torch.ones(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_offset:
            return self.kernel(*upcast_with_offset(x, self.weight), self.epsilon).to(x.dtype)
        return self.kernel(x, self.weight, self.epsilon)


def upcast_with_offset(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` and ``1 + weight`` in fp32, or in the dtype of ``x`` if that is wider; 16 bits would round the sum.

    Source: Gemma Team 2024, "Gemma", and its code.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype), 1.0 + weight.to(dtype)


# Residual connection and norm in one Triton kernel.


def add_and_norm(
    norm: nn.Module, x: torch.Tensor, branch: torch.Tensor | None, parallel: ParallelContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + branch`` (``x`` if ``branch`` is None) and its norm, by a kernel if there is one.

    The kernel also adds the gradients of both outputs, which autograd would do in a separate pass.

    Shapes:
        x, branch, output [s, b, h], or this rank's shard of the sequence
    """
    if isinstance(norm, (LayerNorm, RMSNorm)) and parallel.uses_kernels(x) and _has_kernel(norm):
        return fused_norm.add_and_norm(
            x,
            branch,
            norm.weight,
            norm.bias if isinstance(norm, LayerNorm) else None,
            norm.epsilon,
            is_centred=isinstance(norm, LayerNorm),
            is_offset=norm.is_offset,
        )
    total = x if branch is None else x + branch
    return total, norm(total)


def _has_kernel(norm: LayerNorm | RMSNorm) -> bool:
    """Return True if a kernel can replace the call of ``norm``.

    It cannot if the norm has another kernel (apex's), or if hooks must see the call: those of megatron.debug, and of
    ZeRO 3, which gathers weights.
    """
    is_default = norm.kernel is (layer_norm if isinstance(norm, LayerNorm) else rms_norm)
    hooks = norm._forward_pre_hooks, norm._forward_hooks, norm._backward_pre_hooks, norm._backward_hooks
    return is_default and not any(hooks) and len(norm.weight) <= fused_norm.MAX_WIDTH


# Construction of a model's norms.


def norm_class(args: ModelArgs) -> type[LayerNorm] | type[RMSNorm]:
    """Return the class of all norms of a model."""
    return RMSNorm if args.normalization == "RMSNorm" else LayerNorm


def norm_kwargs(args: ModelArgs) -> dict[str, Any]:
    """Return the keyword arguments for constructing a model's norms, except the size."""
    kwargs: dict[str, Any] = {"epsilon": args.layernorm_epsilon, "is_offset": args.layernorm_1p}
    return kwargs if args.normalization == "RMSNorm" else {**kwargs, "bias": args.norm_bias}


def make_norm(args: ModelArgs, parallel: ParallelContext | None = None) -> LayerNorm | RMSNorm:
    """Build a norm of hidden states.

    Args:
        parallel: if given, and it has sequence parallelism, mark the weights as applied to a shard of the sequence.
    """
    norm = norm_class(args)(args.hidden_size, **norm_kwargs(args))
    return norm if parallel is None else parallel.mark_sequence_parallel(norm)


# Norms of queries and keys, applied before or after the rotary embedding.
#
# | ``qk_norm`` | normalised over | weight | gradient on a tensor rank |
# |---|---|---|---|
# | l2 | the d elements of a head | none | |
# | head | the d elements of a head | [d], full on every rank | sum over the rank's heads (``set_partial``) |
# | per-head | the d elements of a head | [a d] or [g d], sharded by heads | complete gradient of its shard |
# | all | all heads, over the tensor ranks | [a d] or [g d], sharded by heads | complete gradient of its shard |
#
# Source: Dehghani et al. 2023, "Scaling vision transformers to 22 billion parameters"; over all heads: OLMo 2, 2024.


def make_head_norm(args: ModelArgs, parallel: ParallelContext, num_heads: int) -> nn.Module | None:
    """Build the norm of queries or keys; return None if the model does not normalise them.

    Args:
        num_heads: number of heads over all tensor ranks.
    """
    if args.qk_norm == "none":
        return None
    if args.qk_norm == "l2":
        return HeadL2Norm(args.layernorm_epsilon)
    if args.qk_norm == "all":
        return AllHeadsNorm(args, parallel.group, num_heads)
    if args.qk_norm == "per-head":
        return PerHeadNorm(args, parallel.group, num_heads)
    norm = norm_class(args)(args.kv_hidden_size, **norm_kwargs(args))
    if parallel.group.size > 1:
        for parameter in norm.parameters():
            set_partial(parameter)
    return norm


class HeadL2Norm(nn.Module):
    """Root-mean-square normalization of each head without weights.

    Shapes:
        input, output [b, n/t, s, d]

    Source: Meta 2025, "The Llama 4 herd", and its code.
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        upcast = x.to(torch.promote_types(x.dtype, torch.float32))
        return (upcast * (upcast.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()).to(x.dtype)


class AllHeadsNorm(nn.Module):
    """Norm over all heads of a token, across the tensor ranks. Each rank has the weights of its heads. Collective.

    Shapes:
        input, output [b, n/t, s, d]
        weight, bias  [n d / t]
    """

    def __init__(self, args: ModelArgs, group: Group, num_heads: int) -> None:
        super().__init__()
        self.epsilon, self.is_offset, self.group = args.layernorm_epsilon, args.layernorm_1p, group
        self.is_centred = args.normalization == "LayerNorm"
        self.size = num_heads * args.kv_hidden_size
        local_size = divide("the heads of a norm", num_heads, group) * args.kv_hidden_size
        shard = Shard((self.size,), 0, group.rank * local_size, local_size)
        initial_weight = torch.zeros(local_size) if self.is_offset else torch.ones(local_size)
        self.weight = set_shard(nn.Parameter(initial_weight), shard)
        has_bias = self.is_centred and args.norm_bias
        self.bias = set_shard(nn.Parameter(torch.zeros(local_size)), shard) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        upcast = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.is_centred:
            upcast = upcast - self._mean(upcast)
        factor = (self._mean(upcast.square()) + self.epsilon).rsqrt()  # [b, 1, s, 1]
        weight = self._view_by_head(self.weight, x)
        scaled = upcast * factor * (1.0 + weight if self.is_offset else weight)
        return (scaled if self.bias is None else scaled + self._view_by_head(self.bias, x)).to(x.dtype)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over all heads of all ranks, with one all-reduce in forward and one in backward."""
        local_sum = x.sum(dim=(1, 3), keepdim=True)
        return copy_to_tensor_region(reduce_from_tensor_region(local_sum, self.group), self.group) / self.size

    def _view_by_head(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        upcast = vector.to(torch.promote_types(x.dtype, torch.float32))
        return upcast.view(x.shape[1], 1, x.shape[3])  # [n/t, 1, d]
