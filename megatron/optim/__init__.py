"""Parameter groups, learning-rate schedules, and the optimizer step in any precision."""

from megatron.optim.arrival import Arrival
from megatron.optim.host import Offload
from megatron.optim.mixed_precision import MixedPrecisionOptimizer
from megatron.optim.param_groups import build_optimizer
from megatron.optim.scaler import LossScaler
from megatron.optim.schedules import LearningRate

__all__ = ["Arrival", "LearningRate", "LossScaler", "MixedPrecisionOptimizer", "Offload", "build_optimizer"]
