"""Loading: find the newest complete checkpoint, verify every byte, read any slice. Nothing is ever written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron import files, log
from megatron.checkpoint import folders, manifest
from megatron.checkpoint.agree import together
from megatron.checkpoint.manifest import Entry, Manifest, NewerFormatError, Piece
from megatron.checkpoint.records import DTYPES, TensorRecord, part_shape, spans
from megatron.checkpoint.shard_file import ShardFile
from megatron.errors import CheckpointError
from megatron.mpu.groups import Group
from megatron.mpu.shard import Shard


class Checkpoint:
    """A verified checkpoint: ``step``, ``state`` and named global tensors, of which any part can be read."""

    def __init__(self, path: Path, content: Manifest) -> None:
        self.path = path
        self.step = content.step
        self.state: dict[str, Any] = content.state
        self._index = content.index
        self._open: dict[str, ShardFile] = {}

    def names(self) -> list[str]:
        """Return the names of the global tensors."""
        return list(self._index)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of ``name``."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the element type in which ``name`` was saved."""
        return DTYPES[self._entry(name).dtype]

    def read(self, name: str, shard: Shard, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the part ``shard`` of the tensor ``name``, without padding, on the CPU.

        Whoever saved it may have cut it otherwise; only the bytes asked for are read.

        Args:
            dtype: convert to this type; None keeps the saved one.
        """
        self.check([(name, shard)])
        wanted = spans(shard)
        result = torch.empty(part_shape(shard), dtype=dtype or self.dtype(name))
        for piece in self._index[name].pieces:
            held = spans(piece.shard)
            overlap = [(max(w[0], h[0]), min(w[1], h[1])) for w, h in zip(wanted, held, strict=True)]
            if all(start < stop for start, stop in overlap):
                part = self._read_piece(piece, _relative(overlap, held))
                result[_relative(overlap, wanted)] = part
        return result

    def load(self, records: Iterable[TensorRecord]) -> None:
        """Copy every record's part into its tensor, converted to its type; padding rows are left as they are.

        Raises:
            CheckpointError: as ``check``, before anything is copied.
        """
        wanted = list(records)
        self.check((record.name, record.shard) for record in wanted)
        with torch.no_grad():
            for record in wanted:
                record.shard.unpadded(record.tensor).copy_(self.read(record.name, record.shard))

    def check(self, wanted: Iterable[tuple[str, Shard]]) -> None:
        """Check that every wanted tensor is here with its global shape.

        Raises:
            CheckpointError: listing every name that is missing and every shape that differs.
        """
        problems = []
        for name, shard in wanted:
            entry = self._index.get(name)
            if entry is None:
                problems.append(f"{name}: not in the checkpoint")
            elif entry.shape != tuple(shard.global_shape):
                problems.append(f"{name}: saved {list(entry.shape)}, now {list(shard.global_shape)}")
            elif any(
                not 0 <= start <= stop <= size for (start, stop), size in zip(spans(shard), entry.shape, strict=True)
            ):
                problems.append(f"{name}: {shard} reaches beyond the tensor")
        if problems:
            raise CheckpointError(
                f"{self.path} does not fit this model ({len(problems)} tensors): " + "; ".join(problems)
            )

    def _entry(self, name: str) -> Entry:
        if name not in self._index:
            raise CheckpointError(f"{name}: not in the checkpoint {self.path}")
        return self._index[name]

    def _read_piece(self, piece: Piece, cuts: tuple[slice, ...]) -> torch.Tensor:
        if piece.file not in self._open:
            self._open[piece.file] = ShardFile(self.path / piece.file)
        part = self._open[piece.file].read(piece.key, cuts)
        said = tuple(cut.stop - cut.start for cut in cuts)
        if tuple(part.shape) != said:
            raise CheckpointError(f"{self.path / piece.file}: {piece.key} gave {tuple(part.shape)} instead of {said}")
        return part


def _relative(overlap: list[tuple[int, int]], part: list[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(o[0] - p[0], o[1] - p[0]) for o, p in zip(overlap, part, strict=True))


def open_latest(root: Path, world: Group, *, strict: bool = False) -> Checkpoint:
    """Return the newest checkpoint in ``root`` that verifies, or ``root`` itself if it is one. Collective.

    All ranks get the same one. Each that had to be passed over is named in a warning with its reason.

    Args:
        strict: nothing is passed over: the newest must verify.

    Raises:
        CheckpointError: there is no folder ``root``, no checkpoint in it, or none that verifies.
    """
    root = Path(root)
    candidates = together(world, lambda: None, lambda _: _candidates(root))
    if candidates == [root]:
        return open_checkpoint(root, world)
    reasons = []
    for path in candidates:
        try:
            found = open_checkpoint(path, world)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        if world.rank == 0:
            _tell_detours(root, found, reasons)
        return found
    raise CheckpointError(f"no checkpoint in {root} verifies: " + " | ".join(reasons))


def _candidates(root: Path) -> list[Path]:
    """Return what may be opened in ``root``, the newest first. Rank 0 only."""
    if not root.is_dir():
        found_instead = "a file" if root.exists() else "not there"
        raise CheckpointError(f"--load must name a folder of checkpoints; {root} is {found_instead}")
    if (root / manifest.NAME).exists():
        return [root]
    found = folders.newest_first(root) + folders.without_manifest(root)
    if not found:
        raise CheckpointError(f"no checkpoint found in {root}: a checkpoint is a folder like step-00000020")
    return found


def _tell_detours(root: Path, found: Checkpoint, reasons: list[str]) -> None:
    if reasons:
        log.warning(f"going back to {found.path.name} (step {found.step}), since: " + " | ".join(reasons))
    hint = folders.read_latest(root)
    if hint != found.path.name:
        log.warning(f"{root / folders.LATEST} says {hint!r}; the newest complete checkpoint is {found.path.name}")


def open_checkpoint(path: Path, world: Group) -> Checkpoint:
    """Verify the checkpoint in the folder ``path``, the ranks sharing its files, and return it. Collective.

    Raises:
        CheckpointError: on all ranks alike; naming each file that is missing, truncated or altered.
    """
    path = Path(path)
    raw = together(world, lambda: None, lambda _: _manifest_bytes(path))
    content = manifest.from_bytes(raw, path / manifest.NAME)
    own = sorted(content.files)[world.rank :: world.size]
    together(world, lambda: _verify(path, content, own), lambda _: None)
    if world.rank == 0:
        _tell_foreign(path, content)
    return Checkpoint(path, content)


def _manifest_bytes(path: Path) -> bytes:
    """Return the content of the manifest in ``path``. Rank 0 only, so that all ranks see the same."""
    try:
        return (path / manifest.NAME).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {manifest.NAME}: {error.strerror}") from error


def _verify(path: Path, content: Manifest, names: list[str]) -> None:
    """Read the files ``names`` through and compare with the manifest."""
    problems = [problem for name in names if (problem := _file_problem(path / name, content.files[name]))]
    if problems:
        raise CheckpointError(f"{path} is damaged: " + ", ".join(problems))


def _file_problem(path: Path, facts: manifest.FileFacts) -> str | None:
    try:
        size = path.stat().st_size
        if size != facts.size:
            return f"{path.name} is {'truncated' if size < facts.size else 'too long'}: {size} of {facts.size} bytes"
        if files.size_and_crc(path) != (facts.size, facts.crc32):
            return f"{path.name} was altered: its checksum does not fit"
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return None


def _tell_foreign(path: Path, content: Manifest) -> None:
    foreign = sorted(child.name for child in path.iterdir() if child.name not in {*content.files, manifest.NAME})
    if foreign:
        log.warn_once(f"{path} also holds files that are not part of it; they are ignored: {', '.join(foreign)}")
