"""Download a checkpoint from an object store with all ranks, verifying the checksum of every file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from megatron import files, log, object_store
from megatron.checkpoint import remote
from megatron.checkpoint.folders import commit_checkpoint, free_name
from megatron.checkpoint.loading import first_that_verifies
from megatron.checkpoint.manifest import MANIFEST_NAME
from megatron.checkpoint.rank_errors import gather_verdict
from megatron.checkpoint.remote import RemoteCheckpoint
from megatron.errors import CheckpointError
from megatron.mpu.groups import Group


def fetch_newest(source: str, root: Path, world: Group, *, strict: bool = False) -> Path:
    """Download the newest checkpoint of ``source`` whose checksums match into ``root``; return its path. Collective.

    Each rank downloads some of the files. A checkpoint that is already in ``root`` is not downloaded again.

    Args:
        strict: raise if the checksums of the newest checkpoint do not match, instead of trying older ones.

    Raises:
        CheckpointError: no checkpoint can be downloaded; raised on all ranks.
    """
    candidates = gather_verdict(world, lambda: None, lambda _: remote.require(source))

    def fetched(one: RemoteCheckpoint) -> tuple[Path, str]:
        return _fetch(one, root, world), f"{one.path} (step {one.step})"

    return first_that_verifies(candidates, fetched, world, source, strict=strict)


def _fetch(one: RemoteCheckpoint, root: Path, world: Group) -> Path:
    """Download ``one``, with each rank fetching some of its files, and commit it in ``root``. Collective."""

    def prepared(_: list[None]) -> tuple[Path, Path | None]:
        target = root / one.name
        with suppress(OSError):
            if (target / MANIFEST_NAME).read_bytes() == one.manifest:
                return target, None
        temporary = root / f".tmp-{one.name}-download"
        if temporary.exists():
            files.remove_tree(temporary)
        files.make_folder(temporary)
        return free_name(root, one.step) if target.exists() else target, temporary

    target, temporary = gather_verdict(world, lambda: None, prepared)
    if temporary is None:
        return target

    def commit(problems: list[list[str]]) -> None:
        if all_problems := [text for rank_problems in problems for text in rank_problems]:
            files.remove_tree(temporary)
            raise CheckpointError(f"{one.path} is damaged: " + ", ".join(all_problems))
        files.write_bytes(temporary / MANIFEST_NAME, one.manifest)
        files.sync_folder(temporary)
        commit_checkpoint(temporary, target)

    local_names = sorted(one.files)[world.rank :: world.size]
    gather_verdict(world, lambda: [text for name in local_names if (text := _download(one, name, temporary))], commit)
    if world.rank == 0:
        total = sum(size for size, _ in one.files.values())
        log.info(f"downloaded {one.path} to {target}: {total / 1e6:.1f} MB, all checksums match")
    return target


def _download(one: RemoteCheckpoint, name: str, folder: Path) -> str:
    """Download a file; return an error message, or "" if its checksum matches."""
    size, crc32 = one.files[name]
    chunks = object_store.read_chunks(object_store.join(one.path, name), size)
    _, actual_crc32 = files.write_chunks(folder / name, chunks)
    return "" if actual_crc32 == crc32 else f"{name} was altered: its checksum does not match"
