"""open_latest (the newest whole checkpoint, every byte checked by all ranks) and Checkpoint (named slices in any
layout, other vocabularies).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron import files, hub, log
from megatron.checkpoint import folders, former, metadata
from megatron.checkpoint.folders import checkpoints_in
from megatron.checkpoint.metadata import (
    DTYPES,
    Entry,
    FileFacts,
    Manifest,
    NewerFormatError,
    TensorRecord,
    part_shape,
    spans,
)
from megatron.checkpoint.rank_errors import gather_verdict
from megatron.checkpoint.shard_file import FileVisibility
from megatron.config import Config
from megatron.config.config import FIRST_FAMILY
from megatron.errors import CheckpointError, marked
from megatron.models.registry import is_common_decoder
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard

if TYPE_CHECKING:
    from megatron.checkpoint.dcp import ShardReader

# A checkpoint that has been verified: its step, its state, and any slice of its tensors. Nothing is ever written.


class Checkpoint:
    """A verified checkpoint: ``step``, ``sequence``, ``state`` and named global tensors, of which any part is read."""

    def __init__(self, path: Path, content: Manifest, world: Group = SINGLE) -> None:
        self.path = path
        self.step = content.step
        self.sequence = content.sequence
        self.state: dict[str, Any] = content.state
        self._content, self._index, self._world = content, content.index, world
        self._reader: ShardReader | None = None

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
        """Return the part ``shard`` of the tensor ``name``, without padding, on the CPU. Not collective.

        Whoever saved it may have cut it otherwise; only the bytes asked for are read.

        Args:
            dtype: convert to this type; None keeps the saved one.
        """
        self.check([(name, shard)])
        result = torch.empty(part_shape(shard), dtype=dtype or self.dtype(name))
        self._load([TensorRecord(name, result, shard)], SINGLE)
        return result

    def load(self, records: Iterable[TensorRecord]) -> None:
        """Copy every record's part into its tensor, converted to its type; padding rows are left as they are.

        Collective over the ranks that opened the checkpoint.

        Raises:
            CheckpointError: as ``check``, on all ranks before anything is copied.
        """
        self._load(list(records), self._world)

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

    def _load(self, records: list[TensorRecord], world: Group) -> None:
        from megatron.checkpoint import dcp  # 0.6 s, so not before something is read

        if self._reader is None:
            self._reader = dcp.ShardReader(self.path, self._content)
        dcp.load(self._reader, dcp.RecordLoadPlanner(records, self.check), world)


# Does every byte of a checkpoint fit its checksum? All ranks read at once, and several threads of each.
#
# The files are cut into segments, whoever wrote them: the ranks take them in turn, and the checksum of a file is put
# together from those of its segments.

SEGMENT_BYTES = 32 << 20


@dataclass(frozen=True)
class Segment:
    """The bytes from ``start`` to ``stop`` of a file."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Share:
    """What a rank found: checksums by segment, and which files it could not read as they should be."""

    crcs: dict[Segment, int]
    problems: dict[str, str]


def verify(path: Path, content: Manifest, world: Group) -> None:
    """Compare sizes and checksums of the files in ``path`` with the manifest. Collective.

    Raises:
        CheckpointError: on all ranks alike; naming each file that is missing, truncated or altered.
    """
    own = [part for name, facts in sorted(content.files.items()) for part in segments(name, facts.size)]
    gather_verdict(
        world, lambda: _read(path, content, own[world.rank :: world.size]), lambda all: _judge(path, content, all)
    )


def segments(name: str, size: int) -> list[Segment]:
    """Return the segments of a file of ``size`` bytes, one at least."""
    starts = range(0, max(size, 1), SEGMENT_BYTES)
    return [Segment(name, start, min(start + SEGMENT_BYTES, size)) for start in starts]


