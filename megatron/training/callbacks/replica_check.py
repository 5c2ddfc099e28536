"""ReplicaCheck: copies of a weight that differ, by a flipped bit in one rank's memory or a sum that one rank missed.

| copies | on the ranks of |
|---|---|
| every weight, or part of one | the data group, with context parallelism data x context |
| what every tensor rank holds whole | the tensor group |
| tied weights | the stages that hold one |

One checksum of each parameter is compared over each of these. With ZeRO 1 and 2 these are the parameters that the parts
were gathered into; with ZeRO 3 replicas have no copies, and tensor ranks compare their parts of what they hold whole. A
comparison reads each parameter once and sends 16 bytes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.checkpoint import named_parameters
from megatron.errors import NumericsError
from megatron.mpu.groups import Grid
from megatron.mpu.shard import shard_of
from megatron.training.step_result import StepResult
from megatron.training.trainer import Callback
from tds.gradients import is_reduced_apart

WORD = 8  # bytes; the widest whole numbers are the fastest to add up
ROW = 4096


class ReplicaCheck(Callback):
    """Compares the copies of all weights each ``every`` steps (--drift-interval)."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_start(self) -> None:
        engine = self.trainer.engine
        self._copies = find_copies(engine.module, self.trainer.world.grid, engine.optimizer.store.persistent_storage)

    def on_step_end(self, result: StepResult) -> None:
        """Compare.

        Raises:
            NumericsError: copies differ, on all ranks alike; nothing is saved of them.
        """
        engine, step = self.trainer.engine, self.trainer.progress.step
        found = check_replicas(engine.module, self._copies, engine.optimizer.store.persistent_storage)
        (differ,) = self.trainer.world.any([bool(found)])
        if differ:
            raise error_of(found, step, max(step - self.every, 0))


class ReplicaGroup(NamedTuple):
    """Names of parameters of which each rank of a process group holds a copy, in the same order on all."""

    handle: Any
    names: Sequence[str]


class ReplicaMismatch(NamedTuple):
    """A parameter that differs, and the ranks, in words; the first rank of each group tells."""

    text: str
    is_reported_here: bool


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return one int64 that any single flipped bit changes, and almost any other difference: no sum over floats.

    The bits are read as whole numbers, added up by rows of 32 KiB, and these with odd weights of their own modulo 2^64.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD:
        data = data.clone()
    words, rest = data[: data.numel() // WORD * WORD].view(torch.int64), data[data.numel() // WORD * WORD :]
    whole = words.numel() // ROW * ROW
    parts = torch.cat([words[:whole].view(-1, ROW).sum(1), words[whole:], rest.to(torch.int64)])
    return (parts * (2 * torch.arange(parts.numel(), device=parts.device) + 1)).sum()


Kept = Callable[[torch.nn.Parameter], torch.Tensor]
"""Gives what a rank keeps of a parameter: itself, or with ZeRO 3 the replica's part."""


def itself(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return ``parameter``: what is kept without ZeRO 3."""
    return parameter


def find_copies(module: torch.nn.Module, grid: Grid, kept: Kept = itself) -> list[ReplicaGroup]:
    """Return all copies that this rank holds one of; the same kinds in the same order on every rank of a stage."""
    named = dict(named_parameters(module))
    found = []
    for group, is_apart in ((grid.data_context, False), (grid.expert_data, True)):
        own = [name for name, parameter in named.items() if is_reduced_apart(parameter) == is_apart]
        whole = [name for name in own if kept(named[name]) is named[name]]
        if group.size > 1 and whole:
            found.append(ReplicaGroup(group.handle, whole))
    whole = [name for name, parameter in named.items() if not shard_of(parameter).is_partitioned]
    if grid.tensor.size > 1 and whole:
        found.append(ReplicaGroup(grid.tensor.handle, whole))
    return [*found, *_tied(module, named)]


@torch.no_grad()
def check_replicas(
    module: torch.nn.Module, copies: Sequence[ReplicaGroup], kept: Kept = itself
) -> list[ReplicaMismatch]:
    """Return what differs among the copies of this rank's parameters. Collective."""
    if not copies:
        return []
    sums = {name: checksum(kept(parameter)) for name, parameter in named_parameters(module)}
    return [drift for each in copies for drift in _differences(each, sums)]


def error_of(found: Sequence[ReplicaMismatch], step: int, since: int) -> NumericsError:
    """Return what every rank raises once any rank has found a difference.

    Args:
        step, since: of this comparison and the last one that found nothing.
    """
    mismatches = "; ".join(drift.text for drift in found if drift.is_reported_here)
    error = NumericsError(
        f"all copies of a weight must be equal, bit for bit, got at step {step}: "
        f"{mismatches or 'a difference elsewhere'}. Memory or a sum of gradients has failed "
        f"since step {since}: go on from a checkpoint of that step or older (--load), and "
        "test the machine of a rank that is named twice."
    )
    error.is_of_this_rank = bool(mismatches)
    return error


def _tied(module: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> Iterator[ReplicaGroup]:
    names = {id(parameter): name for name, parameter in named.items()}
    groups: dict[Any, list[str]] = {}
    for weight, group in getattr(module, "get_tied_weights_and_groups", list)():
        if dist.get_world_size(group) > 1:
            groups.setdefault(group, []).append(names[id(weight)])
    return (ReplicaGroup(group, tied) for group, tied in groups.items())


def _differences(copies: ReplicaGroup, sums: Mapping[str, torch.Tensor]) -> Iterator[ReplicaMismatch]:
    """Yield each parameter of ``copies`` that differs, with the ranks; the same on all ranks of the group."""
    own = torch.stack([sums[name] for name in copies.names])
    extremes = torch.stack([own, ~own])  # the largest of the complements belongs to the smallest
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=copies.handle)
    differing = (extremes[0] != ~extremes[1]).nonzero().flatten().tolist()
    if not differing:
        return
    ranks = dist.get_process_group_ranks(copies.handle)
    every = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(every, own, group=copies.handle)
    for index in differing:
        who = _who([int(each[index]) for each in every], ranks)
        yield ReplicaMismatch(f"{copies.names[index]} {who}", dist.get_rank() == ranks[0])


def _who(values: Sequence[int], ranks: Sequence[int]) -> str:
    """Say which ranks differ from most others, or among which all differ."""
    usual = max(values, key=values.count)
    if values.count(usual) * 2 <= len(values):
        return f"differs among ranks {_listed(ranks)}"
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    others = [rank for rank, value in zip(ranks, values, strict=True) if value == usual]
    return f"on rank {_listed(odd)} differs from ranks {_listed(others)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
