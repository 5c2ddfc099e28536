"""Find Megatron-LM's ``torch_dist`` folder, and read the state that is common to its ranks. No torch.

    checkpoints/
        latest_checkpointed_iteration.txt   "10": the newest iteration; "release" for weights without a run
        iter_0000010/
            .metadata                       names, shapes and positions of all entries
            __0_0.distcp ...                the entries; rank 0, file 0
            common.pt                       arguments, iteration, state of the scheduler, parameter groups
            metadata.json                   the format; it is written last

Since 2026 Megatron-LM stores the content of ``common.pt`` as a byte entry instead.

Source: Megatron-LM, megatron/training/checkpointing.py, ``generate_state_dict``; megatron/core/dist_checkpointing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import CHECKPOINTS, MANIFEST_NAME
from megatron.checkpoint.torch_dist.index import METADATA, TorchDistIndex, attributes, read_index, read_span
from megatron.checkpoint.torch_dist.torch_zip import ArchivedTensor, read_archive
from megatron.errors import CheckpointError

POINTER = "latest_checkpointed_iteration.txt"
FORMAT_FILE = "metadata.json"
COMMON = "common.pt"
BACKEND = "torch_dist"
_COMMON_ENTRY = re.compile(r"common_state/.*")
_ITERATION = re.compile(r"iter_\d+|release")


@dataclass(frozen=True)
class TorchDistFolder:
    """One Megatron-Core checkpoint.

    Args:
        path: the folder ``iter_N``.
        args: the saved run's arguments, by name.
        iteration: completed iterations.
        scheduler: learning-rate schedule state; empty without an optimizer.
        adam_steps: optimizer updates; None if unknown.
        scaler: loss-scale state; empty without a loss scale.
        sharding: how the distributed optimizer stored its state; "" without a distributed optimizer.
    """

    path: Path
    index: TorchDistIndex
    args: Mapping[str, Any]
    iteration: int
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    adam_steps: int | None = None
    scaler: Mapping[str, Any] = field(default_factory=dict)
    sharding: str = ""


def find_iteration(source: Path) -> Path | None:
    """Find the folder of the newest Megatron-Core checkpoint in ``source``; None if it contains none.

    This project's checkpoints in ``source`` take precedence, so that a run can continue in Megatron's folder.

    Args:
        source: the folder of ``--load``, or one ``iter_N``.

    Raises:
        CheckpointError: latest_checkpointed_iteration.txt names a missing folder, although there are other checkpoints;
            or the checkpoint has another of Megatron-LM's formats.
    """
    if not source.is_dir() or (source / MANIFEST_NAME).exists():
        return None
    if any(source.glob("step-*")) or any((source / CHECKPOINTS).glob("step-*")):
        return None
    if _is_torch_dist(source):
        return source
    _reject_other_formats(source, "mp_rank_*/*.pt")
    pointer = source / POINTER
    if not pointer.is_file():
        return None
    word = pointer.read_text(errors="replace").strip()[:100]
    folder = source / (f"iter_{int(word):07d}" if word.isdecimal() else word)
    if folder.is_dir() and _is_torch_dist(folder):
        return folder
    for path in (folder, source / word):
        if word and path.is_dir():
            _reject_other_formats(path, "mp_rank_*")
    if folder.is_dir():
        return None
    others = sorted(path.name for path in source.iterdir() if _ITERATION.fullmatch(path.name) and _is_torch_dist(path))
    if not others:
        return None
    raise CheckpointError(
        f"{pointer} names {word!r}, but {folder} does not exist. Name one of the checkpoints with --load: "
        f"{', '.join(others)}"
    )


def _reject_other_formats(folder: Path, rank_files: str) -> None:
    """Check that ``folder`` has no checkpoint in a format without ``.distcp`` files.

    Args:
        rank_files: pattern for the files or folders of single ranks.

    Raises:
        CheckpointError: names the format, so that no run starts from scratch next to its checkpoint.
    """
    if any(folder.glob(rank_files)):
        raise CheckpointError(
            f"--load reads the format {BACKEND} of Megatron-LM, but {folder} has a file for each rank (--ckpt-format "
            f"torch). Import its weights with tools/import_checkpoint.py --input {folder}, or save it once more in "
            f"Megatron-LM with --ckpt-format {BACKEND}"
        )
    if (folder / FORMAT_FILE).is_file() and (folder / COMMON).is_file():
        _check_format(folder)


def _is_torch_dist(folder: Path) -> bool:
    """Return True if ``folder`` has files in this format, even if the checkpoint is incomplete."""
    return (folder / METADATA).is_file() or any(folder.glob("*.distcp"))


def read_folder(path: Path) -> TorchDistFolder:
    """Read the checkpoint in the folder ``iter_N``, without tensor values.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or has another format.
    """
    _check_format(path)
    index = read_index(path)
    name, archive = _common_archive(path, index)
    try:
        content = read_archive(archive)
        content = content[0] if isinstance(content, list) else content
        args = attributes(content["args"])
        optimizer = content.get("optimizer") or {}
        return TorchDistFolder(
            path=path,
            index=index,
            args=args,
            iteration=int(content.get("iteration") or 0),
            scheduler=content.get("opt_param_scheduler") or {},
            adam_steps=_adam_steps(optimizer, archive),
            scaler=_numbers(next(_values_of(optimizer, "grad_scaler"), {}), archive),
            sharding=str(next(_values_of(optimizer, "param_state_sharding_type"), "")),
        )
    except KeyError as error:
        raise CheckpointError(
            f"{name} lacks {error}: it was not saved by Megatron-LM's training loop, or with another version"
        ) from error
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error


def _check_format(path: Path) -> None:
    """Check ``metadata.json``, which Megatron-Core writes last.

    Raises:
        CheckpointError: it is missing or damaged, or names another format.
    """
    file = path / FORMAT_FILE
    try:
        backend = json.loads(file.read_bytes())["sharded_backend"]
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint of Megatron-Core: {FORMAT_FILE}: {error.strerror}. The save was "
            "interrupted: choose another iteration"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if backend != BACKEND:
        raise CheckpointError(
            f"{path} must have the format {BACKEND}, got {backend}. Save it again with --ckpt-format torch_dist"
        )


def _common_archive(path: Path, index: TorchDistIndex) -> tuple[str, memoryview]:
    """Read the archive with the common state: (name, content)."""
    file = path / COMMON
    if file.is_file():
        return str(file), memoryview(file.read_bytes())
    entries = [name for name in index.objects if _COMMON_ENTRY.fullmatch(name)]
    if not entries:
        raise CheckpointError(f"{path} is not a complete checkpoint of Megatron-Core: {COMMON} is missing")
    return f"{path}: {entries[0]}", memoryview(read_span(path, index.objects[entries[0]]))


def _adam_steps(optimizer: Any, archive: memoryview) -> int | None:
    """Find the update count in the optimizer state; None if it has none.

    The parameters' count takes precedence over those of parameter groups: torch's AdamW does not advance a count that a
    loaded group contains, and Megatron-Core saves it again.

    Raises:
        ValueError: parameters have different counts.
    """
    steps: set[int] = set()
    for key in ("common_step", "step"):
        values = (v.item(archive) if isinstance(v, ArchivedTensor) else v for v in _values_of(optimizer, key))
        steps = steps or {int(step) for step in values if isinstance(step, int | float)}
    if len(steps) > 1:
        raise ValueError(f"the parameters have different numbers of updates: {sorted(steps)}")
    return steps.pop() if steps else None


def _numbers(state: Mapping[str, Any], archive: memoryview) -> dict[str, Any]:
    """Replace each tensor by its value as a number (``ArchivedTensor.item``)."""
    return {key: value.item(archive) if isinstance(value, ArchivedTensor) else value for key, value in state.items()}


def _values_of(value: Any, key: str) -> Iterator[Any]:
    """Find all values of ``key`` in nested dictionaries and lists."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _values_of(item, key)
