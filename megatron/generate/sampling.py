"""Greedy, temperature, top-k, top-p over a cut vocabulary."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.models.common.generation import ModelStage, Rows
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.layers import vocab_range

# The likeliest token where the logits are cut over the tensor group.

NONE = -1
"""In place of a token where no logit is the largest, since one is not a number."""


def vocab_parallel_argmax(
    logits: torch.Tensor, *, vocab_size: int, divisible_by: int = 1, group: Group = SINGLE
) -> torch.Tensor:
    """Return the token with the largest logit in each row, the lowest of equals; ``NONE`` where a logit is NaN.

    Padded columns never win. Collective: two numbers for each row travel, and every rank gets the same tokens.

    Shapes:
        logits [b, v/t] of this rank, padded columns last
        output [b]
    """
    _, start, num_real = vocab_range(vocab_size, group, divisible_by)
    value, token = _own_best(logits[:, :num_real].double(), start)  # 2 x [b]
    if group.size > 1:
        value, token = _of_all(value, token, group)  # 2 x [t, b]
    else:
        value, token = value[None], token[None]
    largest = value.amax(dim=0)  # NaN where there is one
    lowest = token.masked_fill(value != largest, vocab_size).amin(dim=0)
    return lowest.masked_fill(largest.isnan(), NONE)


def _own_best(logits: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of this rank and its token; -inf from a rank that holds nothing but padding."""
    if logits.shape[-1] == 0:
        rows = logits.shape[0]
        return logits.new_full((rows,), float("-inf")), torch.zeros(rows, dtype=torch.long, device=logits.device)
    local = logits.argmax(dim=-1)  # of equals torch's argmax takes the first; of NaN and numbers the NaN
    return logits.gather(-1, local[:, None])[:, 0], local + start


def _of_all(value: torch.Tensor, token: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.stack([value, token.double()])  # a token is exact in fp64
    parts = [torch.empty_like(own) for _ in range(group.size)]
    dist.all_gather(parts, own, group=group.handle)
    whole = torch.stack(parts, dim=1)  # [2, t, b]
    return whole[0], whole[1].long()


Choose = Callable[[torch.Tensor, list[int], int], torch.Tensor]


"""From (logits [b, v/t], numbers of their rows, number of the new token) to the tokens [b]."""


# Choosing the next token: the likeliest, or one drawn at random with numbers that depend on no layout or batch.


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn: logits are divided by ``temperature``, then ``top_k``, then ``top_p`` leave tokens out.

    Args:
        temperature: above 0; below 1 the likely become likelier.
        top_k: only the k likeliest (and their equals); 0: all.
        top_p: only the likeliest that together reach this probability, above 0; 1: all.
        seed: other numbers for the same prompts.

    Sources: Fan et al. 2018, "Hierarchical neural story generation" (top-k); Holtzman et al. 2020, "The curious case of
    neural text degeneration" (top-p).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def make_sampler(part: ModelStage, sampling: Sampling | None, keys: Sequence[bytes]) -> Choose:
    """Return the function that chooses; without ``sampling`` it takes the likeliest. It is collective over the tensor
    group of the last stage.

    Args:
        keys: of each row, from ``keys_of``.
    """
    sizes, group = part.sizes, part.place.group

    def take(logits: torch.Tensor, rows: list[int], step: int) -> torch.Tensor:
        how = {"vocab_size": sizes.vocab_size, "divisible_by": sizes.make_vocab_size_divisible_by, "group": group}
        return vocab_parallel_argmax(logits, **how)  # type: ignore[arg-type]

    def draw(logits: torch.Tensor, rows: list[int], step: int) -> torch.Tensor:
        assert sampling is not None
        whole = _gathered(logits, sizes.vocab_size, sizes.make_vocab_size_divisible_by, group)  # [b, v]
        numbers = torch.tensor([uniform(sampling.seed, keys[row], step) for row in rows], dtype=torch.float64)
        tokens = drawn(probabilities(whole, sampling), numbers).to(logits.device)
        if group.size > 1:  # one rank's word: a last bit of another processor could lead to another token
            dist.broadcast(tokens, group.ranks[0], group=group.handle)
        return tokens

    return take if sampling is None else draw


def keys_of(rows: Rows) -> list[bytes]:
    """Return what names the random numbers of each row: its tokens, and how many equal rows come before it."""
    seen: Counter[tuple[int, ...]] = Counter()
    keys = []
    for row in map(tuple, rows):
        keys.append(hashlib.blake2b(f"{row} {seen[row]}".encode()).digest())
        seen[row] += 1
    return keys


def uniform(seed: int, key: bytes, step: int) -> float:
    """Return a number from 0 (with) to 1 (without) for new token ``step`` of the row with this key."""
    digest = hashlib.blake2b(key + f" {seed} {step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the probability of each token; 0 for those that are left out.

    Shapes:
        logits, output fp64 [b, v]
    """
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature  # the largest stays finite
    if 0 < sampling.top_k < logits.shape[-1]:
        lowest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    found = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        falling, order = found.sort(dim=-1, descending=True, stable=True)
        before = falling.cumsum(dim=-1) - falling
        before[:, 0] = 0  # the likeliest always stays
        falling = falling.masked_fill(before >= sampling.top_p, 0)
        found = torch.zeros_like(found).scatter_(-1, order, falling)
        found = found / found.sum(dim=-1, keepdim=True)
    return found


def drawn(found: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return for each row the token at which the running sum of probabilities passes its number; ``NONE`` for NaN.

    Shapes:
        found [b, v], numbers [b] from 0 to 1
        output [b]
    """
    sums = found.cumsum(dim=-1)
    tokens = torch.searchsorted(sums, (numbers * sums[:, -1])[:, None], right=True)[:, 0]
    last = found.shape[-1] - 1 - (found > 0).flip(-1).long().argmax(dim=-1)  # rounding must not lead beyond it
    return torch.minimum(tokens, last).masked_fill(found.isnan().any(dim=-1), NONE)


def _gathered(logits: torch.Tensor, vocab_size: int, divisible_by: int, group: Group) -> torch.Tensor:
    """Return the logits of all ranks without padding in fp64 on the CPU. Collective.

    Shapes:
        logits [b, v/t]
        output [b, v]
    """
    rows, _, _ = vocab_range(vocab_size, group, divisible_by)
    parts = [logits[:, :rows]]
    if group.size > 1:
        parts = [torch.empty_like(logits, memory_format=torch.contiguous_format) for _ in range(group.size)]
        dist.all_gather(parts, logits.contiguous(), group=group.handle)
    return torch.cat(parts, dim=-1)[:, :vocab_size].double().cpu()
