"""The choice of a ``GradReducer``."""

from __future__ import annotations

from megatron.mpu.groups import SINGLE, Group
from megatron.optim.gradients.all_reduce import AllReduceGradReducer
from megatron.optim.gradients.local import LocalGradReducer
from megatron.optim.gradients.overlapped import OverlappedGradReducer
from megatron.optim.gradients.reduce_scatter import ReduceScatterGradReducer
from megatron.optim.gradients.reducer import GradReducer
from megatron.optim.param_store import ParamStore


def make_reducer(
    store: ParamStore, model: Group = SINGLE, tensor: Group = SINGLE, *, overlaps_sums: bool = False
) -> GradReducer:
    """Return the reducer of gradients for the replicas and the ZeRO stage of ``store``.

    Args:
        model, tensor: the ranks of one replica, and its tensor-parallel ranks.
        overlaps_sums: with ZeRO 0 and 1, reduce during the last backward.
    """
    if store.data_group.size == 1:
        return LocalGradReducer(store, model, tensor)
    if store.zero_stage > 1:
        return ReduceScatterGradReducer(store, model, tensor)
    return (OverlappedGradReducer if overlaps_sums else AllReduceGradReducer)(store, model, tensor)
