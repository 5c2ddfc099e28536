"""Causal attention on a CPU: by blocks, and by the C++ kernel (causal_kernel.cpp beside it)."""

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

# Heads and blocks of queries for ``causal_attention``: memory that stays in a core's caches, and views of it.
#
# All is made once for the heads that are worked on together, and used again for the next ones: beside products as small
# as a block's, a new view or a new place for a result takes time that is seen.

CACHED = 2**18
"""Scores that a core works on at a time: few enough to stay in its caches from one product to the next."""


def queries_of_block(size: int) -> int:
    """Return the queries q of a block: of s x s scores about (1 + q/s) / 2 are computed.

    Small blocks of long rows leave a core few heads to work on together, and cost more starts than they save products.
    """
    return min(size, 64 if size <= 512 else 128)


class Room:
    """Memory for some heads that are worked on together, and their blocks, the last first: it sees every key.

    Args:
        packed: [s, b, a/t, 3, d], what the heads will come from.
        count: heads, of all samples together.
    """

    def __init__(self, packed: torch.Tensor, count: int) -> None:
        self.size, _, _, _, self.width = packed.shape
        self.scale = self.width**-0.5
        most = queries_of_block(self.size)
        self.together = packed.new_empty(3, count, self.size, self.width)
        self.query, self.key, self.value = self.together
        self.future = packed.new_full((most, most), float("-inf")).triu_(1)
        self.scores = packed.new_empty(count * most * self.size)
        self.products = packed.new_empty(count * most * self.width)
        self.blocks: Sequence[Block] = [self.block(first) for first in reversed(range(0, self.size, most))]

    def block(self, first: int) -> Block:
        """Return the block whose queries begin with ``first``."""
        return Block(self, self.own(first))

    def own(self, first: int) -> slice:
        """Return where the queries of that block lie."""
        return slice(first, min(first + queries_of_block(self.size), self.size))


class Block:
    """The queries ``own`` of a room's heads and the keys that they see, all views.

    Shapes:
        query   [n, own, d]
        keys, values [n, seen, d]
        scores  [n, own, seen]
        product [n, own, d], for a result
    """

    def __init__(self, room: Room, own: slice) -> None:
        self.own, self.scale = own, room.scale
        self.query, self.keys, self.values = room.query[:, own], room.key[:, : own.stop], room.value[:, : own.stop]
        self.scores = self.scores_in(room.scores)
        count = own.stop - own.start
        self.product = room.products[: self.query.numel()].view(self.query.shape)
        self._diagonal, self._future = self.scores[:, :, own.start :], room.future[:count, :count]
        self._keys_across = self.keys.transpose(1, 2)

    def scores_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return memory [n, own, seen]."""
        heads, count, _ = self.query.shape
        return memory[: heads * count * self.own.stop].view(heads, count, self.own.stop)

    def make_probabilities(self) -> None:
        """Put the softmax of the scores in their place."""
        put_product(self.scores, self.query, self._keys_across, self.scale)
        self._diagonal += self._future
        torch.softmax(self.scores, dim=-1, out=self.scores)


class RoomOfBackward(Room):
    """A room with memory for gradients: of the context, ``given``, of key and of value, each [n, s, d]."""

    blocks: Sequence[BlockOfBackward]

    def __init__(self, packed: torch.Tensor, count: int) -> None:
        size, width = len(packed), packed.shape[-1]
        most = queries_of_block(size)
        self.given, self.of_key, self.of_value = (packed.new_empty(count, size, width) for _ in range(3))
        self.second = packed.new_empty(count * most * size)
        added = (size - 1) // most * most  # rows; the rest are the first block's alone
        self.spare = packed.new_empty(count * added * width)
        super().__init__(packed, count)

    def block(self, first: int) -> BlockOfBackward:
        return BlockOfBackward(self, self.own(first))


class BlockOfBackward(Block):
    """A block with the gradient of its context, ``given`` [n, own, d], and ``second``, as large as its scores."""

    def __init__(self, room: RoomOfBackward, own: slice) -> None:
        super().__init__(room, own)
        self.given = room.given[:, own]
        self.second = self.scores_in(room.second)
        self.of_key = _Sum(room.of_key, own.stop, room.spare, self.scale)
        self.of_value = _Sum(room.of_value, own.stop, room.spare)


class _Sum:
    """The first ``seen`` rows of ``place`` [n, s, d], to which a block adds; the block that sees all comes first."""

    def __init__(self, place: torch.Tensor, seen: int, spare: torch.Tensor, scale: float = 1.0) -> None:
        self._rows, self._is_first, self._scale = place[:, :seen], seen == place.shape[1], scale
        self._product = self._rows if self._is_first else spare[: self._rows.numel()].view(self._rows.shape)

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add ``scale`` times the product of two matrices for each head."""
        put_product(self._product, left, right, self._scale)
        if not self._is_first:
            self._rows += self._product


