"""Signatures: the local types of the inputs and outputs of functions that communicate, declared outside of the product.

On the axes of the group that a function gets:

| function | input | output |
|---|---|---|
| ``copy_to_tensor_region`` | I | R |
| ``reduce_from_tensor_region`` | P | I |
| ``scatter_to_tensor_region``, ``scatter_to_sequence_region`` | I | V |
| ``gather_from_tensor_region`` | V | I |
| ``gather_from_sequence_region`` | V | R |
| ``reduce_scatter_to_sequence_region`` | P | V |
| ``gather_from_context_region`` | V | R |
| ``scatter_heads_gather_sequence`` and its inverse, ``Exchange.dispatch``, ``Exchange.combine`` | V | V |
| column-parallel products | I, or V with sequence parallelism; weights V | V |
| the same with the weights of shared groups of Mamba-2 | I, or V with sequence parallelism; weights R | R |
| vocabulary-parallel cross-entropy | logits V | I |
| cross-entropy of a product | hidden states R, table V | I |

A V is accepted for a P: local types do not record that a sum of products of shards is a partial sum. On all other axes,
the output has the types of a product of the inputs. The types of gradients follow from these (``gradient_types``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
from spmd_types import I, P, R, V

from megatron.models.common import language_model, mtp, norms, router
from megatron.mpu import context_parallel, cross_entropy, expert_parallel, layers, linear_cross_entropy, mappings
from megatron.mpu.groups import Group
from megatron.ops import biased_attention, gated_activation, grouped, positions, xielu
from tests.types.local_types import Types, axes_of, gradient_types, name_of, product_types, require, stand_in, types_of

LOCAL_FUNCTIONS = (
    biased_attention._ExpandBias,
    cross_entropy._CrossEntropy,
    gated_activation._Split,
    grouped._AddGroupedBias,
    grouped._Combine,
    grouped._Dispatch,
    grouped._GroupedLinear,
    language_model._SharedTable,
    norms._RMSNorm,
    positions._ApplyRotary,
    xielu._XIELU,
)
"""Functions without communication, to which the rules of an ordinary operation apply."""


class Signature(NamedTuple):
    """The types of one call.

    Args:
        inputs: types of each positional argument within the function; None for arguments that are no typed tensors.
        outputs: types of each output.
        grads: types of the gradient of each output within backward; None: the types that follow from the outputs.
    """

    inputs: list[Types | None]
    outputs: list[Types]
    grads: list[Types] | None = None


def transition(allowed: Sequence[Any], result: Any) -> Callable[..., Signature]:
    """Return the signature of a function of (tensor, group or exchange, ...) with one output.

    Args:
        allowed: types of the tensor on the axes of the group; the body gets the first one.
        result: type of the output on these axes.
    """

    def signature(x: torch.Tensor, group: Any, *_: Any) -> Signature:
        axes = require(x, group.group if isinstance(group, expert_parallel.Exchange) else group, allowed, "the input")
        inputs = {**types_of(x), **dict.fromkeys(axes, allowed[0])}
        return Signature([inputs], [{**inputs, **dict.fromkeys(axes, result)}])

    return signature


def column_products(x: torch.Tensor, group: Group, sequence_parallel: bool, *leaves: torch.Tensor | None) -> Signature:
    """Return the signature of ``_ColumnProducts``: entry of the tensor-parallel region, then a product per weight.

    The backward adds the gradients of all products before it sums them over the ranks. A gradient of an R, which is a
    P, is a V here, because the package does not add a P to the Vs of shards.
    """
    axes = require(x, group, (V,) if sequence_parallel else (I,), "the input of a column-parallel layer")
    for leaf in leaves:
        if leaf is not None:
            require(leaf, group, (V, R), "a weight of a column-parallel layer")
    entered = stand_in({**types_of(x), **dict.fromkeys(axes, R)}, True)
    num_weights = len(leaves) // 2
    outputs = [product_types(entered, *pair) for pair in zip(leaves[:num_weights], leaves[num_weights:], strict=True)]
    inputs = [types_of(x), None, None, *(None if leaf is None else types_of(leaf) for leaf in leaves)]
    return Signature(inputs, outputs, [{**gradient_types(types), **dict.fromkeys(axes, V)} for types in outputs])


def sharded_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, start: int, group: Group, z_loss: float
) -> Signature:
    """Return the signature of ``_VocabParallelCrossEntropy``."""
    axes = require(logits, group, (V,), "the logits")
    require(targets, group, (R, I), "the targets")
    losses = {**product_types(logits, targets), **dict.fromkeys(axes, I)}
    inputs = [types_of(logits), types_of(targets), None, None, None]
    return Signature(inputs, [losses, losses] if z_loss else [losses])


def cross_entropy_of_product(x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None, args: Any) -> Signature:
    """Return the signature of ``_LinearCrossEntropy``; targets and weights are in ``args``."""
    axes = require(x, args.group, (R,), "the hidden states")
    require(table, args.group, (V,), "the table")
    require(args.targets, args.group, (R, I), "the targets")
    require(args.weights, args.group, (R, I), "the weights of the tokens")
    total = {**product_types(x, table, args.targets, args.weights), **dict.fromkeys(axes, I)}
    inputs = [types_of(x), types_of(table), None if bias is None else types_of(bias), None]
    return Signature(inputs, [total, total] if args.z_loss else [total])


def attach_loss(x: torch.Tensor, loss: torch.Tensor, *others: Any) -> Signature:
    """Return the signature of a function that returns ``x`` and backpropagates ``loss`` with a gradient of its own.

    This gradient is the same number on every rank, so ``loss`` must be I, or the rank's summand of a loss (P, or V).
    """
    inputs = types_of(loss)
    for axis, local_type in inputs.items():
        if local_type not in (I, V, P):
            raise spmd.SpmdTypeError(f"an attached loss must be I, V or P on axis {name_of(axis)}, but is R")
    summand = {axis: I if local_type is I else P for axis, local_type in inputs.items()}
    return Signature([types_of(x), summand, *(None for _ in others)], [types_of(x)])


def add_losses(loss: torch.Tensor, extra: torch.Tensor) -> Signature:
    """Return the signature of a sum of losses, which must have the same types."""
    types = types_of(loss)
    if types != types_of(extra):
        raise spmd.SpmdTypeError(f"added losses must have the same types, but have {types} and {types_of(extra)}")
    return Signature([types, types], [types])


AUTOGRAD_FUNCTIONS: dict[type[torch.autograd.Function], Callable[..., Signature]] = {
    mappings._Copy: transition((I,), R),
    mappings._Reduce: transition((P, V), I),
    mappings._Scatter: transition((I,), V),
    mappings._Gather: transition((V,), I),
    mappings._GatherRows: transition((V,), R),
    mappings._ReduceScatterRows: transition((P, V), V),
    mappings._ScatterRows: transition((I,), V),
    context_parallel._Gather: transition((V,), R),
    context_parallel._ToHeads: transition((V,), V),
    context_parallel._ToSequence: transition((V,), V),
    expert_parallel._Dispatch: transition((V,), V),
    expert_parallel._Combine: transition((V,), V),
    layers._ColumnProducts: column_products,
    cross_entropy._VocabParallelCrossEntropy: sharded_cross_entropy,
    linear_cross_entropy._LinearCrossEntropy: cross_entropy_of_product,
    router._AttachLoss: attach_loss,
    mtp._AttachLoss: add_losses,
}
"""Autograd function -> signature of a call with its arguments."""


def reduction(x: torch.Tensor, group: Group, op: Any = torch.distributed.ReduceOp.SUM) -> Signature:
    """Return the signature of ``all_reduce``."""
    return transition((P, V) if op == torch.distributed.ReduceOp.SUM else (V, R, I), R)(x, group)


def selection(x: torch.Tensor, group: Group, *_: Any) -> Signature:
    """Return the signature of functions that select the rank's part of a tensor."""
    inputs = types_of(x)
    return Signature([inputs], [{**inputs, **dict.fromkeys(axes_of(group), V)}])


PLAIN_FUNCTIONS: dict[tuple[Any, str], Callable[..., Signature]] = {
    (mappings, "all_reduce"): reduction,
    (mappings, "start_all_reduce"): transition((P, V), R),
    (mappings, "start_all_gather"): transition((V,), R),
    (mappings, "start_reduce_scatter"): transition((P, V), V),
    (mappings, "_all_gather"): transition((V,), R),
    (mappings, "_all_gather_rows"): transition((V,), R),
    (mappings, "_reduce_scatter_rows"): transition((P, V), V),
    (mappings, "_local_slice"): selection,
    (context_parallel, "gather_rows"): transition((V,), R),
    (context_parallel, "split_along_context"): selection,
}
"""(Module, name) of a function without a gradient -> signature of a call with its arguments."""
