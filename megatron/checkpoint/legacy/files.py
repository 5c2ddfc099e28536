"""Find the files in a legacy checkpoint, and read them without executing code."""

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

# Checkpoint files by program.
#
# | folder | file of a rank | program |
# |---|---|---|
# | iter_0000100, from latest_checkpointed_iteration.txt | mp_rank_TT/model_optim_rng.pt | Megatron-LM, CPM-Pretrain |
# | the same | mp_rank_TT_PPP/model_optim_rng.pt | the same, with a pipeline |
# | 80000, from the same file | mp_rank_TT_model_states.pt | CPM-1 |
# | global_step100, from latest | mp_rank_TT_model_states.pt | DeepSpeed |
# | the same | layer_LL-model_TT-model_states.pt | DeepSpeed with a pipeline |
#
# TT is the tensor rank, PPP the stage, LL the layer. Distributed checkpoints of Megatron-Core (torch_dist) are detected
# and rejected: --load reads torch_dist folders directly (``megatron.checkpoint.torch_dist``), and only Megatron-LM can
# assemble the tensors of the older format zarr.

_MEGATRON = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_DEEPSPEED = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_POINTERS = ("latest_checkpointed_iteration.txt", "latest")
_NAMES = ("model_optim_rng.pt", "model_rng.pt")
_CORE_FILES = ("common.pt", "metadata.json")


@dataclass(frozen=True)
class LegacyFiles:
    """The files in one checkpoint.

    Args:
        ranks: ``ranks[stage][tensor_rank]``; if there are ``layers``, these files only have settings.
        layers: ``layers[idx][tensor_rank]`` of a DeepSpeed pipeline.
    """

    folder: Path
    ranks: list[list[Path]]
    layers: list[list[Path]] = field(default_factory=list)


def find_legacy_files(folder: Path, iteration: str | None = None) -> LegacyFiles:
    """Find the checkpoint files for ``iteration`` in ``folder``; None selects the latest iteration.

    Raises:
        CheckpointError: ``folder`` has no such checkpoint, a rank's file is missing, or Megatron-Core wrote it as a
            distributed checkpoint.
    """
    if not folder.is_dir():
        raise CheckpointError(f"--input must be a folder with a checkpoint, but {folder} is not a folder")
    checkpoint = _select_checkpoint(folder, iteration)
    _reject_distributed(checkpoint)
    layers = _find_layers(checkpoint)
    state_matches = {path: _DEEPSPEED.fullmatch(path.name) for path in checkpoint.iterdir()}
    if any(state_matches.values()):
        by_rank = sorted((int(match[1]), path) for path, match in state_matches.items() if match)
        _check_complete([rank for rank, _ in by_rank], checkpoint, "tensor rank")
        return LegacyFiles(checkpoint, [[path for _, path in by_rank]], layers)
    if layers:
        return LegacyFiles(checkpoint, [], layers)
    ranks: dict[tuple[int, int], Path] = {}
    for path in checkpoint.iterdir():
        match = _MEGATRON.fullmatch(path.name)
        if match and path.is_dir():
            ranks[int(match[2] or 0), int(match[1])] = _find_rank_file(path)
    if not ranks:
        raise CheckpointError(
            f"{checkpoint} contains no checkpoint of Megatron-LM, CPM or DeepSpeed: it has none of "
            "mp_rank_00/model_optim_rng.pt, mp_rank_00_model_states.pt, layer_00-model_00-model_states.pt"
        )
    return LegacyFiles(checkpoint, _to_rows(ranks, checkpoint))


def _select_checkpoint(folder: Path, iteration: str | None) -> Path:
    if iteration is None:
        pointers = [folder / name for name in _POINTERS if (folder / name).is_file()]
        if not pointers:
            return folder
        iteration = pointers[0].read_text(errors="replace").strip()[:100]
    candidates = [folder / iteration]
    if iteration.isdecimal():
        candidates = [
            folder / f"iter_{int(iteration):07d}",
            folder / iteration,
            folder / f"global_step{int(iteration)}",
        ]
    for path in candidates:
        if path.is_dir():
            return path
    raise CheckpointError(f"{folder} must contain {' or '.join(path.name for path in candidates)}, but does not")


