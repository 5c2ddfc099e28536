"""ReplicaCheck: detects copies of a weight that differ, for example after a bit flip or a missed all-reduce.

| copies | ranks that hold them |
|---|---|
| every weight or tensor-parallel shard | the data group; with context parallelism data x context |
| weights that tensor parallelism does not shard | the tensor group |
| tied weights | the stages that hold a copy |

One checksum of each parameter is compared over each of these groups. With ZeRO 1 and 2 the gathered parameters are
compared. With ZeRO 3 replicas have no copies; tensor ranks compare their ZeRO shards of the weights in the second row.
A comparison reads each parameter once and sends 16 bytes for it.
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

WORD = 8  # bytes; the widest integers are the fastest to sum
ROW = 4096


class ReplicaCheck(Callback):
    """Compares the copies of all weights every ``every`` steps (--drift-interval)."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_start(self) -> None:
        engine = self.trainer.engine
        self._copies = find_copies(engine.module, self.trainer.world.grid, engine.optimizer.store.persistent_storage)

    def on_step_end(self, result: StepResult) -> None:
        """Compare the copies.

        Raises:
            NumericsError: copies differ; raised on all ranks, before they are saved.
        """
        engine, step = self.trainer.engine, self.trainer.progress.step
        mismatches = check_replicas(engine.module, self._copies, engine.optimizer.store.persistent_storage)
        (differ,) = self.trainer.world.any([bool(mismatches)])
        if differ:
            raise error_of(mismatches, step, max(step - self.every, 0))


class ReplicaGroup(NamedTuple):
    """Parameters that are replicated on the ranks of a process group: their names, in the same order on all ranks."""

    handle: Any
    names: Sequence[str]


class ReplicaMismatch(NamedTuple):
    """A parameter whose copies differ.

    Args:
        text: description with the parameter and the ranks.
        is_reported_here: True on the first rank of the group, which reports the mismatch.
    """

    text: str
    is_reported_here: bool


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 checksum of the bits. A single bit flip always changes it; other differences almost always do.

    The bits are read as integers and summed in rows of 32 KiB; the rows are summed with distinct odd weights modulo
    2^64.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD:
        data = data.clone()
    words, rest = data[: data.numel() // WORD * WORD].view(torch.int64), data[data.numel() // WORD * WORD :]
    num_row_words = words.numel() // ROW * ROW
    parts = torch.cat([words[:num_row_words].view(-1, ROW).sum(1), words[num_row_words:], rest.to(torch.int64)])
    return (parts * (2 * torch.arange(parts.numel(), device=parts.device) + 1)).sum()


Kept = Callable[[torch.nn.Parameter], torch.Tensor]
"""Function that returns this rank's persistent storage of a parameter: itself, or its shard with ZeRO 3."""


def itself(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return ``parameter``, which is its own persistent storage without ZeRO 3."""
    return parameter


def find_copies(module: torch.nn.Module, grid: Grid, kept: Kept = itself) -> list[ReplicaGroup]:
    """Return the groups of copies that include this rank, in the same order on every rank of a stage."""
    named_params = dict(named_parameters(module))
    groups = []
    for group, is_apart in ((grid.data_context, False), (grid.expert_data, True)):
        names = [name for name, parameter in named_params.items() if is_reduced_apart(parameter) == is_apart]
        replicated = [name for name in names if kept(named_params[name]) is named_params[name]]
        if group.size > 1 and replicated:
            groups.append(ReplicaGroup(group.handle, replicated))
    replicated = [name for name, parameter in named_params.items() if not shard_of(parameter).is_partitioned]
    if grid.tensor.size > 1 and replicated:
        groups.append(ReplicaGroup(grid.tensor.handle, replicated))
    return [*groups, *_tied(module, named_params)]


@torch.no_grad()
def check_replicas(
    module: torch.nn.Module, copies: Sequence[ReplicaGroup], kept: Kept = itself
) -> list[ReplicaMismatch]:
    """Return the mismatches among the copies of this rank's parameters. Collective."""
    if not copies:
        return []
    sums = {name: checksum(kept(parameter)) for name, parameter in named_parameters(module)}
    return [drift for group in copies for drift in _differences(group, sums)]


def error_of(found: Sequence[ReplicaMismatch], step: int, since: int) -> NumericsError:
    """Return the error that every rank raises once any rank has found a mismatch.

    Args:
        step: step of this comparison.
        since: step of the last comparison without a mismatch.
    """
    mismatches = "; ".join(drift.text for drift in found if drift.is_reported_here)
    error = NumericsError(
        f"all copies of a weight must be bitwise equal, but at step {step}: "
        f"{mismatches or 'copies on other ranks differ'}. A memory error or a wrong all-reduce of gradients has "
        f"occurred since step {since}. Resume from a checkpoint of that step or an older one (--load), and "
        "test the machine of a rank that is named twice."
    )
    error.is_of_this_rank = bool(mismatches)
    return error


def _tied(module: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> Iterator[ReplicaGroup]:
    """Return the groups of stages that hold copies of tied weights."""
    names = {id(parameter): name for name, parameter in named.items()}
    groups: dict[Any, list[str]] = {}
    for weight, group in getattr(module, "get_tied_weights_and_groups", list)():
        if dist.get_world_size(group) > 1:
            groups.setdefault(group, []).append(names[id(weight)])
    return (ReplicaGroup(group, tied) for group, tied in groups.items())


def _differences(copies: ReplicaGroup, sums: Mapping[str, torch.Tensor]) -> Iterator[ReplicaMismatch]:
    """Yield the mismatches of ``copies``; the same on all ranks of the group."""
    local_sums = torch.stack([sums[name] for name in copies.names])
    extremes = torch.stack([local_sums, ~local_sums])  # the maximum of the complements is the complement of the minimum
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=copies.handle)
    differing = (extremes[0] != ~extremes[1]).nonzero().flatten().tolist()
    if not differing:
        return
    ranks = dist.get_process_group_ranks(copies.handle)
    gathered = [torch.empty_like(local_sums) for _ in ranks]
    dist.all_gather(gathered, local_sums, group=copies.handle)
    for index in differing:
        ranks_text = _who([int(sums_of_rank[index]) for sums_of_rank in gathered], ranks)
        yield ReplicaMismatch(f"{copies.names[index]} {ranks_text}", dist.get_rank() == ranks[0])


def _who(values: Sequence[int], ranks: Sequence[int]) -> str:
    """Return text that names the ranks that differ from the majority, or all ranks if there is no majority."""
    usual = max(values, key=values.count)
    if values.count(usual) * 2 <= len(values):
        return f"differs among ranks {_listed(ranks)}"
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    others = [rank for rank, value in zip(ranks, values, strict=True) if value == usual]
    return f"on rank {_listed(odd)} differs from ranks {_listed(others)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
