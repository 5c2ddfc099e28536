"""State of the running backward pass, from autograd."""

from __future__ import annotations

import torch
from torch.autograd.graph import get_gradient_edge

from tds import torch_api


def is_running() -> bool:
    """Return True if a backward pass is running in this thread."""
    return torch_api.runs_backward()


def will_reach(parameter: torch.Tensor) -> bool:
    """Return True if the running backward pass has reached or will reach ``parameter``, even if its gradient is None.

    Inside reentrant recompute (``use_reentrant=True``), this refers to the inner backward pass.
    """
    return torch_api.backward_executes(get_gradient_edge(parameter).node)
