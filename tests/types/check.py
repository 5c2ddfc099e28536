"""check_decoder: type-check forward, backward and the reduction of gradients of a decoder on a grid of fake ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import spmd_types as spmd
import spmd_types.checker
import torch
from spmd_types import P, R, V

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.mpu.groups import Grid
from megatron.mpu.topology import Topology
from megatron.ops import positions
from megatron.optim.gradients import all_reduce, sum_group
from megatron.optim.gradients.reducer import GradReducer
from megatron.optim.param_store import ParamStore
from tests.types import typed_functions
from tests.types.collectives import typed_collectives
from tests.types.fake_world import fake_grid, make_parallel_context
from tests.types.local_types import Mesh, gradient_types, name_of, require, set_types, stand_in, types_of
from tests.types.memory import typed_memory

BATCH, LENGTH = 2, 12
"""Samples of a rank, and tokens per sample on all context ranks."""


def check_decoder(
    args: ModelArgs, topology: Topology, *, rank: int = 0, has_documents: bool = False, **options: Any
) -> None:
    """Type-check one training step of a decoder on ``rank``.

    1. Forward: every operation. Each call of a function in ``signatures`` also checks the bodies of its forward and
       backward.
    2. The loss: complete on every tensor rank, and a summand along data and context.
    3. Backward by autograd, without types: every parameter gets a gradient. Its type follows from the parameter's.
    4. The sums of gradients in the optimizer: each gradient is complete afterwards, and none is summed twice.

    Args:
        has_documents: samples consist of several documents.
        options: fields of ``ParallelContext``, such as sequence_parallel, cp_comm_type.

    Raises:
        SpmdTypeError: the types of an operation do not fit.
        AssertionError: a parameter has no gradient.
    """
    positions._compute_table.cache_clear()  # tables that earlier tests cached in this process have no types
    with fake_grid(topology, rank) as grid, type_session(Mesh(topology)) as mesh:
        with spmd.no_typecheck():
            model = DecoderModel(args, make_parallel_context(grid, **options))
            for parameter in model.parameters():
                parameter.data = torch.full_like(parameter, 0.01)
            batch = make_batch(args, topology, has_documents)
        set_initial_types(model, mesh)
        for tensor in batch.values():
            spmd.assert_type(tensor, mesh.types(R, V))
        with patch.object(typed_functions, "is_active", True):
            losses = model(**batch)
        total = losses["loss"][0] if isinstance(losses, dict) else losses[0]
        check_loss(total, mesh)
        with spmd.no_typecheck():
            total.backward()
        check_gradients(model, grid, mesh)


@contextmanager
def type_session(mesh: Mesh) -> Iterator[Mesh]:
    """Check the types of all operations in the block on the axes of ``mesh``."""
    with ExitStack() as stack:
        stack.enter_context(typed_collectives())
        stack.enter_context(typed_memory())
        stack.enter_context(spmd.set_current_mesh(mesh.named))
        stack.enter_context(spmd_types.checker.typecheck())
        yield mesh


def make_batch(args: ModelArgs, topology: Topology, has_documents: bool) -> dict[str, torch.Tensor]:
    """Return random tokens of one rank."""
    generator = torch.Generator().manual_seed(0)
    shape = BATCH, LENGTH // topology.context
    batch = {name: torch.randint(0, args.vocab_size, shape, generator=generator) for name in ("tokens", "labels")}
    batch["loss_mask"] = torch.ones(shape)
    if args.position_embedding_type != "alibi":
        batch["position_ids"] = torch.arange(shape[1]).repeat(BATCH, 1)
    if has_documents:
        batch["segment_ids"] = (torch.arange(shape[1]) // 3).repeat(BATCH, 1)
    return batch


def set_initial_types(model: torch.nn.Module, mesh: Mesh) -> None:
    """Set the types of parameters from their metadata; other tensors of the modules are equal on every rank."""
    for parameter in model.parameters():
        spmd.assert_type(parameter, mesh.of_parameter(parameter))
    for module in model.modules():
        for tensor in [*module._buffers.values(), *vars(module).values()]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter):
                spmd.assert_type(tensor, mesh.types(R, R))


def check_loss(total: torch.Tensor, mesh: Mesh) -> None:
    """Check that ``total`` is complete on every tensor rank; along data and context it is a summand.

    Raises:
        SpmdTypeError: it is not. Backward of a loss, whose gradient is 1 on every rank, requires I or P.
    """
    for axis in mesh.data_context:
        spmd.mutate_type(total, axis, src=V, dst=P)
    stand_in(types_of(total), requires_grad=True).backward()


def check_gradients(model: torch.nn.Module, grid: Grid, mesh: Mesh) -> None:
    """Check that the optimizer's sums complete every gradient, and that none is summed twice.

    Raises:
        SpmdTypeError: a gradient remains partial, or a complete gradient is summed.
        AssertionError: a parameter has no gradient.
    """
    store = ParamStore(data=grid.data_context, expert_data=grid.expert_data, expert_tensor=grid.expert_tensor)
    reducer = _TypedReducer(store, grid.model, grid.tensor)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        assert parameter.grad is not None, f"{name} has no gradient"
        set_types(parameter.grad, gradient_types(mesh.of_parameter(parameter)))
        store.main_params[parameter] = parameter
        reducer.register(parameter)
    with (
        patch.object(all_reduce, "reduce_gradients", _sum_types),
        patch.object(sum_group, "reduce_gradients", _sum_types),
    ):
        reducer.finish(1.0)
        reducer.sum_over_groups()
    for name, parameter in trained:
        for axis, local_type in types_of(reducer.grad(parameter)).items():
            if local_type is P:
                raise spmd.SpmdTypeError(f"the gradient of {name} remains a partial sum on axis {name_of(axis)}")


def _sum_types(gradients: Sequence[torch.Tensor], group: Any, scale: float = 1.0) -> None:
    """Replace ``tds.gradients.reduce_gradients``: each gradient must be P on the axes of the group and becomes R."""
    for gradient in gradients:
        set_types(gradient, dict.fromkeys(require(gradient, group, (P,), "a gradient that is summed"), R))


class _TypedReducer(all_reduce.AllReduceGradReducer):
    """The reducer of ZeRO 0 and 1, applied to the gradients of autograd instead of its buffer."""

    def register(self, parameter: torch.nn.Parameter) -> None:
        GradReducer.register(self, parameter)

    def grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad
