"""The gated delta rule with the Triton kernels of fla-core, an optional package for CUDA."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

HALF_PRECISION = (torch.bfloat16, torch.float16)


@functools.cache
def is_installed() -> bool:
    """Return True if fla-core is installed."""
    return importlib.util.find_spec("fla") is not None


def is_available(value: torch.Tensor) -> bool:
    """Return True if a kernel of fla-core can process ``value``: 16-bit tensors on CUDA."""
    return value.device.type == "cuda" and value.dtype in HALF_PRECISION and is_installed()


def fla_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, *,
    starts: torch.Tensor | None = None, initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Apply the gated delta rule to a sequence; the final state is None if there are documents.

    The kernels take documents as the bounds of packed sequences. The host waits for the device to count the bounds.

    Shapes and arguments: as in ``megatron.ops.delta_rule.gated_delta_rule``. All documents must start within
    the sequence, and ``initial_state`` must be None if there are several.
    """
    batch, length, num_heads = value.shape[:3]
    num_repeats = num_heads // key.shape[2]
    if num_repeats > 1:
        query, key = (x.repeat_interleave(num_repeats, dim=2) for x in (query, key))
    query, key, beta = (x.to(value.dtype) for x in (query, key, beta))
    inputs = [query, key, value, log_decay.float(), beta]
    options: dict[str, Any] = {"scale": 1.0, "initial_state": initial_state, "output_final_state": starts is None}
    if starts is not None:
        is_first = starts == torch.arange(length, device=starts.device)
        is_first[:, 0] = True
        bounds = is_first.flatten().nonzero().squeeze(1)
        options["cu_seqlens"] = torch.cat((bounds, bounds.new_tensor([batch * length])))
        inputs = [x.flatten(0, 1).unsqueeze(0) for x in inputs]
    output, state = _kernel(has_decay_per_element=log_decay.dim() == 4)(*inputs, **options)
    return output.view(value.shape), state


def _kernel(has_decay_per_element: bool) -> Callable[..., Any]:
    """Return the function of fla-core. It is imported on first use, because the import takes seconds."""
    module, name = ("kda", "chunk_kda") if has_decay_per_element else ("gated_delta_rule", "chunk_gated_delta_rule")
    function: Callable[..., Any] = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    return function
