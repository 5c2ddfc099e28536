"""DeepSpeed, once it is sure that its version and torch's are right and that nothing is compiled for a CPU."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from importlib import metadata
from types import ModuleType
from typing import Any

IS_VERBOSE = os.environ.get("TDS_VERBOSE", "0") not in ("", "0")
OLDEST, BELOW = (0, 19, 6), (0, 20)
"""Of DeepSpeed."""
OLDEST_TORCH = (2, 11)
"""What ``pyproject.toml`` asks for is newer: lower versions are let through for machines that have nothing else."""


def theirs(name: str = "deepspeed") -> Any:
    """Return a module of DeepSpeed. It is looked up by its name, so that whoever asks does without until then.

    Raises:
        ImportError: DeepSpeed or torch is missing, or of a version that tds was not written against.
    """
    _prepare()
    return importlib.import_module(name)


@functools.cache
def _prepare() -> None:
    check_torch()
    check_versions()
    spare_the_compiler(importlib.import_module("deepspeed"))
    if IS_VERBOSE:
        _log_from(logging.INFO)


def log_from(level: int) -> None:
    """Let DeepSpeed's logger tell what is of ``level`` or above."""
    _prepare()
    _log_from(level)


def _log_from(level: int) -> None:
    logger = importlib.import_module("deepspeed.utils").logger
    logger.setLevel(level)
    for handler in logger.handlers:
        handler.setLevel(level)


def check_versions(installed: str | None = None) -> None:
    """Do nothing if DeepSpeed's version is one that tds was written against.

    Raises:
        ImportError: it is older or newer, or not installed.
    """
    _check("deepspeed", installed, OLDEST, BELOW)


def check_torch(installed: str | None = None) -> None:
    """Do nothing if torch is as new as that which tds was tried with.

    Raises:
        ImportError: it is older, or not installed.
    """
    _check("torch", installed, OLDEST_TORCH, None)


def _check(package: str, installed: str | None, oldest: tuple[int, ...], below: tuple[int, ...] | None) -> None:
    wanted = f">={_text(oldest)}" + (f",<{_text(below)}" if below else "")
    if installed is None:
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError as missing:
            raise ImportError(
                f"tds needs {package}, which is not installed: pip install '{package}{wanted}'"
            ) from missing
    numbers = []
    for part in installed.split("+")[0].split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        numbers.append(int(digits or 0))
    version = tuple(numbers)
    if version < oldest or (below is not None and version >= below):
        raise ImportError(
            f"tds needs {package} {wanted}, got {installed}: it builds on private parts that change between versions. "
            f"pip install '{package}{wanted}'"
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def spare_the_compiler(deepspeed: ModuleType) -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce at start on a CPU (35 s, and needs g++).

    Where DeepSpeed has not asked yet which of its operations can be compiled, it never does: that runs a compiler and
    imports setuptools, and all it would learn is about this one.
    """
    if importlib.import_module("deepspeed.accelerator").get_accelerator().device_name() == "cpu":
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
