"""Load ``torch.save`` files without executing code from them.

A ``torch.save`` file is a pickle, which can call any function when it is loaded. DeepSpeed loads its files without
protection against that. In ``weights_only``, every ``torch.load``, including DeepSpeed's, only constructs tensors,
plain containers and the classes in ``ALLOWED``, which DeepSpeed's files contain. Any other object raises an error
before its code runs.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tds.deepspeed.api import (
    DynamicLossScaler,
    LossScaler,
    ZeroStageEnum,
    fragment_address,
)

_FORCE_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # overrides the argument that DeepSpeed passes to ``torch.load``
_NAME = re.compile(r"(?:GLOBAL|class) ([\w.]+)")
_reconstruct: Any = np.ndarray.__reduce__(np.zeros(0))[0]  # type: ignore[index]
_scalar: Any = np.float64(0).__reduce__()[0]  # type: ignore[index]
_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")  # renamed in NumPy 2
_DTYPE_NAMES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
ALLOWED: list[Any] = [
    LossScaler,
    DynamicLossScaler,
    ZeroStageEnum,
    fragment_address,
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(dtype_name)) for dtype_name in _DTYPE_NAMES),
    *((_reconstruct, f"{module_name}._reconstruct") for module_name in _NUMPY_MODULES),
    *((_scalar, f"{module_name}.scalar") for module_name in _NUMPY_MODULES),
]
"""Allowed classes, in addition to the classes that torch allows (tensors, sizes, dtypes, sets, OrderedDict, Counter).

| written by | objects |
|---|---|
| DeepSpeed's fp16 and ZeRO optimizers | loss scalers, the ZeRO stage, fragment addresses in flat buffers |
| programs, as client state | ``argparse.Namespace``; NumPy scalars and arrays (object arrays only of allowed classes) |
"""


class UnsafeFileError(RuntimeError):
    """Raised if a file contains a class that is not allowed; no code from the file has run."""


@contextmanager
def weights_only() -> Iterator[None]:
    """Restrict every ``torch.load`` in the block to the classes in ``ALLOWED`` and the classes that torch allows."""
    previous = os.environ.get(_FORCE_VARIABLE)
    os.environ[_FORCE_VARIABLE] = "1"
    try:
        with torch.serialization.safe_globals(ALLOWED):
            yield
    finally:
        if previous is None:
            del os.environ[_FORCE_VARIABLE]
        else:
            os.environ[_FORCE_VARIABLE] = previous


def load_safely(path: str, read: Callable[..., Any] = torch.load, **options: Any) -> Any:
    """Return ``read(path, **options)``, which calls ``torch.load``, restricted to allowed classes.

    Raises:
        UnsafeFileError: the file contains a class that is not allowed, or is damaged.
    """
    try:
        with weights_only():
            return read(path, **options)
    except pickle.UnpicklingError as error:
        raise UnsafeFileError(
            f"{path} may only contain tensors, numbers, strings and the few classes that DeepSpeed saves, got "
            f"{_rejected_name(error)}. No code of the file was run. Save the file again without this object. Only if "
            "you trust the author of the file, pass load_checkpoint(..., is_trusted=True), which runs the author's code"
        ) from error


class SafeLoad:
    """Safe replacement for ``load`` on any of DeepSpeed's checkpoint engines.

    Attributes:
        is_trusted: load without restrictions, which runs code from the file. The user requests it for a single load.
        last_path: the last file that was loaded or failed to load.
    """

    def __init__(self, read: Callable[..., Any]) -> None:
        self.is_trusted = False
        self.last_path: str | None = None
        self._read = read

    def __call__(self, path: str, map_location: Any = None) -> Any:
        """Load ``path``, like ``CheckpointEngine.load``."""
        self.last_path = path
        if self.is_trusted:
            return self._read(path, map_location=map_location)
        return load_safely(path, self._read, map_location=map_location)


def make_safe(checkpoint_engine: Any) -> SafeLoad:
    """Replace ``checkpoint_engine.load`` by a ``SafeLoad`` if that is not done yet, and return the ``SafeLoad``."""
    if not isinstance(checkpoint_engine.load, SafeLoad):
        checkpoint_engine.load = SafeLoad(checkpoint_engine.load)
    return checkpoint_engine.load


def _rejected_name(error: pickle.UnpicklingError) -> str:
    match = _NAME.search(str(error))
    return match[1] if match else "unreadable content (the file is damaged, or not from torch.save)"
