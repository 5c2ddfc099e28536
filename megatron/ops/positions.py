"""Position encodings: RoPE, ALiBi and relative buckets."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron.ops.attention import document_mask, mask_value

# Positions of tokens relative to each other.


def relative_buckets(
    distances: torch.Tensor, *, num_buckets: int, max_distance: int, is_bidirectional: bool
) -> torch.Tensor:
    """Assign distances (key position minus query position) to buckets.

    The first half of a direction's buckets hold one distance each, from 0. The others grow by a constant factor up to
    ``max_distance``, and the last one also holds all larger distances. If bidirectional, each direction has half of
    ``num_buckets``, the second half being for keys after the query. Otherwise keys after the query are in bucket 0. The
    logarithm is computed in fp32 as by Hugging Face, so that both round alike at the edge of a bucket.

    Shapes:
        distances int64, any shape; output the same shape

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning", section 2.1.
    """
    size = num_buckets // 2 if is_bidirectional else num_buckets
    distance = distances.abs() if is_bidirectional else (-distances).clamp(min=0)
    num_exact = size // 2
    growth = torch.log(distance.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    logarithmic = (num_exact + (growth * (size - num_exact)).long()).clamp(max=size - 1)
    buckets = torch.where(distance < num_exact, distance, logarithmic)
    return buckets + size * (distances > 0) if is_bidirectional else buckets


# Rotary positions: a query or key is rotated by an angle proportional to its position, so that scores depend only on
# distances.
#
# Elements i and i + d/2 of a head form a rotated pair (halves, as in Hugging Face's files). Meta's files, GPT-J's and
# ``--rotary-interleaved`` rotate elements 2 i and 2 i + 1. The result is the same if the rows of each head's
# query and key weights are reordered. If weights in one order are used with the other rule, the model generates
# nonsense. Both rules train equally well from scratch, so that no loss curve reveals the mistake. A conversion must
# permute the rows.
#
# Source: Su et al. 2021, "RoFormer"; for llama3 Dubey et al. 2024, "The Llama 3 herd of models"; for yarn
# Peng et al. 2023, "YaRN: efficient context window extension of large language models"; for longrope Ding et al. 2024,
# "LongRoPE: extending LLM context window beyond 2 million tokens".


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotation speeds of the pairs in a head. Fields are named like the flags, without ``rotary_``.

    Args:
        is_long: longrope: the speeds are those of samples of more than ``original_positions`` tokens.
        is_truncated: yarn's pair indices for beta_fast and beta_slow are rounded outwards.
        is_interleaved: neighbouring elements form a pair, not elements of the two halves.
    """

    head_size: int
    base: float = 10000.0
    percent: float = 1.0
    scaling: str = "none"
    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    is_truncated: bool = True
    is_interleaved: bool = False

    @property
    def num_rotated(self) -> int:
        """Number of rotated elements, from the start of a head."""
        return int(self.head_size * self.percent)

    @property
    def multiplier(self) -> float:
        """Factor for rotated queries and keys: 1 except for yarn and longrope, which increase scores."""
        if self.scaling == "longrope" and not self.attention_factor:
            growth = math.log(self.factor) / math.log(self.original_positions) if self.factor > 1.0 else 0.0
            return math.sqrt(1.0 + growth)
        if self.scaling not in ("yarn", "longrope"):
            return 1.0
        return self.attention_factor or (0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0)

    def frequencies(self) -> list[float]:
        """Return each rotated pair's speed: the angle between neighbouring positions, in radians.

        linear: each original speed is divided by ``factor``. llama3 and yarn: a weighted mean of the original speed and
        that quotient.

        llama3: let n = original_positions / w be the number of turns of a pair with wavelength w over the original
        length. The weight of the original speed rises linearly in n, from 0 at low_frequency_factor and below to 1 at
        high_frequency_factor and above.

        yarn: the weight falls linearly in the index of the pair, from 1 at the pair that turns beta_fast times over the
        original length (index rounded down) to 0 at the pair that turns beta_slow times (index rounded up). Without
        ``is_truncated`` the indices are not rounded.

        longrope: each original speed is divided by its factor in ``short_factors``, or in ``long_factors`` if
        ``is_long``.
        """
        size = self.num_rotated
        unscaled = [self.base ** (-2.0 * pair / size) for pair in range(size // 2)]
        if self.scaling == "none":
            return unscaled
        if self.scaling == "linear":
            return [frequency / self.factor for frequency in unscaled]
        if self.scaling == "longrope":
            factors = self.long_factors if self.is_long else self.short_factors
            return [frequency / factor for frequency, factor in zip(unscaled, factors, strict=True)]
        weights = self._yarn_weights() if self.scaling == "yarn" else self._llama3_weights(unscaled)
        return [
            speed * (weight + (1.0 - weight) / self.factor) for speed, weight in zip(unscaled, weights, strict=True)
        ]

    def _llama3_weights(self, frequencies: list[float]) -> list[float]:
        """Return weights for the original speeds, given as ``frequencies``."""
        low, high = self.low_frequency_factor, self.high_frequency_factor
        num_turns = [self.original_positions * frequency / (2.0 * math.pi) for frequency in frequencies]
        return [min(max((n - low) / (high - low), 0.0), 1.0) for n in num_turns]

    def _yarn_weights(self) -> list[float]:
        """Return weights for the original speeds."""

        def pair_idx(turns: float) -> float:
            waves = self.original_positions / (turns * 2.0 * math.pi)
            return self.num_rotated * math.log(waves) / (2.0 * math.log(self.base))

        first, last = pair_idx(self.beta_fast), pair_idx(self.beta_slow)
        if self.is_truncated:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.num_rotated - 1)
        length = last - first or 0.001
        return [1.0 - min(max((pair - first) / length, 0.0), 1.0) for pair in range(self.num_rotated // 2)]


def rotary_cos_sin(
    rotary: Rotary, x: torch.Tensor, positions: torch.Tensor | None = None, max_length: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cosine and sine of the angles at ``positions``, in fp32 or in the dtype of ``x`` if it is wider.

    Angles are computed in fp64: in fp32 an angle of 100,000 has an error of up to 0.004.

    Shapes:
        x         [b, a/t, s, d], queries
        positions [b, s]; None: 0 ... s-1
        output    2 x [s, d/2], or [b, 1, s, d/2] with ``positions``; fewer columns if only a part of the head rotates

    Args:
        max_length: positions must be below ``max(max_length, s)``. Larger positions read outside the table or get wrong
            values, and only a CPU raises an error. ``DecoderModel`` checks its positions.
    """
    length = x.shape[2]
    num_rows = max(length, max_length)
    table = _table(rotary, 1 << (num_rows - 1).bit_length(), torch.promote_types(x.dtype, torch.float32), x.device)
    if positions is None:
        return table[0][:length], table[1][:length]
    return table[0][positions].unsqueeze(1), table[1][positions].unsqueeze(1)


@torch.compiler.assume_constant_result  # the table is an input of a compiled layer's graph, not recomputed in it
def _table(
    rotary: Rotary, num_rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines for positions below ``num_rows``, which all layers of a process share.

    Shapes:
        output 2 x [num_rows, d/2]
    """
    return _compute_table(rotary, num_rows, dtype, device)


@functools.lru_cache(maxsize=16)
def _compute_table(
    rotary: Rotary, num_rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False), torch.device("cpu"):
        frequencies = torch.tensor(rotary.frequencies(), dtype=torch.float64)
        angles = torch.arange(num_rows, dtype=torch.float64).unsqueeze(1) * frequencies
        cosine, sine = angles.cos(), angles.sin()
        if rotary.multiplier != 1.0:
            cosine, sine = cosine * rotary.multiplier, sine * rotary.multiplier
        return cosine.to(device, dtype), sine.to(device, dtype)


def apply_rotary(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, is_interleaved: bool = False
) -> torch.Tensor:
    """Rotate the pairs in ``x``; 16-bit values are multiplied in fp32.

    Shapes:
        x, output    [b, a/t, s, d]
        cosine, sine [s, d/2] or [b, 1, s, d/2]; with fewer columns only a head's first pairs are rotated

    Args:
        is_interleaved: elements 2 i and 2 i + 1 form pair i; otherwise elements i and i + r/2 of the r rotated ones.
    """
    if torch.compiler.is_compiling():
        size = 2 * cosine.shape[-1]
        first, second = _pairs(x[..., :size].to(cosine.dtype), size, is_interleaved)
        pair = [y.to(x.dtype) for y in (first * cosine - second * sine, second * cosine + first * sine)]
        rotated = torch.stack(pair, dim=-1).flatten(-2) if is_interleaved else torch.cat(pair, dim=-1)
        return torch.cat((rotated, x[..., size:]), dim=-1)
    result: torch.Tensor = _ApplyRotary.apply(x, cosine, sine, is_interleaved)
    return result


class _ApplyRotary(torch.autograd.Function):
    """Rotation that saves only cosine and sine; its backward rotates the gradient by minus the angle."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, is_interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.is_interleaved = is_interleaved
        return _rotate(x, cosine, sine, is_interleaved)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        cosine, sine = ctx.saved_tensors
        return _rotate(grads[0], cosine, -sine, ctx.is_interleaved), None, None, None


def _pairs(x: torch.Tensor, size: int, is_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """View the first and the second elements of the pairs in the first ``size`` columns of ``x``."""
    if is_interleaved:
        return x[..., 0:size:2], x[..., 1:size:2]
    return x[..., : size // 2], x[..., size // 2 : size]


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Rotate ``x``, and write each product where it is needed: faster than a concatenation."""
    size = 2 * cosine.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (first, second), (first_out, second_out) = (_pairs(y, size, is_interleaved) for y in (x, out))
    if x.dtype == cosine.dtype:
        torch.mul(first, cosine, out=first_out).sub_(second * sine)
        torch.mul(second, cosine, out=second_out).add_(first * sine)
    else:
        first, second = first.to(cosine.dtype), second.to(cosine.dtype)
        first_out.copy_((first * cosine).sub_(second * sine))
        second_out.copy_(second.mul_(cosine).add_(first.mul_(sine)))
    if size < x.shape[-1]:
        out[..., size:] = x[..., size:]
    return out


# ALiBi: scores decrease with the distance between query and key, by a fixed slope per head. Nothing is learned.


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> list[float]:
    """Return slopes by head: ``2 ** (-bias_max k / n)`` for k = 1 ... n, with n heads.

    If ``num_heads`` is not a power of two, n is the next power of two. The heads get the slopes in the order k = 2, 4,
    ..., n, 1, 3, ... The first n/2 heads therefore have the slopes of a model with n/2 heads.

    Source: Press et al. 2022, "Train short, test long", section 3 and code; MosaicML's MPT has ``bias_max``.
    """
    n = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * k / n) for k in range(1, n + 1)]
    return slopes if n == num_heads else [*slopes[1::2], *slopes[::2]][:num_heads]


def alibi_bias(
    slopes: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute the score bias: minus slope times distance, and ``mask_value`` for keys after the query.

    The bias is computed in fp32 (fp64 for fp64), then rounded to ``dtype``. In bf16 it is exact up to a distance of 256
    if slopes are powers of two. Otherwise a bias -B, which multiplies a probability by ``e ** -B``, has an error of up
    to ``2 ** -8`` B.

    Shapes:
        slopes [a]
        query_positions [b or 1, s], key_positions [s_k] integers
        output [b or 1, a, s, s_k]
    """
    wide_dtype = dtype if dtype == torch.float64 else torch.float32
    offsets = (key_positions - query_positions.unsqueeze(-1)).unsqueeze(1)  # [b, 1, s, s_k]
    bias = slopes.to(wide_dtype).view(-1, 1, 1) * offsets.to(wide_dtype)  # [b, a, s, s_k]
    return bias.to(dtype).masked_fill_(offsets > 0, mask_value(dtype))


def mask_other_documents(bias: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Mask ``bias`` with ``mask_value`` where query and key belong to different documents.

    Distances are differences of positions, so that within a document they do not depend on the start of the document.

    Shapes:
        bias   [1, a, s, s]
        segment_ids [b, s] integers, document index per position
        output [b, a, s, s]
    """
    return bias.masked_fill(~document_mask(segment_ids), mask_value(bias.dtype))
