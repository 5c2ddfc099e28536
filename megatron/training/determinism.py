"""Deterministic order of summation in every run (``--deterministic``).

CPU kernels are deterministic for a given number of threads. On CUDA, many kernels sum in the order in which their
blocks finish.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from megatron.config import Config
from megatron.errors import ConfigError

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Values with which cuBLAS is deterministic, according to its documentation; the first is faster."""
NCCL_SETTINGS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Settings that fix the order of NCCL's sums; by default it depends on message size and hardware topology."""


def configure_determinism(config: Config, device_type: str) -> None:
    """Make torch and cuBLAS deterministic if --deterministic is given. Must be called before CUDA is first used.

    Raises:
        ConfigError: the environment sets a cuBLAS workspace that is not deterministic.
    """
    if not config.run.deterministic or device_type == "cpu":
        return
    if device_type == "cuda":
        _configure_workspace()
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        # Filling each new tensor only guards against reading uninitialized memory, and costs a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


def _configure_workspace() -> None:
    workspace = os.environ.setdefault(WORKSPACE_VARIABLE, DETERMINISTIC_WORKSPACES[0])
    if workspace not in DETERMINISTIC_WORKSPACES:
        raise ConfigError(
            f"--deterministic needs {WORKSPACE_VARIABLE}={' or '.join(DETERMINISTIC_WORKSPACES)} in the environment, "
            f"got {workspace!r}. Unset the variable, or leave the flag out"
        )


def determinism_rows(config: Config, device_type: str) -> Iterator[tuple[str, str]]:
    """Yield the start-table row on whether a resumed run is bitwise identical to an uninterrupted one."""
    is_deterministic = config.run.deterministic
    if device_type == "cuda" and is_deterministic:
        yield "resume", "bitwise identical in the same layout (--deterministic)"
    elif device_type == "cuda":
        yield (
            "resume",
            "not bitwise identical: kernels on this device sum in any order; --deterministic fixes it, but is slower",
        )
    elif is_deterministic and device_type != "cpu":
        yield (
            "resume",
            f"bitwise identical in the same layout if the kernels of {device_type} are deterministic (--deterministic)",
        )
    elif is_deterministic:
        yield "resume", "bitwise identical in the same layout; on a CPU also without --deterministic"
