"""Which parameters are decayed, and the optimizer over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.optim.mixed_precision import MixedPrecisionOptimizer
from megatron.optim.scaler import LossScaler


def decay_groups(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices with weight decay; biases and norms (one dimension) without.

    The rule looks at the parameter alone, so it is the same in every layout.
    """
    trainable = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    *,
    name: str = "adamw",
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    dtype: torch.dtype = torch.float32,
    clip_grad: float = 0.0,
    scaler: LossScaler | None = None,
    model: Group = SINGLE,
    tensor: Group = SINGLE,
) -> MixedPrecisionOptimizer:
    """Return the optimizer called ``name`` (adamw or sgd); the rest as in ``MixedPrecisionOptimizer``.

    Raises:
        ValueError: there is no optimizer of that name.
    """
    if name not in ("adamw", "sgd"):
        raise ValueError(f"--optimizer must be adamw or sgd, got {name}")

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if name == "sgd":
            return torch.optim.SGD(groups, lr=lr)
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=epsilon, fused=True)

    groups = decay_groups(parameters, weight_decay)
    return MixedPrecisionOptimizer(
        groups, build, dtype=dtype, clip_grad=clip_grad, scaler=scaler, model=model, tensor=tensor
    )
