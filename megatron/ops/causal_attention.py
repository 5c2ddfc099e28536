"""Causal self-attention on a CPU, by blocks of queries: what lies in the future is not computed.

Some heads at a time are copied, each together (``causal_blocks``): products of strided rows take a fifth longer. A
block of their queries is a product with the keys up to its own end, a softmax in place and a product with the values;
backward makes the probabilities once more, for reading them from memory would take as long. Nothing of [s, s] is kept,
and the gradients of query, key and value are written where the layer's product reads them, one beside the other.

It is an operator (``torch.library``), one node to ``--compile``. In fp32 ``causal_kernel`` takes its place, where it
can be built. torch's own kernel, which every other case takes, goes over whole rows of the scores in its backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from megatron.ops import causal_kernel
from megatron.ops.attention import Drop, attention
from megatron.ops.biased_attention import is_blocked
from megatron.ops.causal_blocks import Room, RoomOfBackward, put_product, rooms

_softmax_backward = torch.ops.aten._softmax_backward_data.out


def causal_self_attention(packed: torch.Tensor, *, dropout: float = 0.0, drop: Drop | None = None) -> torch.Tensor:
    """Return ``softmax(q k^T d^-0.5) v`` where no query sees a later key.

    Shapes:
        packed [s, b, a/t, 3, d]: query, key and value of each head
        output [b, a/t, s, d]

    Args:
        drop: drops probabilities in place of ``dropout``; as ``megatron.ops.attention``, which does that.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.1; Dao et al. 2022, "FlashAttention", makes
    probabilities again in backward.
    """
    if is_blocked(packed) and not dropout and drop is None:
        context: torch.Tensor = causal_kernel.forward(packed)[0] if causal_kernel.takes(packed) else _forward(packed)
        return context.permute(1, 2, 0, 3)
    return attention(*heads_of(packed), dropout=dropout, drop=drop)


def heads_of(packed: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of each head.

    Shapes:
        packed [s, b, a/t, parts, d]
        output parts x [b, a/t, s, d]
    """
    return [part.permute(1, 2, 0, 3) for part in packed.unbind(3)]


@torch.library.custom_op("megatron_tds::causal_self_attention", mutates_args=())
def _forward(packed: torch.Tensor) -> torch.Tensor:
    s, b, a, _, d = packed.shape
    parts = _by_part(packed)
    context = packed.new_empty(s, b, a, d)
    rows = context.flatten(1, 2)  # [s, n, d]
    for heads, room in rooms(Room, packed):
        room.together.copy_(parts[:, heads])
        found = rows[:, heads]
        for block in room.blocks:
            block.make_probabilities()
            torch.bmm(block.scores, block.values, out=block.product)
            found[block.own].copy_(block.product.transpose(0, 1))
    return context


@torch.library.custom_op("megatron_tds::causal_self_attention_backward", mutates_args=())
def _backward(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``packed``, like it in shape; that of the context is [s, b, a, d]."""
    parts, of_context = _by_part(packed), grad.flatten(1, 2).transpose(0, 1)
    found = torch.empty_like(packed, memory_format=torch.contiguous_format)
    of_parts = _by_part(found)
    for heads, room in rooms(RoomOfBackward, packed):
        room.together.copy_(parts[:, heads])
        room.given.copy_(of_context[heads])
        of_query, of_key, of_value = of_parts[:, heads]
        for block in room.blocks:
            block.make_probabilities()
            block.of_value.add(block.scores.transpose(1, 2), block.given)
            torch.bmm(block.given, block.values.transpose(1, 2), out=block.second)  # gradients of the probabilities
            _softmax_backward(block.second, block.scores, -1, packed.dtype, grad_input=block.second)  # of the scores
            block.of_key.add(block.second.transpose(1, 2), block.query)
            put_product(block.product, block.second, block.keys, room.scale)
            of_query[:, block.own].copy_(block.product)
        of_key.copy_(room.of_key)
        of_value.copy_(room.of_value)
    return found


def _by_part(packed: torch.Tensor) -> torch.Tensor:
    """Return a view [3, n, s, d] of [s, b, a, 3, d], of n = b a heads."""
    return packed.flatten(1, 2).permute(2, 1, 0, 3)


@_forward.register_fake
def _(packed: torch.Tensor) -> torch.Tensor:
    s, b, a, _, d = packed.shape
    return packed.new_empty(s, b, a, d)


@_backward.register_fake
def _(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return _backward(grad, *ctx.saved_tensors)


_forward.register_autograd(_gradient, setup_context=_setup_context)


@register_flop_formula(torch.ops.megatron_tds.causal_self_attention)
def _flops(packed: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * causal_kernel.products(packed)


@register_flop_formula(torch.ops.megatron_tds.causal_self_attention_backward)
def _flops_of_backward(_: torch.Size, packed: torch.Size, *__: Any, **___: Any) -> int:
    return 5 * causal_kernel.products(packed)