def _read(path: Path, content: Manifest, own: list[Segment]) -> _Share:
    names = sorted({segment.name for segment in own})
    patience = FileVisibility()
    problems = {name: _size_problem(path / name, content.files[name], patience) for name in names}
    found = {name: problem for name, problem in problems.items() if problem}
    readable = [segment for segment in own if segment.name not in found]
    with ThreadPoolExecutor(_num_threads()) as pool:
        read = pool.map(lambda one: files.segment_crc(path / one.name, one.start, one.stop), readable)
        return _Share(dict(zip(readable, read, strict=True)), found)


def _size_problem(path: Path, facts: FileFacts, patience: FileVisibility) -> str | None:
    patience.wait_for(path, facts.size)
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if size != facts.size:
        return f"{path.name} is {'truncated' if size < facts.size else 'too long'}: {size} of {facts.size} bytes"
    return None


def _judge(path: Path, content: Manifest, shares: list[_Share]) -> None:
    """Rank 0 only."""
    crcs = {segment: value for share in shares for segment, value in share.crcs.items()}
    problems = {name: problem for share in shares for name, problem in share.problems.items()}
    for name, facts in sorted(content.files.items()):
        if name not in problems:
            crc = 0
            for part in segments(name, facts.size):
                crc = files.crc32_combine(crc, crcs[part], part.stop - part.start)
            if crc != facts.crc32:
                problems[name] = f"{name} was altered: its checksum does not fit"
    if problems:
        raise CheckpointError(f"{path} is damaged: " + ", ".join(problems[name] for name in sorted(problems)))


