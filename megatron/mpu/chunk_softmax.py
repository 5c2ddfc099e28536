"""Softmax and gradient for a chunk of logits whose vocabulary is sharded over the tensor group.

| class | implementation | memory traffic per fp32 logit with a bf16 gradient |
|---|---|---|
| ``TorchSoftmax`` | torch operators, in the memory of the logits | 38 bytes |
| ``FusedSoftmax`` | two Triton kernels, on CUDA | 10 bytes: reads of 4 and 4, a write of 2 |

Both classes have the same methods. The constructor computes ``statistics`` of this rank's columns. When all ranks'
statistics are known, ``gradient`` computes the logits' gradient, and ``bias_gradient`` the sum over tokens.
"""

from __future__ import annotations

import torch

from megatron.mpu.fused_cross_entropy import logits_gradient, row_statistics


class TorchSoftmax:
    """Softmax by torch operators.

    Shapes:
        logits     [c, width], overwritten; the columns from ``num_columns`` are excluded and get a gradient of 0
        targets    [c] target columns; a target on another rank is outside of this rank's columns
        statistics [3, c]: maximum, sum of exponentials, target's logit (0 for other ranks' targets)

    Args:
        cap: each logit y becomes ``cap * tanh(y / cap)``; 0: unchanged.
        needs_gradient: ``gradient`` will be called.
    """

    def __init__(
        self, logits: torch.Tensor, targets: torch.Tensor, num_columns: int, *, cap: float, needs_gradient: bool
    ) -> None:
        self.buffer = logits
        logits = logits[:, :num_columns]  # [c, v/t]
        self.cap_derivatives = _cap(logits, cap, needs_gradient) if cap else None
        self.is_local = (targets >= 0) & (targets < num_columns)
        self.local_targets = targets.masked_fill(~self.is_local, 0).unsqueeze(-1)
        if num_columns:
            max_logits = logits.amax(dim=-1)
            target_logits = logits.gather(-1, self.local_targets).squeeze(-1).masked_fill(~self.is_local, 0.0)
        else:
            max_logits, target_logits = logits.new_full((len(logits),), float("-inf")), logits.new_zeros(len(logits))
        self.exponentials = logits.sub_(max_logits.unsqueeze(-1)).exp_()
        self.statistics = torch.stack([max_logits, self.exponentials.sum(dim=-1), target_logits])

    def gradient(self, factor: torch.Tensor, exp_factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert the exponentials into the logits' gradient in ``dtype``, [c, width].

        Args:
            factor: [c], derivative of the total with respect to each token's loss.
            exp_factor: [c], factor that converts a token's exponentials into its softmax times ``factor``.
        """
        self.wide_grad = self.exponentials.mul_(exp_factor.unsqueeze(-1))
        if self.wide_grad.shape[1]:
            self.wide_grad.scatter_add_(-1, self.local_targets, -(factor * self.is_local).unsqueeze(-1))
        if self.cap_derivatives is not None:
            self.wide_grad.mul_(self.cap_derivatives)
        return self._with_zero_columns(dtype)

    def _with_zero_columns(self, dtype: torch.dtype) -> torch.Tensor:
        num_columns = self.wide_grad.shape[1]
        if self.buffer.shape[1] == num_columns:
            return self.wide_grad.to(dtype)
        if dtype == self.buffer.dtype:
            padded = self.buffer
        else:
            padded = self.buffer.new_empty(self.buffer.shape, dtype=dtype)
            padded[:, :num_columns].copy_(self.wide_grad)
        padded[:, num_columns:].zero_()
        return padded

    def bias_gradient(self) -> torch.Tensor:
        """Sum the logits' gradient over tokens, [v/t]; must be called after ``gradient``."""
        return self.wide_grad.sum(dim=0)


def _cap(logits: torch.Tensor, cap: float, needs_gradient: bool) -> torch.Tensor | None:
    """Cap ``logits`` in place; return the derivatives if they are needed."""
    tangents = logits.div_(cap).tanh_()
    derivatives = tangents.square().neg_().add_(1.0) if needs_gradient else None
    tangents.mul_(cap)
    return derivatives


class FusedSoftmax:
    """Softmax by Triton kernels. Same interface as ``TorchSoftmax``, plus the argument ``bias``.

    The logits stay in memory until ``gradient``, which overwrites them if it has their dtype.

    Args:
        bias: [width], added to the logits; None: none. ``TorchSoftmax`` gets logits that include their bias.
    """

    def __init__(
        self, logits: torch.Tensor, targets: torch.Tensor, num_columns: int, *, bias: torch.Tensor | None, cap: float
    ) -> None:
        self.logits, self.targets, self.num_columns, self.bias, self.cap = logits, targets, num_columns, bias, cap
        self.statistics = row_statistics(logits, targets, num_columns, bias=bias, cap=cap)

    def gradient(self, factor: torch.Tensor, exp_factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Compute the logits' gradient in ``dtype``; see ``TorchSoftmax.gradient``."""
        logits = self.logits
        self.grad = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
        return logits_gradient(
            logits, self.targets, self.num_columns, self.statistics[0], exp_factor, factor, self.grad,
            bias=self.bias, cap=self.cap,
        )  # fmt: skip

    def bias_gradient(self) -> torch.Tensor:
        """Sum the logits' gradient over tokens in fp32, [v/t]; must be called after ``gradient``."""
        return self.grad[:, : self.num_columns].sum(dim=0, dtype=self.statistics.dtype)
