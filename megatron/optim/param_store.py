"""The parameter store.

A
parameter of 32 or 64 bits (``WIDE``) is its own master.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import set_shard, shard_of
from megatron.optim.offload import NOTHING, OffloadConfig
from megatron.optim.zero.gather import Piece, gather_all
from megatron.optim.zero.param_gather import ParamGather, gathers_later
from megatron.optim.zero.param_init import ParamInit
from megatron.optim.zero.partition import ParamPartition, partition_of
from tds.gradients import WIDE, bucket_numbers, is_reduced_apart


class MainParams:
    """The masters of this replica's parameters.

    | precision | ZeRO 0 | ZeRO 1, 2 | ZeRO 3 |
    |---|---|---|---|
    | fp32, fp64 | the parameter | a view of the replica's part of it | the part |
    | bf16, fp16 | a copy in fp32 | a copy in fp32 of the replica's part | a copy in fp32 of the part |

    With offload of the optimizer each is a copy on the CPU. ``homes`` are the parts of the weights that ZeRO 3 keeps.

    Args:
        data: the replicas.
        expert_data: those that have the same experts, where not all do.
        zero_stage: from 1 on each replica has parts; with one replica there is nothing to cut, unless weights are
            offloaded.
        param_init: with ZeRO 3, how weights come that are not where they are trained yet; None: all are there.
        reduce_bucket_size, allgather_bucket_size: numbers of a bucket of gradients that are summed, and of weights that
            are gathered after an update; 0: as ``tds.gradients.bucket_numbers`` has it.

    Attributes:
        are_apart: a parameter is not its own master: an update is to be brought into it.
    """

    def __init__(
        self,
        data: Group = SINGLE,
        expert_data: Group = SINGLE,
        *,
        zero_stage: int = 0,
        offload: OffloadConfig = NOTHING,
        param_init: ParamInit | None = None,
        reduce_bucket_size: int = 0,
        allgather_bucket_size: int = 0,
    ) -> None:
        self.data_group, self._expert_group = data, expert_data
        self._asked = {"reduce": reduce_bucket_size, "allgather": allgather_bucket_size}
        self.offload = offload
        self.of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.homes: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.are_apart = False
        self._zero_stage = zero_stage
        self._is_cut = zero_stage > 0 and (data.size > 1 or offload.parameters)
        self._has_homes = zero_stage == 3 and self._is_cut
        self._cuts: dict[torch.nn.Parameter, ParamPartition] = {}
        self._param_init = param_init if self._has_homes else None
        self._are_away = self._param_init is not None

    def register(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
        """Let ``parameter`` have ``dtype`` from now on and return its master."""
        is_wide = dtype in WIDE
        replicas = self.group_of(parameter).size
        is_apart = is_reduced_apart(parameter) and replicas == 1  # an expert that no other rank has is its own master
        cut = partition_of(parameter, replicas) if self._is_cut and not is_apart else None
        if self._param_init is not None:
            self._param_init.come(parameter, is_cut=cut is not None)
        if is_wide:
            parameter.data = parameter.data.to(dtype)
        self.of[parameter] = parameter
        if cut is not None or not is_wide or self.offload.optimizer:
            self.of[parameter], self.are_apart = self._make(parameter, cut, is_wide), True
        parameter.data = parameter.data.to(dtype)
        if cut is not None and self._has_homes:
            self.homes[parameter] = self._home(parameter, cut, is_wide)
            if self._param_init is not None:
                self._param_init.leave(parameter)
        return self.of[parameter]

    def group_of(self, parameter: torch.Tensor) -> Group:
        """Return the replicas of ``parameter``."""
        return self._expert_group if is_reduced_apart(parameter) else self.data_group

    def bucket_numbers(self, place: torch.device, of: str = "reduce") -> int | None:
        """Return how many numbers travel together on ``place``; None: as many as ``BUCKET_BYTES`` allow.

        Sums of ZeRO 2 and 3 are made in copies of buckets, which grow if they are asked to alone.
        """
        asked = self._asked[of]
        if of == "reduce" and self._zero_stage > 1:
            return asked or None
        return bucket_numbers(place, self.data_group.size, asked)

    @property
    def are_shared_out(self) -> bool:
        """Whether replicas have parts of the masters, from ZeRO 1 on."""
        return self._is_cut and self.data_group.size > 1

    def is_cut(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether each replica has a part of ``parameter`` only."""
        return parameter in self._cuts

    def cut(self, parameter: torch.nn.Parameter) -> ParamPartition | None:
        """Return how ``parameter`` is cut over the replicas; None where all have the whole of it."""
        return self._cuts.get(parameter)

    def part(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return what lies in ``whole``, of the shape of ``parameter``, where its master lies in it; in one run."""
        cut = self._cuts.get(parameter)
        return whole if cut is None else cut.part(whole, self.group_of(parameter).rank).contiguous()

    def gather_later(self, module: torch.nn.Module) -> ParamGather | None:
        """Let ``module`` wait for updated weights where it needs them; None where they are here at once (gloo)."""
        if not self._cuts or self._has_homes or self.data_group.size == 1 or not gathers_later(self.data_group):
            return None
        weights = [parameter for parameter in module.parameters() if parameter in self._cuts]
        is_whole = len(weights) == len(self._cuts)
        weights = [parameter for parameter in weights if not is_reduced_apart(parameter)]
        return ParamGather(module, weights, self.data_group) if is_whole else None

    def send_away(self) -> dict[torch.nn.Parameter, Piece]:
        """Let the whole weights of which there are homes be somebody else's from now on; return how they are made."""
        self._are_away = True
        return {p: Piece(p.detach(), home, self._cuts[p]) for p, home in self.homes.items()}

    @torch.no_grad()
    def to_parameters(self, later: ParamGather | None = None) -> None:
        """Round the masters into the parameters. Collective over the replicas where masters are cut.

        Args:
            later: what lets the parts of the other replicas come where they are needed; None: they are here at once.
        """
        for parameter, home in self.homes.items():
            if home.data_ptr() != self.of[parameter].data_ptr():
                home.copy_(self.of[parameter])
        pairs = [(p, m) for p, m in self.of.items() if p is not m and p not in self._cuts]
        if pairs:
            # not blocking, a device rounds what it is sent; else the host would, to memory that is not pinned
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs], non_blocking=True)
        away = self.homes if self._are_away else {}
        cuts = {parameter: cut for parameter, cut in self._cuts.items() if parameter not in away}
        pieces = {p: Piece(p.detach(), self.of[p].detach(), cut) for p, cut in cuts.items()}
        if not pieces:
            return
        numbers = self.bucket_numbers(next(iter(pieces)).device, "allgather")
        apart = {p: pieces.pop(p) for p in list(pieces) if is_reduced_apart(p)}
        if apart:
            gather_all(apart.values(), self._expert_group, numbers)
        if later is None:
            gather_all(pieces.values(), self.data_group, numbers)
        else:
            later.start(pieces, numbers)

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

    def _make(self, parameter: torch.nn.Parameter, cut: ParamPartition | None, is_wide: bool) -> torch.nn.Parameter:
        shard, part = shard_of(parameter), parameter.detach()
        if cut is not None:
            self._cuts[parameter] = cut
            shard, part = cut.shard(shard, self.group_of(parameter).rank), self._own_part(parameter, cut)
        if self.offload.optimizer:
            part = self.offload.copy(part if is_wide else part.float())
        elif not is_wide:
            part = part.float().clone()
        elif self._has_homes:
            part = part.clone(memory_format=torch.contiguous_format)
        return set_shard(torch.nn.Parameter(part), shard)

    def _home(self, parameter: torch.nn.Parameter, cut: ParamPartition, is_wide: bool) -> torch.Tensor:
        """Return the part of the weight that this replica keeps: the master itself, where it may be that."""
        if is_wide and self.offload.parameters == self.offload.optimizer:
            return self.of[parameter].detach()
        part = self._own_part(parameter, cut)
        return self.offload.copy(part) if self.offload.parameters else part.clone(memory_format=torch.contiguous_format)

    def _own_part(self, parameter: torch.nn.Parameter, cut: ParamPartition) -> torch.Tensor:
        """Return this replica's part of ``parameter``, where that is trained."""
        part = cut.part(parameter.detach(), self.group_of(parameter).rank)
        return part if self._param_init is None else part.to(self._param_init.device)
