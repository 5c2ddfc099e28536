"""``--deterministic``: sums in the same order in every run.

CPUs are that way: one thread count gives one result. On CUDA many kernels add in whatever order their blocks finish.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from megatron.config import Config
from megatron.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Values with which cuBLAS repeats itself, as its documentation on reproducibility has them; the first is faster."""
NCCL_SUMS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""One order of sums for every start: left alone, NCCL chooses by size and by what it finds of the machine."""


def configure_determinism(config: Config, kind: str) -> None:
    """Tell torch and cuBLAS to repeat themselves if the flag asks for it; before CUDA is first used.

    Raises:
        ConfigError: the environment asks cuBLAS for a workspace with which it does not.
    """
    if not config.run.deterministic or kind == "cpu":
        return
    if kind == "cuda":
        _configure_workspace()
        for name, value in NCCL_SUMS.items():
            os.environ.setdefault(name, value)
        # A pass over each new tensor, against reading it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


def _configure_workspace() -> None:
    asked = os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    if asked not in WORKSPACES:
        raise ConfigError(
            f"with --deterministic the environment's {WORKSPACE} must be {' or '.join(WORKSPACES)}, got {asked!r}. "
            "Unset it, or leave the flag out"
        )


def determinism_rows(config: Config, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the row of the start table that says how exactly a run resumes, where there is something to say."""
    asked = config.run.deterministic
    if kind == "cuda" and asked:
        yield "resume", "bit for bit in the same layout (--deterministic)"
    elif kind == "cuda":
        yield "resume", "not bit for bit: kernels on this device add in any order; --deterministic makes it so, slower"
    elif asked and kind != "cpu":
        yield "resume", f"bit for bit in the same layout, as far as the kernels of {kind} hold to it (--deterministic)"
    elif asked:
        yield "resume", "bit for bit in the same layout; on a CPU so without --deterministic, too"
