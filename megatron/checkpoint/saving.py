"""Saving: shards into a temporary folder, one manifest, one rename.

1. Every rank tells what it holds; rank 0 checks that each global tensor is written exactly once and that the disk
   has room, and makes the temporary folder.
2. Every rank writes its file, flushes it and tells its size and checksum.
3. Rank 0 writes the manifest, flushes file and folder, and renames the folder. That rename is the commit.

An error on any rank up to the commit is an error on all; older checkpoints are not touched. After it, what is left
(the hint, the removal of old ones) can only cost a warning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import files, log
from megatron.checkpoint import folders, manifest, shard_file
from megatron.checkpoint.agree import together
from megatron.checkpoint.folders import Keep
from megatron.checkpoint.manifest import Entry, FileFacts, Manifest, Piece
from megatron.checkpoint.records import Claim, TensorRecord, claim, is_empty, owned, tiling_problem
from megatron.errors import CheckpointError, ConfigError
from megatron.mpu.groups import Group

_MANIFEST_BYTES_PER_TENSOR = 400  # generous; for the check of the free space only


@dataclass(frozen=True)
class _Share:
    """What a rank is about to write."""

    claims: list[Claim]
    num_bytes: int


@dataclass(frozen=True)
class _Plan:
    """Where the ranks write, and the checkpoint that it becomes."""

    temporary: Path
    target: Path
    sequence: int
    num_bytes: int
    index: dict[str, Entry]


def save(
    root: Path,
    step: int,
    records: list[TensorRecord],
    state: dict[str, Any],
    world: Group,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    loaded: Path | None = None,
) -> Path:
    """Write the checkpoint ``root/step-00000020`` and return its path. Collective over ``world``.

    Args:
        records: the tensors that this rank holds. A name may be held by many ranks and is written by its owners.
        state: what JSON can hold (tuples come back as lists); rank 0's is written.
        keep_last: afterwards delete all but so many complete checkpoints (at least 1); None keeps all.
        keep_every: never delete one whose step is a multiple of this.
        loaded: the checkpoint that this run started from, which is never deleted.

    Raises:
        CheckpointError: on all ranks alike, when any rank failed. The checkpoints in ``root`` are as they were.
        ConfigError: ``keep_last`` or ``keep_every`` is below 1.
    """
    check_keep(keep_last, keep_every)
    return save_from(lambda: records, root, step, state, world, Keep(keep_last, keep_every, loaded))


def check_keep(keep_last: int | None, keep_every: int | None) -> None:
    """Check that numbers of checkpoints to keep are such.

    Raises:
        ConfigError: one is below 1.
    """
    for flag, value in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")


def save_from(
    source: Callable[[], list[TensorRecord]], root: Path, step: int, state: dict[str, Any], world: Group, keep: Keep
) -> Path:
    """Do what ``save`` does with the records that ``source`` returns; one that raises fails the save. Collective."""
    root = Path(root)
    told = state if world.rank == 0 else {}
    records: list[TensorRecord] = []

    def share() -> _Share:
        records.extend(source())
        return _share(records, told)

    try:
        plan = together(world, share, lambda shares: _prepare(root, step, shares))
        path = together(
            world,
            lambda: _write_shard(plan.temporary, world.rank, records),
            lambda written: _commit(plan, step, state, written),
            lambda error: _abandon(root, plan, error),
        )
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint of step {step} was not saved to {root}: {error}") from error
    if world.rank == 0:
        _tidy(root, path, keep)
    return path


def _owned(records: list[TensorRecord]) -> dict[str, torch.Tensor]:
    return {_key(record.name, record.shard.start): record.tensor for record in owned(records).values()}


def _key(name: str, start: int) -> str:
    return f"{name}[{start}:]" if start else name


def _share(records: list[TensorRecord], state: dict[str, Any]) -> _Share:
    claims = [claim(record) for record in records]
    return _Share(claims, shard_file.num_bytes(_owned(records)) + len(json.dumps(state)))


def _prepare(root: Path, step: int, shares: list[_Share]) -> _Plan:
    """Check that the shares make whole tensors and fit on the disk; make the temporary folder. Rank 0 only."""
    index = _index([share.claims for share in shares])
    files.make_folder(root)
    folders.remove_leftovers(root)
    needed = sum(share.num_bytes for share in shares) + _MANIFEST_BYTES_PER_TENSOR * (len(index) + len(shares))
    free = files.free_bytes(root)
    if needed > free:
        raise CheckpointError(
            f"need {_told_bytes(needed)}, free {_told_bytes(free)}. Free some space, lower --keep-last or move --save."
        )
    target = folders.free_name(root, step)
    temporary = folders.temporary_name(target)
    sequences = [manifest.peek_sequence(path) or 0 for path in folders.newest_first(root)]
    files.make_folder(temporary)
    return _Plan(temporary, target, max(sequences, default=0) + 1, needed, index)


def _index(claims_of_ranks: list[list[Claim]]) -> dict[str, Entry]:
    """Return the entry of each global tensor.

    Raises:
        CheckpointError: ranks disagree on a tensor, or it is not written exactly once; all such tensors are named.
    """
    held: dict[str, list[tuple[int, Claim]]] = {}
    for rank, claims in enumerate(claims_of_ranks):
        for one in claims:
            held.setdefault(one.name, []).append((rank, one))
    problems, index = [], {}
    for name, holders in held.items():
        kinds = {(one.dtype, one.shard.global_shape) for _, one in holders}
        owned = [(rank, one) for rank, one in holders if one.is_owner]
        dtype, shape = next(iter(kinds))
        problem = f"ranks disagree: {sorted(kinds)}" if len(kinds) > 1 else None
        problem = problem or tiling_problem(shape, [one.shard for _, one in owned])
        if problem:
            problems.append(f"{name} (owners: ranks {[rank for rank, _ in owned]}): {problem}")
        index[name] = Entry(dtype, shape, tuple(_piece(rank, one) for rank, one in owned if not is_empty(one.shard)))
    if problems:
        raise CheckpointError("each global tensor must be written exactly once: " + "; ".join(problems))
    return index


def _piece(rank: int, one: Claim) -> Piece:
    return Piece(_file(rank), _key(one.name, one.shard.start), one.shard)


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_shard(folder: Path, rank: int, records: list[TensorRecord]) -> dict[str, FileFacts]:
    """Write this rank's file, if it owns anything; return its name and what was written."""
    tensors = _owned(records)
    if not tensors:
        return {}
    size, crc32 = shard_file.write(folder / _file(rank), tensors)
    return {_file(rank): FileFacts(size, crc32)}


