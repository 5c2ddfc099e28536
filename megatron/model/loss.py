"""The language-model loss as a sum and a count, so that any split into micro-batches gives the same mean."""

from __future__ import annotations

import torch

from megatron.model.head import LazyLogits, Logits
from megatron.model.sizes import Place, Sizes
from megatron.mpu.cross_entropy import known_or_nan, vocab_parallel_cross_entropy
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.linear_cross_entropy import linear_cross_entropy


def language_model_loss(
    logits: Logits,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    vocab_size: int,
    divisible_by: int = 1,
    group: Group = SINGLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum of the losses of all tokens that count, number of those tokens). Collective.

    Shapes:
        logits    [s, b, v/t], or what they are made of
        labels    [b, s] token ids
        loss_mask [b, s], 0 where a token does not count
        output    two scalars in fp32 (fp64 for fp64 logits)

    Raises:
        ValueError: a token that counts has a label outside the vocabulary; not on a CPU: the sum is not a number.
    """
    targets, weights = labels.transpose(0, 1), loss_mask.transpose(0, 1)  # 2 x [s, b]
    if isinstance(logits, LazyLogits):
        weights = weights.to(torch.promote_types(logits.x.dtype, torch.float32))
        total = linear_cross_entropy(
            logits.x, logits.weight, targets, weights, bias=logits.bias, at_once=logits.at_once,
            vocab_size=vocab_size, divisible_by=divisible_by, group=group,
        )  # fmt: skip
        return total, weights.sum()
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights = known_or_nan(weights.to(wide), targets, vocab_size)
    losses = vocab_parallel_cross_entropy(
        logits, targets, vocab_size=vocab_size, divisible_by=divisible_by, group=group
    )  # [s, b]
    return (losses * weights).sum(), loss_mask.to(wide).sum()


def model_loss(
    logits: Logits, labels: torch.Tensor, loss_mask: torch.Tensor, sizes: Sizes, place: Place
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (loss sum, token count) of a model of these sizes; shapes as in ``language_model_loss``."""
    return language_model_loss(
        logits,
        labels,
        loss_mask,
        vocab_size=sizes.vocab_size,
        divisible_by=sizes.make_vocab_size_divisible_by,
        group=place.group,
    )
