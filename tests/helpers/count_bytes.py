"""Count the bytes that autograd saves and that context-parallel collectives send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megatron.models.common import context_attention, latent_context_attention
from megatron.mpu import context_parallel


@contextmanager
def count_saved_bytes(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Yield address -> bytes of each storage that autograd saves in the block, without the weights of ``model``."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved_bytes: dict[int, int] = {}
    saved_tensors: list[torch.Tensor] = []  # prevents reuse of an address

    def record_saved(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
            saved_tensors.append(x)
        return x

    pack = context_attention._SavedShardHooks.pack

    def pack_shard(self: Any, x: torch.Tensor) -> Any:
        packed = pack(self, x)
        record_saved(packed if isinstance(packed, torch.Tensor) else self._shard)
        return packed

    pack_latents = latent_context_attention._RebuildHooks.pack

    def pack_and_record(self: Any, x: torch.Tensor) -> Any:
        packed = pack_latents(self, x)
        return record_saved(packed) if isinstance(packed, torch.Tensor) else packed

    hooks = torch.autograd.graph.saved_tensors_hooks(record_saved, lambda x: x)
    with (
        hooks,
        patch.object(context_attention._SavedShardHooks, "pack", pack_shard),
        patch.object(latent_context_attention._RebuildHooks, "pack", pack_and_record),
    ):
        yield saved_bytes


@contextmanager
def count_sent_bytes(num_ranks: int, sent: list[float] | None = None) -> Iterator[list[float]]:
    """Yield a list that receives the bytes sent by each collective over ``num_ranks`` context ranks in the block.

    Args:
        sent: list to extend; None for a new one.
    """
    log = [] if sent is None else sent

    def count_call(call: Callable[..., Any], arg_idx: int) -> Callable[..., Any]:
        def wrapper(*tensors: torch.Tensor, **kwargs: Any) -> Any:
            log.append(tensors[arg_idx].nbytes * (num_ranks - 1) / num_ranks)
            return call(*tensors, **kwargs)

        return wrapper

    with ExitStack() as stack:
        for module, name, arg_idx in (
            (context_parallel, "all_gather_single", 0), (context_parallel, "reduce_scatter_single", 1),
            (context_parallel.dist, "all_to_all_single", 0),
        ):  # fmt: skip
            stack.enter_context(patch.object(module, name, count_call(getattr(module, name), arg_idx)))
        yield log
