"""Greedy decoding and sampling (temperature, top-k, top-p) with logits sharded over the vocabulary."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.models.common.generation import ModelStage, TokenRows
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.layers import vocab_range

# Argmax of logits that are sharded over the tensor group.

NO_TOKEN = -1
"""Returned instead of a token if a logit is NaN."""


def vocab_parallel_argmax(
    logits: torch.Tensor, *, vocab_size: int, divisible_by: int = 1, group: Group = SINGLE
) -> torch.Tensor:
    """Return the token with the largest logit in each row, the lowest one in a tie; ``NO_TOKEN`` if a logit is NaN.

    Padded columns are ignored. Collective: ranks exchange two numbers per row, and all ranks return the same tokens.

    Shapes:
        logits [b, v/t] of this rank, padded columns last
        output [b]
    """
    _, start, num_real = vocab_range(vocab_size, group, divisible_by)
    value, token = _local_best(logits[:, :num_real].double(), start)  # 2 x [b]
    if group.size > 1:
        value, token = _gather_best(value, token, group)  # 2 x [t, b]
    else:
        value, token = value[None], token[None]
    largest = value.amax(dim=0)  # NaN if any is NaN
    lowest = token.masked_fill(value != largest, vocab_size).amin(dim=0)
    return lowest.masked_fill(largest.isnan(), NO_TOKEN)


def _local_best(logits: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's largest logit and its token; -inf if the rank has only padded columns."""
    if logits.shape[-1] == 0:
        rows = logits.shape[0]
        return logits.new_full((rows,), float("-inf")), torch.zeros(rows, dtype=torch.long, device=logits.device)
    local = logits.argmax(dim=-1)  # the first of a tie; NaN takes precedence over numbers
    return logits.gather(-1, local[:, None])[:, 0], local + start


def _gather_best(value: torch.Tensor, token: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    local = torch.stack([value, token.double()])  # tokens are exact in fp64
    gathered = [torch.empty_like(local) for _ in range(group.size)]
    dist.all_gather(gathered, local, group=group.handle)
    stacked = torch.stack(gathered, dim=1)  # [2, t, b]
    return stacked[0], stacked[1].long()


TokenSampler = Callable[[torch.Tensor, list[int], int], torch.Tensor]


"""Function from (logits [b, v/t], row indices, index of the new token) to the tokens [b]."""


# Choosing the next token, greedily or at random. Random numbers do not depend on the layout or the batch.


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters; ``temperature`` is applied first, then ``top_k``, then ``top_p``.

    Args:
        temperature: divisor of the logits, above 0; values below 1 favour likely tokens.
        top_k: sample only from the k most likely tokens and ties; 0: from all.
        top_p: sample only from the most likely tokens that together reach this probability, above 0; 1: from all.
        seed: seed of the random numbers.

    Sources: Fan et al. 2018, "Hierarchical neural story generation" (top-k); Holtzman et al. 2020, "The curious case of
    neural text degeneration" (top-p).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def make_sampler(stage: ModelStage, sampling: Sampling | None, keys: Sequence[bytes]) -> TokenSampler:
    """Return the function that chooses tokens, collective over the last stage's tensor group.

    Args:
        sampling: None: choose the most likely token.
        keys: the key of each row, from ``keys_of``.
    """
    args, group = stage.args, stage.parallel.group

    def choose_greedy(logits: torch.Tensor, rows: list[int], step: int) -> torch.Tensor:
        vocabulary = {
            "vocab_size": args.vocab_size,
            "divisible_by": args.make_vocab_size_divisible_by,
            "group": group,
        }
        return vocab_parallel_argmax(logits, **vocabulary)  # type: ignore[arg-type]

    def sample(logits: torch.Tensor, rows: list[int], step: int) -> torch.Tensor:
        assert sampling is not None
        all_logits = _gather_logits(logits, args.vocab_size, args.make_vocab_size_divisible_by, group)  # [b, v]
        uniforms = torch.tensor([uniform(sampling.seed, keys[row], step) for row in rows], dtype=torch.float64)
        tokens = sample_tokens(probabilities(all_logits, sampling), uniforms).to(logits.device)
        if group.size > 1:  # rounding on another processor could lead to another token
            dist.broadcast(tokens, group.ranks[0], group=group.handle)
        return tokens

    return choose_greedy if sampling is None else sample


def keys_of(rows: TokenRows) -> list[bytes]:
    """Return the key of each row's random numbers, a hash of its tokens and the number of equal rows before it."""
    seen: Counter[tuple[int, ...]] = Counter()
    keys = []
    for row in map(tuple, rows):
        keys.append(hashlib.blake2b(f"{row} {seen[row]}".encode()).digest())
        seen[row] += 1
    return keys


def uniform(seed: int, key: bytes, step: int) -> float:
    """Return a uniform random number in [0, 1) for new token ``step`` of the row with this key."""
    digest = hashlib.blake2b(key + f" {seed} {step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Compute token probabilities; 0 for tokens excluded by top-k or top-p.

    Shapes:
        logits, output fp64 [b, v]
    """
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature  # keeps the largest logit finite
    if 0 < sampling.top_k < logits.shape[-1]:
        lowest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    probs = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
        cumulative = sorted_probs.cumsum(dim=-1) - sorted_probs
        cumulative[:, 0] = 0  # always keep the most likely token
        sorted_probs = sorted_probs.masked_fill(cumulative >= sampling.top_p, 0)
        probs = torch.zeros_like(probs).scatter_(-1, order, sorted_probs)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def sample_tokens(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return each row's token at which the cumulative probability exceeds its uniform number; ``NO_TOKEN`` for NaN.

    Shapes:
        probs [b, v], uniforms [b] from 0 to 1
        output [b]
    """
    cumulative = probs.cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    # last possible token, in case of rounding errors
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).long().argmax(dim=-1)
    return torch.minimum(tokens, last).masked_fill(probs.isnan().any(dim=-1), NO_TOKEN)


def _gather_logits(logits: torch.Tensor, vocab_size: int, divisible_by: int, group: Group) -> torch.Tensor:
    """Return the logits of all ranks without padding, in fp64 on the CPU. Collective.

    Shapes:
        logits [b, v/t]
        output [b, v]
    """
    num_columns, _, _ = vocab_range(vocab_size, group, divisible_by)
    shards = [logits[:, :num_columns]]
    if group.size > 1:
        shards = [torch.empty_like(logits, memory_format=torch.contiguous_format) for _ in range(group.size)]
        dist.all_gather(shards, logits.contiguous(), group=group.handle)
    return torch.cat(shards, dim=-1)[:, :vocab_size].double().cpu()
