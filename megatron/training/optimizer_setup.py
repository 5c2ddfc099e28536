"""Construction of a run's optimizer, loss scaler and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from megatron import device
from megatron.checkpoint import named_parameters
from megatron.config import Config, OptimizerConfig
from megatron.errors import ConfigError
from megatron.optim import (
    GradScaler,
    LRScheduler,
    MixedPrecisionOptimizer,
    MuonArgs,
    OffloadConfig,
    ParamInit,
    build_optimizer,
)
from megatron.optim.moment2 import AdaptiveArgs
from megatron.optim.param_rates import RateTable
from megatron.optim.weight_decay import WeightDecaySchedule
from megatron.training import fused_kernels
from megatron.training.train_progress import TrainProgress
from megatron.training.world import World

QUERY_KEY_NORMS = ("query_norm", "key_norm")
"""Names of the norms of queries and keys in an attention layer."""


def deepspeed_adam(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Build DeepSpeedCPUAdam over ``groups``; ``settings`` are keyword arguments for ``torch.optim.AdamW``.

    Raises:
        ConfigError: its extension cannot be compiled on this machine.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
    except Exception as error:  # any error of the compiler, the loader or their files
        raise ConfigError(
            f"--cpu-adam deepspeed cannot compile its extension: {type(error).__name__}: {error}. It needs a C++ "
            "compiler (g++) and ninja. Use --cpu-adam torch, which needs no extension"
        ) from error


def make_optimizer(
    config: Config, module: torch.nn.Module, world: World, param_init: ParamInit | None = None
) -> MixedPrecisionOptimizer:
    """Build the optimizer over ``module``'s parameters; converts them to the run's precision."""
    settings, precision = config.optimizer, config.precision
    table = RateTable.of(config)
    named_rates = [(name, parameter, table.rate_of(name, parameter)) for name, parameter in named_parameters(module)]
    return build_optimizer(
        module.parameters(),
        name="muon" if settings.is_muon else settings.optimizer,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        decayed_vectors=query_key_norms(module) if settings.apply_wd_to_qk_layernorm else (),
        betas=(settings.adam_beta1, settings.adam_beta2),
        epsilon=settings.adam_eps,
        momentum=settings.sgd_momentum,
        dtype=device.DTYPES[_require_dtype(precision.dtype)],
        clip_grad=settings.clip_grad,
        scaler=make_scaler(config),
        model=world.grid.model,
        tensor=world.grid.tensor,
        data=world.grid.data_context,
        expert_data=world.grid.expert_data,
        expert_tensor=world.grid.expert_tensor,
        zero_stage=settings.zero_stage,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        has_pipeline=config.parallel.has_pipeline,
        offload=OffloadConfig(settings.offload_optimizer, settings.offload_parameters, not settings.no_pin_memory),
        adam=_adam_constructor(config),
        param_init=param_init,
        reduce_bucket_size=config.parallel.reduce_bucket_size,
        allgather_bucket_size=config.parallel.allgather_bucket_size,
        prefetches=config.parallel.stage3_prefetch_bucket_size > 0,
        fuses_accumulation=config.fuses_accumulation(world.device_type),
        muon=_muon_args(settings),
        bf16_states=settings.bf16_states,
        quantized_states=settings.quantized_states,
        rates={parameter: rate for _, parameter, rate in named_rates if rate is not None},
    )


def query_key_norms(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """List the weights and biases of the norms of queries and keys."""
    norms = [norm for name, norm in module.named_modules() if name.rpartition(".")[2] in QUERY_KEY_NORMS]
    return [parameter for norm in norms for parameter in norm.parameters()]


def check_rate_patterns(config: Config, module: torch.nn.Module, world: World) -> None:
    """Check that every learning-rate or weight-decay pattern matches a parameter on some stage. Collective.

    Raises:
        ConfigError: a pattern matches no parameter; the same on every rank.
    """
    table = RateTable.of(config)
    if table.named or table.decays:
        names_of_ranks = world.grid.host.gather_objects([name for name, _ in named_parameters(module)])
        table.check_names(name for names in names_of_ranks for name in names)


def _muon_args(settings: OptimizerConfig) -> MuonArgs:
    names = [field.name for field in fields(MuonArgs) if field.name != "adaptive"]
    adaptive = None
    if settings.optimizer == "adaptive_muon":
        adaptive = AdaptiveArgs(
            settings.adaptive_muon_moment2_method, settings.adaptive_muon_beta2, settings.adaptive_muon_eps
        )
    return MuonArgs(**{name: getattr(settings, f"muon_{name}") for name in names}, adaptive=adaptive)


def _adam_constructor(config: Config) -> Callable[..., torch.optim.Optimizer] | None:
    """Return the AdamW constructor, or None for torch's."""
    if config.optimizer.cpu_adam == "deepspeed":
        return deepspeed_adam
    return fused_kernels.apex_adam if fused_kernels.uses_apex_adam(config) else None


