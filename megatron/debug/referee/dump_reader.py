"""Dumps by ``tools/referee_hook.py``: files, checks and the layout."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RANK_FILE = re.compile(r"rank-(\d{5,})\.pt")
CHUNK_PREFIX = re.compile(r"^chunk\d+\.")
"""Part of names that the hook adds."""
WRAPPER_PREFIX = re.compile(r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of names that wrappers (DDP, torch.compile, FSDP) add."""

Axes = dict[str, tuple[int, int]]
"""Name of an axis -> (index of a rank on it, size)."""


class BadDumpError(ValueError):
    """A dump is missing, incomplete or damaged, or two dumps cannot be compared."""


@dataclass(frozen=True)
class Parameter:
    """One rank's parameter or shard.

    Attributes:
        name: name without wrapper prefixes; ``chunkN.`` precedes it if two model chunks of the rank have the same names
        value, grad: local tensors; ``grad`` is None if the trainer computed no gradient
        dim: sharded dimension if the trainer recorded it on the parameter (Megatron's ``partition_dim``)
        placements, grad_placements: DTensor placements as text, empty for plain tensors
        mesh, shape: the DTensor's mesh of ranks and global shape
    """

    name: str
    value: Tensor
    grad: Tensor | None
    dim: int | None = None
    placements: tuple[str, ...] = ()
    grad_placements: tuple[str, ...] = ()
    mesh: Any = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankDump:
    """One rank's dump.

    Attributes:
        norm: gradient norm that the trainer reported
        calls: module names in forward order; empty if not recorded
    """

    rank: int
    axes: Axes
    loss: float | None
    norm: float | None
    parameters: tuple[Parameter, ...]
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dump:
    """All ranks' dumps from one run, in rank order."""

    folder: Path
    ranks: tuple[RankDump, ...]

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Layout axes with more than one rank, and ``micro`` (the micro-batch count)."""
        return {name: size for name, (_, size) in self.ranks[0].axes.items() if size > 1}

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {
            parameter.grad.dtype for rank in self.ranks for parameter in rank.parameters if parameter.grad is not None
        }


def read_dump(folder: Path, axis_sizes: dict[str, int] | None = None, renames: Sequence[tuple[str, str]] = ()) -> Dump:
    """Read and check a run's dump.

    Args:
        axis_sizes: axis sizes, the axis with adjacent ranks first; they replace the axes in the dump.
        renames: (regular expression, replacement) pairs, applied to each name in this order.

    Raises:
        BadDumpError: If the folder has no dump, a file is damaged, or ranks are missing or contradict each other.
    """
    paths = sorted(path for path in folder.glob("rank-*.pt") if RANK_FILE.fullmatch(path.name))
    if not paths:
        raise BadDumpError(f"{folder} has no dump (files rank-00000.pt, ...)")
    contents = [_load(path) for path in paths]
    world_sizes = sorted({content["world_size"] for content in contents})
    if len(world_sizes) > 1:
        raise BadDumpError(
            f"{folder} mixes dumps of {' and '.join(map(str, world_sizes))} ranks. Dump into an empty folder"
        )
    missing = sorted(set(range(world_sizes[0])) - {content["rank"] for content in contents})
    if missing or len(contents) != world_sizes[0]:
        raise BadDumpError(f"{folder} lacks the dumps of ranks {missing} of {world_sizes[0]}")
    if axis_sizes and math.prod(size for name, size in axis_sizes.items() if name != "micro") != world_sizes[0]:
        raise BadDumpError(f"the product of the axes {axis_sizes} is not the number of ranks, {world_sizes[0]}")
    ranks = []
    for path, content in zip(paths, contents, strict=True):
        if not content["tensors"]:
            raise BadDumpError(f"{path} has no parameters")
        names = _unique_names(list(content["tensors"]), renames)
        parameters = tuple(
            _read_parameter(path, name, entry) for name, entry in zip(names, content["tensors"].values(), strict=True)
        )
        norm_path = path.with_suffix(".norm.pt")
        norm = float(_load(norm_path, ("norm",))["norm"]) if norm_path.exists() else None
        axes = _axes_of_rank(content["rank"], axis_sizes) if axis_sizes else _recorded_axes(path, content)
        has_chunk_prefixes = any(CHUNK_PREFIX.match(name) for name in names)
        calls = tuple(plain_name(name, keeps_chunk=has_chunk_prefixes) for name in content.get("calls", ()))
        ranks.append(RankDump(content["rank"], axes, content["loss"], norm, parameters, calls))
    ranks.sort(key=lambda rank: rank.rank)
    if any(
        {name: size for name, (_, size) in rank.axes.items()} != {n: s for n, (_, s) in ranks[0].axes.items()}
        for rank in ranks
    ):
        raise BadDumpError(f"the ranks in {folder} name different axes or sizes. Use --axes")
    return Dump(folder, tuple(ranks))


def plain_name(name: str, *, keeps_chunk: bool = False) -> str:
    """Strip wrapper prefixes, and the chunk prefix unless ``keeps_chunk``, from a parameter or module name."""
    chunk, rest = split_chunk(name)
    return (chunk if keeps_chunk else "") + WRAPPER_PREFIX.sub("", rest + ".")[:-1]


def split_chunk(name: str) -> tuple[str, str]:
    """Split a name into its chunk prefix ("" if it has none) and the remaining name."""
    match = CHUNK_PREFIX.match(name)
    return (match[0], name[match.end() :]) if match else ("", name)


def _unique_names(names: Sequence[str], renames: Sequence[tuple[str, str]]) -> list[str]:
    """Return plain, renamed names, with the chunk prefix if two chunks would have the same name.

    An interleaved pipeline may number the layers of each chunk from 0.

    Args:
        names: parameter names in one rank's dump.
    """
    plain_names = []
    for name in map(plain_name, names):
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        plain_names.append(name)
    if len(set(plain_names)) == len(plain_names):
        return plain_names
    return [split_chunk(name)[0] + plain for name, plain in zip(names, plain_names, strict=True)]


def _load(path: Path, keys: Sequence[str] = ("rank", "world_size", "axes", "loss", "tensors")) -> dict[str, Any]:
    """Load a hook file; only tensors and plain data are unpickled."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise BadDumpError(f"{path} is damaged or not a dump: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or not set(keys) <= content.keys():
        raise BadDumpError(f"{path} is not a dump of the hook: it needs the entries {', '.join(keys)}")
    return content


