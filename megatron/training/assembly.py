"""From configuration and a user's functions to an engine that can step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import tds
from megatron import device
from megatron.checkpoint import named_parameters
from megatron.config import Config
from megatron.config.deepspeed import engine_dict
from megatron.errors import ConfigError
from megatron.model.init import Rule, initialize
from megatron.models.registry import load
from megatron.mpu.counted import CountedDropout
from megatron.mpu.random import DropoutStreams
from megatron.optim import Arrival, LearningRate, LossScaler, MixedPrecisionOptimizer, Offload, build_optimizer
from megatron.training import arriving, fused, position
from megatron.training.accelerator import check_agreement
from megatron.training.compiled import compile_layers
from megatron.training.cpu_adam import deepspeed_adam
from megatron.training.deepspeed_mpu import DeepSpeedMpu
from megatron.training.engines import ForwardStep, PipelineEngine, SingleStageEngine, StepEngine
from megatron.training.sequence_parallel import check_sequence_is_cut
from megatron.training.world import World
from tds.device import move
from tds.module import PartitionError


def make_streams(config: Config, world: World) -> DropoutStreams:
    """Return this rank's source of dropout masks."""
    seed, data, tensor = config.run.seed, world.grid.data, world.grid.tensor
    if config.model.layout_independent_dropout:
        return CountedDropout(config.batch.batch_size, seed, data, tensor)
    return DropoutStreams(seed, data, tensor)


def build_engine(
    config: Config,
    world: World,
    streams: DropoutStreams,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
) -> StepEngine:
    """Build the model, fill its weights by name, and put it under the engine for its pipeline size. Collective."""
    check_agreement(world.kind)
    module, optimizer = build_weights(config, world, streams, model_provider)
    settings = engine_dict(config, world.grid.topology.world_size)
    mpu = None if config.parallel.has_pipeline else DeepSpeedMpu(world.grid)
    tds.quiet(not config.run.verbose_deepspeed)
    with arriving.not_sent(module, arrives=arriving.is_asked_for(config, world)):
        engine, *_ = tds.initialize(model=module, optimizer=optimizer, config=settings, mpu=mpu)
    optimizer.cut_weights(module)
    batch, replicas = config.batch, world.grid.data.size
    numbers = {
        "num_micro_batches": batch.num_micro_batches,
        "micro_batch_tokens": batch.batch_size * replicas * config.loss_tokens_per_sample,
    }
    built: StepEngine
    if config.parallel.has_pipeline:
        built = PipelineEngine(engine, streams=streams, **numbers)
    else:
        built = SingleStageEngine(engine, forward_step, grid=world.grid, streams=streams, **numbers)
    built.on_activity = position.note
    if config.debug.is_on:
        from megatron.training.debugging import attach  # imported where it is asked for alone

        attach(built, config, world, streams)
    return built


def build_weights(
    config: Config, world: World, streams: DropoutStreams, model_provider: Callable[[], torch.nn.Module]
) -> tuple[torch.nn.Module, MixedPrecisionOptimizer]:
    """Return the model, its weights filled by name and where they are trained, and its optimizer. Collective."""
    module = build_model(config, world, model_provider)
    check_chunks(module, config.parallel.chunks)
    check_sequence_is_cut(module, config.parallel.sequence_parallel)
    fused.use_norms(config, module)
    arrival = arriving.arrival_of(config, module, world, weight_rule(config))
    if arrival is None:
        put_in_place(config, module, world)
    if config.parallel.compile:
        compile_layers(module, streams, world.device, has_all=not config.parallel.has_pipeline)
    optimizer = make_optimizer(config, module, world, arrival)
    if arrival is not None:
        put_in_place(config, module, world)  # what is left: frozen weights, buffers
    return module, optimizer


