"""The chunked scan of the package ``mamba-ssm``, an optional CUDA implementation of the recurrence of Mamba-2.

The adapter follows the documented interface of ``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined``. It has
not been run on a GPU yet.

| argument | shape | ours |
|---|---|---|
| x | [b, s, a, d] | x, not multiplied by the time step |
| dt | [b, s, a] | time step, after softplus |
| A | [a] | ``-exp(A_log)`` |
| B, C | [b, s, g, n] | B, C |
| seq_idx | int32 [b, s] | number of documents that start up to and including each token |
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

from megatron.ops.state_space import CHUNK_SIZE

MODULE, FUNCTION = "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"


def is_supported(x: torch.Tensor) -> bool:
    """Return True if ``mamba-ssm`` is installed and can process ``x``."""
    return x.device.type == "cuda" and x.dtype != torch.float64 and _is_installed()


def scan(
    value: torch.Tensor,
    time_step: torch.Tensor,
    rates: torch.Tensor,
    b_t: torch.Tensor,
    c_t: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the outputs ``S_i C_i`` of sequences whose initial state is zero.

    Shapes:
        value     [b, s, a, d]
        time_step [b, s, a], at least 0
        rates     [a], at most 0; the state of a head decays by ``exp(rate * time_step)``
        b_t, c_t  [b, s, g, n]
        starts    int32 [b, s], as in ``state_space_scan``
        output    [b, s, a, d], in the dtype of ``value``
    """
    function: Any = getattr(importlib.import_module(MODULE), FUNCTION)
    documents = None if starts is None else document_indices(starts)
    output: torch.Tensor = function(value, time_step, rates, b_t, c_t, CHUNK_SIZE, seq_idx=documents)
    return output


def document_indices(starts: torch.Tensor) -> torch.Tensor:
    """Return each token's document, counted from 1 in its row, int32 [b, s]; 0: it started before the first token."""
    positions = torch.arange(starts.shape[1], device=starts.device)
    return (starts == positions).cumsum(1, dtype=torch.int32)


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("mamba_ssm") is not None
