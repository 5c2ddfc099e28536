"""Distributions of initial values other than the normal distribution: functions of standard normal values.

The standard normal values of a parameter depend only on its name and on the seed, so the initial values are the same in
every layout. The distributions are classes, so that parameters can be pickled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution from ``low`` to ``high``."""

    low: float
    high: float

    def __call__(self, normal: torch.Tensor) -> torch.Tensor:
        return (self.low + (self.high - self.low) * _fraction(normal)).to(normal.dtype)


@dataclass(frozen=True)
class LogOfUniform:
    """Distribution of the logarithm of a uniform value from ``low`` to ``high``, both at least 0."""

    low: float
    high: float

    def __call__(self, normal: torch.Tensor) -> torch.Tensor:
        value = self.low + (self.high - self.low) * _fraction(normal)
        return value.clamp(min=torch.finfo(torch.float32).tiny).log().to(normal.dtype)


@dataclass(frozen=True)
class TimeStepBias:
    """Distribution of the inverse softplus of a time step whose logarithm is uniform.

    Args:
        low, high: bounds of the time step.
        floor: lower bound of the time step after it is drawn.

    Source: Gu and Dao 2023, "Mamba: linear-time sequence modeling with selective state spaces", section 3.6.
    """

    low: float = 1e-3
    high: float = 0.1
    floor: float = 1e-4

    def __call__(self, normal: torch.Tensor) -> torch.Tensor:
        log_step = math.log(self.low) + (math.log(self.high) - math.log(self.low)) * _fraction(normal)
        step = log_step.exp().clamp(min=self.floor)
        return (step + torch.log(-torch.expm1(-step))).to(normal.dtype)  # inverse of softplus


def _fraction(normal: torch.Tensor) -> torch.Tensor:
    """Return the normal distribution function of ``normal`` in fp64, which is uniform from 0 to 1."""
    return 0.5 * torch.erfc(-normal.double() / math.sqrt(2.0))
