"""Group and Grid: a set of ranks that communicate, and this rank's groups along every axis."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.mpu.topology import Topology

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """Ranks that communicate.

    ``rank`` is this process's index in ``ranks``; ``handle`` is torch's process group. A single-rank group has no
    handle and needs no process group: every operation on it is the identity.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: Any = None
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))

    def gather_objects(self, value: Value) -> list[Value]:
        """Gather every rank's ``value`` on every rank, in rank order. Values are pickled. Collective."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def gather_objects_on_first(self, value: Value) -> list[Value] | None:
        """Gather every rank's ``value`` on the first rank, in rank order; None elsewhere. Pickled. Collective."""
        values: list[Any] | None = [value] * self.size if self.rank == 0 else None
        if self.size > 1:
            dist.gather_object(value, values, dst=self.ranks[0], group=self.handle)
        return values

    def broadcast_object(self, value: Value) -> Value:
        """Return the first rank's ``value`` on every rank. The value is pickled. Collective."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=self.ranks[0], group=self.handle)
        return values[0]


SINGLE = Group(ranks=(0,), rank=0)
"""The group of a single process; the default of every layer."""


@dataclass(frozen=True)
class Grid:
    """This rank's groups along every axis."""

    topology: Topology
    rank: int
    tensor: Group
    pipe: Group
    data: Group
    model: Group  # the ranks of one replica: pipe x tensor
    world: Group
    host: Group  # all ranks, over the CPU, with a long timeout: for waiting on disks
    tensor_host: Group  # the tensor group over the CPU: for exchanges that must not wait for the device
    context: Group = SINGLE  # the ranks that hold chunks of the same sequences
    data_context: Group = SINGLE  # data x context: the ranks that hold the same weights and all-reduce gradients
    expert: Group = SINGLE  # the ranks over which the experts of a layer are distributed
    expert_data: Group = SINGLE  # the ranks that hold the same experts, and the same shard of them
    context_inner: Group = SINGLE  # the context ranks that exchange heads, with hierarchical context parallelism
    context_outer: Group = SINGLE  # the context ranks with the same rank in ``context_inner``
    expert_tensor: Group = SINGLE  # the tensor ranks over which each expert is sharded


AXES = {
    "tensor": ("tensor",), "pipe": ("pipe",), "data": ("data",), "model": ("pipe", "tensor"),
    "context": ("context",), "data_context": ("data", "context"),
}  # fmt: skip
"""Axes of the topology along which the ranks of each group of a ``Grid`` differ."""
HOST_TIMEOUT = timedelta(minutes=30)
"""Timeout for waiting on disk operations of other ranks: opening data, saving, loading."""


def single_grid() -> Grid:
    """Build the grid for a single process, which has no process groups."""
    return Grid(Topology(1, 1, 1), 0, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE)


def build_grid(topology: Topology, rank: int, timeout: timedelta | None = None, *, is_on_host: bool = True) -> Grid:
    """Create the process groups of ``topology``. Collective: every rank calls it with the same topology.

    Args:
        timeout: timeout of collectives on the new groups; None: torch's default.
        is_on_host: True if the default process group communicates tensors in host memory, as in a run on CPUs.
    """
    if topology.world_size == 1:
        return single_grid()
    handles: dict[tuple[int, ...], Any] = {}
    groups = {
        name: _create_group(topology.groups(*axes), topology, rank, timeout, handles) for name, axes in AXES.items()
    }
    groups |= {
        name: _create_group(rank_sets, topology, rank, timeout, handles)
        for name, rank_sets in _special_rank_sets(topology).items()
    }
    world = Group(ranks=tuple(range(topology.world_size)), rank=rank, handle=dist.group.WORLD)
    rank_sets = topology.groups("tensor")
    tensor_host = (
        groups["tensor"] if is_on_host else _create_group(rank_sets, topology, rank, timeout, {}, backend="gloo")
    )
    host = replace(world, handle=dist.new_group(backend="gloo", timeout=HOST_TIMEOUT))
    return Grid(topology=topology, rank=rank, **groups, world=world, host=host, tensor_host=tensor_host)


def _special_rank_sets(topology: Topology) -> dict[str, list[list[int]]]:
    """Return the rank sets of the groups that span no full axes, by the name of the group in ``Grid``."""
    return {
        "context_inner": topology.context_groups(is_inner=True),
        "context_outer": topology.context_groups(is_inner=False),
        "expert": topology.expert_groups(),
        "expert_data": topology.expert_groups(same_experts=True),
        "expert_tensor": topology.expert_tensor_groups(),
    }


def groups_by_ranks(grid: Grid) -> dict[tuple[int, ...], Any]:
    """Map ranks to torch's process group, for all groups with at least two ranks.

    Groups without this rank map to ``GroupMember.NON_GROUP_MEMBER``.
    """
    handles: dict[tuple[int, ...], Any] = {} if grid.world.size == 1 else {grid.world.ranks: grid.world.handle}
    rank_sets_by_name = {name: grid.topology.groups(*axes) for name, axes in AXES.items()}
    rank_sets_by_name |= _special_rank_sets(grid.topology)
    for name, rank_sets in rank_sets_by_name.items():
        group: Group = getattr(grid, name)
        for ranks in map(tuple, rank_sets):
            if len(ranks) > 1:
                handles.setdefault(ranks, group.handle if ranks == group.ranks else dist.GroupMember.NON_GROUP_MEMBER)
    return handles


def _create_group(
    rank_sets: list[list[int]], topology: Topology, rank: int, timeout: timedelta | None,
    handles_by_ranks: dict[tuple[int, ...], Any], backend: str | None = None,
) -> Group:  # fmt: skip
    """Create a process group for each rank set and return the group that contains ``rank``. Collective.

    Args:
        rank_sets: disjoint sets of ranks, in the same order on every rank.
        handles_by_ranks: process groups created so far, by ranks. Existing groups are reused, new ones are added.
        backend: backend for new groups; None: the default group's backend, and the default group is reused for a set of
            all ranks.
    """
    group = None
    for ranks in map(tuple, rank_sets):
        if len(ranks) == topology.world_size and backend is None:
            handles_by_ranks[ranks] = dist.group.WORLD
        elif len(ranks) > 1 and ranks not in handles_by_ranks:
            handles_by_ranks[ranks] = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if rank in ranks:
            group = Group(ranks=ranks, rank=ranks.index(rank), handle=handles_by_ranks.get(ranks))
    if group is None:
        raise RuntimeError(f"rank {rank} is outside the grid {topology}")
    return group
