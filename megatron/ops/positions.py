"""RoPE, ALiBi, relative buckets."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from megatron.ops.attention import document_mask, lowest

# Positions of tokens relative to each other.


def relative_buckets(
    distances: torch.Tensor, *, num_buckets: int, max_distance: int, is_bidirectional: bool
) -> torch.Tensor:
    """Return the bucket of each distance, key position minus query position.

    Half of the buckets of a direction hold one distance each, from 0; the others grow by a constant factor up to
    ``max_distance``, and the last holds all beyond. With both directions each has half of ``num_buckets``, keys to the
    right the second half; with one, keys to the right are in bucket 0. The logarithm is in fp32, as Hugging Face's,
    so that both round alike at the edge of a bucket.

    Shapes:
        distances int64, any shape; output the same

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning", section 2.1.
    """
    size = num_buckets // 2 if is_bidirectional else num_buckets
    away = distances.abs() if is_bidirectional else (-distances).clamp(min=0)
    exact = size // 2
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    beyond = (exact + (growth * (size - exact)).long()).clamp(max=size - 1)
    buckets = torch.where(away < exact, away, beyond)
    return buckets + size * (distances > 0) if is_bidirectional else buckets


# Rotary positions: a query or key turns by an angle that grows with its position, so that scores see distances alone.
#
# Numbers i and i + d/2 of a head make the pair that turns (halves, as in Hugging Face's files). Meta's own files,
# GPT-J's and Megatron's ``--rotary-interleaved`` turn 2 i and 2 i + 1: the same mathematics with the rows of the query
# and key weights of each head in another order. Weights of one order under the other's rule give a model that talks
# nonsense and trains well from scratch, so that no loss curve tells; a conversion must permute the rows.
#
# Source: Su et al. 2021, "RoFormer"; for llama3 Dubey et al. 2024, "The Llama 3 herd of models"; for yarn
# Peng et al. 2023, "YaRN: efficient context window extension of large language models".


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """How fast the pairs of a head of ``head_size`` numbers turn; the flags' names without ``rotary_``."""

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

    @property
    def num_turned(self) -> int:
        """Numbers of a head, from its start, that turn."""
        return int(self.head_size * self.percent)

    @property
    def multiplier(self) -> float:
        """What queries and keys are multiplied with as they turn: 1 but for yarn, which makes scores larger."""
        if self.scaling != "yarn":
            return 1.0
        return self.attention_factor or (0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0)

    def frequencies(self) -> list[float]:
        """Return the angle between neighbouring positions of each of the d/2 pairs, fewer where a part turns.

        With llama3 a wave of w positions, of which n = original_positions / w fit into the earlier length, turns as it
        did where n is high_frequency_factor or more, slower by the factor where n is low_frequency_factor or less, and
        between these by a mean of both speeds. With yarn it is the pair's number that lies between two: that which
        turns beta_fast times over the earlier length, rounded down, and that which does beta_slow times, rounded up.
        """
        size = self.num_turned
        plain = [self.base ** (-2.0 * pair / size) for pair in range(size // 2)]
        if self.scaling == "none":
            return plain
        if self.scaling == "linear":
            return [frequency / self.factor for frequency in plain]
        share = self._yarn_share() if self.scaling == "yarn" else self._llama3_share(plain)
        return [each * (kept + (1.0 - kept) / self.factor) for each, kept in zip(plain, share, strict=True)]

    def _llama3_share(self, plain: list[float]) -> list[float]:
        """Return how much of each pair's speed stays as it was."""
        low, high = self.low_frequency_factor, self.high_frequency_factor
        waves = [self.original_positions * frequency / (2.0 * math.pi) for frequency in plain]
        return [min(max((number - low) / (high - low), 0.0), 1.0) for number in waves]

    def _yarn_share(self) -> list[float]:
        def pair_of(turns: float) -> float:
            waves = self.original_positions / (turns * 2.0 * math.pi)
            return self.num_turned * math.log(waves) / (2.0 * math.log(self.base))

        first = max(math.floor(pair_of(self.beta_fast)), 0)
        last = min(math.ceil(pair_of(self.beta_slow)), self.num_turned - 1)
        length = last - first or 0.001
        return [1.0 - min(max((pair - first) / length, 0.0), 1.0) for pair in range(self.num_turned // 2)]


def turns(
    rotary: Rotary, x: torch.Tensor, positions: torch.Tensor | None = None, longest: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the angles at ``positions``, in fp32 or the type of ``x`` where that is wider.

    Angles are computed in fp64: in fp32 an angle of 100,000 is off by up to 0.004.

    Shapes:
        x         [b, a/t, s, d], queries
        positions [b, s]; None: 0 ... s-1
        output    2 x [s, d/2], or [b, 1, s, d/2] of given positions; fewer columns where a part of the head turns

    Args:
        longest: given positions are below it or ``s``; others are read beyond the table, or not as they should be, and
            only a CPU would tell. ``DecoderModel`` checks what it is given.
    """
    length = x.shape[2]
    rows = max(length, longest)
    table = _table(rotary, 1 << (rows - 1).bit_length(), torch.promote_types(x.dtype, torch.float32), x.device)
    if positions is None:
        return table[0][:length], table[1][:length]
    return table[0][positions].unsqueeze(1), table[1][positions].unsqueeze(1)


@torch.compiler.assume_constant_result  # in a compiled layer's graph the table is an input, not made anew
def _table(rotary: Rotary, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the positions below ``rows``; all layers of a process share them.

    Shapes:
        output 2 x [rows, d/2]
    """
    return _made(rotary, rows, dtype, device)


@functools.lru_cache(maxsize=16)
def _made(rotary: Rotary, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False), torch.device("cpu"):
        speeds = torch.tensor(rotary.frequencies(), dtype=torch.float64)
        angles = torch.arange(rows, dtype=torch.float64).unsqueeze(1) * speeds
        cosine, sine = angles.cos(), angles.sin()
        if rotary.multiplier != 1.0:
            cosine, sine = cosine * rotary.multiplier, sine * rotary.multiplier
        return cosine.to(device, dtype), sine.to(device, dtype)


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its pairs turned; 16-bit numbers are multiplied in fp32.

    Shapes:
        x, output    [b, a/t, s, d]
        cosine, sine [s, d/2] or [b, 1, s, d/2]; fewer columns: only as many pairs at the start of a head turn
    """
    size = 2 * cosine.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotated(x[..., :size], cosine, sine), x[..., size:]), dim=-1)
    first, second = x.to(cosine.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)


# ALiBi: scores fall with the distance between query and key, by a slope of each head's own. Nothing is learned.


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> list[float]:
    """Return the slope of each head: ``2 ** (-bias_max k / n)`` for k = 1 ... n, with n heads.

    Where ``num_heads`` is no power of two, n is the next one; the heads get every second slope, from the second on,
    and then the others from the first on, until all have one. The slopes of half as many heads come first, therefore.

    Source: Press et al. 2022, "Train short, test long", section 3 and code; MosaicML's MPT has ``bias_max``.
    """
    n = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * k / n) for k in range(1, n + 1)]
    return slopes if n == num_heads else [*slopes[1::2], *slopes[::2]][:num_heads]


def alibi_bias(
    slopes: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return what is added to the scores: minus slope times distance, and the lowest number where a key comes later.

    Made in fp32 (fp64 for fp64), then rounded to ``dtype``. In bf16 that is exact up to a distance of 256 where slopes
    are powers of two; else a bias B is off by up to ``2 ** -8`` B, where ``e ** -B`` is the share that it leaves.

    Shapes:
        slopes [a]
        query_positions [b or 1, s], key_positions [s_k] integers
        output [b or 1, a, s, s_k]
    """
    wide = dtype if dtype == torch.float64 else torch.float32
    ahead = (key_positions - query_positions.unsqueeze(-1)).unsqueeze(1)  # [b, 1, s, s_k]
    bias = slopes.to(wide).view(-1, 1, 1) * ahead.to(wide)  # [b, a, s, s_k]
    return bias.to(dtype).masked_fill_(ahead > 0, lowest(dtype))


def within_documents(bias: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return ``bias`` with the lowest number where query and key are of two documents.

    Distances are differences of positions, so within a document they are the same wherever it begins.

    Shapes:
        bias   [1, a, s, s]
        segment_ids [b, s] integers, the document of each position
        output [b, a, s, s]
    """
    return bias.masked_fill(~document_mask(segment_ids), lowest(bias.dtype))
