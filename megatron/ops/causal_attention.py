"""Causal attention on a CPU: block by block with torch's operators, or by the C++ kernel of causal_kernel.cpp."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import register_flop_formula

from megatron import log
from megatron.ops.attention import Drop, attention
from megatron.ops.biased_attention import is_blocked
from megatron.ops.document_attention import document_attention
from megatron.torch_compat import load_cpp

# Heads and blocks of queries of ``causal_self_attention``: memory that stays in a core's caches, and views of it.
#
# Memory and views are created once for the heads that are processed together, and reused for the next heads. Compared
# with the small products of a block, creating a view or allocating a result takes a noticeable time.

CACHED_SCORES = 2**18
"""Number of scores that a core computes at a time, small enough to stay in its caches between products."""


def queries_per_block(size: int) -> int:
    """Return the number of queries per block, q, for sequences of ``size`` tokens.

    About (1 + q/s) / 2 of the s x s scores are computed, so smaller blocks save computation. In long sequences,
    however, only a few heads fit into a core's caches, and the overhead of additional products would exceed the
    savings.
    """
    return min(size, 64 if size <= 512 else 128)


class HeadBuffers:
    """Memory for n heads that are processed together, and the blocks of their queries.

    ``blocks`` start with the last block, which sees every key, so that its gradients initialize all rows.

    Args:
        packed: [s, b, a/t, 3, d], the tensor from which heads are copied.
        num_heads: number of heads, counted over all samples.
    """

    def __init__(self, packed: torch.Tensor, num_heads: int) -> None:
        self.size, _, _, _, self.width = packed.shape
        self.scale = self.width**-0.5
        num_queries = queries_per_block(self.size)
        self.qkv = packed.new_empty(3, num_heads, self.size, self.width)
        self.query, self.key, self.value = self.qkv
        self.future_mask = packed.new_full((num_queries, num_queries), float("-inf")).triu_(1)
        self.scores = packed.new_empty(num_heads * num_queries * self.size)
        self.products = packed.new_empty(num_heads * num_queries * self.width)
        self.blocks: Sequence[QueryBlock] = [self.block(first) for first in reversed(range(0, self.size, num_queries))]

    def block(self, first: int) -> QueryBlock:
        """Return the block with queries from ``first`` on."""
        return QueryBlock(self, self.query_range(first))

    def query_range(self, first: int) -> slice:
        """Return the query indices in the block that starts at ``first``."""
        return slice(first, min(first + queries_per_block(self.size), self.size))


class QueryBlock:
    """Views of the queries in ``query_range`` for n heads, and of the keys and values up to the last query.

    Shapes, for a block of q queries and the k keys up to its end:
        query   [n, q, d]
        keys, values [n, k, d]
        scores  [n, q, k]
        product [n, q, d], memory for a result
    """

    def __init__(self, buffers: HeadBuffers, query_range: slice) -> None:
        self.query_range, self.scale = query_range, buffers.scale
        self.query, self.keys, self.values = (
            buffers.query[:, query_range],
            buffers.key[:, : query_range.stop],
            buffers.value[:, : query_range.stop],
        )
        self.scores = self.view_scores(buffers.scores)
        num_queries = query_range.stop - query_range.start
        self.product = buffers.products[: self.query.numel()].view(self.query.shape)
        self._diagonal, self._future = (
            self.scores[:, :, query_range.start :],
            buffers.future_mask[:num_queries, :num_queries],
        )
        self._keys_transposed = self.keys.transpose(1, 2)

    def view_scores(self, memory: torch.Tensor) -> torch.Tensor:
        """View ``memory`` as [n, q, k], in the shape of ``scores``."""
        heads, num_queries, _ = self.query.shape
        return memory[: heads * num_queries * self.query_range.stop].view(heads, num_queries, self.query_range.stop)

    def compute_probabilities(self) -> None:
        """Compute the probabilities in the memory of the scores."""
        write_product(self.scores, self.query, self._keys_transposed, self.scale)
        self._diagonal += self._future
        torch.softmax(self.scores, dim=-1, out=self.scores)


class BackwardHeadBuffers(HeadBuffers):
    """``HeadBuffers`` with gradients for context, keys and values, each [n, s, d]."""

    blocks: Sequence[BackwardQueryBlock]

    def __init__(self, packed: torch.Tensor, num_heads: int) -> None:
        size, width = len(packed), packed.shape[-1]
        num_queries = queries_per_block(size)
        self.context_grad, self.key_grad, self.value_grad = (packed.new_empty(num_heads, size, width) for _ in range(3))
        self.score_grads = packed.new_empty(num_heads * num_queries * size)
        num_added_rows = (size - 1) // num_queries * num_queries  # rows to which later blocks add
        self.scratch = packed.new_empty(num_heads * num_added_rows * width)
        super().__init__(packed, num_heads)

    def block(self, first: int) -> BackwardQueryBlock:
        return BackwardQueryBlock(self, self.query_range(first))


class BackwardQueryBlock(QueryBlock):
    """``QueryBlock`` with the views that backward needs.

    ``context_grad`` [n, q, d] is the context gradient. ``score_grads`` [n, q, k] is memory for the probability
    gradient, and later for the score gradient. ``key_grad`` and ``value_grad`` accumulate gradients over the blocks.
    """

    def __init__(self, buffers: BackwardHeadBuffers, query_range: slice) -> None:
        super().__init__(buffers, query_range)
        self.context_grad = buffers.context_grad[:, query_range]
        self.score_grads = self.view_scores(buffers.score_grads)
        self.key_grad = _GradAccumulator(buffers.key_grad, query_range.stop, buffers.scratch, self.scale)
        self.value_grad = _GradAccumulator(buffers.value_grad, query_range.stop, buffers.scratch)


class _GradAccumulator:
    """Accumulates a gradient in the first ``num_keys`` rows of ``target`` [n, s, d].

    The first block sees all s rows and overwrites them; later blocks add to them, using ``scratch`` for their product.
    """

    def __init__(self, target: torch.Tensor, num_keys: int, scratch: torch.Tensor, scale: float = 1.0) -> None:
        self._rows, self._is_first, self._scale = target[:, :num_keys], num_keys == target.shape[1], scale
        self._product = self._rows if self._is_first else scratch[: self._rows.numel()].view(self._rows.shape)

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add ``scale * left @ right`` for each head."""
        write_product(self._product, left, right, self._scale)
        if not self._is_first:
            self._rows += self._product


