"""AdamW whose two states may be kept in bf16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

NUMBERS_AT_ONCE = 2**22
"""Of a weight: what is computed in the type of the master is so many numbers, four times, and no more."""
STATES = ("exp_avg", "exp_avg_sq")

# One step on a master w with gradient g, number n of its updates, all in the type of the master (fp32, or fp64):
#
#     m <- b1 m + (1 - b1) g
#     v <- b2 v + (1 - b2) g^2
#     w <- (1 - lr decay) w - lr / (1 - b1^n) m / (sqrt(v) / sqrt(1 - b2^n) + eps)
#
# m and v come from their states exactly and are rounded to nearest even when they go back, behind the update: that is
# made with what they were ahead of it. No operation of torch's here is a product and a sum at once, which a vector and
# the numbers behind the last one may round otherwise: a number has the same bits wherever ZeRO cuts its weight.
#
# bf16 has 8 bits: a v that a step would change by less than half of its last one, 2^-9 to 2^-8 of it, stays. By
# b2 = 0.999 it falls by 2^-10 and so not at all; by 0.99 and less it does.
#
# Source: Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2. Of the states in bf16:
# Megatron-LM's --exp-avg-dtype and --exp-avg-sq-dtype.


class AdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` with states of ``state_dtypes``, by name; a state that is not named is like its master.

    Attributes:
        state_dtypes: as given.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtypes: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtypes = dict(state_dtypes)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    self._step_on(master, master.grad, group)

    def _step_on(self, master: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in STATES:
                dtype = self.state_dtypes.get(name, master.dtype)
                state[name] = torch.zeros_like(master, dtype=dtype, memory_format=torch.contiguous_format)
        state["step"] += 1
        number, tensors = int(state["step"]), (master, gradient, *(state[name] for name in STATES))
        if all(tensor.is_contiguous() for tensor in tensors):
            pieces = zip(*(tensor.view(-1).split(NUMBERS_AT_ONCE) for tensor in tensors), strict=True)
        else:
            pieces = zip(*((tensor,) for tensor in tensors), strict=True)
        for w, g, mean, square in pieces:
            _update(w, g, mean, square, number, group)


def _update(
    w: torch.Tensor, g: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, number: int, group: dict[str, Any]
) -> None:
    """Make one step on numbers of one weight, in place."""
    (b1, b2), lr = group["betas"], group["lr"]
    m = mean.to(w.dtype).mul_(b1).add_(g * (1 - b1))
    v = square.to(w.dtype).mul_(b2).add_(g.mul(g).mul_(1 - b2))
    denominator = v.sqrt().mul_(1 / math.sqrt(1 - b2**number)).add_(group["eps"])
    w.mul_(1 - lr * group["weight_decay"]).sub_(m.div(denominator).mul_(lr / (1 - b1**number)))
    mean.copy_(m)
    square.copy_(v)