def _num_threads() -> int:
    """Return this rank's part of the cores that the process may use; 8 threads read faster than any disk."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // ranks_here))


# Opening: find the newest complete checkpoint and verify every byte. Nothing is ever written.


def open_latest(
    root: Path, world: Group, *, strict: bool = False, accept: Callable[[Path], bool] | None = None
) -> Checkpoint:
    """Return the newest checkpoint in ``root`` that verifies, or ``root`` itself if it is one. Collective.

    All ranks get the same one. Each that had to be passed over is named in a warning with its reason.

    Args:
        strict: nothing is passed over: the newest must verify.
        accept: which ones to look at; asked on rank 0.

    Raises:
        CheckpointError: there is no folder ``root``, no checkpoint in it, or none that verifies.
    """
    root = Path(root)
    candidates = gather_verdict(world, lambda: None, lambda _: _candidates(root, accept))
    found = open_first(candidates, world, root, strict=strict)
    if world.rank == 0 and accept is None and found.path != root:
        _compare_hint(root, found)
    return found


def open_first(candidates: list[Path], world: Group, root: Path, *, strict: bool = False) -> Checkpoint:
    """Return the first of ``candidates``, the same on all ranks, that verifies; else as ``open_latest``. Collective."""
    if candidates == [root]:
        return open_checkpoint(root, world)

    def opened(path: Path) -> tuple[Checkpoint, str]:
        found = open_checkpoint(path, world)
        return found, f"{path.name} (step {found.step})"

    return first_that_verifies(candidates, opened, world, root, strict=strict)


Candidate = TypeVar("Candidate")
Opened = TypeVar("Opened")


@marked(is_of_this_rank=False)
def first_that_verifies(
    candidates: Sequence[Candidate],
    opened: Callable[[Candidate], tuple[Opened, str]],
    world: Group,
    root: Path | str,
    *,
    strict: bool = False,
) -> Opened:
    """Return what ``opened`` makes of the first of ``candidates`` for which it raises no CheckpointError. Collective.

    Args:
        opened: also returns what the candidate is called in the warning that names those that were passed over.

    Raises:
        CheckpointError: of none, or ``strict`` and not of the first; on all ranks alike.
    """
    reasons = []
    for one in candidates:
        try:
            found, name = opened(one)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if strict:
                raise CheckpointError(f"the newest checkpoint must verify, none older is taken: {error}") from error
            reasons.append(str(error))
            continue
        if reasons and world.rank == 0:
            log.warning(f"going back to {name}, since: " + " | ".join(reasons))
        return found
    raise CheckpointError(f"no checkpoint in {root} verifies: " + " | ".join(reasons))


def _candidates(root: Path, accept: Callable[[Path], bool] | None) -> list[Path]:
    """Return what may be opened in ``root``, the newest first. Rank 0 only."""
    if not root.is_dir():
        found_instead = "a file" if root.exists() else "not there"
        raise CheckpointError(f"checkpoints must lie in a folder; {root} is {found_instead}")
    if (root / metadata.MANIFEST_NAME).exists():
        return [root]
    found = [path for path in folders.in_turn(folders.list_checkpoints(root)) if accept is None or accept(path)]
    if not found:
        theirs = sorted(path.name for path in root.glob("global_step*"))
        other = f"; {theirs[-1]} is in DeepSpeed's format, which training alone reads (--load)" if theirs else ""
        raise CheckpointError(f"no checkpoint found in {root}: a checkpoint is a folder like step-00000020{other}")
    return found


def _compare_hint(root: Path, found: Checkpoint) -> None:
    hint = folders.read_latest(root)
    if hint != found.path.name:
        log.warning(f"{root / folders.LATEST} says {hint!r}; the newest complete checkpoint is {found.path.name}")


@marked(is_of_this_rank=False)
def open_checkpoint(path: Path, world: Group) -> Checkpoint:
    """Verify the checkpoint in the folder ``path``, the ranks sharing its files, and return it. Collective.

    Raises:
        CheckpointError: on all ranks alike; naming each file that is missing, truncated or altered.
    """
    path = Path(path)
    raw = gather_verdict(world, lambda: None, lambda _: _manifest_bytes(path))
    content = metadata.manifest_from_bytes(raw, path / metadata.MANIFEST_NAME)
    verify(path, content, world)
    if world.rank == 0:
        _warn_foreign(path, content)
    return Checkpoint(path, content, world)


def _manifest_bytes(path: Path) -> bytes:
    """Return the content of the manifest in ``path``. Rank 0 only, so that all ranks see the same."""
    try:
        return (path / metadata.MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {metadata.MANIFEST_NAME}: {error.strerror}"
        ) from error


def _warn_foreign(path: Path, content: Manifest) -> None:
    foreign = sorted(
        child.name for child in path.iterdir() if child.name not in {*content.files, metadata.MANIFEST_NAME}
    )
    if foreign:
        log.warn_once(f"{path} also holds files that are not part of it; they are ignored: {', '.join(foreign)}")


# Does a checkpoint belong to the model of this run?

_ABSENT = "absent"


def compare_model_config(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that the model that was saved has the sizes of the model of this run.

    Raises:
        CheckpointError: listing every key that differs with both values.
    """
    keys = [*saved, *(key for key in now if key not in saved)]
    different = [key for key in keys if saved.get(key, _ABSENT) != now.get(key, _ABSENT)]
    if different:
        table = "\n".join(f"  {key}: saved {saved.get(key, _ABSENT)}, now {now.get(key, _ABSENT)}" for key in different)
        raise CheckpointError(
            f"the checkpoint is of another model, {len(different)} values differ:\n{table}\n"
            "Start with the saved values, or name another folder with --load."
        )


