"""Which files make up such a checkpoint, read without running code."""

from __future__ import annotations

import argparse
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.errors import CheckpointError

# Which files make up a checkpoint of these families.
#
# | folder | file of a rank | family |
# |---|---|---|
# | iter_0000100, by latest_checkpointed_iteration.txt | mp_rank_TT/model_optim_rng.pt | Megatron-LM, CPM-Pretrain |
# | the same | mp_rank_TT_PPP/model_optim_rng.pt | the same with a pipeline |
# | 80000, by the same file | mp_rank_TT_model_states.pt | CPM-1 |
# | global_step100, by latest | mp_rank_TT_model_states.pt | DeepSpeed |
# | the same | layer_LL-model_TT-model_states.pt | DeepSpeed with a pipeline |
#
# TT counts tensor ranks, PPP stages, LL layers. The distributed checkpoints of Megatron-Core (torch_dist) are known,
# and refused with the way to these files: their tensors can be put together by Megatron-LM alone.

_MEGATRON = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_DEEPSPEED = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_POINTERS = ("latest_checkpointed_iteration.txt", "latest")
_NAMES = ("model_optim_rng.pt", "model_rng.pt")
_CORE = ("common.pt", "metadata.json")


@dataclass(frozen=True)
class Files:
    """The files of one checkpoint: ``ranks[stage][tensor rank]``, and of a DeepSpeed pipeline ``layers[number][...]``.

    Where there are layers, ``ranks`` holds settings alone.
    """

    folder: Path
    ranks: list[list[Path]]
    layers: list[list[Path]] = field(default_factory=list)


def find_legacy_files(folder: Path, iteration: str | None = None) -> Files:
    """Return the files of the checkpoint in ``folder``: the one that it points to, or that of ``iteration``.

    Raises:
        CheckpointError: there is none, a rank's file is missing, or it is a distributed one of Megatron-Core.
    """
    if not folder.is_dir():
        raise CheckpointError(f"--input must name a folder with a checkpoint, got {folder}, which is none")
    chosen = _chosen(folder, iteration)
    _refuse_distributed(chosen)
    layers = _layers(chosen)
    found = {path: _DEEPSPEED.fullmatch(path.name) for path in chosen.iterdir()}
    if any(found.values()):
        by_rank = sorted((int(match[1]), path) for path, match in found.items() if match)
        _require_all([rank for rank, _ in by_rank], chosen, "tensor rank")
        return Files(chosen, [[path for _, path in by_rank]], layers)
    if layers:
        return Files(chosen, [], layers)
    ranks: dict[tuple[int, int], Path] = {}
    for path in chosen.iterdir():
        match = _MEGATRON.fullmatch(path.name)
        if match and path.is_dir():
            ranks[int(match[2] or 0), int(match[1])] = _file_in(path)
    if not ranks:
        raise CheckpointError(
            f"{chosen} holds no checkpoint of Megatron-LM, CPM or DeepSpeed: none of mp_rank_00/model_optim_rng.pt, "
            "mp_rank_00_model_states.pt, layer_00-model_00-model_states.pt is there"
        )
    return Files(chosen, _rows(ranks, chosen))


def _chosen(folder: Path, iteration: str | None) -> Path:
    if iteration is None:
        pointers = [folder / name for name in _POINTERS if (folder / name).is_file()]
        if not pointers:
            return folder
        iteration = pointers[0].read_text(errors="replace").strip()[:100]
    named = [folder / iteration]
    if iteration.isdecimal():
        named = [folder / f"iter_{int(iteration):07d}", folder / iteration, folder / f"global_step{int(iteration)}"]
    for path in named:
        if path.is_dir():
            return path
    raise CheckpointError(f"{folder} must hold {' or '.join(path.name for path in named)}, and does not")