def write_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Write ``scale * left @ right`` for each head into ``target``, and return it."""
    return torch.baddbmm(target, left, right, beta=0, alpha=scale, out=target)


AnyHeadBuffers = TypeVar("AnyHeadBuffers", bound=HeadBuffers)


def head_buffers(buffers_type: type[AnyHeadBuffers], packed: torch.Tensor) -> Iterator[tuple[slice, AnyHeadBuffers]]:
    """Yield (head range, buffers) for heads that are processed together; all ranges share the buffers."""
    size, num_heads = len(packed), packed.shape[1] * packed.shape[2]
    max_heads = max(1, CACHED_SCORES * torch.get_num_threads() // (queries_per_block(size) * size))
    heads_per_room = -(-num_heads // -(-num_heads // max_heads))  # ranges of nearly equal size
    buffers = buffers_type(packed, heads_per_room)
    for start in range(0, num_heads, heads_per_room):
        first = min(start, num_heads - heads_per_room)  # the last range has full size: it repeats some heads
        yield slice(first, first + heads_per_room), buffers


# Causal self-attention in fp32 on a CPU by ``causal_kernel.cpp``, which is built on first use if g++ is available.
#
# A head stays in its core's cache from the scores to the gradients. The implementation with torch's operators passes
# over each block of scores with several kernels, and copies heads to memory that all cores share.
#
# | fp32, 2 cores, forward and backward | by blocks | C++ kernel |
# |---|---|---|
# | [512, 8, 8, 64] | 55 ms | 36 ms |
# | [1024, 4, 12, 64] | 160 ms | 107 ms |
# | [2048, 1, 16, 128] | 299 ms | 248 ms |

SOURCE = Path(__file__).with_name("causal_kernel.cpp")
VECTOR_FLAGS = {"AVX512": "-march=skylake-avx512", "AVX2": "-march=haswell"}
"""Supported CPU capabilities as torch names them -> compiler flag, used instead of torch's ``-march=native``.

torch's cache identifies a library by its source and flags, and may be shared by machines with different processors.
"""


def is_supported(packed: torch.Tensor) -> bool:
    """Return True if the kernel supports ``packed`` [s, b, a/t, 3, d] on a CPU: in fp32, if it can be built."""
    return packed.dtype == torch.float32 and is_built()


@torch.compiler.assume_constant_result
def is_built() -> bool:
    """Return True if the kernel is available. The first call builds it in 3 s; later runs use torch's cache."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in VECTOR_FLAGS:
        return None
    flags = (
        f"-DCPU_CAPABILITY={capability}",
        f"-DCPU_CAPABILITY_{capability}",
        VECTOR_FLAGS[capability],
        "-mtune=native",
    )
    try:
        library: Any = load_cpp(SOURCE.read_text(), flags)
        library.causal_vectors.restype = library.causal_numbers.restype = ctypes.c_int64
        library.causal_forward.restype = library.causal_backward.restype = ctypes.c_char_p
        return library
    except Exception as error:
        has_no_compiler = type(error).__name__ == "InvalidCxxCompiler"
        (log.info if has_no_compiler else log.warn_once)(
            f"{SOURCE.name} could not be built, so attention uses torch's operators, which makes a step about 5 % "
            f"slower. The build needs a C++ compiler (g++, or the compiler in CXX): {str(error)[:3000]}"
        )
        return None


