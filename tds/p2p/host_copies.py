"""A backend of torch.distributed for ranks that share a device: gloo, with copies of the tensors in the host's memory.

NCCL refuses two ranks on one GPU, and gloo sends no tensor of a device from rank to rank. In the backend "host_copies"
whatever a group is asked to do with such tensors is done by gloo with copies of them: what goes out is copied when the
operation starts, what comes in is copied back when it is waited for. So several ranks on one GPU show the numbers of
any layout. Tensors of the host go to gloo as they are.

    tds.p2p.host_copies.register()
    deepspeed.init_distributed(dist_backend="host_copies")

Copied is all that lies on a device, though gloo could sum and broadcast tensors of a GPU by itself: there is one way,
the same for every operation and every kind of device.

| operations | copied to the host | copied back |
|---|---|---|
| all-reduces, broadcast, reduce | the tensors | the same |
| all-gathers, reduce-scatters, all-to-alls, gather, scatter | inputs | outputs |
| send | the tensors | none |
| recv | none | the tensors |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tds.device import is_host
from tds.log import log_rank_0

NAME = "host_copies"
HOST = torch.device("cpu")
IN, OUT, BOTH = "in", "out", "both"
_OUT_AND_IN = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "alltoall", "alltoall_base", "gather",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    "scatter",
)  # fmt: skip
OPERATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce"), (BOTH,)),
    **dict.fromkeys(_OUT_AND_IN, (OUT, IN)),
    "send": (IN,),
    "recv": (OUT,),
    "recv_anysource": (OUT,),
}
"""Methods of a process group with tensors: what its first arguments are. torch 2.11 and 2.13 differ in some names."""
_has_announced = False


def register() -> None:
    """Let torch know the backend by its name.

    Not done on import: once torch knows of any backend in Python, it leaves groups of several others, such as
    "cpu:gloo,npu:hccl", without a default one.
    """
    dist.Backend.register_backend(NAME, HostCopies, devices=["cpu", "cuda"])


class Copied(dist.Work):
    """Operations on their way over gloo.

    Args:
        back: pairs (tensor of a device, its copy in the host's memory) of what comes in.
    """

    def __init__(self, works: Sequence[Any], back: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._works, self._back = works, back
        self._is_done = False

    @torch.no_grad()
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for gloo, then put what came in where it belongs.

        Raises:
            RuntimeError: gloo's own.
        """
        if self._is_done:  # gloo would wait for another message
            return True
        for work in self._works:
            work.wait(*([timeout] if timeout else []))
        for tensor, copy in self._back:
            tensor.data.copy_(copy)  # not ``tensor``: torch's own operations count no change in place either
        self._back, self._is_done = (), True
        return True

    def is_completed(self) -> bool:
        return self._is_done or all(work.is_completed() for work in self._works)

    def _source_rank(self) -> int:
        return self._works[0]._source_rank()


class HostCopies(dist.ProcessGroup):
    """A process group over gloo that does ``OPERATIONS`` with copies of what lies on a device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only one that a class of Python may call
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._gloo._set_sequence_number_for_group()
        self._plain = dist.ProcessGroup(store, rank, size)  # calls of the base class would come back to this one
        for group in (self, self._plain):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(HOST, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._together: list[Any] | None = None

    def getBackendName(self) -> str:  # torch's spelling
        return "gloo"

    def _get_backend(self, device: torch.device) -> Any:
        """Return gloo, whose time limit counts, for any device."""
        return self._gloo

    def barrier(self, opts: Any = None) -> Any:
        opts = dist.BarrierOptions() if opts is None else opts
        opts.device, opts.device_ids = HOST, []
        return self._plain.barrier(opts)

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """Return all that was started since ``_start_coalescing`` as one work."""
        works, self._together = self._together, None
        return Copied(works or (), ())

    def _start(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        back: list[tuple[torch.Tensor, torch.Tensor]] = []
        roles = OPERATIONS[name]
        with torch.no_grad():
            handed = [_handed(value, role, back) for value, role in zip(args, roles, strict=False)]
        work = Copied([getattr(self._plain, name)(*handed, *args[len(roles) :], **options)], back)
        if self._together is not None:
            self._together.append(work)
        return work


def _handed(value: Any, role: str, back: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return ``value``, a tensor or lists of them, with copies in place of tensors of a device; note what comes in."""
    if not isinstance(value, torch.Tensor):
        return [_handed(one, role, back) for one in value]
    if is_host(value.device):
        return value
    _announce(value.device)
    copy = torch.empty(value.shape, dtype=value.dtype, device=HOST)
    if role != OUT:
        copy.copy_(value)
    if role != IN:
        back.append((value, copy))
    return copy


def _announce(device: torch.device) -> None:
    """Say, once in a job, what this backend is for."""
    global _has_announced
    if not _has_announced and dist.get_rank() == 0:
        log_rank_0(f"{device.type} tensors go through the host, by gloo ({NAME}): for numbers only, not for speed")
    _has_announced = True


def _operation(name: str) -> Callable[..., Any]:
    def start(self: HostCopies, *args: Any, **options: Any) -> Any:
        return self._start(name, args, options)

    return start


for _name in OPERATIONS:
    setattr(HostCopies, _name, _operation(_name))
