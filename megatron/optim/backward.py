"""What autograd tells of the backward that runs now."""

from __future__ import annotations

import torch
from torch.autograd.graph import get_gradient_edge


def is_running() -> bool:
    """Return whether a backward runs now, in this thread."""
    return torch._C._current_graph_task_id() != -1


def will_reach(parameter: torch.Tensor) -> bool:
    """Return whether the backward that runs now comes to ``parameter``: it has or will, with a gradient or with None.

    Within a recompute that starts a backward of its own (``use_reentrant=True``) it is that one.
    """
    return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
