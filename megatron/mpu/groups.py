"""A set of ranks that communicate, with this rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.mpu.topology import Topology

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: ``rank`` is this process's index in ``ranks``; ``handle`` is torch's process group.

    A group of one has no handle and needs no process group at all: every operation on it is the identity.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: Any = None
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))

    def gather_objects(self, value: Value) -> list[Value]:
        """Return what each rank gives, in rank order, on every rank; pickled on the way. Collective."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def broadcast_object(self, value: Value) -> Value:
        """Return what the first rank gives on every rank; pickled on the way. Collective."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=self.ranks[0], group=self.handle)
        return box[0]


SINGLE = Group(ranks=(0,), rank=0)
"""The group of one process alone; the default of every layer."""


@dataclass(frozen=True)
class Grid:
    """This rank's groups along every axis that training needs."""

    topology: Topology
    rank: int
    tensor: Group
    pipe: Group
    data: Group
    model: Group  # the ranks of one replica: pipe x tensor
    world: Group
    host: Group  # all ranks too, over the CPU, with patience: for what disks decide
    tensor_host: Group  # the tensor group over the CPU: for what a device need not be waited for
    context: Group = SINGLE  # the ranks that have pieces of the same sequences
    data_context: Group = SINGLE  # data x context: the ranks that hold the same weights and add up their gradients
    expert: Group = SINGLE  # of these the neighbours that share out the experts of a layer
    expert_data: Group = SINGLE  # and those that have the same experts


AXES = {
    "tensor": ("tensor",), "pipe": ("pipe",), "data": ("data",), "model": ("pipe", "tensor"),
    "context": ("context",), "data_context": ("data", "context"),
}  # fmt: skip
"""Of the groups of a ``Grid``: along which axes of the topology."""
HOST_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other's disks: opening data, saving, loading."""


def single_grid() -> Grid:
    """Return the grid of one process, which has no process group."""
    return Grid(Topology(1, 1, 1), 0, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE)


def build_grid(topology: Topology, rank: int, timeout: timedelta | None = None, *, is_on_host: bool = True) -> Grid:
    """Create the process groups of ``topology``. Collective: every rank calls it with the same topology.

    Args:
        timeout: a rank that does not answer for so long is an error; None takes torch's default.
        is_on_host: the default group sends what lies in the host's memory, as that of a run on CPUs.
    """
    if topology.world_size == 1:
        return single_grid()
    made: dict[tuple[int, ...], Any] = {}
    own = {name: _own_group(topology.groups(*axes), topology, rank, timeout, made) for name, axes in AXES.items()}
    own |= {
        "expert": _own_group(topology.expert_groups(), topology, rank, timeout, made),
        "expert_data": _own_group(topology.expert_groups(of_replicas=True), topology, rank, timeout, made),
    }
    world = Group(ranks=tuple(range(topology.world_size)), rank=rank, handle=dist.group.WORLD)
    tensor = topology.groups("tensor")
    on_host = own["tensor"] if is_on_host else _own_group(tensor, topology, rank, timeout, {}, backend="gloo")
    host = replace(world, handle=dist.new_group(backend="gloo", timeout=HOST_TIMEOUT))
    return Grid(topology=topology, rank=rank, **own, world=world, host=host, tensor_host=on_host)


def groups_by_ranks(grid: Grid) -> dict[tuple[int, ...], Any]:
    """Return torch's process group of each set of two ranks or more, those of other ranks too."""
    found: dict[tuple[int, ...], Any] = {} if grid.world.size == 1 else {grid.world.ranks: grid.world.handle}
    every = {name: grid.topology.groups(*axes) for name, axes in AXES.items()}
    every["expert"] = grid.topology.expert_groups()
    every["expert_data"] = grid.topology.expert_groups(of_replicas=True)
    for name, sets in every.items():
        own: Group = getattr(grid, name)
        for ranks in map(tuple, sets):
            if len(ranks) > 1:
                found.setdefault(ranks, own.handle if ranks == own.ranks else dist.GroupMember.NON_GROUP_MEMBER)
    return found


def _own_group(
    sets: list[list[int]], topology: Topology, rank: int, timeout: timedelta | None, made: dict[tuple[int, ...], Any],
    backend: str | None = None,
) -> Group:  # fmt: skip
    """Create the groups of all ``sets`` of ranks in the same order on every rank; return the one that holds ``rank``.

    Args:
        made: groups by their ranks: one that is there is not made again.
        backend: of new groups; None: as the default group, which is then that of all ranks.
    """
    own = None
    for ranks in map(tuple, sets):
        if len(ranks) == topology.world_size and backend is None:
            made[ranks] = dist.group.WORLD
        elif len(ranks) > 1 and ranks not in made:
            made[ranks] = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if rank in ranks:
            own = Group(ranks=ranks, rank=ranks.index(rank), handle=made.get(ranks))
    if own is None:
        raise RuntimeError(f"rank {rank} is outside the grid {topology}")
    return own
