"""ReplicaCheck: detects weight copies that differ, for example after a bit flip or a missed all-reduce.

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
from tds.gradients import is_reduced_by_optimizer

WORD_BYTES = 8  # bytes; the widest integers are the fastest to sum
ROW_WORDS = 4096


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
        (has_mismatch,) = self.trainer.world.any_rank([bool(mismatches)])
        if has_mismatch:
            raise mismatch_error(mismatches, step, max(step - self.every, 0))


class ReplicaGroup(NamedTuple):
    """Parameters that a process group replicates: their names, in the same order on all ranks."""

    handle: Any
    names: Sequence[str]


class ReplicaMismatch(NamedTuple):
    """A parameter whose copies differ.

    Args:
        text: text that names the parameter and the ranks.
        is_reporter: True on the group's first rank, which reports the mismatch.
    """

    text: str
    is_reporter: bool


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Compute an int64 checksum over the bits. A single bit flip always changes it; other differences almost always do.

    The bits are read as integers and summed in rows of 32 KiB; the rows are summed with distinct odd weights modulo
    2^64.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()
    words, tail = (
        data[: data.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64),
        data[data.numel() // WORD_BYTES * WORD_BYTES :],
    )
    num_row_words = words.numel() // ROW_WORDS * ROW_WORDS
    terms = torch.cat([words[:num_row_words].view(-1, ROW_WORDS).sum(1), words[num_row_words:], tail.to(torch.int64)])
    return (terms * (2 * torch.arange(terms.numel(), device=terms.device) + 1)).sum()


StorageOf = Callable[[torch.nn.Parameter], torch.Tensor]
"""Function that returns this rank's persistent storage of a parameter: itself, or its shard with ZeRO 3."""


def identity(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return ``parameter``, which without ZeRO 3 is its own persistent storage."""
    return parameter


def find_copies(module: torch.nn.Module, grid: Grid, storage_of: StorageOf = identity) -> list[ReplicaGroup]:
    """Find the groups of copies that include this rank, in the same order on every rank of a stage."""
    named_params = dict(named_parameters(module))
    groups = []
    for group, is_apart in ((grid.data_context, False), (grid.expert_data, True)):
        names = [name for name, parameter in named_params.items() if is_reduced_by_optimizer(parameter) == is_apart]
        replicated = [name for name in names if storage_of(named_params[name]) is named_params[name]]
        if group.size > 1 and replicated:
            groups.append(ReplicaGroup(group.handle, replicated))
    for group, is_apart in ((grid.tensor, False), (grid.expert_tensor, True)):
        replicated = [
            name
            for name, parameter in named_params.items()
            if not shard_of(parameter).is_partitioned and is_reduced_by_optimizer(parameter) == is_apart
        ]
        if group.size > 1 and replicated:
            groups.append(ReplicaGroup(group.handle, replicated))
    return [*groups, *_tied_groups(module, named_params)]


@torch.no_grad()
def check_replicas(
    module: torch.nn.Module, copies: Sequence[ReplicaGroup], storage_of: StorageOf = identity
) -> list[ReplicaMismatch]:
    """Find mismatches among copies of this rank's parameters. Collective."""
    if not copies:
        return []
    checksums = {name: checksum(storage_of(parameter)) for name, parameter in named_parameters(module)}
    return [mismatch for group in copies for mismatch in _find_mismatches(group, checksums)]


def mismatch_error(all_mismatches: Sequence[ReplicaMismatch], step: int, last_good_step: int) -> NumericsError:
    """Return the error that every rank raises once any rank has found a mismatch.

    Args:
        step: step of this comparison.
        last_good_step: step of the last comparison without a mismatch.
    """
    mismatch_text = "; ".join(mismatch.text for mismatch in all_mismatches if mismatch.is_reporter)
    error = NumericsError(
        f"all copies of a weight must be bitwise equal, but at step {step}: "
        f"{mismatch_text or 'copies on other ranks differ'}. A memory error or a wrong all-reduce of gradients has "
        f"occurred since step {last_good_step}. Resume from a checkpoint of that step or an older one (--load), and "
        "test the machine of a rank that is named twice."
    )
    error.is_of_this_rank = bool(mismatch_text)
    return error


def _tied_groups(module: torch.nn.Module, named_params: Mapping[str, torch.Tensor]) -> Iterator[ReplicaGroup]:
    """Find the stage groups that hold copies of tied weights."""
    names = {id(parameter): name for name, parameter in named_params.items()}
    groups: dict[Any, list[str]] = {}
    for weight, group in getattr(module, "get_tied_weights_and_groups", list)():
        if dist.get_world_size(group) > 1:
            groups.setdefault(group, []).append(names[id(weight)])
    return (ReplicaGroup(group, tied) for group, tied in groups.items())


def _find_mismatches(copies: ReplicaGroup, checksums: Mapping[str, torch.Tensor]) -> Iterator[ReplicaMismatch]:
    """Yield mismatches in ``copies``; the same on all ranks of the group."""
    local_checksums = torch.stack([checksums[name] for name in copies.names])
    extremes = torch.stack(
        [local_checksums, ~local_checksums]
    )  # the maximum of the complements is the complement of the minimum
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=copies.handle)
    differing = (extremes[0] != ~extremes[1]).nonzero().flatten().tolist()
    if not differing:
        return
    ranks = dist.get_process_group_ranks(copies.handle)
    gathered = [torch.empty_like(local_checksums) for _ in ranks]
    dist.all_gather(gathered, local_checksums, group=copies.handle)
    for idx in differing:
        ranks_text = _describe_ranks([int(rank_checksums[idx]) for rank_checksums in gathered], ranks)
        yield ReplicaMismatch(f"{copies.names[idx]} {ranks_text}", dist.get_rank() == ranks[0])


def _describe_ranks(values: Sequence[int], ranks: Sequence[int]) -> str:
    """Return a text on the ranks that differ from the majority, or on all ranks if there is no majority."""
    majority = max(values, key=values.count)
    if values.count(majority) * 2 <= len(values):
        return f"differs among ranks {_list_ranks(ranks)}"
    differing_ranks = [rank for rank, value in zip(ranks, values, strict=True) if value != majority]
    majority_ranks = [rank for rank, value in zip(ranks, values, strict=True) if value == majority]
    return f"on rank {_list_ranks(differing_ranks)} differs from ranks {_list_ranks(majority_ranks)}"


def _list_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
