"""TokenLosses: the loss of each token of a training step."""

from __future__ import annotations

import torch


class TokenLosses:
    """Records the token losses of a step, without the z-loss and without the losses of MTP layers.

    The module that computes the loss calls ``record`` in each forward. Only forwards between ``start_step`` and
    ``end_forwards`` with enabled gradients are recorded, so evaluations are not.

    Attributes:
        by_micro_batch: index of the micro-batch -> float[2, b, s], the weighted losses and the weights of the tokens
            of this rank; weights are 0 for tokens without a loss.
    """

    def __init__(self) -> None:
        self.by_micro_batch: dict[int, torch.Tensor] = {}
        self._is_enabled = False

    @property
    def is_recording(self) -> bool:
        """True in forwards whose token losses are recorded."""
        return self._is_enabled and torch.is_grad_enabled()

    def start_step(self) -> None:
        """Forget the last step, and record all forwards until ``end_forwards``."""
        self.by_micro_batch = {}
        self._is_enabled = True

    def end_forwards(self) -> None:
        """Stop recording; the token losses remain until the next step."""
        self._is_enabled = False

    def record(self, micro_batch: int, losses: torch.Tensor, weights: torch.Tensor) -> None:
        """Record one micro-batch; call it only if ``is_recording``.

        Shapes:
            losses, weights [s, b]
        """
        losses = losses.detach()
        weighted = torch.where(weights != 0, losses * weights, 0.0)
        self.by_micro_batch[micro_batch] = torch.stack([weighted, weights]).transpose(1, 2)  # [2, b, s]