@torch.library.custom_op("megatron_tds::causal_kernel", mutates_args=())
def forward(packed: torch.Tensor, starts: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the context [s, b, a/t, d] and two values per query for backward [2, b a/t, s], which get no gradient.

    The two values are the largest score before scaling, and the inverse of the sum of the exponentials. ``starts``
    int32 [b, s] contains document starts by position; attention does not cross documents.
    """
    packed = packed.contiguous()
    context, queries = _empty_outputs(packed)
    _call("causal_forward", packed, _as_int32(starts), context, queries, is_backward=False, packed=packed)
    return context, queries


@torch.library.custom_op("megatron_tds::causal_kernel_backward", mutates_args=())
def backward(
    grad: torch.Tensor, packed: torch.Tensor, queries: torch.Tensor, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the gradient for ``packed`` from the context gradient [s, b, a/t, d]."""
    packed = packed.contiguous()
    out = torch.empty_like(packed)
    _call(
        "causal_backward", grad.contiguous(), packed, _as_int32(starts), queries, out, is_backward=True, packed=packed
    )
    return out


def _as_int32(starts: torch.Tensor | None) -> torch.Tensor | None:
    """Convert ``starts`` to the library's format."""
    return None if starts is None else starts.to(torch.int32).contiguous()


def _call(name: str, *tensors: torch.Tensor | None, is_backward: bool, packed: torch.Tensor) -> None:
    """Call the library's function ``name`` with ``tensors``, memory for its threads and the sizes of ``packed``.

    Raises:
        RuntimeError: the function failed.
    """
    s, b, a, _, d = packed.shape
    library, num_buffers = _library(), max(1, min(torch.get_num_threads(), b * a))
    assert library is not None
    tensor = library.causal_numbers(ctypes.c_int64(s), ctypes.c_int64(d), ctypes.c_bool(is_backward))
    memory = packed.new_empty(num_buffers * tensor)
    pointers = (ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (*tensors, memory))
    error = getattr(library, name)(*pointers, *map(ctypes.c_int64, (num_buffers, s, b * a, d, a)))
    if error is not None:
        raise RuntimeError(f"{name} in {SOURCE.name} failed for shape {tuple(packed.shape)}: {error.decode()}")


def _empty_outputs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s, b, a, _, d = packed.shape
    return packed.new_empty(s, b, a, d), packed.new_empty(2, b * a, s)


@forward.register_fake
def _(packed: torch.Tensor, starts: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_outputs(packed)


@backward.register_fake
def _(
    grad: torch.Tensor, packed: torch.Tensor, queries: torch.Tensor, starts: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


def _setup_kernel_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    packed, starts = inputs
    ctx.save_for_backward(packed, output[1], starts)


def _kernel_gradient(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
    return backward(grad, *ctx.saved_tensors), None


forward.register_autograd(_kernel_gradient, setup_context=_setup_kernel_context)


@register_flop_formula(torch.ops.megatron_tds.causal_kernel)
def _kernel_flops(packed: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * product_flops(packed)


@register_flop_formula(torch.ops.megatron_tds.causal_kernel_backward)
def _kernel_backward_flops(_: torch.Size, packed: torch.Size, *__: Any, **___: Any) -> int:
    return 5 * product_flops(packed)


def product_flops(shape: torch.Size) -> int:
    """Return the FLOPs to multiply every query with the visible keys, including the key at the query's position."""
    s, b, a, _, d = shape
    return b * a * d * s * (s + 1)


# Causal self-attention on a CPU by blocks of queries: scores of later keys are not computed.
#
# Some heads at a time are copied into contiguous memory (``HeadBuffers``), because products of strided rows take a
# fifth longer. A block of queries computes a product with the keys up to the end of the block, a softmax in place and a
# product with the values. Backward recomputes the probabilities, because reading them from memory would take as long.
# Nothing of size [s, s] is saved, and the gradients of query, key and value are written next to each other, as the
# backward of the layer's product reads them.
#
# It is a custom operator (``torch.library``), a single node for ``--compile``. In fp32 the C++ kernel is used instead
# if it can be built. All other cases use torch's kernel, which processes full rows of the scores in its backward.

_softmax_backward = torch.ops.aten._softmax_backward_data.out


def causal_self_attention(
    packed: torch.Tensor, starts: torch.Tensor | None = None, *, dropout: float = 0.0, drop: Drop | None = None
) -> torch.Tensor:
    """Return ``softmax(q k^T d^-0.5) v``; no query sees a later key or, with ``starts``, another document.

    Shapes:
        packed [s, b, a/t, 3, d]: query, key and value per head
        starts int32 [b, s], see ``document_attention``, only without dropout; None: each sample is one document
        output [b, a/t, s, d]

    Args:
        drop: dropout of probabilities, used instead of ``dropout``; see ``megatron.ops.attention``.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.1; Dao et al. 2022, "FlashAttention",
    recomputes probabilities in backward.
    """
    if starts is not None:
        if packed.device.type != "cpu" or not is_supported(packed):
            query, key, value = split_packed(packed)
            return document_attention(query, key, value, starts)
        rows: torch.Tensor = forward(packed, starts)[0]
        return rows.permute(1, 2, 0, 3)
    if is_blocked(packed) and not dropout and drop is None:
        context: torch.Tensor = forward(packed)[0] if is_supported(packed) else _forward(packed)
        return context.permute(1, 2, 0, 3)
    return attention(*split_packed(packed), dropout=dropout, drop=drop)


def split_packed(packed: torch.Tensor) -> list[torch.Tensor]:
    """Split the p tensors packed in each head, such as query, key and value.

    Shapes:
        packed [s, b, a/t, p, d]
        output p x [b, a/t, s, d]
    """
    return [tensor.permute(1, 2, 0, 3) for tensor in packed.unbind(3)]


@torch.library.custom_op("megatron_tds::causal_self_attention", mutates_args=())
def _forward(packed: torch.Tensor) -> torch.Tensor:
    s, b, a, _, d = packed.shape
    qkv = _packed_view(packed)
    context = packed.new_empty(s, b, a, d)
    rows = context.flatten(1, 2)  # [s, n, d]
    for heads, buffers in head_buffers(HeadBuffers, packed):
        buffers.qkv.copy_(qkv[:, heads])
        context_of_heads = rows[:, heads]
        for block in buffers.blocks:
            block.compute_probabilities()
            torch.bmm(block.scores, block.values, out=block.product)
            context_of_heads[block.query_range].copy_(block.product.transpose(0, 1))
    return context


@torch.library.custom_op("megatron_tds::causal_self_attention_backward", mutates_args=())
def _backward(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Compute the gradient for ``packed`` from the context gradient [s, b, a, d]."""
    qkv, context_grad = _packed_view(packed), grad.flatten(1, 2).transpose(0, 1)
    packed_grad = torch.empty_like(packed, memory_format=torch.contiguous_format)
    qkv_grad = _packed_view(packed_grad)
    for heads, buffers in head_buffers(BackwardHeadBuffers, packed):
        buffers.qkv.copy_(qkv[:, heads])
        buffers.context_grad.copy_(context_grad[heads])
        query_grad, key_grad, value_grad = qkv_grad[:, heads]
        for block in buffers.blocks:
            block.compute_probabilities()
            block.value_grad.add(block.scores.transpose(1, 2), block.context_grad)
            torch.bmm(
                block.context_grad, block.values.transpose(1, 2), out=block.score_grads
            )  # gradient of the probabilities
            _softmax_backward(
                block.score_grads, block.scores, -1, packed.dtype, grad_input=block.score_grads
            )  # of the scores
            block.key_grad.add(block.score_grads.transpose(1, 2), block.query)
            write_product(block.product, block.score_grads, block.keys, buffers.scale)
            query_grad[:, block.query_range].copy_(block.product)
        key_grad.copy_(buffers.key_grad)
        value_grad.copy_(buffers.value_grad)
    return packed_grad


def _packed_view(packed: torch.Tensor) -> torch.Tensor:
    """View ``packed`` [s, b, a, 3, d] as [3, n, s, d], with n = b a heads."""
    return packed.flatten(1, 2).permute(2, 1, 0, 3)


@_forward.register_fake
def _(packed: torch.Tensor) -> torch.Tensor:
    s, b, a, _, d = packed.shape
    return packed.new_empty(s, b, a, d)


@_backward.register_fake
def _(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return _backward(grad, *ctx.saved_tensors)


_forward.register_autograd(_gradient, setup_context=_setup_context)


@register_flop_formula(torch.ops.megatron_tds.causal_self_attention)
def _flops(packed: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * product_flops(packed)


@register_flop_formula(torch.ops.megatron_tds.causal_self_attention_backward)
def _flops_of_backward(_: torch.Size, packed: torch.Size, *__: Any, **___: Any) -> int:
    return 5 * product_flops(packed)
