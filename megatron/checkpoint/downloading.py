"""Download a checkpoint from an object store with all ranks, verifying all checksums."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from megatron import files, log, object_store
from megatron.checkpoint import remote
from megatron.checkpoint.folders import commit_checkpoint, unused_path
from megatron.checkpoint.loading import open_first_valid
from megatron.checkpoint.manifest import MANIFEST_NAME
from megatron.checkpoint.rank_errors import gather_verdict
from megatron.checkpoint.remote import RemoteCheckpoint
from megatron.errors import CheckpointError
from megatron.mpu.groups import Group


def fetch_newest(source: str, root: Path, world: Group, *, strict: bool = False) -> Path:
    """Download the newest checkpoint with matching checksums from ``source`` to ``root``; return its path. Collective.

    Each rank downloads some of the files. A checkpoint that is already in ``root`` is not downloaded again.

    Args:
        strict: raise if the newest checkpoint's checksums do not match, instead of trying older ones.

    Raises:
        CheckpointError: no checkpoint can be downloaded; raised on all ranks.
    """
    candidates = gather_verdict(world, lambda: None, lambda _: remote.require_checkpoints(source))

    def fetch_candidate(checkpoint: RemoteCheckpoint) -> tuple[Path, str]:
        return _fetch(checkpoint, root, world), f"{checkpoint.path} (step {checkpoint.step})"

    return open_first_valid(candidates, fetch_candidate, world, source, strict=strict)


def _fetch(checkpoint: RemoteCheckpoint, root: Path, world: Group) -> Path:
    """Download ``checkpoint``, with each rank fetching some of its files, and commit it in ``root``. Collective."""

    def prepare(_: list[None]) -> tuple[Path, Path | None]:
        target = root / checkpoint.name
        with suppress(OSError):
            if (target / MANIFEST_NAME).read_bytes() == checkpoint.manifest:
                return target, None
        temporary = root / f".tmp-{checkpoint.name}-download"
        if temporary.exists():
            files.remove_tree(temporary)
        files.make_folder(temporary)
        return unused_path(root, checkpoint.step) if target.exists() else target, temporary

    target, temporary = gather_verdict(world, lambda: None, prepare)
    if temporary is None:
        return target

    def commit(problems: list[list[str]]) -> None:
        if all_problems := [text for rank_problems in problems for text in rank_problems]:
            files.remove_tree(temporary)
            raise CheckpointError(f"{checkpoint.path} is damaged: " + ", ".join(all_problems))
        files.write_bytes(temporary / MANIFEST_NAME, checkpoint.manifest)
        files.sync_folder(temporary)
        commit_checkpoint(temporary, target)

    local_names = sorted(checkpoint.files)[world.rank :: world.size]
    gather_verdict(
        world, lambda: [text for name in local_names if (text := _download(checkpoint, name, temporary))], commit
    )
    if world.rank == 0:
        total = sum(size for size, _ in checkpoint.files.values())
        log.info(f"downloaded {checkpoint.path} to {target}: {total / 1e6:.1f} MB, all checksums match")
    return target


def _download(checkpoint: RemoteCheckpoint, name: str, folder: Path) -> str:
    """Download a file; return an error message, or "" if its checksum matches."""
    size, crc32 = checkpoint.files[name]
    chunks = object_store.read_chunks(object_store.join(checkpoint.path, name), size)
    _, actual_crc32 = files.write_chunks(folder / name, chunks)
    return "" if actual_crc32 == crc32 else f"{name} was altered: its checksum does not match"
