"""PipelineEngine: ``ScheduleEngine`` behind the interface of DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from tds.deepspeed import checks
from tds.deepspeed.api import (
    BaseEngine,
    PipelineError,
    coordinates_of,
    grid_of,
    groups_of,
    layer_specs,
    set_module_timeouts,
)
from tds.deepspeed.checkpointing import LayerCheckpoints
from tds.deepspeed.layer_profiler import layer_name
from tds.deepspeed.recompute import Recompute, recomputes_reentrantly
from tds.deepspeed.step_report import StepReport
from tds.deepspeed.training_loader import training_loader
from tds.engine import build, pipeline_json
from tds.engine.engine import ScheduleEngine
from tds.engine.monitor import Names
from tds.torch_api import default_timeout
from tds.watchdog.watchdog import rank_name


class EngineUpdate:
    """Implementation of ``tds.engine.update.Update`` by DeepSpeed's engine, which clips, steps and counts."""

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine

    @property
    def num_steps(self) -> int:
        return self._engine.global_steps

    def step(self) -> None:
        self._engine._force_grad_boundary = True
        try:
            self._engine.take_model_step()
        finally:
            self._engine._force_grad_boundary = False

    def zero_grad(self) -> None:
        self._engine.zero_grad()


class DeepSpeedAttributes:
    """Public names of DeepSpeed's pipeline engine that programs may use and tds does not need."""

    module: Any
    grid: Any
    stage_id: int
    micro_batch_size: int

    @property
    def prev_stage(self) -> int:
        """The previous stage; -1 on the first stage."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """The next stage; the number of stages on the last stage."""
        return self.stage_id + 1

    @property
    def is_pipe_parallel(self) -> bool:
        """True with more than one stage."""
        return self.grid.pipe_parallel_size > 1

    @property
    def is_data_parallel(self) -> bool:
        """True with more than one replica."""
        return self.grid.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """True if layers are sharded over a tensor group."""
        return self.grid.model_parallel_size > 1

    def _reentrant_activation_checkpointing(self) -> bool:
        return recomputes_reentrantly(self.module)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size, and with it the global batch size. The data must have this micro-batch size."""
        super().set_train_micro_batch_size(micro_batch_size)  # type: ignore[misc]  # DeepSpeed's engine has it
        self.micro_batch_size = micro_batch_size

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing, because boolean tensors may be at any position of a boundary."""


class PipelineEngine(  # type: ignore[misc]  # grad_norm is a property of BaseEngine
    LayerCheckpoints, DeepSpeedAttributes, ScheduleEngine, BaseEngine
):
    """Trains a ``PipelineModule`` by ``ScheduleEngine``. ``tds.initialize`` constructs it.

    DeepSpeed's engine provides the configuration, the optimizer, the counters, the monitors and the checkpoints.
    """

    def __init__(self, has_bool_tensors: bool = False, *args: Any, **kwargs: Any) -> None:
        BaseEngine.__init__(self, *args, **kwargs)
        self.enable_backward_allreduce = False
        module, section = self.module, self.pipeline_section
        self.grid = grid_of(module)
        self.global_rank = self.grid.get_global_rank()
        self.micro_batch_size = self.train_micro_batch_size_per_gpu()
        self._force_grad_boundary = False
        set_module_timeouts(module, pipeline_json.timeout_of(section, default_timeout()))
        checks.check_supported(self)
        checks.log_unused_settings(self)
        checks.configure_recompute(self)
        placement = build.placement_of(module, self.grid.pipe_parallel_size)
        settings = pipeline_json.settings_of(self.user_config, section, module, placement, default_timeout())
        ScheduleEngine.__init__(
            self,
            module,
            self.grid,
            torch.device(self.device),
            self.optimizer,
            micro_batches=self.gradient_accumulation_steps(),
            settings=replace(settings, grad_reduce_dtype=self.grad_reduce_dtype),
            names=Names(
                ranks=[rank_name(rank, coord) for rank, coord in enumerate(coordinates_of(self.grid))],
                layers=[layer_name(spec) for spec in layer_specs(module)],
            ),
            gradients=checks.make_gradient_source(self),
            update=EngineUpdate(self),
            recompute=Recompute(),
            report=StepReport(self, lambda: self._monitor.bubble("report")),
            world_group=module.world_group,
        )
        if self.training_data and self._reads_data():
            has_curriculum = self.curriculum_learning_enabled()
            loader = training_loader(self.training_data, self.grid, self.deepspeed_io, has_curriculum=has_curriculum)
            self.set_dataloader(loader)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        loss = super().train_batch(data_iter)
        self.micro_steps += self.micro_batches
        return loss

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size and thus the number of micro-batches.

        Raises:
            ValueError: the batch size is not divisible by the micro-batch size times the number of replicas.
        """
        super().set_train_batch_size(train_batch_size)
        self.micro_batches = self.gradient_accumulation_steps()

    def reset_activation_shape(self) -> None:
        """Do nothing, because stages exchange the shapes in each call. Kept for programs that call it."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True while the optimizer's step runs."""
        return self._force_grad_boundary

    def flops_profiler_enabled(self) -> bool:
        """Return False regardless of the JSON: DeepSpeed would start the profiler in each forward and never stop it."""
        return False

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all stages and shards. DeepSpeed's step calls this unless its optimizer clips."""
        self.clip_gradients(self.gradient_clipping())

    def destroy(self) -> None:
        """Draw the trace and release the engine's resources now, not only when the program ends."""
        if hasattr(self, "_monitor"):
            self.close()
        super().destroy()

    def forward(self, *_: Any, **__: Any) -> Any:
        raise PipelineError("a pipeline engine has no forward(): use train_batch(data_iter) or eval_batch(data_iter)")

    def backward(self, *_: Any, **__: Any) -> Any:
        raise PipelineError("a pipeline engine has no backward(): train_batch(data_iter) runs it")

    def step(self, *_: Any, **__: Any) -> Any:
        raise PipelineError("a pipeline engine has no step(): train_batch(data_iter) updates the weights")

    def _groups(self) -> Collection[Any]:
        return list(groups_of(self.module))
