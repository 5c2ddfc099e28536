"""Construction of a run's engine: model, initial weights, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from megatron import log
from megatron.checkpoint import named_parameters
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.models.common.experts import stack_expert_weights
from megatron.models.common.parameters import Rule, initialize
from megatron.models.common.qk_clip import AttentionLogits
from megatron.models.common.router import Routers
from megatron.models.registry import model_parts
from megatron.mpu.philox_dropout import PhiloxDropout
from megatron.mpu.random import DropoutStreams
from megatron.optim import MixedPrecisionOptimizer
from megatron.training import fused_kernels
from megatron.training.compile import compile_layers
from megatron.training.deepspeed_engine import (
    build_deepspeed_engine,
    build_pipeline_engine,
    initialize_loaded_deepspeed,
    reasons_for_deepspeed,
    sharing_groups_of,
)
from megatron.training.device_setup import check_deepspeed_device
from megatron.training.kernel_rows import dropout_warning
from megatron.training.layout_checks import check_context_parallel, check_sequence_parallel
from megatron.training.model_engine import ModelEngine, broadcast_from_first_replica
from megatron.training.optimizer_setup import check_rate_patterns, make_optimizer
from megatron.training.pipeline_engine import PipelineStepEngine
from megatron.training.single_stage_engine import SingleStageEngine
from megatron.training.step_engine import ForwardStep, StepEngine, StepSettings
from megatron.training.world import World
from megatron.training.zero3_init import build_module, is_weight_sharded, make_param_init
from tds.device import move
from tds.param_info import info_of
from tds.partition import PartitionError
from tds.schedule import LOOP


def make_streams(config: Config, world: World) -> DropoutStreams:
    """Make this rank's source of dropout masks."""
    seed, grid = config.run.seed, world.grid
    if config.model.layout_independent_dropout:
        streams: DropoutStreams = PhiloxDropout(config.batch.batch_size, seed, grid.data, grid.tensor, grid.context)
    else:
        streams = DropoutStreams(seed, grid.data_context, grid.tensor)
    streams.has_kernels = config.parallel.fused_kernels != "torch"
    if world.rank == 0 and (warning := dropout_warning(config, world.device_type)):
        log.warning(warning)
    return streams


def build_engine(
    config: Config,
    world: World,
    streams: DropoutStreams,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
) -> StepEngine:
    """Build the model, initialise its weights, and wrap it in the engine with or without a pipeline. Collective."""
    has_pipeline = config.parallel.has_pipeline
    if has_pipeline:
        check_deepspeed_device(world.device_type)
    with sharing_groups_of(world.grid) if has_pipeline else nullcontext():
        module, optimizer = build_weights(config, world, streams, model_provider)
    make_deepspeed_engine = partial(build_deepspeed_engine, config, world, module, optimizer)
    batch, replicas = config.batch, world.grid.data_context
    if has_pipeline:
        engine = build_pipeline_engine(config, world, module, optimizer)
    elif reasons_for_deepspeed(config, module):
        engine = make_deepspeed_engine()
    else:
        initialize_loaded_deepspeed(world.device_type)
        broadcast_from_first_replica(module, replicas, are_sharded=is_weight_sharded(config, world))
        engine = ModelEngine(
            module,
            optimizer,
            world.device,
            micro_batch_size=batch.batch_size,
            gas=batch.gas,
            num_replicas=replicas.size,
        )
    optimizer.store.shard_weights(module)
    routers = None
    if config.model.num_experts:
        routers = Routers(module, world.grid, sequence_parallel=config.parallel.sequence_parallel)
    logits = None
    if config.model.measures_logits:
        dtype = torch.float64 if config.precision.dtype == "fp64" else torch.float32
        logits = AttentionLogits(module, config.model, world.grid, optimizer.store, world.device, dtype)
        optimizer.after_update = logits.clip if logits.clips else None
    settings = StepSettings(
        grid=world.grid,
        streams=streams,
        share=batch.share(world.grid.data.size, world.grid.data.rank, is_interleaved=config.data.has_megatron_order),
        micro_batch_tokens=batch.batch_size * world.grid.data.size * config.loss_tokens_per_sample,
        averages_micro_batches=config.model.loss_average == "micro-batch",
        routers=routers,
        logits=logits,
        shares_quantized_weights=config.precision.fp8_format is not None and not is_weight_sharded(config, world),
    )
    if has_pipeline:
        return PipelineStepEngine(engine, settings)
    return SingleStageEngine(engine, forward_step, settings, make_deepspeed_engine)


