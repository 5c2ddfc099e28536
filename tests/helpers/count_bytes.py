"""Count the bytes that autograd saves and that context-parallel collectives send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megatron.models.common import context_attention
from megatron.mpu import context_parallel


@contextmanager
def bytes_kept(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Yield address -> bytes of each storage that autograd saves in the block, without the weights of ``model``."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved_bytes: dict[int, int] = {}
    saved_tensors: list[torch.Tensor] = []  # prevents reuse of an address

    def keep(x: torch.Tensor) -> torch.Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in weights:
            saved_bytes[memory.data_ptr()] = memory.nbytes()
            saved_tensors.append(x)
        return x

    pack = context_attention._KeptAsPart.pack

    def pack_part(self: Any, x: torch.Tensor) -> Any:
        packed = pack(self, x)
        keep(packed if isinstance(packed, torch.Tensor) else self._part)
        return packed

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with hooks, patch.object(context_attention._KeptAsPart, "pack", pack_part):
        yield saved_bytes


@contextmanager
def bytes_sent(size: int, sent: list[float] | None = None) -> Iterator[list[float]]:
    """Yield a list that receives the bytes sent by each collective over ``size`` context ranks in the block.

    Args:
        sent: list to extend; None for a new one.
    """
    log = [] if sent is None else sent

    def counting(call: Callable[..., Any], number: int) -> Callable[..., Any]:
        def counted(*tensors: torch.Tensor, **how: Any) -> Any:
            log.append(tensors[number].nbytes * (size - 1) / size)
            return call(*tensors, **how)

        return counted

    with ExitStack() as stack:
        for module, name, number in (
            (context_parallel, "all_gather_single", 0), (context_parallel, "reduce_scatter_single", 1),
            (context_parallel.dist, "all_to_all_single", 0),
        ):  # fmt: skip
            stack.enter_context(patch.object(module, name, counting(getattr(module, name), number)))
        yield log