def _reject_distributed(folder: Path) -> None:
    """Raise CheckpointError for a checkpoint written by torch's distributed checkpointing or Megatron-Core.

    Checkpoints of this project have no files of these names.

    Source: folders written by Megatron-LM with ``--ckpt-format torch_dist`` and ``zarr``.
    """
    distcp_names = sorted(path.name for path in folder.glob("*.distcp"))
    if distcp_names:
        raise CheckpointError(
            f"{folder} must contain a file for each rank, got a distributed checkpoint of Megatron-Core "
            f"({distcp_names[0]}), which needs no import: train with --load {folder}"
        )
    if all((folder / name).is_file() for name in _CORE_FILES):
        raise CheckpointError(
            f"{folder} must contain a file for each rank, got a distributed checkpoint of Megatron-Core "
            f"({', '.join(_CORE_FILES)}), which only Megatron-LM can read. "
            "Convert it with Megatron-LM: run the training command with --ckpt-convert-format torch "
            "--ckpt-convert-save DIR, then tools/checkpoint/convert.py --model-type GPT --loader core --saver legacy "
            "--load-dir DIR --save-dir OTHER, and import OTHER"
        )


def _find_rank_file(folder: Path) -> Path:
    for name in _NAMES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} must contain {' or '.join(_NAMES)}, but does not")


def _to_rows(paths: dict[tuple[int, int], Path], folder: Path) -> list[list[Path]]:
    """Convert (row, tensor rank) -> path to a list of rows.

    Raises:
        CheckpointError: a row lacks a tensor rank's file.
    """
    tensor_size = 1 + max(rank for _, rank in paths)
    rows = sorted({row for row, _ in paths})
    missing = [f"{row}/{rank}" for row in rows for rank in range(tensor_size) if (row, rank) not in paths]
    if missing:
        raise CheckpointError(f"{folder} lacks files of stage or layer / tensor rank {', '.join(missing)}")
    return [[paths[row, rank] for rank in range(tensor_size)] for row in rows]


def _find_layers(folder: Path) -> list[list[Path]]:
    matches = [(match, path) for path in folder.iterdir() if (match := _LAYER.fullmatch(path.name))]
    return _to_rows({(int(match[1]), int(match[2])): path for match, path in matches}, folder) if matches else []


def _check_complete(indices: list[int], folder: Path, label: str) -> None:
    missing = sorted(set(range(max(indices) + 1)) - set(indices))
    if missing:
        raise CheckpointError(f"{folder} lacks the files of {label} {', '.join(map(str, missing))}")


# Read a pickled file with an allowlist of classes.
#
# ``torch.load(weights_only=True)`` only builds tensors, plain containers, and the classes in ``ALLOWED``. Loss scalers
# become empty stubs, since their state is not used. A file with any other class, function or module is rejected before
# any of its code runs.


class UnpickledStub:
    """Replaces objects of classes that are not available and whose content is not used."""

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
"""Enums in Megatron-LM's settings since 2021: the type of model, and the attention kernels."""
_reconstruct: Any = np.ndarray.__reduce__(np.zeros(0))[0]  # type: ignore[index]  # NumPy 2 moved it to another module
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
"""Classes that a file may use in addition to tensors: settings, their enums, NumPy's generator state, loss scalers."""


def unpickle_allowed(path: Path) -> dict[str, Any]:
    """Read the dictionary in ``path``, with its tensors on the CPU.

    Raises:
        CheckpointError: the file is truncated, is not a dictionary, or uses a class that is not in ``ALLOWED``.
    """
    try:
        with torch.serialization.safe_globals(ALLOWED):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} contains objects of classes that a checkpoint may not contain; none of them was created: "
            f"{_first_line(error)}. If you trust the file, save it again with only its tensors and settings."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read by torch.load: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must contain a dictionary, got {type(content).__name__}")
    return content


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    relevant = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (relevant or lines or [type(error).__name__])[0]
