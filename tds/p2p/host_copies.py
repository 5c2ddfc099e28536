"""A torch.distributed backend for ranks that share a device: gloo with tensor copies in host memory.

NCCL does not support two ranks on one GPU, and gloo does not send device tensors point to point. The backend
"host_copies" runs every operation by gloo on copies of the device tensors. Inputs are copied to the host when the
operation starts, and outputs are copied back in ``wait``. Several ranks on one GPU can therefore compute the results of
any layout. CPU tensors are passed to gloo without a copy.

    tds.p2p.host_copies.register()
    deepspeed.init_distributed(dist_backend="host_copies")

All device tensors are copied, although gloo could all-reduce and broadcast CUDA tensors itself. This keeps a single
code path for every operation and every device type.

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
"""Roles of the first arguments in each process-group method that takes tensors. torch 2.11 and 2.13 differ in some
names."""
_has_logged = False


def register() -> None:
    """Register the backend with torch.

    This is not done on import: once a Python backend is registered, torch sets no default backend for groups with
    several backends, such as "cpu:gloo,npu:hccl".
    """
    dist.Backend.register_backend(NAME, HostCopies, devices=["cpu", "cuda"])


class CopiedWork(dist.Work):
    """Work handle for running gloo operations.

    Args:
        outputs: pairs (device tensor, host copy), which ``wait`` copies back.
    """

    def __init__(self, works: Sequence[Any], outputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._works, self._outputs = works, outputs
        self._is_done = False

    @torch.no_grad()
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for gloo, then copy the outputs back to the device.

        Raises:
            RuntimeError: gloo's error.
        """
        if self._is_done:  # a second gloo wait would wait for another message
            return True
        for work in self._works:
            work.wait(*([timeout] if timeout else []))
        for tensor, host_copy in self._outputs:
            # ``.data``, because torch's collectives do not increment the version counter either.
            tensor.data.copy_(host_copy)
        self._outputs, self._is_done = (), True
        return True

    def is_completed(self) -> bool:
        return self._is_done or all(work.is_completed() for work in self._works)

    def _source_rank(self) -> int:
        return self._works[0]._source_rank()


class HostCopies(dist.ProcessGroup):
    """A process group over gloo that runs ``OPERATIONS`` on host copies of device tensors."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only constructor a Python subclass may call
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._gloo._set_sequence_number_for_group()
        # A second group for the base class's methods, which would call this class's methods again if run on ``self``.
        self._gloo_group = dist.ProcessGroup(store, rank, size)
        for group in (self, self._gloo_group):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(HOST, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._coalesced_works: list[Any] | None = None

    def getBackendName(self) -> str:  # torch's spelling
        return "gloo"

    def _get_backend(self, device: torch.device) -> Any:
        """Return gloo's backend for any ``device``, because its timeout applies to all operations."""
        return self._gloo

    def barrier(self, opts: Any = None) -> Any:
        opts = dist.BarrierOptions() if opts is None else opts
        opts.device, opts.device_ids = HOST, []
        return self._gloo_group.barrier(opts)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced_works = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """Return one work handle for all operations started since ``_start_coalescing``."""
        works, self._coalesced_works = self._coalesced_works, None
        return CopiedWork(works or (), ())

    def _start(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        roles = OPERATIONS[name]
        with torch.no_grad():
            host_args = [_copy_to_host(value, role, outputs) for value, role in zip(args, roles, strict=False)]
        work = CopiedWork([getattr(self._gloo_group, name)(*host_args, *args[len(roles) :], **options)], outputs)
        if self._coalesced_works is not None:
            self._coalesced_works.append(work)
        return work


def _copy_to_host(value: Any, role: str, outputs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Replace the device tensors in ``value``, a tensor or nested lists of tensors, by host copies.

    Args:
        role: IN, OUT or BOTH.
        outputs: receives (device tensor, host copy) for each output.
    """
    if not isinstance(value, torch.Tensor):
        return [_copy_to_host(element, role, outputs) for element in value]
    if is_host(value.device):
        return value
    _log_once(value.device)
    host_copy = torch.empty(value.shape, dtype=value.dtype, device=HOST)
    if role != OUT:
        host_copy.copy_(value)
    if role != IN:
        outputs.append((value, host_copy))
    return host_copy


def _log_once(device: torch.device) -> None:
    global _has_logged
    if not _has_logged and dist.get_rank() == 0:
        log_rank_0(
            f"{device.type} tensors are copied through the host and sent by gloo ({NAME}): slow, for tests of results"
        )
    _has_logged = True


def _make_operation(name: str) -> Callable[..., Any]:
    def start(self: HostCopies, *args: Any, **options: Any) -> Any:
        return self._start(name, args, options)

    return start


for _name in OPERATIONS:
    setattr(HostCopies, _name, _make_operation(_name))
