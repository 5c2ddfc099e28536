"""Models trained as small scripts do: no engine, no masters, fused AdamW, clipping by torch's own function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from megatron import device

LR, CLIP_GRAD = 3e-4, 1.0
Fields = Mapping[str, torch.Tensor]
Step = Callable[[Fields], torch.Tensor | float]


class MeanLoss(nn.Module):
    """A model of Hugging Face's, called with tokens and labels, to its mean loss.

    Args:
        names: under which the model takes the labels.
    """

    def __init__(self, inner: nn.Module, names: tuple[str, ...] = ("labels",)) -> None:
        super().__init__()
        self.inner, self.names = inner, names

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=tokens, use_cache=False, **dict.fromkeys(self.names, labels)).loss


class PlainLoop:
    """Any model that returns a mean loss, trained as small scripts do.

    Args:
        model: called with tokens and labels.
        pair_of: from a batch to these.
        dtype: bf16 runs the forward pass under autocast; the weights stay fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        pair_of: Callable[[Fields], tuple[torch.Tensor, torch.Tensor]],
        *,
        kind: str,
        dtype: str,
    ) -> None:
        self.device, self.dtype = device.bind(kind, 0), device.DTYPES[dtype]
        self.model, self.pair_of = model.to(self.device).train(), pair_of
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=True)

    def step(self, batch: Fields) -> torch.Tensor:
        """Train on ``batch`` and return the loss; it is not read, so a GPU need not wait."""
        tokens, labels = (each.to(self.device) for each in self.pair_of(batch))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            loss = self.model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
