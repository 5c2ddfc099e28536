"""The likeliest token where the logits are cut over the tensor group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.layers import vocab_range

NONE = -1
"""In place of a token where no logit is the largest, since one is not a number."""


def likeliest(logits: torch.Tensor, *, vocab_size: int, divisible_by: int = 1, group: Group = SINGLE) -> torch.Tensor:
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
