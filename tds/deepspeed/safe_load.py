"""Load ``torch.save`` files without executing code from them.

A file of ``torch.save`` is a pickle, which can name any function and have it called. DeepSpeed reads its own in the
way that does so. Here every ``torch.load``, DeepSpeed's too, builds tensors, plain containers and the few classes of
``ALLOWED``, which are those that DeepSpeed's own files hold; anything else ends the reading before anything of it
runs.
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

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # beats what DeepSpeed passes to ``torch.load``
_NAME = re.compile(r"(?:GLOBAL|class) ([\w.]+)")
_reconstruct: Any = np.ndarray.__reduce__(np.zeros(0))[0]  # type: ignore[index]
_scalar: Any = np.float64(0).__reduce__()[0]  # type: ignore[index]
_HOMES = ("numpy.core.multiarray", "numpy._core.multiarray")  # it moved with NumPy 2
_KINDS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
ALLOWED: list[Any] = [
    LossScaler,
    DynamicLossScaler,
    ZeroStageEnum,
    fragment_address,
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in _KINDS),
    *((_reconstruct, f"{home}._reconstruct") for home in _HOMES),
    *((_scalar, f"{home}.scalar") for home in _HOMES),
]
"""What a file may name beside what torch allows (tensors, their sizes and types, sets, ordered and counting dicts).

| who writes it | what |
|---|---|
| DeepSpeed's fp16 and ZeRO optimizers | loss scalers, the stage, the places of parts in flat buffers |
| programs, as client state | ``argparse.Namespace``; numbers and arrays of NumPy, but arrays of objects only of these |
"""


class UnsafeFileError(RuntimeError):
    """A file names something that is not on the list; nothing of it was run."""


@contextmanager
def weights_only() -> Iterator[None]:
    """Let every ``torch.load`` in here build nothing but what is on the list."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(ALLOWED):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def load_safely(path: str, read: Callable[..., Any] = torch.load, **options: Any) -> Any:
    """Return what ``read(path, **options)``, which calls ``torch.load``, makes of the file.

    Raises:
        UnsafeFileError: it names something that is not on the list.
    """
    try:
        with weights_only():
            return read(path, **options)
    except pickle.UnpicklingError as error:
        raise UnsafeFileError(
            f"{path} may hold tensors, numbers, texts and the few classes that DeepSpeed itself saves, got "
            f"{_named(error)}, and nothing of it was run. Save it anew without it; only if you trust whoever wrote the "
            "file, whose code would run here, pass load_checkpoint(..., is_trusted=True)"
        ) from error


class SafeLoad:
    """In the place of a checkpoint engine's ``load``, whichever of DeepSpeed's engines it is.

    Attributes:
        is_trusted: read as the engine does, code and all; for one load, by the user's own word.
        last_path: of the file that was read last, or could not be.
    """

    def __init__(self, read: Callable[..., Any]) -> None:
        self.is_trusted = False
        self.last_path: str | None = None
        self._read = read

    def __call__(self, path: str, map_location: Any = None) -> Any:
        """Return the content of ``path``, as ``CheckpointEngine.load``."""
        self.last_path = path
        if self.is_trusted:
            return self._read(path, map_location=map_location)
        return load_safely(path, self._read, map_location=map_location)


def make_safe(checkpoint_engine: Any) -> SafeLoad:
    """Let ``checkpoint_engine`` read safely from now on; what it writes stays the same."""
    if not isinstance(checkpoint_engine.load, SafeLoad):
        checkpoint_engine.load = SafeLoad(checkpoint_engine.load)
    return checkpoint_engine.load


def _named(error: pickle.UnpicklingError) -> str:
    """Return the object that torch refused."""
    found = _NAME.search(str(error))
    return found[1] if found else "what no such file has (it is damaged, or not one of torch.save)"
