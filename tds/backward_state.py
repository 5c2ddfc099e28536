"""State of the running backward pass, from autograd."""

from __future__ import annotations

import torch
from torch.autograd.graph import get_gradient_edge

from tds import torch_api


def is_running() -> bool:
    """Return whether a backward runs now, in this thread."""
    return torch_api.runs_backward()


def will_reach(parameter: torch.Tensor) -> bool:
    """Return whether the backward that runs now comes to ``parameter``: it has or will, with a gradient or with None.

    Within a recompute that starts a backward of its own (``use_reentrant=True``) it is that one.
    """
    return torch_api.backward_executes(get_gradient_edge(parameter).node)
