"""Reading a pickled file with a list of what it may build.

``torch.load(weights_only=True)`` builds tensors and plain containers; of other classes only those named here. Loss
scalers become empty shells: what they held is not used. Any other class, function or module ends the reading before
anything of it runs.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.errors import CheckpointError


class Shell:
    """Stands in for an object whose class is not here and whose content nobody reads."""

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
    *((Shell, f"{module}.{name}") for module in _SCALER_MODULES for name in _SCALERS),
]
"""Classes that a file may name beside tensors: settings, the state of NumPy's generator, loss scalers."""


def read(path: Path) -> dict[str, Any]:
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