def make_scaler(config: Config) -> GradScaler:
    """Build the loss scaler: dynamic or fixed for fp16, with scale 1 for all other precisions."""
    precision = config.precision
    if precision.dtype != "fp16":
        return GradScaler()
    if precision.loss_scale:
        return GradScaler(scale=precision.loss_scale)
    return GradScaler(
        scale=2.0**precision.initial_scale_power,
        is_dynamic=True,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        floor=precision.min_scale,
    )


def make_lr_scheduler(config: Config) -> LRScheduler:
    """Build the learning-rate schedule, in samples if ``config.optimizer.lr_follows_samples``, else in updates."""
    settings = config.optimizer
    return LRScheduler(
        lr=settings.lr,
        min_lr=settings.min_lr,
        style=settings.lr_decay_style,
        decay_updates=settings.lr_decay_samples or settings.lr_decay_iters,
        warmup_length=settings.warmup_length,
        wsd_decay_fraction=settings.wsd_decay_fraction,
        wsd_length=settings.lr_wsd_decay_samples if settings.lr_follows_samples else settings.lr_wsd_decay_iters,
        wsd_style=settings.lr_wsd_decay_style,
        step_offset=settings.lr_step_offset,
        warmup_init=settings.lr_warmup_init,
    )


def make_weight_decay_schedule(config: Config, data_parallel_size: int) -> WeightDecaySchedule | None:
    """Build the schedule of the weight decay, in the unit of the learning rate's schedule; None if it is constant."""
    settings, batch = config.optimizer, config.batch
    if settings.start_weight_decay is None or settings.end_weight_decay is None:
        return None
    length = batch.train_iters
    if settings.lr_follows_samples:
        length = batch.train_samples or batch.batch_sizes(data_parallel_size).consumed_after(length)
    return WeightDecaySchedule(
        settings.start_weight_decay, settings.end_weight_decay, settings.weight_decay_incr_style, length
    )


class SchedulePositions:
    """Positions of a step in the schedules of the learning rate and of the weight decay.

    With --seq-length-curriculum, a learning rate with lengths in tokens counts the tokens after truncation. If its
    warm-up counts samples, its position is scaled, so that it ends with the samples of the warm-up.

    Source: Megatron-DeepSpeed, optimizer_param_scheduler.py, ``get_lr``.
    """

    def __init__(self, config: Config, scheduler: LRScheduler, data_parallel_size: int) -> None:
        self.scheduler, self.lengths = scheduler, config.batch.seq_lengths
        self.follows_samples = config.optimizer.lr_follows_samples
        trained_tokens = config.optimizer.lr_trained_tokens if self.lengths.truncates else "none"
        self.counts_trained_tokens, self.warmup_samples = trained_tokens != "none", 0.0
        if trained_tokens == "decay":
            tokens = round(scheduler.warmup_updates * self.lengths.full)
            self.warmup_samples = self.lengths.samples_of(tokens, config.batch.batch_sizes(data_parallel_size))

    def of_weight_decay(self, progress: TrainProgress, num_samples: int) -> float:
        """Return the position of the step after ``progress``, in samples or updates."""
        step = (progress.samples_updated, num_samples) if self.follows_samples else (progress.updates, 1)
        return self.scheduler.position(*step)

    def of_rate(self, progress: TrainProgress, num_samples: int, length: int) -> float:
        """Return the position of the step after ``progress`` in the schedule of the learning rate.

        Args:
            num_samples, length: samples of the step, and its sequence length.
        """
        position = self.of_weight_decay(progress, num_samples)
        if not self.counts_trained_tokens:
            return position
        if 0 < self.warmup_samples >= position:
            return position * self.scheduler.warmup_updates / self.warmup_samples
        full = self.lengths.full
        return self.scheduler.position(progress.tokens_updated(full), num_samples * length) / full


def _require_dtype(dtype: str | None) -> str:
    """Return ``dtype``; raise RuntimeError if it has not been resolved yet."""
    if dtype is None:
        raise RuntimeError("the precision is not resolved yet: call megatron.arguments.resolve_dtype first")
    return dtype
