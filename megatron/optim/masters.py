"""The tensors that the inner optimizer updates: the parameters themselves, wider copies of them, or parts of either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import set_shard, shard_of
from megatron.optim.cuts import Cut, cut_of
from megatron.optim.gather import Piece, buckets, gather

WIDE = (torch.float32, torch.float64)
"""Types in which a parameter is its own master."""


class Masters:
    """The masters of this replica's parameters.

    | precision | ZeRO 0 | ZeRO 1 |
    |---|---|---|
    | fp32, fp64 | the parameter | a view of the replica's part of it |
    | bf16, fp16 | a copy in fp32 | a copy in fp32 of the replica's part |

    Args:
        data: the replicas.
        is_cut: ZeRO 1; with one replica there is nothing to cut.
    """

    def __init__(self, data: Group = SINGLE, *, is_cut: bool = False) -> None:
        self.data_group = data
        self.of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._is_cut = is_cut and data.size > 1
        self._cuts: dict[torch.nn.Parameter, Cut] = {}

    def adopt(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
        """Let ``parameter`` have ``dtype`` from now on and return its master."""
        is_wide = dtype in WIDE
        if is_wide:
            parameter.data = parameter.data.to(dtype)
        cut = cut_of(parameter, self.data_group.size) if self._is_cut else None
        self.of[parameter] = parameter
        if cut is not None or not is_wide:
            self.of[parameter] = self._make(parameter, cut, is_wide)
        parameter.data = parameter.data.to(dtype)
        return self.of[parameter]

    def is_cut(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether each replica has a part of ``parameter`` only."""
        return parameter in self._cuts

    def part(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return what lies in ``whole``, of the shape of ``parameter``, where its master lies in it; in one run."""
        cut = self._cuts.get(parameter)
        return whole if cut is None else cut.part(whole, self.data_group.rank).contiguous()

    @torch.no_grad()
    def to_parameters(self) -> None:
        """Round the masters into the parameters. Collective over the replicas where masters are cut."""
        pairs = [(p, m) for p, m in self.of.items() if p is not m and p not in self._cuts]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])
        for bucket in buckets(Piece(p.detach(), self.of[p].detach(), cut) for p, cut in self._cuts.items()):
            gather(bucket, self.data_group)

    @torch.no_grad()
    def from_parameters(self) -> None:
        """Let each master hold what its part of the parameter holds."""
        for parameter, master in self.of.items():
            if parameter is not master:
                master.copy_(self.part(parameter, parameter))

    @contextmanager
    def contiguous(self) -> Iterator[None]:
        """Let every master lie in one run of memory: fused optimizers take for granted that it does."""
        strided = [(m, m.data) for m in self.of.values() if not m.is_contiguous()] if self._is_cut else []
        for master, _ in strided:
            master.data = master.data.contiguous()
        try:
            yield
        finally:
            for master, view in strided:
                view.copy_(master.data)
                master.data = view

    def _make(self, parameter: torch.nn.Parameter, cut: Cut | None, is_wide: bool) -> torch.nn.Parameter:
        shard, part = shard_of(parameter), parameter.detach()
        if cut is not None:
            self._cuts[parameter] = cut
            shard, part = cut.shard(shard, self.data_group.rank), cut.part(part, self.data_group.rank)
        if not is_wide:
            part = part.float().clone()
        return set_shard(torch.nn.Parameter(part), shard)
