"""The language-model loss as a sum and a count, so that any split into micro-batches gives the same mean."""

from __future__ import annotations

import torch

from megatron.model.sizes import Place, Sizes
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.groups import SINGLE, Group


def language_model_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    vocab_size: int,
    divisible_by: int = 1,
    group: Group = SINGLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum of the losses of all tokens that count, number of those tokens). Collective.

    Shapes:
        logits    [s, b, v/t]
        labels    [b, s] token ids
        loss_mask [b, s], 0 where a token does not count
        output    two scalars in fp32 (fp64 for fp64 logits)
    """
    losses = vocab_parallel_cross_entropy(
        logits, labels.transpose(0, 1), vocab_size=vocab_size, divisible_by=divisible_by, group=group
    )  # [s, b]
    weights = loss_mask.transpose(0, 1).to(losses.dtype)
    return (losses * weights).sum(), weights.sum()


def model_loss(
    logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, sizes: Sizes, place: Place
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
