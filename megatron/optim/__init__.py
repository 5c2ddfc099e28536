"""Parameter groups, learning-rate schedules, and the optimizer step in any precision."""

from typing import Any

from megatron.optim.grad_scaler import GradScaler
from megatron.optim.lr_scheduler import LRScheduler
from megatron.optim.muon import MuonArgs
from megatron.optim.optimizer import MixedPrecisionOptimizer
from megatron.optim.param_groups import build_optimizer
from megatron.optim.zero.partition import OffloadConfig, ParamInit
from tds.deprecated_paths import look_up

__all__ = [
    "GradScaler",
    "LRScheduler",
    "MixedPrecisionOptimizer",
    "MuonArgs",
    "OffloadConfig",
    "ParamInit",
    "build_optimizer",
]
_FORMER = {
    "Arrival": "megatron.optim.zero.partition.ParamInit",
    "LearningRate": "megatron.optim.lr_scheduler.LRScheduler",
    "LossScaler": "megatron.optim.grad_scaler.GradScaler",
    "Offload": "megatron.optim.zero.partition.OffloadConfig",
}
"""Names that were here -> what they are now, for one release."""


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _FORMER)
