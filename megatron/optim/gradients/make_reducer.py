"""make_reducer: the choice of a ``GradReducer``."""

from __future__ import annotations

from megatron.mpu.groups import SINGLE, Group
from megatron.optim.gradients.all_reduce import AllReduceGradReducer
from megatron.optim.gradients.local import LocalGradReducer
from megatron.optim.gradients.overlapped import OverlappedGradReducer
from megatron.optim.gradients.reduce_scatter import ReduceScatterGradReducer
from megatron.optim.gradients.reducer import GradReducer
from megatron.optim.param_store import ParamStore


def make_reducer(
    store: ParamStore,
    model: Group = SINGLE,
    tensor: Group = SINGLE,
    *,
    overlap_grad_reduce: bool = False,
    has_pipeline: bool = False,
) -> GradReducer:
    """Build the ``GradReducer`` that fits the replicas and the ZeRO stage of ``store``.

    Args:
        model, tensor: model-parallel group (one replica), and tensor-parallel group.
        overlap_grad_reduce: with ZeRO 0 and 1, all-reduce gradients while the last backward runs.
        has_pipeline: the pipeline engine starts the reductions, with or without overlap.
    """
    if store.data_group.size == 1:
        return LocalGradReducer(store, model, tensor)
    if store.zero_stage > 1:
        return ReduceScatterGradReducer(store, model, tensor, has_pipeline=has_pipeline)
    if overlap_grad_reduce and not has_pipeline:
        return OverlappedGradReducer(store, model, tensor)
    return AllReduceGradReducer(store, model, tensor)
