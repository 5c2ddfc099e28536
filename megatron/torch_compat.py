"""Compatibility with torch 2.11, which lacks some features of torch 2.13 or has them under another name.

| torch 2.13 | torch 2.11 |
|---|---|
| ``all_gather_single`` (2.13 warns about the older name) | ``all_gather_into_tensor`` |
| ``reduce_scatter_single`` (likewise) | ``reduce_scatter_tensor`` |
| ``varlen_attn(enable_gqa=True)`` | keys and values are repeated for each query head |
| ``torch.compile(recompile_limit=...)`` | one limit for all compiled functions |
| ``CppCodeCache.load(needs_vec_isa=False)`` | selects vector flags itself; "cpp.simdlen" 1 disables them |
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
"""Name in torch 2.13 -> earlier name."""


def all_gather_single(full: torch.Tensor, shard: torch.Tensor, **options: Any) -> Any:
    """All-gather the ranks' ``shard`` tensors into ``full``. Options and return value are as in torch. Collective."""
    return getattr(dist, name_of("all_gather_single"))(full, shard, **options)


def reduce_scatter_single(shard: torch.Tensor, full: torch.Tensor, **options: Any) -> Any:
    """Reduce-scatter the ranks' ``full`` tensors into ``shard``. Options and result are as in torch. Collective."""
    return getattr(dist, name_of("reduce_scatter_single"))(shard, full, **options)


def name_of(name: str) -> str:
    """Return this torch version's name for torch 2.13's collective ``name``."""
    return name if hasattr(dist, name) else OLDER[name]


HAS_GROUPS = tuple(int(component) for component in torch.__version__.split(".")[:2]) >= (2, 12)
"""True if ``varlen_attn`` supports fewer key heads than query heads."""


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_query: torch.Tensor, cu_key: torch.Tensor,
    max_query: int, max_key: int, *, scale: float, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Compute causal attention within packed sequences with torch. CUDA only.

    The last query in a sequence attends to all keys of the sequence.

    Shapes:
        query  [total, a, d]; key, value [total_k, g, d], each shared by a/g neighbouring query heads
        cu_query, cu_key int32 [n + 1], sequence starts, and the end
        output [total, a, d]

    Args:
        max_query, max_key: upper bounds on the sequence lengths.
        window: number of preceding keys that a query attends to; 0: all.
    """
    from torch.nn.attention.varlen import varlen_attn  # imported on use, since it takes 2 s with its dependencies

    options: dict[str, Any] = {"scale": scale, "window_size": (window or -1, 0)}
    if key.shape[1] != query.shape[1]:
        if HAS_GROUPS:
            options["enable_gqa"] = True
        else:
            key, value = (kv.repeat_interleave(query.shape[1] // kv.shape[1], 1) for kv in (key, value))
    output: Any = varlen_attn(query, key, value, cu_query, cu_key, max_query, max_key, **options)
    return output  # type: ignore[no-any-return]


MAX_GRAPHS = 64
"""Maximum number of ``flex_attention`` graphs per process: one per shape, with and without gradients (torch: 8)."""


@functools.cache
def has_triton() -> bool:
    """Return True if Triton is installed; torch's ``flex_attention`` also requires it on CUDA."""
    return importlib.util.find_spec("triton") is not None


def flexible_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Call torch's ``flex_attention``, compiled; inside ``torch.compile`` it becomes part of the caller's graph.

    On a CPU, ``flex_attention`` is not compiled: it materializes all scores and has no gradients.

    Shapes:
        query, output [b, a, s, d]; key, value [b, g, s_k, d]

    Raises:
        Exception: (torch's own types) there are more than ``MAX_GRAPHS`` shapes, or no kernel supports the head sizes.
    """
    output: torch.Tensor = _flex_function(query)(query, key, value, **options)
    return output


def flexible_attention_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``flexible_attention`` and the log-sum-exp over each query's scores; both have gradients.

    Shapes:
        query [b, a, s, d]; key, value [b, g, s_k, d]
        output [b, a, s, d], [b, a, s] in fp32
    """
    from torch.nn.attention.flex_attention import AuxRequest

    output, auxiliary = _flex_function(query)(query, key, value, **options, return_aux=AuxRequest(lse=True))
    lse: torch.Tensor = auxiliary.lse
    return output, lse


def _flex_function(query: torch.Tensor) -> Any:
    """Return torch's ``flex_attention``, compiled unless the caller is compiled or runs on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention  # imported on use, since few runs need it

    is_uncompiled = torch.compiler.is_compiling() or query.device.type == "cpu"
    return flex_attention if is_uncompiled else compiled_flex_attention()


@functools.cache
def compiled_flex_attention(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """Compile ``flex_attention``, which then raises instead of falling back to materializing all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    options: dict[str, Any] = {"backend": backend, "dynamic": False, "fullgraph": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = MAX_GRAPHS
    else:
        dynamo_config = torch._dynamo.config
        dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, MAX_GRAPHS)
    compiled: Callable[..., Any] = torch.compile(flex_attention, **options)
    return compiled


def load_cpp(source: str, flags: Sequence[str]) -> Any:
    """Compile a C++ program with ``flags``, without torch's own vector flags, and load it as a library.

    Raises:
        Exception: (torch's own types) no compiler is installed, or the compiler rejects the program.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache  # imported on use, since it takes 1 s with its dependencies

    if "needs_vec_isa" in inspect.signature(CppCodeCache.load_async).parameters:
        return CppCodeCache.load(source, extra_flags=flags, needs_vec_isa=False)
    with config.patch({"cpp.simdlen": 1}):
        return CppCodeCache.load(source, extra_flags=flags)
