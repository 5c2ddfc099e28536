"""Cross-entropy of logits with the vocabulary sharded over the tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.fused_cross_entropy import logits_gradient, row_statistics, uses_kernels
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.layers import vocab_range
from megatron.mpu.mappings import all_reduce


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, vocab_size: int, divisible_by: int = 1, group: Group = SINGLE,
    z_loss: float = 0.0, has_kernels: bool = True,
) -> Any:  # fmt: skip
    """Compute ``-log softmax(logits)[target]`` at each position, in fp32 (fp64 for fp64 logits). Collective.

    If ``z_loss`` is not 0, two tensors are returned: the cross-entropy, and the z-loss ``z_loss * (log Z)^2``, which is
    not differentiable. Backward through the cross-entropy computes the gradient for both. Columns of padded vocabulary
    rows are excluded from the softmax: they get no probability and no gradient.

    Shapes:
        logits  [..., v/t] on this rank, padded columns last
        targets [...] token ids below ``vocab_size``, the same on every rank
        output  [...], the same on every rank

    Args:
        has_kernels: use the Triton kernels on CUDA if Triton is installed.

    Raises:
        ValueError: the columns of the logits are not this rank's shard, for example because the logits are gathered.
    """
    num_rows, start, num_real = vocab_range(vocab_size, group, divisible_by)
    _check_columns(logits.shape[-1], num_rows, num_real, group)
    if uses_kernels(logits, has_kernels):
        return _FusedCrossEntropy.apply(logits, targets - start, num_real, group, z_loss)
    real_logits = logits[..., :num_real] if logits.shape[-1] != num_real else logits
    real_logits = real_logits if real_logits.dtype == torch.float64 else real_logits.float()
    if group.size == 1:
        return _CrossEntropy.apply(real_logits, targets, z_loss)
    return _VocabParallelCrossEntropy.apply(real_logits, targets, start, group, z_loss)


def _check_columns(num_columns: int, num_rows: int, num_real: int, group: Group) -> None:
    """Raise ``ValueError`` unless the columns are this rank's vocabulary shard, with or without padding.

    On one rank, all columns after the vocabulary are padding.
    """
    is_shard = num_columns in (num_rows, num_real) if group.size > 1 else num_columns >= num_real
    if not is_shard:
        expected = f"{num_rows} (or {num_real} without padding)" if num_rows != num_real else str(num_rows)
        raise ValueError(
            f"logits must have the columns of this tensor rank's shard of the vocabulary, {expected}, got "
            f"{num_columns}. Pass logits [..., v/t] that are not gathered over the {group.size} tensor ranks, and the "
            "divisible_by of the output table"
        )


# The z-loss of a token is ``c (log Z)^2``, where Z is the sum of the exponentials of all its logits. The returned
# z-loss is not differentiable: backward of the cross-entropy computes the gradient of the sum of both losses. The
# logged loss is therefore the cross-entropy, while training minimizes the sum.
#
# Source: Chowdhery et al. 2022, "PaLM", section 5.


def _save_with_z_loss(
    ctx: Any, saved: tuple[torch.Tensor, ...], losses: torch.Tensor, log_z: torch.Tensor, z_loss: float
) -> Any:
    """Add the z-losses to ``losses``; save the tensors ``saved`` and ``softmax_grad_scale`` for backward."""
    z_losses = z_loss * log_z.square()
    ctx.save_for_backward(*saved, softmax_grad_scale(log_z, z_loss))
    ctx.mark_non_differentiable(z_losses)
    return losses, z_losses


def softmax_grad_scale(log_z: torch.Tensor, z_loss: float) -> torch.Tensor:
    """Return the softmax factor in the loss gradient: ``1 + 2 c log Z``, c = ``z_loss``."""
    return 1 + 2 * z_loss * log_z


def validate_targets(
    weights: torch.Tensor, targets: torch.Tensor, vocab_size: int, *, is_on_host: bool | None = None
) -> torch.Tensor:
    """Return ``weights`` with NaN for tokens with non-zero weight and a target outside the vocabulary.

    Without this check such a token would get a probability of 0 and a plausible loss. On a CPU the function raises an
    error. On other devices, raising would require the host to wait for the device, so the loss becomes NaN instead.

    Shapes:
        weights, targets [...]

    Args:
        is_on_host: raise an error instead of returning NaN; None: True if the targets are on a CPU.

    Raises:
        ValueError: such a token exists and ``is_on_host`` is True.
    """
    is_invalid = ((targets < 0) | (targets >= vocab_size)) & (weights != 0)
    if not (targets.device.type == "cpu" if is_on_host is None else is_on_host):
        return weights.masked_fill(is_invalid, float("nan"))
    try:
        # only on the host: on CUDA the assertion would run asynchronously and abort the process if it failed
        torch._assert_async(~is_invalid.any())
    except RuntimeError as error:
        raise _invalid_target_error(targets[is_invalid], vocab_size) from error
    return weights


def _invalid_target_error(labels: torch.Tensor, vocab_size: int) -> ValueError:
    return ValueError(
        f"labels of tokens with a loss must be between 0 and {vocab_size - 1}, got {int(labels[0])} at the first of "
        f"{len(labels)} invalid tokens. Set loss_mask to 0 for these tokens, or --vocab-size to the size of the data's "
        "vocabulary"
    )


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy with the full vocabulary on one rank.

    Backward reuses the memory of the log-softmax, the largest tensor of a step, so a second backward through the same
    graph raises. Twice as fast as ``F.cross_entropy`` for v = 16384 on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, z_loss: float) -> Any:
        log_softmax = logits.log_softmax(dim=-1)  # [..., v]
        losses = log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1).neg_()
        if z_loss:
            log_z = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) + losses
            return _save_with_z_loss(ctx, (log_softmax, targets), losses, log_z, z_loss)
        ctx.save_for_backward(log_softmax, targets)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        log_softmax, targets, *grad_scales = ctx.saved_tensors
        grad = log_softmax.exp_()
        if grad_scales:
            grad.mul_(grad_scales[0].unsqueeze(-1))
        minus_one = grad.new_full((), -1.0).expand(targets.shape).unsqueeze(-1)
        return grad.scatter_add_(-1, targets.unsqueeze(-1), minus_one).mul_(grads[0].unsqueeze(-1)), None, None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy with the vocabulary sharded over the group.

    Forward saves the softmax of this rank's columns. Backward subtracts the one-hot target in place, so a second
    backward through the same graph raises.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, start: int, group: Group, z_loss: float) -> Any:
        num_columns = logits.shape[-1]
        max_logits = logits.amax(dim=-1) if num_columns else logits.new_full(targets.shape, float("-inf"))
        all_reduce(max_logits, group, dist.ReduceOp.MAX)
        shifted = logits - max_logits.unsqueeze(-1)  # [..., v/t]
        local_targets = targets - start
        is_remote = (local_targets < 0) | (local_targets >= num_columns)
        local_targets = local_targets.masked_fill(is_remote, 0)
        if num_columns:
            target_logits = shifted.gather(-1, local_targets.unsqueeze(-1)).squeeze(-1).masked_fill(is_remote, 0.0)
        else:
            target_logits = torch.zeros_like(max_logits)
        exp_logits = shifted.exp_()
        stacked = torch.stack([exp_logits.sum(dim=-1), target_logits])  # one all-reduce for both sums
        all_reduce(stacked, group)
        denominator, target_logits = stacked[0], stacked[1]
        softmax = exp_logits.div_(denominator.unsqueeze(-1))
        losses = denominator.log() - target_logits
        if z_loss:
            return _save_with_z_loss(
                ctx, (softmax, local_targets, is_remote), losses, denominator.log() + max_logits, z_loss
            )
        ctx.save_for_backward(softmax, local_targets, is_remote)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        softmax, local_targets, is_remote, *grad_scales = ctx.saved_tensors
        if grad_scales:
            softmax.mul_(grad_scales[0].unsqueeze(-1))
        if softmax.shape[-1]:
            is_local = (~is_remote).to(softmax.dtype).unsqueeze(-1)
            softmax.scatter_add_(-1, local_targets.unsqueeze(-1), -is_local)
        return softmax.mul_(grads[0].unsqueeze(-1)), None, None, None, None


class _FusedCrossEntropy(torch.autograd.Function):
    """Cross-entropy by Triton kernels, with or without sharding of the vocabulary.

    Forward reads the logits once and saves them instead of the softmax. Backward reads them again and writes their
    gradient in their dtype. With 16-bit logits, both move 6 bytes per logit.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, num_columns: int, group: Group, z_loss: float
    ) -> Any:
        rows, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)  # [n, v/t], [n]
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        local_max, exp_sum, target_logits = row_statistics(rows, targets, num_columns).unbind()
        max_logits = local_max
        if group.size > 1:
            max_logits = all_reduce(local_max.clone(), group, dist.ReduceOp.MAX)
            stacked = torch.stack([exp_sum * (local_max - max_logits).exp(), target_logits])
            exp_sum, target_logits = all_reduce(stacked, group).unbind()  # one all-reduce for both sums
        log_z = exp_sum.log() + max_logits
        saved = rows, targets, max_logits, exp_sum
        ctx.num_columns, ctx.shape = num_columns, logits.shape
        losses = (log_z - target_logits).view(logits.shape[:-1])
        if z_loss:
            return _save_with_z_loss(ctx, saved, losses, log_z.view_as(losses), z_loss)
        ctx.save_for_backward(*saved)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, targets, max_logits, exp_sum, *grad_scales = ctx.saved_tensors
        factor = grads[0].reshape(-1).contiguous()
        softmax_factor = factor * grad_scales[0].view(-1) if grad_scales else factor
        grad = torch.empty_like(rows, memory_format=torch.contiguous_format)
        logits_gradient(rows, targets, ctx.num_columns, max_logits, softmax_factor / exp_sum, factor, grad)
        return grad.view(ctx.shape), None, None, None, None
