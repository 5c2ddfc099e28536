"""AdamW with its two states optionally in bf16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

CHUNK_NUMEL = 2**22
"""Number of elements updated at a time. Temporary tensors have at most four times as many elements."""
STATES = ("exp_avg", "exp_avg_sq")

# Update n of a main param w with gradient g, all in the dtype of w (fp32 or fp64):
#
#     m <- b1 m + (1 - b1) g
#     v <- b2 v + (1 - b2) g^2
#     w <- (1 - lr decay) w - lr / (1 - b1^n) m / (sqrt(v) / sqrt(1 - b2^n) + eps)
#
# The update uses the unrounded m and v, which are rounded to nearest even when they are stored in their states. No
# operation is a fused multiply-add, which a vectorized kernel and its remainder loop may round differently, so that an
# element has the same bits wherever ZeRO splits its weight.
#
# bf16 has 8 significant bits, so a change of v by less than half a unit in the last place (2^-9 to 2^-8 of v) is lost
# in rounding. If gradients vanish, v should decrease by (1 - b2) v per update. With b2 = 0.999 that is about 2^-10 v,
# so v stays constant; with b2 = 0.99 or less v decreases.
#
# Source: Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2; for the states in bf16,
# Megatron-LM's --exp-avg-dtype and --exp-avg-sq-dtype.


class AdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` with states in other dtypes.

    Attributes:
        state_dtypes: dtypes by state name; other states have the main param's dtype.
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
            for main_param in group["params"]:
                if main_param.grad is not None:
                    self._update_param(main_param, main_param.grad, group)

    def _update_param(self, main_param: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[main_param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in STATES:
                dtype = self.state_dtypes.get(name, main_param.dtype)
                state[name] = torch.zeros_like(main_param, dtype=dtype, memory_format=torch.contiguous_format)
        state["step"] += 1
        step, tensors = int(state["step"]), (main_param, gradient, *(state[name] for name in STATES))
        if all(tensor.is_contiguous() for tensor in tensors):
            chunks = zip(*(tensor.view(-1).split(CHUNK_NUMEL) for tensor in tensors), strict=True)
        else:
            chunks = zip(*((tensor,) for tensor in tensors), strict=True)
        for w, g, exp_avg, exp_avg_sq in chunks:
            _update(w, g, exp_avg, exp_avg_sq, step, group)


def _update(
    w: torch.Tensor, g: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: int, group: dict[str, Any]
) -> None:
    """Update weight elements and both states in place; ``step`` counts updates from 1."""
    (b1, b2), lr = group["betas"], group["lr"]
    m = exp_avg.to(w.dtype).mul_(b1).add_(g * (1 - b1))
    v = exp_avg_sq.to(w.dtype).mul_(b2).add_(g.mul(g).mul_(1 - b2))
    denominator = v.sqrt().mul_(1 / math.sqrt(1 - b2**step)).add_(group["eps"])
    w.mul_(1 - lr * group["weight_decay"]).sub_(m.div(denominator).mul_(lr / (1 - b1**step)))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
