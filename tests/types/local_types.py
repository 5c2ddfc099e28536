"""Local SPMD types of this project's tensors: the mesh, the types of parameters and gradients, type comparison.

``spmd_types`` assigns one of four types to a tensor on each axis of the mesh:

| type | values on the ranks of the axis | gradient |
|---|---|---|
| R, replicate | equal | P: each rank has a summand |
| I, invariant | equal | I: complete and equal on every rank |
| V, varying | different | V: of the rank's own values |
| P, partial | summands | R |

Only slow tests import this file, because ``spmd_types`` is optional (extra ``[spmd-types]``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, MeshAxis, P, R, V
from torch.autograd.graph import saved_tensors_hooks

from megatron.mpu.groups import Group
from megatron.mpu.topology import Topology
from tds.param_info import info_of, is_partial, is_tensor_parallel

Types = dict[MeshAxis, Any]
"""The type of a tensor on each axis of the mesh."""

COMPATIBLE = {R: (R, I), I: (R, I), V: (V, R, I), P: (P, V)}
"""Declared type -> types that the body of a function may have computed.

R and I differ only in their gradients. A slice that is selected by the rank has the type of the full tensor, and a sum
of products of shards has the type V, since local types do not record along which dimension a tensor is sharded.
"""


class Mesh:
    """The axes of a grid, derived from its sizes and from the documented order of the ranks, not from its groups.

    The order is pipe, data, context, tensor. The experts of a layer are distributed over consecutive ranks along data
    and context. Every context group and every expert group is a product of axes: with 2 context ranks and experts over
    4 ranks, the axes "data x context 0" and "data x context 1" have 2 ranks each.

    Attributes:
        tensor: the tensor axis.
        data_context: the axes along data and context, without axes of one rank.
        named: all axes of more than one rank by name.
        strides: distance of neighbouring ranks on each axis.
    """

    def __init__(self, topology: Topology) -> None:
        self.tensor = MeshAxis.of(topology.tensor, 1)
        # with unsharded experts, the expert groups begin with the tensor axis
        self._has_unsharded_experts = topology.expert_shards < topology.tensor
        self._is_tensor_expert_axis = self._has_unsharded_experts and topology.expert >= topology.tensor
        expert = max(topology.expert // topology.tensor, 1) if self._has_unsharded_experts else topology.expert
        ends = sorted({1, topology.context, expert, topology.data_context})
        strides = [topology.tensor * start for start in ends[:-1]]
        sizes = [end // start for start, end in itertools.pairwise(ends)]
        self.data_context = [MeshAxis.of(size, stride) for size, stride in zip(sizes, strides, strict=True)]
        self._is_expert_axis = [end <= expert for end in ends[1:]]
        self.named = {f"data x context {idx}": axis for idx, axis in enumerate(self.data_context)}
        if topology.tensor > 1:
            self.named["tensor"] = self.tensor
        self.strides = {self.tensor: 1, **dict(zip(self.data_context, strides, strict=True))}

    def types(self, tensor: Any, data_context: Any, experts: Any = None) -> Types:
        """Return the types on the tensor axis, along data and context, and on the axes of experts if they differ."""
        types = {self.tensor: tensor} if self.tensor.size() > 1 else {}
        for axis, is_expert_axis in zip(self.data_context, self._is_expert_axis, strict=True):
            types[axis] = experts if experts is not None and is_expert_axis else data_context
        return types

    def of_parameter(self, parameter: torch.Tensor) -> Types:
        """Return the types that the metadata of ``parameter`` (``tds.param_info``) declares."""
        is_expert = info_of(parameter).is_expert
        if is_tensor_parallel(parameter):
            tensor = V
        elif is_expert and self._has_unsharded_experts:
            tensor = V if self._is_tensor_expert_axis else R
        else:
            tensor = R if is_partial(parameter) else I
        return self.types(tensor, R, V if is_expert else R)


def axes_of(group: Group | Any) -> list[MeshAxis]:
    """Return the axes of the current mesh that ``group``, or a process group, spans.

    Raises:
        SpmdTypeError: the group is no product of axes.
    """
    handle = group.handle if isinstance(group, Group) else group
    if handle is None:  # a group of one rank
        return []
    span = MeshAxis.of(handle)
    axes = [axis for axis in spmd.current_mesh() or () if axis <= span]
    num_ranks = 1
    for axis in axes:
        num_ranks *= axis.size()
    if num_ranks != span.size():
        raise spmd.SpmdTypeError(f"the ranks of {span} are no product of axes of the mesh")
    return axes


def name_of(axis: MeshAxis) -> str:
    """Return the name of an axis of the current mesh."""
    return next((name for name, named in (spmd.current_mesh_names() or {}).items() if named == axis), repr(axis))


def types_of(tensor: torch.Tensor) -> Types:
    """Return a copy of the types of ``tensor``."""
    return dict(spmd.get_local_type(tensor))


def set_types(tensor: torch.Tensor, types: Types) -> torch.Tensor:
    """Replace the types of ``tensor`` and return it."""
    for axis, new in types.items():
        current = spmd.maybe_get_axis_local_type(tensor, axis)
        if current is None:
            spmd.assert_type(tensor, {axis: new})
        elif current is not new:
            spmd.mutate_type(tensor, axis, src=current, dst=new)
    return tensor


def require(tensor: torch.Tensor, group: Group | Any, allowed: Iterable[Any], what: str) -> list[MeshAxis]:
    """Check the type of ``tensor`` on the axes of ``group`` and return these axes.

    Raises:
        SpmdTypeError: the type on one of the axes is not in ``allowed``.
    """
    axes = axes_of(group)
    for axis in axes:
        actual = spmd.maybe_get_axis_local_type(tensor, axis)
        if actual not in allowed:
            allowed_text = " or ".join(repr(local_type) for local_type in allowed)
            raise spmd.SpmdTypeError(f"{what} must be {allowed_text} on axis {name_of(axis)}, but is {actual!r}")
    return axes


def gradient_types(types: Types) -> Types:
    """Return the types of the gradient of a tensor with ``types``."""
    return {axis: local_type.backward_type() for axis, local_type in types.items()}


def compare(tensor: torch.Tensor, declared: Types, what: str) -> None:
    """Check that the computed types of ``tensor`` are compatible with ``declared``.

    Raises:
        SpmdTypeError: they are not.
    """
    for axis, expected in declared.items():
        actual = spmd.maybe_get_axis_local_type(tensor, axis)
        if actual not in COMPATIBLE[expected]:
            raise spmd.SpmdTypeError(f"{what} must be {expected!r} on axis {name_of(axis)}, but is {actual!r}")


def stand_in(types: Types, requires_grad: bool) -> torch.Tensor:
    """Return a tensor of one element with ``types``."""
    with spmd.no_typecheck():
        tensor = torch.ones((), requires_grad=requires_grad)
    return spmd.assert_type(tensor, types)


def product_types(*factors: torch.Tensor | Types | None) -> Types:
    """Return the types of the product of ``factors``, computed by the package from tensors of one element.

    Args:
        factors: tensors, types of tensors without a gradient, or None.
    """
    stand_ins = []
    for factor in factors:
        if isinstance(factor, torch.Tensor):
            stand_ins.append(stand_in(types_of(factor), factor.requires_grad))
        elif factor is not None:
            stand_ins.append(stand_in(factor, requires_grad=False))
    with saved_tensors_hooks(lambda x: x, lambda x: x):  # a recomputed layer must not count the factors as its own
        return types_of(functools.reduce(torch.mul, stand_ins))
