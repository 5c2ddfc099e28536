"""Read and write Hugging Face folders: config.json, and tensors in one safetensors file or in several with an index.

| file | contents |
|---|---|
| config.json, generation_config.json | model settings; ids of control tokens |
| model.safetensors | all tensors, or |
| model-00001-of-00002.safetensors, ..., model.safetensors.index.json | shards, and the file of each tensor |

A folder is assembled under a temporary name and renamed at the end, so that a folder with the final name is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron import files
from megatron.checkpoint import shard_file
from megatron.checkpoint.huggingface.config import CONFIG as CONFIG
from megatron.checkpoint.huggingface.config import INDEX, WEIGHTS, missing_file_error, read_json, uses_index
from megatron.errors import CheckpointError, ConfigError

_METADATA = b'{"__metadata__":{"format":"pt"},'  # transformers rejects a file without it


def check_empty(folder: Path) -> None:
    """Check that ``folder`` does not exist or is empty.

    Raises:
        ConfigError: ``folder`` is not empty.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"--output must be a new or empty folder, got {folder}. Choose another one")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; rename it to ``folder`` on success and remove it on an error.

    Raises:
        ConfigError: ``folder`` is not empty, or cannot be written.
    """
    check_empty(folder)
    temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    try:
        files.make_folder(temporary)
        yield temporary
        files.sync_folder(temporary)
        files.rename(temporary, folder)
    except BaseException as error:
        with suppress(OSError):
            files.remove_tree(temporary)
        if isinstance(error, OSError):
            raise ConfigError(f"--output {folder} could not be written: {error}") from error
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` to ``path`` as JSON."""
    files.write_bytes(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> list[str]:
    """Write ``tensors`` to files of at most ``max_shard_bytes``, unless one tensor is larger; return the file names."""
    shards = _shards(tensors, max_shard_bytes)
    num_shards = len(shards)
    names = (
        [WEIGHTS]
        if num_shards == 1
        else [f"model-{i:05d}-of-{num_shards:05d}.safetensors" for i in range(1, num_shards + 1)]
    )
    for name, shard in zip(names, shards, strict=True):
        files.write_chunks(folder / name, _chunks(shard))
    if num_shards > 1:
        file_of_tensor = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(_num_bytes(tensor) for tensor in tensors.values())
        write_json(
            folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of_tensor.items()))}
        )
    return names


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shards(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + _num_bytes(tensor) > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += _num_bytes(tensor)
    return shards


def _chunks(tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    header = _METADATA + shard_file.make_header(tensors)[8:].rstrip()[1:]
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        yield tensor.contiguous().flatten().view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Slice:
    """A tensor in an open file. Indexing reads only the requested part."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._slice.get_shape())

    @property
    def dtype(self) -> torch.dtype:
        return self._slice[:1].dtype

    @property
    def _slice(self) -> Any:
        return self.file.get_slice(self.name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._slice[index]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors in ``folder`` by name.

    Raises:
        CheckpointError: there are no safetensors files, one is missing or damaged, or one lacks tensors of the index.
    """
    with ExitStack() as stack:
        slices = open_slices(folder, stack)
        try:
            return {name: tensor_slice.file.get_tensor(name) for name, tensor_slice in slices.items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{folder} cannot be read: {error}") from error


def open_slices(folder: Path, stack: ExitStack) -> dict[str, Slice]:
    """Open all tensors in ``folder`` by name as slices, which are readable while ``stack`` is open.

    Raises:
        CheckpointError: as ``read_tensors``.
    """
    if not uses_index(folder):
        return _open_file(folder, WEIGHTS, stack)
    try:
        index: dict[str, str] = read_json(folder, INDEX)["weight_map"]
        names = sorted({_check_plain_name(name) for name in index.values()})
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / INDEX} is not a safetensors index: {error}") from error
    slices_of_file = {name: _open_file(folder, name, stack) for name in names}
    missing = sorted(key for key, name in index.items() if key not in slices_of_file[name])
    if missing:
        raise CheckpointError(f"{folder}: the files lack tensors that the index lists: {', '.join(missing)}")
    return {key: slices_of_file[name][key] for key, name in index.items()}


def _check_plain_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"files of the index must be in the folder, got {name!r}")
    return name


def _open_file(folder: Path, name: str, stack: ExitStack) -> dict[str, Slice]:
    path = folder / name
    if not path.exists():
        raise missing_file_error(folder, name)
    try:
        file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        return {key: Slice(file, key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