def put_product(place: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Set ``place`` to ``scale`` times the product of two matrices for each head, and return it."""
    return torch.baddbmm(place, left, right, beta=0, alpha=scale, out=place)


AnyRoom = TypeVar("AnyRoom", bound=Room)


def rooms(kind: type[AnyRoom], packed: torch.Tensor) -> Iterator[tuple[slice, AnyRoom]]:
    """Yield the heads that are worked on together, and the room for them, always the same."""
    size, num_heads = len(packed), packed.shape[1] * packed.shape[2]
    most = max(1, CACHED * torch.get_num_threads() // (queries_of_block(size) * size))
    at_once = -(-num_heads // -(-num_heads // most))  # as even as they come
    room = kind(packed, at_once)
    for start in range(0, num_heads, at_once):
        first = min(start, num_heads - at_once)  # the last ones fill the room with some that are made again
        yield slice(first, first + at_once), room


# Causal self-attention in fp32 on a CPU: ``causal_kernel.cpp``, built when a run first asks for it, where g++ is.
#
# A head stays in its core's cache from the scores to the gradients. ``causal_attention``, by torch's operators, goes
# over each block of scores with one kernel after another, and copies heads in and out for all cores to share.
#
# | fp32, 2 cores, forward and backward | by blocks | this |
# |---|---|---|
# | [512, 8, 8, 64] | 55 ms | 36 ms |
# | [1024, 4, 12, 64] | 160 ms | 107 ms |
# | [2048, 1, 16, 128] | 299 ms | 248 ms |

SOURCE = Path(__file__).with_name("causal_kernel.cpp")
VECTORS = {"AVX512": "-march=skylake-avx512", "AVX2": "-march=haswell"}
"""Processors, by torch's word for them, that this is for -> what each of them has, in place of torch's ``native``.

torch's cache knows a library by its text and flags, and may lie where machines of several kinds see it.
"""


def takes(packed: torch.Tensor) -> bool:
    """Return whether this is for ``packed`` [s, b, a/t, 3, d], on a CPU: in fp32, where it could be built."""
    return packed.dtype == torch.float32 and is_built()


@torch.compiler.assume_constant_result
def is_built() -> bool:
    """Return whether the kernel is there; it is built in 3 s when first asked for, and in torch's cache after that."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in VECTORS:
        return None
    flags = f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}", VECTORS[capability], "-mtune=native"
    try:
        found: Any = load_cpp(SOURCE.read_text(), flags)
        found.causal_vectors.restype = found.causal_numbers.restype = ctypes.c_int64
        found.causal_forward.restype = found.causal_backward.restype = ctypes.c_char_p
        return found
    except Exception as error:
        has_none = type(error).__name__ == "InvalidCxxCompiler"
        (log.info if has_none else log.warn_once)(
            f"attention goes by torch's operators, some 5 % of a step longer, for {SOURCE.name} could not be built; it "
            f"needs a C++ compiler (g++, or what CXX names): {str(error)[:3000]}"
        )
        return None


