"""Parameter groups, learning-rate schedules, and the optimizer step in any precision."""

from megatron.optim.grad_scaler import GradScaler
from megatron.optim.lr_scheduler import LRScheduler
from megatron.optim.muon import MuonArgs
from megatron.optim.offload import OffloadConfig
from megatron.optim.optimizer import MixedPrecisionOptimizer
from megatron.optim.param_groups import build_optimizer
from megatron.optim.zero.param_init import ParamInit

__all__ = [
    "GradScaler",
    "LRScheduler",
    "MixedPrecisionOptimizer",
    "MuonArgs",
    "OffloadConfig",
    "ParamInit",
    "build_optimizer",
]