def build_model(config: Config, world: World, model_provider: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return what the script's ``model_provider`` builds. Collective.

    Raises:
        ConfigError: its layers cannot be cut into stages as --partition-method says; the same on every rank. Or it
            writes to a weight that has no memory yet.
    """
    try:
        return arriving.build(model_provider, arrives=arriving.is_asked_for(config, world))
    except PartitionError as error:
        if world.grid.topology.world_size > 1:
            dist.barrier(group=world.grid.host.handle)  # a rank that left earlier would end rank 0, which tells why
        method = config.parallel.partition_method
        raise ConfigError(f"--partition-method {method} cannot cut this model: {error}") from None


def check_chunks(module: torch.nn.Module, chunks: int) -> None:
    """Check that the script built its pipeline with as many chunks as the flags ask for.

    Raises:
        ConfigError: it did not; the same on every rank.
    """
    built = getattr(module, "chunks", 1)
    if chunks > 1 and built != chunks:
        raise ConfigError(
            f"--pipeline-chunks must be the chunks that the model was built with, got {chunks} and {built}. Build it "
            f"with tds.PipelineModule(..., chunks={chunks}), or leave the flag out"
        )


def put_in_place(config: Config, module: torch.nn.Module, world: World) -> None:
    """Fill the weights that have no values yet, and bring all of ``module`` to where it is trained."""
    initialize(named_parameters(module), seed=config.run.seed, rule=weight_rule(config))
    move(module, world.device)


def weight_rule(config: Config) -> Rule:
    """Return the scale of initial weights, by name, for the family of ``config``."""
    rule: Rule = load(config.family, "model").weight_init(config)
    return rule


def make_optimizer(
    config: Config, module: torch.nn.Module, world: World, arrival: Arrival | None = None
) -> MixedPrecisionOptimizer:
    """Return the optimizer over ``module``'s parameters, which take the run's precision from here on."""
    settings, precision = config.optimizer, config.precision
    return build_optimizer(
        module.parameters(),
        name=settings.optimizer,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=(settings.adam_beta1, settings.adam_beta2),
        epsilon=settings.adam_eps,
        dtype=device.DTYPES[_known(precision.dtype)],
        clip_grad=settings.clip_grad,
        scaler=make_scaler(config),
        model=world.grid.model,
        tensor=world.grid.tensor,
        data=world.grid.data,
        zero_stage=settings.zero_stage,
        overlaps_sums=config.parallel.overlap_grad_reduce and not config.parallel.has_pipeline,
        offload=Offload(settings.offload_optimizer, settings.offload_parameters, not settings.no_pin_memory),
        adam=_adam(config),
        arrival=arrival,
    )


def _adam(config: Config) -> Callable[..., torch.optim.Optimizer] | None:
    """Return what AdamW is, where it is not torch's."""
    if config.optimizer.cpu_adam == "deepspeed":
        return deepspeed_adam
    return fused.apex_adam if fused.uses_adam(config) else None


def make_scaler(config: Config) -> LossScaler:
    """Return the loss scale: dynamic or fixed for fp16, 1 for every other precision."""
    precision = config.precision
    if precision.dtype != "fp16":
        return LossScaler()
    if precision.loss_scale:
        return LossScaler(scale=precision.loss_scale)
    return LossScaler(
        scale=2.0**precision.initial_scale_power,
        is_dynamic=True,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        floor=precision.min_scale,
    )


def make_learning_rate(config: Config) -> LearningRate:
    """Return the schedule of the configuration."""
    settings = config.optimizer
    return LearningRate(
        lr=settings.lr,
        min_lr=settings.min_lr,
        style=settings.lr_decay_style,
        decay_updates=settings.lr_decay_iters or max(config.batch.train_iters, 1),
        warmup=settings.warmup,
        wsd_decay_fraction=settings.wsd_decay_fraction,
    )


def _known(dtype: str | None) -> str:
    if dtype is None:
        raise RuntimeError("the precision is not resolved yet: call config.resolve_dtype first")
    return dtype
