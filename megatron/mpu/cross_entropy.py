"""Cross-entropy of logits whose vocabulary is cut over the tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.layers import vocab_range
from megatron.mpu.mappings import all_reduce


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, vocab_size: int, divisible_by: int = 1, group: Group = SINGLE,
    z_loss: float = 0.0,
) -> Any:  # fmt: skip
    """Return ``-log softmax(logits)[target]`` at each position, in fp32 (fp64 for fp64 logits). Collective.

    With a ``z_loss`` c return two tensors: these and ``c (log Z)^2``, see below. Columns of padded vocabulary rows are
    left out of the softmax: they get no probability and no gradient.

    Shapes:
        logits  [..., v/t] of this rank, padded columns last
        targets [...] token ids below ``vocab_size``, the same on every rank
        output  [...], the same on every rank
    """
    _, start, num_real = vocab_range(vocab_size, group, divisible_by)
    real = logits[..., :num_real] if logits.shape[-1] != num_real else logits
    real = real if real.dtype == torch.float64 else real.float()
    if group.size == 1:
        return _CrossEntropy.apply(real, targets, z_loss)
    return _VocabParallelCrossEntropy.apply(real, targets, start, group, z_loss)


# The z-loss, ``c (log Z)^2`` of a token, Z being the sum of the exponentials of all its logits. It has no gradient of
# its own, for that of the cross-entropy is the gradient of both: the number that is logged remains the cross-entropy,
# and what is trained on is their sum.
#
# Source: Chowdhery et al. 2022, "PaLM", section 5.


def _with_z_loss(ctx: Any, kept: tuple[torch.Tensor, ...], losses: torch.Tensor, log_z: torch.Tensor, c: float) -> Any:
    """Return ``losses`` and the z-losses, ``kept`` and the slopes being there in backward."""
    squares = c * log_z.square()
    ctx.save_for_backward(*kept, slopes_of_softmax(log_z, c))
    ctx.mark_non_differentiable(squares)
    return losses, squares


def slopes_of_softmax(log_z: torch.Tensor, z_loss: float) -> torch.Tensor:
    """Return what the softmax counts in the gradient of a loss: 1, and by the z-loss ``2 c log Z`` more."""
    return 1 + 2 * z_loss * log_z


def known_or_nan(
    weights: torch.Tensor, targets: torch.Tensor, vocab_size: int, *, is_on_host: bool | None = None
) -> torch.Tensor:
    """Return ``weights``, those of tokens that count though their target is not in the vocabulary made no number.

    Such a token would have a probability of 0 and a loss that looks like one. Where tokens are in the CPU's memory it
    raises; elsewhere the host would have to wait for the answer, and the loss is no number.

    Shapes:
        weights, targets [...]

    Args:
        is_on_host: reading them costs no waiting; None: as for a CPU.

    Raises:
        ValueError: there is such a token, on a CPU.
    """
    wrong = ((targets < 0) | (targets >= vocab_size)) & (weights != 0)
    if not (targets.device.type == "cpu" if is_on_host is None else is_on_host):
        return weights.masked_fill(wrong, float("nan"))
    try:
        torch._assert_async(~wrong.any())  # the same code on a device would not wait, but end the process
    except RuntimeError as error:
        raise _outside(targets[wrong], vocab_size) from error
    return weights


def _outside(labels: torch.Tensor, vocab_size: int) -> ValueError:
    return ValueError(
        f"labels of tokens that count must be 0 to {vocab_size - 1}, got {int(labels[0])} at the first of "
        f"{len(labels)} tokens. Set loss_mask to 0 there, or --vocab-size to that of the data"
    )


class _CrossEntropy(torch.autograd.Function):
    """The whole vocabulary on one rank. Backward reuses the memory of forward, the largest tensor of a step.

    Twice as fast as ``F.cross_entropy`` at v 16384 on a CPU. A second backward through the same graph raises.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, z_loss: float) -> Any:
        log_softmax = logits.log_softmax(dim=-1)  # [..., v]
        losses = log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1).neg_()
        if z_loss:
            log_z = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) + losses
            return _with_z_loss(ctx, (log_softmax, targets), losses, log_z, z_loss)
        ctx.save_for_backward(log_softmax, targets)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        log_softmax, targets, *slopes = ctx.saved_tensors
        grad = log_softmax.exp_()
        if slopes:
            grad.mul_(slopes[0].unsqueeze(-1))
        minus_one = grad.new_full((), -1.0).expand(targets.shape).unsqueeze(-1)
        return grad.scatter_add_(-1, targets.unsqueeze(-1), minus_one).mul_(grads[0].unsqueeze(-1)), None, None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Forward keeps the softmax; backward makes it softmax minus the one-hot target, on this rank's columns, in place.

    A second backward through the same graph raises.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, start: int, group: Group, z_loss: float) -> Any:
        columns = logits.shape[-1]
        largest = logits.amax(dim=-1) if columns else logits.new_full(targets.shape, float("-inf"))
        all_reduce(largest, group, dist.ReduceOp.MAX)
        shifted = logits - largest.unsqueeze(-1)  # [..., v/t]
        local = targets - start
        elsewhere = (local < 0) | (local >= columns)
        local = local.masked_fill(elsewhere, 0)
        if columns:
            at_target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        else:
            at_target = torch.zeros_like(largest)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), at_target])  # one message for both sums
        all_reduce(sums, group)
        denominator, at_target = sums[0], sums[1]
        softmax = exponentials.div_(denominator.unsqueeze(-1))
        losses = denominator.log() - at_target
        if z_loss:
            return _with_z_loss(ctx, (softmax, local, elsewhere), losses, denominator.log() + largest, z_loss)
        ctx.save_for_backward(softmax, local, elsewhere)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        softmax, local, elsewhere, *slopes = ctx.saved_tensors
        if slopes:
            softmax.mul_(slopes[0].unsqueeze(-1))
        if softmax.shape[-1]:
            hit = (~elsewhere).to(softmax.dtype).unsqueeze(-1)
            softmax.scatter_add_(-1, local.unsqueeze(-1), -hit)
        return softmax.mul_(grads[0].unsqueeze(-1)), None, None, None, None
