"""Average the weights of several checkpoints (mean or moving average) and save the result as a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.folders import CHECKPOINTS, checkpoints_folder, list_checkpoints, newest_first, step_of
from megatron.checkpoint.huggingface.folder import check_empty, new_folder
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.model_match import compare_model_config
from megatron.checkpoint.one_process import WEIGHTS, read_full
from megatron.checkpoint.opened_checkpoint import Checkpoint
from megatron.checkpoint.saving import save
from megatron.checkpoint.tensor_record import TensorRecord
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard

# | average | of the weights w_1 ... w_K, oldest first |
# |---|---|
# | mean | (w_1 + ... + w_K) / K |
# | ema D | m_1 = w_1; m_k = D m_{k-1} + (1 - D) w_k |
#
# Averages are computed in fp64 and rounded once, to the dtype of the last checkpoint's weight.
#
# Source of the mean over the end of a run: Izmailov et al. 2018, "Averaging weights leads to wider optima and better
# generalization"; over several runs: Wortsman et al. 2022, "Model soups".

_DROPPED_ENTRIES = ("callbacks", "guard", "scaler", "unasked")
"""Metadata entries about the state of training, which an average does not have."""


def open_newest(run: Path, count: int) -> list[Checkpoint]:
    """Return the last ``count`` checkpoints of a run, oldest first, verified.

    Raises:
        CheckpointError: the run has fewer checkpoints, or one does not verify.
    """
    paths = newest_first(list_checkpoints(checkpoints_folder(run)))
    if len(paths) < count:
        names = ", ".join(path.name for path in reversed(paths)) or "none"
        raise CheckpointError(
            f"--last {count} exceeds the number of checkpoints in {run}: {names}. Use a smaller --last"
        )
    return [open_checkpoint(path, SINGLE) for path in reversed(paths[:count])]


def open_steps(run: Path, steps: Sequence[int]) -> list[Checkpoint]:
    """Return the checkpoints of ``steps`` in ascending order, verified; the newest one if a step was saved repeatedly.

    Raises:
        CheckpointError: a checkpoint is missing or does not verify.
    """
    by_step: dict[int, Path] = {}
    for path in reversed(newest_first(list_checkpoints(checkpoints_folder(run)))):
        by_step[step_of(path)] = path
    missing = [str(step) for step in sorted(set(steps)) if step not in by_step]
    if missing:
        available = ", ".join(map(str, sorted(by_step))) or "none"
        raise CheckpointError(f"--steps {' '.join(missing)}: not found in {run}. Available steps: {available}")
    return [open_checkpoint(by_step[step], SINGLE) for step in sorted(set(steps))]


def average(checkpoints: Sequence[Checkpoint], output: Path, *, ema: float | None = None) -> Path:
    """Write the average of ``checkpoints`` to the new run folder ``output``; return the path of the checkpoint.

    The average has the metadata of the last checkpoint, without an optimizer.

    Args:
        checkpoints: at least two, oldest first.
        ema: decay of a moving average; None for the mean.

    Raises:
        CheckpointError: the checkpoints are not of the same model.
        ConfigError: ``output`` is not empty.
    """
    check_empty(output)
    last = checkpoints[-1]
    names = [name for name in last.names() if name.startswith(WEIGHTS)]
    for other in checkpoints[:-1]:
        _check_compatible(other, last, names)
    weights = {name: _average_tensor(checkpoints, name, ema) for name in names}
    records = [TensorRecord(name, tensor, Shard(tuple(tensor.shape))) for name, tensor in weights.items()]
    with new_folder(output) as folder:
        saved = save(folder / CHECKPOINTS, last.step, records, _average_metadata(checkpoints, ema), SINGLE)
    return output / CHECKPOINTS / saved.name


def _average_tensor(checkpoints: Sequence[Checkpoint], name: str, ema: float | None) -> torch.Tensor:
    total = read_full(checkpoints[0], name).double()
    for checkpoint in checkpoints[1:]:
        tensor = read_full(checkpoint, name).double()
        if ema is None:
            total += tensor
        else:
            total = ema * total + (1 - ema) * tensor
    if ema is None:
        total /= len(checkpoints)
    return total.to(checkpoints[-1].dtype(name))


def _check_compatible(checkpoint: Checkpoint, reference: Checkpoint, names: Sequence[str]) -> None:
    try:
        compare_model_config(checkpoint.metadata["model"], reference.metadata["model"])
    except CheckpointError as error:
        table = "\n".join(str(error).splitlines()[1:-1])
        raise CheckpointError(
            f"only checkpoints of the same model can be averaged, got {checkpoint.path} and {reference.path}:\n{table}"
        ) from error
    if checkpoint.metadata.get("tokenizer") != reference.metadata.get("tokenizer"):
        raise CheckpointError(
            f"only checkpoints with the same tokenizer can be averaged, got {checkpoint.path} and {reference.path}"
        )
    differing_names = set(names) ^ {name for name in checkpoint.names() if name.startswith(WEIGHTS)}
    differing_names |= {
        name for name in names if name not in differing_names and checkpoint.shape(name) != reference.shape(name)
    }
    if differing_names:
        raise CheckpointError(
            f"only checkpoints with the same weights can be averaged, but {checkpoint.path} and {reference.path} "
            f"differ in: {', '.join(sorted(differing_names))}"
        )


def _average_metadata(checkpoints: Sequence[Checkpoint], ema: float | None) -> dict[str, Any]:
    description = "mean" if ema is None else f"moving average, decay {ema:g},"
    retained = {name: value for name, value in checkpoints[-1].metadata.items() if name not in _DROPPED_ENTRIES}
    averaged = [str(checkpoint.path) for checkpoint in checkpoints]
    optimizer = f"none ({description} of {len(averaged)} checkpoints)"
    return {**retained, "scaler": {}, "optimizer": optimizer, "optimizer_steps": 0, "averaged": averaged}
