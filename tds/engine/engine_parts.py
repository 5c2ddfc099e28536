"""What the files around the engine need of it: they know this, and only the engine's own file knows the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from tds.loss_reduction import MeanLosses


class EngineParts(Protocol):
    """An engine as its parts see it: what DeepSpeed made, the place of this rank, and the state of training.

    Attributes:
        sums_dtype: in which gradients are summed over ranks; None: in their own.
        means: of the last global batch, that of an evaluation too.
        report: measures the parts of a step (``tds.engine.monitor``).
        grad_norm: of the last step, as ``get_global_grad_norm`` tells it.
    """

    module: Any
    grid: Any
    optimizer: Any
    monitor: Any
    timers: Any
    report: Any
    device: Any
    stage_id: int
    num_stages: int
    loss_stage: int
    micro_batches: int
    global_rank: int
    global_steps: int
    global_samples: int
    has_moe_layers: bool
    means: MeanLosses | None
    on_loss: Callable[[torch.Tensor], None] | None
    agg_train_loss: torch.Tensor | None
    agg_additional_losses: dict[str, torch.Tensor] | None
    grad_norm: float | torch.Tensor
    _force_grad_boundary: bool
    _has_untaken_gradients: bool

    @property
    def config_given(self) -> dict[str, Any]: ...

    @property
    def pipeline_section(self) -> dict[str, Any]: ...

    @property
    def sums_dtype(self) -> torch.dtype | None: ...

    @property
    def asks_for_flops(self) -> bool: ...

    def is_last_stage(self) -> bool: ...

    def zero_grad(self) -> None: ...

    def take_model_step(self) -> None: ...

    def gradient_clipping(self) -> float: ...

    def zero_optimization_stage(self) -> int: ...

    def torch_autocast_enabled(self) -> bool: ...

    def fp16_enabled(self) -> bool: ...

    def get_lr(self) -> list[float]: ...

    def train_batch_size(self) -> int: ...

    def steps_per_print(self) -> int | None: ...

    def wall_clock_breakdown(self) -> bool: ...
