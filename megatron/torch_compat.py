"""What torch 2.11 lacks, or has under another name, of what this project uses of torch 2.13.

| torch 2.13 | torch 2.11 |
|---|---|
| ``all_gather_single`` (2.13 warns of the older name) | ``all_gather_into_tensor`` |
| ``reduce_scatter_single`` (likewise) | ``reduce_scatter_tensor`` |
| ``varlen_attn(enable_gqa=True)`` | keys and values for each query |
| ``torch.compile(recompile_limit=...)`` | one limit for all that is compiled |
| ``CppCodeCache.load(needs_vec_isa=False)`` | chooses vectors by itself, but none of a width that none has |
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

OLDER = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""Name of torch 2.13 -> name before."""


def all_gather_single(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
    """Fill ``whole`` with the ``part`` of each rank, one after another; options and result are torch's. Collective."""
    return getattr(dist, name_of("all_gather_single"))(whole, part, **options)


def reduce_scatter_single(part: torch.Tensor, whole: torch.Tensor, **options: Any) -> Any:
    """Fill ``part`` with this rank's part of the sum of every rank's ``whole``; the rest is torch's. Collective."""
    return getattr(dist, name_of("reduce_scatter_single"))(part, whole, **options)


def name_of(name: str) -> str:
    """Return what this torch calls the collective that torch 2.13 calls ``name``."""
    return name if hasattr(dist, name) else OLDER[name]


HAS_GROUPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
"""Whether ``varlen_attn`` takes fewer keys than queries."""


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_query: torch.Tensor, cu_key: torch.Tensor,
    max_query: int, max_key: int, *, scale: float, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return torch's causal attention within sequences, whose last query sees up to the last key; on CUDA alone.

    Shapes:
        query  [total, a, d]; key, value [total_k, g, d], each for a/g neighbouring queries
        cu_query, cu_key int32 [n + 1], where each sequence begins, and the end
        output [total, a, d]

    Args:
        max_query, max_key: lengths that no sequence exceeds.
        window: keys before its own that a query sees; 0: all.
    """
    from torch.nn.attention.varlen import varlen_attn  # not ahead of need: with all that it imports it takes 2 s

    how: dict[str, Any] = {"scale": scale, "window_size": (window or -1, 0)}
    if key.shape[1] != query.shape[1]:
        if HAS_GROUPS:
            how["enable_gqa"] = True
        else:
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    found: Any = varlen_attn(query, key, value, cu_query, cu_key, max_query, max_key, **how)
    return found  # type: ignore[no-any-return]


MOST_GRAPHS = 64
"""Of ``flex_attention`` in a process: a graph for each shape, with gradients and without. Torch's limit is 8."""


def has_triton() -> bool:
    """Return whether Triton is installed, of which torch makes kernels of ``flex_attention`` on CUDA."""
    return importlib.util.find_spec("triton") is not None


def flexible_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
    """Return torch's ``flex_attention``, compiled; within a graph it is a part of that.

    On a CPU it is not compiled: all scores are made, and there are no gradients.

    Shapes:
        query, output [b, a, s, d]; key, value [b, g, s_k, d]

    Raises:
        Exception: of torch's own kinds: there are more than ``MOST_GRAPHS`` shapes, or heads fit no kernel.
    """
    from torch.nn.attention.flex_attention import flex_attention  # not ahead of need: few runs have it

    is_part = torch.compiler.is_compiling() or query.device.type == "cpu"
    function: Any = flex_attention if is_part else compiled_flex_attention()
    found: torch.Tensor = function(query, key, value, **how)
    return found


@functools.cache
def compiled_flex_attention(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """Return ``flex_attention`` compiled, which fails where it would go on without a kernel and make all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    how: dict[str, Any] = {"backend": backend, "dynamic": False, "fullgraph": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        how["recompile_limit"] = MOST_GRAPHS
    else:
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
    compiled: Callable[..., Any] = torch.compile(flex_attention, **how)
    return compiled


# A name that torch keeps to itself: the function that ``torch.optim.Muon`` makes updates with. Its public step takes
# one matrix for one parameter on one rank; tests/test_torch_compat.py holds the two against each other.


def newton_schulz(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return ``update`` [m, n] made nearly orthogonal, in bf16, by torch's own coefficients; its memory may be used.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
    """
    from torch.optim import _muon

    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(update, coefficients, steps, _muon.EPS)


def load_cpp(source: str, flags: Sequence[str]) -> Any:
    """Return the library of this C++ program, compiled with ``flags`` and none of torch's choice for vectors.

    Raises:
        Exception: of torch's own kinds: there is no compiler, or it refuses the program.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache  # not ahead of need: with all that it imports it takes 1 s

    if "needs_vec_isa" in inspect.signature(CppCodeCache.load_async).parameters:
        return CppCodeCache.load(source, extra_flags=flags, needs_vec_isa=False)
    with config.patch({"cpp.simdlen": 1}):
        return CppCodeCache.load(source, extra_flags=flags)