@torch.library.custom_op("megatron_tds::causal_kernel", mutates_args=())
def forward(packed: torch.Tensor, starts: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the context [s, b, a/t, d]; and for the backward alone, without a gradient, two numbers of each query.

    They are its largest score, which no factor has yet, and what its exponentials are multiplied by: [2, b a/t, s].
    ``starts`` int32 [b, s] is where documents begin that are kept apart.
    """
    packed = packed.contiguous()
    context, queries = _like_outcome(packed)
    _call("causal_forward", packed, _read(starts), context, queries, is_backward=False, packed=packed)
    return context, queries


@torch.library.custom_op("megatron_tds::causal_kernel_backward", mutates_args=())
def backward(
    grad: torch.Tensor, packed: torch.Tensor, queries: torch.Tensor, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient of ``packed``, like it in shape; that of the context is [s, b, a/t, d]."""
    packed = packed.contiguous()
    found = torch.empty_like(packed)
    _call("causal_backward", grad.contiguous(), packed, _read(starts), queries, found, is_backward=True, packed=packed)
    return found


def _read(starts: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``starts`` as the library reads it."""
    return None if starts is None else starts.to(torch.int32).contiguous()


def _call(name: str, *tensors: torch.Tensor | None, is_backward: bool, packed: torch.Tensor) -> None:
    """Call ``name`` of the library with ``tensors``, rooms for threads to work in, and the sizes of ``packed``.

    Raises:
        RuntimeError: what it ran into.
    """
    s, b, a, _, d = packed.shape
    library, rooms = _library(), max(1, min(torch.get_num_threads(), b * a))
    assert library is not None
    each = library.causal_numbers(ctypes.c_int64(s), ctypes.c_int64(d), ctypes.c_bool(is_backward))
    memory = packed.new_empty(rooms * each)
    places = (ctypes.c_void_p(None if each is None else each.data_ptr()) for each in (*tensors, memory))
    error = getattr(library, name)(*places, *map(ctypes.c_int64, (rooms, s, b * a, d, a)))
    if error is not None:
        raise RuntimeError(f"{name} of {SOURCE.name} on {tuple(packed.shape)}: {error.decode()}")


def _like_outcome(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s, b, a, _, d = packed.shape
    return packed.new_empty(s, b, a, d), packed.new_empty(2, b * a, s)


@forward.register_fake
def _(packed: torch.Tensor, starts: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _like_outcome(packed)


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
    return 2 * products(packed)


@register_flop_formula(torch.ops.megatron_tds.causal_kernel_backward)
def _kernel_backward_flops(_: torch.Size, packed: torch.Size, *__: Any, **___: Any) -> int:
    return 5 * products(packed)


def products(shape: torch.Size) -> int:
    """Return the FLOPs of a product of every query with the keys it sees, itself among them."""
    s, b, a, _, d = shape
    return b * a * d * s * (s + 1)


# Causal self-attention on a CPU, by blocks of queries: what lies in the future is not computed.
#
# Some heads at a time are copied, each together (``causal_blocks``): products of strided rows take a fifth longer. A
# block of their queries is a product with the keys up to its own end, a softmax in place and a product with the values;
# backward makes the probabilities once more, for reading them from memory would take as long. Nothing of [s, s] is
# kept, and the gradients of query, key and value are written where the layer's product reads them, one beside the
# other.
#
# It is an operator (``torch.library``), one node to ``--compile``. In fp32 ``causal_kernel`` takes its place, where it
# can be built. torch's own kernel, which every other case takes, goes over whole rows of the scores in its backward
# pass.

_softmax_backward = torch.ops.aten._softmax_backward_data.out


def causal_self_attention(
    packed: torch.Tensor, starts: torch.Tensor | None = None, *, dropout: float = 0.0, drop: Drop | None = None
) -> torch.Tensor:
    """Return ``softmax(q k^T d^-0.5) v`` where no query sees a later key, nor with ``starts`` another document.

    Shapes:
        packed [s, b, a/t, 3, d]: query, key and value of each head
        starts int32 [b, s], as of ``document_attention``, which drops nothing; or None
        output [b, a/t, s, d]

    Args:
        drop: drops probabilities in place of ``dropout``; as ``megatron.ops.attention``, which does that.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.1; Dao et al. 2022, "FlashAttention", makes
    probabilities again in backward.
    """
    if starts is not None:
        if packed.device.type != "cpu" or not takes(packed):
            query, key, value = heads_of(packed)
            return document_attention(query, key, value, starts)
        found: torch.Tensor = forward(packed, starts)[0]
        return found.permute(1, 2, 0, 3)
    if is_blocked(packed) and not dropout and drop is None:
        context: torch.Tensor = forward(packed)[0] if takes(packed) else _forward(packed)
        return context.permute(1, 2, 0, 3)
    return attention(*heads_of(packed), dropout=dropout, drop=drop)


def heads_of(packed: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of each head.

    Shapes:
        packed [s, b, a/t, parts, d]
        output parts x [b, a/t, s, d]
    """
    return [part.permute(1, 2, 0, 3) for part in packed.unbind(3)]


@torch.library.custom_op("megatron_tds::causal_self_attention", mutates_args=())
def _forward(packed: torch.Tensor) -> torch.Tensor:
    s, b, a, _, d = packed.shape
    parts = _by_part(packed)
    context = packed.new_empty(s, b, a, d)
    rows = context.flatten(1, 2)  # [s, n, d]
    for heads, room in rooms(Room, packed):
        room.together.copy_(parts[:, heads])
        found = rows[:, heads]
        for block in room.blocks:
            block.make_probabilities()
            torch.bmm(block.scores, block.values, out=block.product)
            found[block.own].copy_(block.product.transpose(0, 1))
    return context


@torch.library.custom_op("megatron_tds::causal_self_attention_backward", mutates_args=())
def _backward(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``packed``, like it in shape; that of the context is [s, b, a, d]."""
    parts, of_context = _by_part(packed), grad.flatten(1, 2).transpose(0, 1)
    found = torch.empty_like(packed, memory_format=torch.contiguous_format)
    of_parts = _by_part(found)
    for heads, room in rooms(RoomOfBackward, packed):
        room.together.copy_(parts[:, heads])
        room.given.copy_(of_context[heads])
        of_query, of_key, of_value = of_parts[:, heads]
        for block in room.blocks:
            block.make_probabilities()
            block.of_value.add(block.scores.transpose(1, 2), block.given)
            torch.bmm(block.given, block.values.transpose(1, 2), out=block.second)  # gradients of the probabilities
            _softmax_backward(block.second, block.scores, -1, packed.dtype, grad_input=block.second)  # of the scores
            block.of_key.add(block.second.transpose(1, 2), block.query)
            put_product(block.product, block.second, block.keys, room.scale)
            of_query[:, block.own].copy_(block.product)
        of_key.copy_(room.of_key)
        of_value.copy_(room.of_value)
    return found


def _by_part(packed: torch.Tensor) -> torch.Tensor:
    """Return a view [3, n, s, d] of [s, b, a, 3, d], of n = b a heads."""
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
    return 2 * products(packed)


@register_flop_formula(torch.ops.megatron_tds.causal_self_attention_backward)
def _flops_of_backward(_: torch.Size, packed: torch.Size, *__: Any, **___: Any) -> int:
    return 5 * products(packed)