def check_model(saved: Mapping[str, Any], config: Config) -> None:
    """Check that weights fit the model of ``config``, as closely as its flags ask for.

    ``--resize-vocab`` takes another vocabulary, ``--finetune`` another value of what no weight's shape depends on
    (``FamilyConfig.REFITTED``). Families of the common decoder are one model where their settings are.

    Args:
        saved: ``Config.identity()`` of the model that the weights are of.

    Raises:
        CheckpointError: listing every key that differs with both values.
    """
    flags, now = config.checkpoint, config.identity()
    free: tuple[str, ...] = ("vocab_size",) if flags.resize_vocab else ()
    free += config.refitted if flags.finetune else ()
    try:
        saved = former.identity(saved)
        if is_common_decoder(saved.get("family", FIRST_FAMILY)) and is_common_decoder(config.family):
            saved, now = ({key: each[key] for key in each if key != "family"} for each in (saved, now))
        compare_model_config({**saved, **{key: now[key] for key in free if key in saved}}, now)
    except CheckpointError as error:
        fitting = [key for key in config.refitted if saved.get(key, _ABSENT) != now[key]]
        if not fitting or flags.finetune:
            raise
        raise CheckpointError(
            f"{error} The weights fit another {', '.join(fitting)} as well: --finetune starts anew from them so"
        ) from None


# Tables of a vocabulary of another size than was saved.
#
# The rows that both have are taken. Each further row is the mean of all saved rows, as Hewitt 2021 ("Initializing new
# word embeddings for pretrained language models") recommends: a new token is then about as likely as the average one.

_ROWS_AT_ONCE = 4096


def is_resized(saved: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Tell whether a table has another number of rows than was saved, and is the same else."""
    return len(saved) == len(now) and saved[1:] == now[1:] and saved != now


def fill(target: torch.Tensor, shard: Shard, saved: tuple[int, ...], read: Callable[[Shard], torch.Tensor]) -> None:
    """Fill this rank's part of a table from one of another number of rows, a block of rows after another.

    Args:
        target: the part ``shard``, without padding; cut by rows, or whole.
        saved: shape of the table that was saved.
        read: returns a part of it.
    """
    if target.numel() == 0:
        return
    start = shard.start if shard.is_partitioned else 0
    known = min(max(saved[0] - start, 0), target.shape[0])
    for at in range(0, known, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, known - at)
        target[at : at + rows].copy_(read(Shard(saved, 0, start + at, rows)))
    if known < target.shape[0]:
        target[known:].copy_(_mean(saved, read))


def _mean(saved: tuple[int, ...], read: Callable[[Shard], torch.Tensor]) -> torch.Tensor:
    """Return the mean of all rows, in fp64: the same on every rank."""
    total = torch.zeros(saved[1:], dtype=torch.float64)
    for start in range(0, saved[0], _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, saved[0] - start)
        total += read(Shard(saved, 0, start, rows)).double().sum(0)
    return total / saved[0]


# A checkpoint in the hands of one process: opened from any of its folders, its tensors read whole.

WEIGHTS = "weights/"
"""What the names of weights begin with."""


def open_folder(path: Path, world: Group = SINGLE) -> Checkpoint:
    """Return the checkpoint that ``path`` means: a run folder, its checkpoints folder, or one checkpoint. Collective.

    Raises:
        CheckpointError: there is none there, or none that verifies.
    """
    if not path.is_dir():
        found = "a file" if path.exists() else "not there"
        raise CheckpointError(
            f"{path} is {found}: name a run folder, its checkpoints folder, or one checkpoint.{hub.advice(path)}"
        )
    return open_latest(checkpoints_in(path), world)


def open_written(path: Path) -> Checkpoint:
    """Return the checkpoint ``path`` that this process has just written, without reading it through.

    Raises:
        CheckpointError: its manifest cannot be read.
    """
    return Checkpoint(path, metadata.manifest_from_bytes(_manifest_bytes(path), path / metadata.MANIFEST_NAME))


def read_whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return the tensor ``name`` as it was saved, without padding."""
    return checkpoint.read(name, Shard(checkpoint.shape(name)))


def weight_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the weights, without what they begin with."""
    return [name.removeprefix(WEIGHTS) for name in checkpoint.names() if name.startswith(WEIGHTS)]


def read_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return all weights by the names that they have in the model."""
    return {name: read_whole(checkpoint, WEIGHTS + name) for name in weight_names(checkpoint)}
