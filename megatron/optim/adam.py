"""AdamW with its two states optionally in bf16 or in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from megatron.optim import quantized_state

CHUNK_NUMEL = 2**22
"""Number of elements updated at a time. Temporary tensors have at most four times as many elements."""
STATES = ("exp_avg", "exp_avg_sq")

# Update n of a main param w with gradient g, all in the dtype of w (fp32 or fp64):
#
#     m <- b1 m + (1 - b1) g
#     v <- b2 v + (1 - b2) g^2
#     w <- (1 - lr decay) w - lr / (1 - b1^n) m / (sqrt(v) / sqrt(1 - b2^n) + eps)
#
# The update uses the unrounded m and v, which are rounded when they are stored: to nearest even in bf16,
# by blocks in 8 bits (``quantized_state``). No operation is a fused multiply-add, which a vectorized kernel and its
# remainder loop may round differently, so that an element has the same bits wherever ZeRO splits its weight.
#
# bf16 has 8 significant bits, so a change of v by less than half a unit in the last place (2^-9 to 2^-8 of v) is lost
# in rounding. If gradients vanish, v should decrease by (1 - b2) v per update. With b2 = 0.999 that is about 2^-10 v,
# so v stays constant; with b2 = 0.99 or less v decreases.
#
# Source: Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2; for the states in bf16,
# Megatron-LM's --exp-avg-dtype and --exp-avg-sq-dtype.


class AdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` with states in other dtypes.

    Args:
        quantized: names of states that are stored in 8 bits, if the main param is large enough.

    Attributes:
        state_dtypes: dtypes by state name; other states have the main param's dtype.

    Raises:
        ConfigError: states are quantized and torchao is not installed.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtypes: Mapping[str, torch.dtype],
        quantized: Collection[str] = (),
    ) -> None:
        if quantized:
            quantized_state.check_torchao()
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtypes, self._quantized = dict(state_dtypes), frozenset(quantized)

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
                if name in self._quantized and quantized_state.can_be_quantized(main_param):
                    state[name] = quantized_state.zeros(main_param, is_signed=name == "exp_avg")
                    continue
                dtype = self.state_dtypes.get(name, main_param.dtype)
                state[name] = torch.zeros_like(main_param, dtype=dtype, memory_format=torch.contiguous_format)
        state["step"] += 1
        weight = main_param.contiguous()
        weights, grads = weight.view(-1).split(CHUNK_NUMEL), gradient.reshape(-1).split(CHUNK_NUMEL)
        for idx, (w, g) in enumerate(zip(weights, grads, strict=True)):
            m, v = (_load(state[name], idx * CHUNK_NUMEL, w) for name in STATES)
            _update(w, g, m, v, int(state["step"]), group)
            for name, values in zip(STATES, (m, v), strict=True):
                _store(state[name], idx * CHUNK_NUMEL, values)
        if weight is not main_param:
            main_param.copy_(weight)


def _update(
    w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: int, group: dict[str, Any]
) -> None:
    """Update weight elements and their moments in place; ``step`` counts updates from 1."""
    (b1, b2), lr = group["betas"], group["lr"]
    m.mul_(b1).add_(g * (1 - b1))
    v.mul_(b2).add_(g.mul(g).mul_(1 - b2))
    denominator = v.sqrt().mul_(1 / math.sqrt(1 - b2**step)).add_(group["eps"])
    w.mul_(1 - lr * group["weight_decay"]).sub_(m.div(denominator).mul_(lr / (1 - b1**step)))


def _load(state: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``state`` from ``start`` on, as many as in ``like`` and in its dtype."""
    if quantized_state.is_quantized(state):
        return quantized_state.load(state, start, start + like.numel()).view(-1).to(like.dtype)
    return state.view(-1)[start : start + like.numel()].to(like.dtype)


def _store(state: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Round ``values`` into the elements of ``state`` from ``start`` on, unless they share memory."""
    if quantized_state.is_quantized(state):
        quantized_state.store(state, values, start)
        return
    target = state.view(-1)[start : start + values.numel()]
    if target.data_ptr() != values.data_ptr():
        target.copy_(values)
