"""The tensors that the inner optimizer updates: the parameters themselves, wider copies of them, or parts of either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import set_shard, shard_of
from megatron.optim.arrival import Arrival
from megatron.optim.cuts import Cut, cut_of
from megatron.optim.gather import Piece, buckets, gather
from megatron.optim.host import NOTHING, Offload

WIDE = (torch.float32, torch.float64)
"""Types in which a parameter is its own master."""


class Masters:
    """The masters of this replica's parameters.

    | precision | ZeRO 0 | ZeRO 1, 2 | ZeRO 3 |
    |---|---|---|---|
    | fp32, fp64 | the parameter | a view of the replica's part of it | the part |
    | bf16, fp16 | a copy in fp32 | a copy in fp32 of the replica's part | a copy in fp32 of the part |

    With offload of the optimizer each is a copy on the CPU. ``homes`` are the parts of the weights that ZeRO 3 keeps.

    Args:
        data: the replicas.
        zero_stage: from 1 on each replica has parts; with one replica there is nothing to cut, unless weights are
            offloaded.
        arrival: with ZeRO 3, how weights come that are not where they are trained yet; None: all are there.
    """

    def __init__(
        self,
        data: Group = SINGLE,
        *,
        zero_stage: int = 0,
        offload: Offload = NOTHING,
        arrival: Arrival | None = None,
    ) -> None:
        self.data_group = data
        self.offload = offload
        self.of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.homes: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._is_cut = zero_stage > 0 and (data.size > 1 or offload.parameters)
        self._has_homes = zero_stage == 3 and self._is_cut
        self._cuts: dict[torch.nn.Parameter, Cut] = {}
        self._arrival = arrival if self._has_homes else None
        self._are_away = self._arrival is not None

    def adopt(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
        """Let ``parameter`` have ``dtype`` from now on and return its master."""
        is_wide = dtype in WIDE
        cut = cut_of(parameter, self.data_group.size) if self._is_cut else None
        if self._arrival is not None:
            self._arrival.come(parameter, is_cut=cut is not None)
        if is_wide:
            parameter.data = parameter.data.to(dtype)
        self.of[parameter] = parameter
        if cut is not None or not is_wide or self.offload.optimizer:
            self.of[parameter] = self._make(parameter, cut, is_wide)
        parameter.data = parameter.data.to(dtype)
        if cut is not None and self._has_homes:
            self.homes[parameter] = self._home(parameter, cut, is_wide)
            if self._arrival is not None:
                self._arrival.leave(parameter)
        return self.of[parameter]

    def is_cut(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether each replica has a part of ``parameter`` only."""
        return parameter in self._cuts

    def cut(self, parameter: torch.nn.Parameter) -> Cut | None:
        """Return how ``parameter`` is cut over the replicas; None where all have the whole of it."""
        return self._cuts.get(parameter)

    def part(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return what lies in ``whole``, of the shape of ``parameter``, where its master lies in it; in one run."""
        cut = self._cuts.get(parameter)
        return whole if cut is None else cut.part(whole, self.data_group.rank).contiguous()

    def send_away(self) -> dict[torch.nn.Parameter, Piece]:
        """Let the whole weights of which there are homes be somebody else's from now on; return how they are made."""
        self._are_away = True
        return {p: Piece(p.detach(), home, self._cuts[p]) for p, home in self.homes.items()}

    @torch.no_grad()
    def to_parameters(self) -> None:
        """Round the masters into the parameters. Collective over the replicas where masters are cut."""
        for parameter, home in self.homes.items():
            if home.data_ptr() != self.of[parameter].data_ptr():
                home.copy_(self.of[parameter])
        pairs = [(p, m) for p, m in self.of.items() if p is not m and p not in self._cuts]
        if pairs:
            # not blocking, a device rounds what it is sent; else the host would, to memory that is not pinned
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs], non_blocking=True)
        away = self.homes if self._are_away else {}
        cuts = {parameter: cut for parameter, cut in self._cuts.items() if parameter not in away}
        for bucket in buckets(Piece(p.detach(), self.of[p].detach(), cut) for p, cut in cuts.items()):
            gather(bucket, self.data_group)

    @torch.no_grad()
    def from_parameters(self) -> None:
        """Let each master hold what its part of the parameter holds."""
        for parameter, master in self.of.items():
            if parameter is not master:
                home = self.homes.get(parameter)
                master.copy_(self.part(parameter, parameter) if home is None else home)

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
            shard, part = cut.shard(shard, self.data_group.rank), self._own_part(parameter, cut)
        if self.offload.optimizer:
            part = self.offload.copy(part if is_wide else part.float())
        elif not is_wide:
            part = part.float().clone()
        elif self._has_homes:
            part = part.clone(memory_format=torch.contiguous_format)
        return set_shard(torch.nn.Parameter(part), shard)

    def _home(self, parameter: torch.nn.Parameter, cut: Cut, is_wide: bool) -> torch.Tensor:
        """Return the part of the weight that this replica keeps: the master itself, where it may be that."""
        if is_wide and self.offload.parameters == self.offload.optimizer:
            return self.of[parameter].detach()
        part = self._own_part(parameter, cut)
        return self.offload.copy(part) if self.offload.parameters else part.clone(memory_format=torch.contiguous_format)

    def _own_part(self, parameter: torch.nn.Parameter, cut: Cut) -> torch.Tensor:
        """Return this replica's part of ``parameter``, where that is trained."""
        part = cut.part(parameter.detach(), self.data_group.rank)
        return part if self._arrival is None else part.to(self._arrival.device)
