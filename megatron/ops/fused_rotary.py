"""Rotary positions of queries and keys by a Triton kernel, which can split packed queries, keys and values as well."""

from __future__ import annotations

from typing import Any

import torch

from megatron import triton_launch

KERNEL = "megatron.ops.rotary_kernels:rotary_kernel"
MAX_BLOCK = 2048
"""Maximum number of pairs that a program loads at once."""


def split_and_rotate(
    groups: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split packed heads into rotated queries, rotated keys, and values, which are a view of ``groups``.

    Backward writes the gradient for ``groups`` in one pass over the three gradients.

    Shapes:
        groups       [s, b, g/t, a/g + 2, d]: a group's queries, key and value
        cosine, sine [s, d/2] or [b, 1, s, d/2]; with fewer columns only the first pairs of a head are rotated
        output       [b, a/t, s, d], 2 x [b, g/t, s, d]
    """
    query, key, value = _SplitAndRotate.apply(groups, cosine, sine)
    return query, key, value


def rotate(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys.

    Shapes:
        query, output [b, a/t, s, d]
        key, output   [b, g/t, s, d]
        cosine, sine  as for ``split_and_rotate``
    """
    rotated_query, rotated_key = _Rotate.apply(query, key, cosine, sine)
    return rotated_query, rotated_key


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> Any:
        ctx.save_for_backward(cosine, sine)
        ctx.shape = groups.shape
        query, key, value = _split_groups(groups)
        outputs = query.new_empty(query.shape), key.new_empty(key.shape)
        _launch((query, key), outputs, cosine, sine, is_inverse=False)
        return *(_heads_first(x) for x in outputs), _heads_first(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        cosine, sine = ctx.saved_tensors
        groups_grad = grads[0].new_empty(ctx.shape)
        num_groups = ctx.shape[2]
        head_grads = tuple(_tokens_first(grad, num_groups) for grad in grads)
        _launch(head_grads, _split_groups(groups_grad), cosine, sine, is_inverse=True)
        return groups_grad, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> Any:
        ctx.save_for_backward(cosine, sine)
        return _rotate_pair(query, key, cosine, sine, is_inverse=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *_rotate_pair(*grads, *ctx.saved_tensors, is_inverse=True), None, None


def _rotate_pair(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, is_inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = tuple(_tokens_first(x, key.shape[1]) for x in (query, key))
    outputs = tuple(x.new_empty(x.shape) for x in inputs)
    _launch(inputs, outputs, cosine, sine, is_inverse=is_inverse)
    return _heads_first(outputs[0]), _heads_first(outputs[1])


# Heads are [s, b, g, heads per group, d] here, with contiguous columns.


def _split_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = groups.split([groups.shape[3] - 2, 1, 1], dim=3)
    return query, key, value


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """View heads as [b, a, s, d]."""
    return x.flatten(2, 3).permute(1, 2, 0, 3)


def _tokens_first(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """View [b, a, s, d] as heads; copy it if its columns are not contiguous."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.permute(2, 0, 1, 3).unflatten(2, (num_groups, -1))


def _launch(
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    cosine: torch.Tensor,
    sine: torch.Tensor,
    *,
    is_inverse: bool,
) -> None:
    """Write rotated queries and keys to ``outputs``; if there are three inputs, also copy the values."""
    query, key, value = inputs if len(inputs) == 3 else (*inputs, inputs[1])
    query_out, key_out, value_out = outputs if len(outputs) == 3 else (*outputs, outputs[1])
    length, batch_size, num_groups, heads_per_group, head_size = query.shape
    if not query.numel():
        return
    num_pairs = cosine.shape[-1]
    block_pairs = triton_launch.power_of_two(num_pairs)
    block_rest = triton_launch.power_of_two(max(1, head_size - 2 * num_pairs))
    max_heads = max(1, MAX_BLOCK // max(block_pairs, block_rest // 2))
    cosine, sine = cosine.contiguous(), sine.contiguous()
    is_shared = cosine.dim() == 2 or len(cosine) == 1  # all samples have the same positions
    triton_launch.launch(
        KERNEL, (length * batch_size,), query, key, value, query_out, key_out, value_out, cosine, sine, batch_size,
        *query.stride()[:4], *key.stride()[:3], *value.stride()[:3], *query_out.stride()[:4], *key_out.stride()[:3],
        *value_out.stride()[:3], num_pairs, 0 if is_shared else length * num_pairs, writes=outputs,
        NUM_GROUPS=num_groups, HEADS_PER_GROUP=heads_per_group, HEAD_SIZE=head_size, NUM_PAIRS=num_pairs,
        IS_INVERSE=is_inverse, HAS_VALUE=len(inputs) == 3,
        BLOCK_HEADS=min(max_heads, triton_launch.power_of_two(num_groups * heads_per_group)),
        BLOCK_GROUPS=min(max_heads, triton_launch.power_of_two(num_groups)), BLOCK_PAIRS=block_pairs,
        BLOCK_REST=block_rest, BLOCK_COLUMNS=triton_launch.power_of_two(head_size),
    )  # fmt: skip