def _refuse_distributed(folder: Path) -> None:
    """Refuse what torch's distributed checkpointing or Megatron-Core's wrote; our own folders have none of these names.

    Source: the folders that ``--ckpt-format torch_dist`` and ``zarr`` of Megatron-LM leave.
    """
    pieces = sorted(path.name for path in folder.glob("*.distcp"))
    if pieces or all((folder / name).is_file() for name in _CORE):
        raise CheckpointError(
            f"{folder} must hold a file for each rank, got a distributed checkpoint of Megatron-Core "
            f"({pieces[0] if pieces else ', '.join(_CORE)}), which Megatron-LM alone can read. Have it write the old "
            "files first: the command that trained it, with --ckpt-convert-format torch --ckpt-convert-save DIR, then "
            "tools/checkpoint/convert.py --model-type GPT --loader core --saver legacy --load-dir DIR "
            "--save-dir OTHER, and import OTHER"
        )


def _file_in(folder: Path) -> Path:
    for name in _NAMES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} must hold {' or '.join(_NAMES)}, and does not")


def _rows(found: dict[tuple[int, int], Path], folder: Path) -> list[list[Path]]:
    """Return ``found`` by (row, tensor rank) as a list of rows, all complete."""
    tensor = 1 + max(rank for _, rank in found)
    rows = sorted({row for row, _ in found})
    missing = [f"{row}/{rank}" for row in rows for rank in range(tensor) if (row, rank) not in found]
    if missing:
        raise CheckpointError(f"{folder} lacks files of stage or layer / tensor rank {', '.join(missing)}")
    return [[found[row, rank] for rank in range(tensor)] for row in rows]


def _layers(folder: Path) -> list[list[Path]]:
    matches = [(match, path) for path in folder.iterdir() if (match := _LAYER.fullmatch(path.name))]
    return _rows({(int(match[1]), int(match[2])): path for match, path in matches}, folder) if matches else []


def _require_all(numbers: list[int], folder: Path, what: str) -> None:
    missing = sorted(set(range(max(numbers) + 1)) - set(numbers))
    if missing:
        raise CheckpointError(f"{folder} lacks the files of {what} {', '.join(map(str, missing))}")


# Reading a pickled file with a list of what it may build.
#
# ``torch.load(weights_only=True)`` builds tensors and plain containers; of other classes only those named here. Loss
# scalers become empty shells: what they held is not used. Any other class, function or module ends the reading before
# anything of it runs.


class UnpickledStub:
    """Stands in for an object whose class is not here and whose content nobody reads."""

    def __init__(self, *value: object) -> None:
        return None

    def __setstate__(self, state: object) -> None:
        return None


_SCALERS = ("LossScaler", "DynamicLossScaler", "LossScalerBase", "ConstantGradScaler", "DynamicGradScaler")
_SCALER_MODULES = (
    "fp16.loss_scaler",
    "megatron.fp16.loss_scaler",
    "megatron.optimizer.grad_scaler",
    "deepspeed.runtime.fp16.loss_scaler",
    "apex.fp16_utils.loss_scaler",
)
_ENUMS = (
    "megatron.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
)
"""Of Megatron-LM's settings since 2021: the kind of model, and which kernels computed attention."""
_reconstruct: Any = np.ndarray.__reduce__(np.zeros(0))[0]  # type: ignore[index]  # its home moved with NumPy 2
_ARRAYS = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
ALLOWED: list[Any] = [
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    type(np.dtype(np.int64)),
    type(np.dtype(np.float64)),
    *((_reconstruct, name) for name in _ARRAYS),
    *((UnpickledStub, f"{module}.{name}") for module in _SCALER_MODULES for name in _SCALERS),
    *((UnpickledStub, name) for name in _ENUMS),
]
"""Classes that a file may name beside tensors: settings and their enums, the state of NumPy's generator, loss scalers.
"""


def unpickle_allowed(path: Path) -> dict[str, Any]:
    """Return the dictionary in ``path``, its tensors on the CPU.

    Raises:
        CheckpointError: the file is cut short or no dictionary, or names something that is not ``ALLOWED``.
    """
    try:
        with torch.serialization.safe_globals(ALLOWED):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds objects that are not on the list of what a checkpoint may hold, and none of them was built: "
            f"{_first_line(error)}. If you trust the file, save it anew with its tensors and settings alone."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read as a file of torch.save: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a dictionary, got {type(content).__name__}")
    return content


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (named or lines or [type(error).__name__])[0]