def build_weights(
    config: Config, world: World, streams: DropoutStreams, model_provider: Callable[[], torch.nn.Module]
) -> tuple[torch.nn.Module, MixedPrecisionOptimizer]:
    """Build the model, with initialised weights on the training device, and its optimizer. Collective."""
    module = build_model(config, world, model_provider)
    check_chunks(module, config.parallel.chunks, config.parallel.placement)
    check_sequence_parallel(module, config.parallel.sequence_parallel)
    check_context_parallel(module, config.parallel.context_parallel_size)
    check_rate_patterns(config, module, world)
    check_fp8(config, module, world)
    fused_kernels.set_norm_kernels(config, module)
    param_init = make_param_init(config, module, world, init_rule(config))
    if param_init is None:
        initialize_and_move(config, module, world)
    if config.parallel.compile:
        num_lengths = len(config.batch.seq_lengths.all())
        compile_layers(
            module, streams, world.device, is_full_model=not config.parallel.has_pipeline, num_lengths=num_lengths
        )
    optimizer = make_optimizer(config, module, world, param_init)
    if param_init is not None:
        initialize_and_move(config, module, world)  # the remaining tensors: frozen weights and buffers
    stack_expert_weights(module)
    return module, optimizer


def build_model(config: Config, world: World, model_provider: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Build the model with the script's ``model_provider``. Collective.

    Raises:
        ConfigError: --partition-method cannot split the layers into stages (the same error on every rank), or the
            provider writes to a weight that has no memory yet.
    """
    try:
        return build_module(model_provider, is_deferred=is_weight_sharded(config, world))
    except PartitionError as error:
        if world.grid.topology.world_size > 1:
            # If another rank exited first, rank 0 would be ended before it reports the error.
            dist.barrier(group=world.grid.host.handle)
        method = config.parallel.partition_method
        raise ConfigError(f"--partition-method {method} cannot split this model: {error}") from None


def check_chunks(module: torch.nn.Module, chunks: int, placement: str = LOOP) -> None:
    """Check that the script built the pipeline with the chunk count and placement that the flags select.

    Raises:
        ConfigError: number or placement differ; the same on every rank.
    """
    num_built = getattr(module, "chunks", 1)
    if chunks > 1 and num_built != chunks:
        raise ConfigError(
            f"--pipeline-chunks must match the chunks of the model, got {chunks} and {num_built}. "
            f"Build it with tds.PipelineModule(..., chunks={chunks}), or leave the flag out"
        )
    built_placement = getattr(module, "placement", LOOP)
    if built_placement != placement:
        raise ConfigError(
            f"--pipeline-placement must match the model, got {placement} and {built_placement}. Build it with "
            f'tds.PipelineModule(..., placement="{placement}"), or choose a schedule for {built_placement}'
        )


def check_fp8(config: Config, module: torch.nn.Module, world: World) -> None:
    """Check that a weight of the model has products in FP8, if --fp8-format selects them. Collective.

    Raises:
        ConfigError: no rank has such a weight; the same on every rank.
    """
    if config.precision.fp8_format is None:
        return
    has_products = any(info_of(parameter).products is not None for parameter in module.parameters())
    if not world.any_rank([has_products])[0]:
        raise ConfigError(
            f"--fp8-format needs layers with products in FP8, got --fp8-format {config.precision.fp8_format} and a "
            "model without them. Call megatron.mpu.fp8.use_fp8 for the weights of your layers, or remove the flag"
        )


def initialize_and_move(config: Config, module: torch.nn.Module, world: World) -> None:
    """Initialise the weights that have no values yet, and move ``module`` to the training device."""
    initialize(named_parameters(module), seed=config.run.seed, rule=init_rule(config))
    move(module, world.device)


def init_rule(config: Config) -> Rule:
    """Return the model family's rule, which maps a parameter name to the scale of the initial values."""
    return model_parts(config.family).weight_init(config)
