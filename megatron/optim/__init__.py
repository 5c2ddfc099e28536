"""Parameter groups, learning-rate schedules, and the optimizer step in any precision."""

from megatron.optim.grad_scaler import LossScaler
from megatron.optim.lr_scheduler import LearningRate
from megatron.optim.optimizer import MixedPrecisionOptimizer
from megatron.optim.param_groups import build_optimizer
from megatron.optim.zero.partition import Arrival, Offload

__all__ = ["Arrival", "LearningRate", "LossScaler", "MixedPrecisionOptimizer", "Offload", "build_optimizer"]