def _commit(plan: _Plan, step: int, state: dict[str, Any], written: list[dict[str, FileFacts]]) -> Path:
    """Write the manifest and rename. Rank 0 only."""
    facts = {name: one for files_of_rank in written for name, one in files_of_rank.items()}
    content = Manifest(plan.sequence, step, state, facts, plan.index)
    files.write_bytes(plan.temporary / manifest.NAME, manifest.to_bytes(content))
    files.sync_folder(plan.temporary)
    files.rename(plan.temporary, plan.target)
    return plan.target


def _abandon(root: Path, plan: _Plan, error: CheckpointError) -> CheckpointError:
    """Remove the temporary folder; return ``error`` with the space that was needed and is free. Rank 0 only."""
    with suppress(OSError):
        files.remove_tree(plan.temporary)
    with suppress(OSError):
        free = _told_bytes(files.free_bytes(root))
        return CheckpointError(f"{error} (needed {_told_bytes(plan.num_bytes)}, now free {free})")
    return error


def _tidy(root: Path, path: Path, keep: Keep) -> None:
    """Point the hint at ``path`` and delete old checkpoints: the save has succeeded whatever happens here."""
    folders.write_latest(root, path)
    try:
        folders.remove_old(root, keep)
    except OSError as error:
        log.warning(f"old checkpoints in {root} could not be deleted ({error}); {path} is complete")


def _told_bytes(count: int) -> str:
    """Return ``count`` bytes in the unit that a person would choose."""
    size, units = float(count), ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{count} B"