def _read_parameter(path: Path, name: str, entry: dict[str, Any]) -> Parameter:
    value, grad = entry.get("value"), entry.get("grad")
    if not isinstance(value, Tensor):
        raise BadDumpError(f"{path}: {name} has no value")
    if grad is not None and grad.shape != value.shape:
        # Gradient buffers may be flat views.
        if grad.numel() != value.numel():
            raise BadDumpError(
                f"{path}: the gradient of {name} has the shape {list(grad.shape)}, its value {list(value.shape)}. "
                "Dump full gradients: switch off sharded gradients (ZeRO 2, a distributed optimizer) for this step"
            )
        grad = grad.reshape(value.shape)
    return Parameter(
        name,
        value,
        grad,
        entry.get("dim"),
        tuple(entry.get("value_placements", ())),
        tuple(entry.get("grad_placements", ())),
        entry.get("mesh"),
        tuple(entry.get("shape", ())),
    )


def _recorded_axes(path: Path, content: dict[str, Any]) -> Axes:
    """Read the axes that the hook was called with; a single axis ``ranks`` if there are none.

    Raises:
        BadDumpError: If an axis is not (index, size).
    """
    axes: Axes = {}
    for name, value in content["axes"].items():
        try:
            index, size = map(int, value)
        except (TypeError, ValueError):
            index, size = 0, 0
        if not 0 <= index < size:
            raise BadDumpError(
                f"{path}: an axis must be (index of this rank, size), got {name}={value}. Call the hook with "
                f"{name}=(index, size), or use --axes"
            )
        axes[name] = index, size
    has_layout = any(size > 1 for name, (_, size) in axes.items() if name != "micro")
    return (
        axes
        if has_layout or content["world_size"] == 1
        else {"ranks": (content["rank"], content["world_size"]), **axes}
    )


def _axes_of_rank(rank: int, axis_sizes: dict[str, int]) -> Axes:
    """Compute a rank's axes in a grid whose first axis has adjacent ranks."""
    axes = {}
    for name, size in axis_sizes.items():
        axes[name] = (0 if name == "micro" else rank % size, size)
        rank = rank if name == "micro" else rank // size
    return axes
