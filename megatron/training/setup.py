"""setup_model_and_optimizer: model, initial weights, ZeRO-3 construction, optimizer, engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

import tds
from megatron import device, log
from megatron.arguments.deepspeed_json import engine_dict
from megatron.checkpoint import named_parameters
from megatron.config import Config, OptimizerConfig
from megatron.errors import ConfigError
from megatron.models.common.parameters import Rule, initialize
from megatron.models.common.router import Routers
from megatron.models.registry import load
from megatron.mpu.groups import Grid, Group, groups_by_ranks
from megatron.mpu.random import DropoutStreams, PhiloxDropout
from megatron.mpu.shard import init_empty_weights, is_uninitialized
from megatron.optim import (
    GradScaler,
    LRScheduler,
    MixedPrecisionOptimizer,
    MuonArgs,
    OffloadConfig,
    ParamInit,
    build_optimizer,
)
from megatron.optim.param_rates import RateTable
from megatron.training import device_setup
from megatron.training.compile import compile_layers
from megatron.training.device_setup import check_agreement, dropout_warning
from megatron.training.initialize import World
from megatron.training.train_step import ForwardStep, PipelineStepEngine, SingleStageEngine, StepEngine
from tds.deepspeed_api import sharing_groups
from tds.device import move
from tds.gradients import is_reduced_apart
from tds.module import PartitionError
from tds.schedule import LOOP

# Building a model for ZeRO 3, which cuts each weight as soon as it has its values: nobody ever holds the whole model.
#
# The host makes modules whose weights have no memory yet (``megatron.mpu.shard``). The optimizer takes them one by one
# (``ParamInit``): a weight is filled on the host, its parts go to the device, and its memory goes back. So
# a rank's host holds one weight at a time, beside what modules have filled themselves, and its device the parts.
#
# Weights that a module fills itself, biases and norms among them, are those of the first replica, as DeepSpeed has it;
# what is filled by its name is the same on all replicas anyway. DeepSpeed sends neither, for nothing is left to send.

CHUNK_BYTES = 32 * 2**20
"""Of the values that are sent at a time."""
SINGLE_PLACE = "single memory location"
"""What torch says of writing to a tensor whose elements share memory."""


def is_asked_for(config: Config, world: World) -> bool:
    """Return whether each replica keeps parts of the weights alone."""
    settings = config.optimizer
    return settings.zero_stage == 3 and (world.grid.data_context.size > 1 or settings.offload_parameters)


def build(provider: Callable[[], torch.nn.Module], *, arrives: bool) -> torch.nn.Module:
    """Return what ``provider`` builds, where weights arrive later without memory for those to be filled by name.

    Raises:
        ConfigError: it writes to such a weight.
    """
    try:
        with init_empty_weights() if arrives else nullcontext():
            return provider()
    except RuntimeError as error:
        if not arrives or SINGLE_PLACE not in str(error):
            raise
        raise ConfigError(
            "with --zero-stage 3 the weights of megatron.mpu's layers are filled after the model is built, got a "
            "model_provider that writes to one. Nothing would be left of that in other stages either: leave it out, or "
            "set the weight as an nn.Parameter of your own"
        ) from error


def param_init_of(config: Config, module: torch.nn.Module, world: World, rule: Rule) -> ParamInit | None:
    """Return how the weights of ``module`` come, which lie on the host; None where all come together."""
    if not is_asked_for(config, world):
        return None
    names = {parameter: name for name, parameter in named_parameters(module)}

    def fill(parameter: torch.nn.Parameter) -> None:
        if is_uninitialized(parameter):
            initialize([(names[parameter], parameter)], seed=config.run.seed, rule=rule)
        else:
            send_first(parameter.detach(), world.device, world.grid.data_context)

    return ParamInit(world.device, fill)


@torch.no_grad()
def send_first(values: torch.Tensor, device: torch.device, group: Group) -> None:
    """Let ``values`` on the host be those of the first rank of ``group``, over ``device``. Collective."""
    if group.size == 1:
        return
    flat = values.contiguous().view(-1)
    for chunk in flat.view(torch.uint8).split(CHUNK_BYTES):
        sent = chunk.to(device)
        dist.broadcast(sent, group.ranks[0], group=group.handle)
        chunk.copy_(sent)
    values.copy_(flat.view_as(values))


@contextmanager
def not_sent(module: torch.nn.Module, *, arrives: bool) -> Iterator[None]:
    """Keep DeepSpeed from sending weights that are cut, or of experts, to the replicas: it leaves what has a mark."""
    parameters = list(module.parameters())
    cut = [p for p in parameters if (arrives and p.requires_grad) or is_reduced_apart(p)]
    for parameter in cut:
        parameter.ds_optim_param = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in cut:
            del parameter.ds_optim_param  # type: ignore[attr-defined]


# Our grid as the ``mpu`` object that DeepSpeed's engine asks for its groups.


class DeepSpeedMpu:
    """The methods that ``deepspeed.initialize(mpu=...)`` calls; data and context are one axis to it.

    DeepSpeed takes a missing handle for the whole world, so a group of one gets a real process group here. Collective.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._data = _handle(grid, grid.data_context)
        self._tensor = _handle(grid, grid.tensor)

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return self._grid.data_context.rank

    def get_data_parallel_world_size(self) -> int:
        return self._grid.data_context.size

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        return self._grid.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._grid.tensor.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def _handle(grid: Grid, group: Group) -> Any:
    if group.handle is not None:
        return group.handle
    own = None
    for rank in range(grid.topology.world_size):
        handle = dist.new_group([rank])
        if rank == grid.rank:
            own = handle
    return own


# ``--sequence-parallel`` acts on models whose layers were built for it, and on no others.


def check_sequence_is_cut(module: torch.nn.Module, is_asked_for: bool) -> None:
    """Check that the layers of ``module``, a model or a stage, cut the sequence as the flag says.

    Raises:
        ConfigError: they do although nobody asked for it, or the other way round.
    """
    if any(map(_cuts, module.modules())) == is_asked_for:
        return
    if is_asked_for:
        raise ConfigError(
            f"--sequence-parallel acts on layers that are built for it, got none in {type(module).__name__}. Build it "
            "with megatron.models.ParallelContext(group, streams, sequence_parallel=True), or leave the flag out"
        )
    raise ConfigError(
        f"layers of {type(module).__name__} are built with sequence_parallel=True, got no --sequence-parallel. "
        "Give the flag, or build them without"
    )


def _cuts(module: torch.nn.Module) -> bool:
    place = getattr(module, "place", None)
    return bool(getattr(module, "sequence_parallel", False) or getattr(place, "sequence_parallel", False))


def check_context_is_cut(module: torch.nn.Module, size: int) -> None:
    """Check that the attention of ``module``, a model or a stage, is built for a context group of ``size`` ranks.

    Raises:
        ConfigError: it is not: tokens of other ranks would not be seen.
    """
    built = {place.context.size for each in module.modules() if (place := getattr(each, "place", None)) is not None}
    if size > 1 and built != {size}:
        raise ConfigError(
            f"--context-parallel-size {size} acts on layers that are built for it, got "
            f"{', '.join(map(str, sorted(built))) or 'none'} in {type(module).__name__}. Build it with "
            "megatron.models.ParallelContext(..., context=mpu.get_grid().context), or leave the flag out"
        )


# DeepSpeed's AdamW for weights on the CPU, compiled on this machine when it is first used.


def deepspeed_adam(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Return DeepSpeedCPUAdam over ``groups``; ``settings`` as of ``torch.optim.AdamW``.

    Raises:
        ConfigError: it cannot be compiled here.
    """
    try:
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
    except Exception as error:  # whatever the compiler, its loader or their files say
        raise ConfigError(
            f"--cpu-adam deepspeed compiles an extension, which failed here: {type(error).__name__}: {error}. It needs "
            "a C++ compiler (g++) and ninja. Use --cpu-adam torch, which needs none"
        ) from error


# From configuration and a user's functions to an engine that can step.


def make_streams(config: Config, world: World) -> DropoutStreams:
    """Return this rank's source of dropout masks."""
    seed, grid = config.run.seed, world.grid
    if config.model.layout_independent_dropout:
        streams: DropoutStreams = PhiloxDropout(config.batch.batch_size, seed, grid.data, grid.tensor, grid.context)
    else:
        streams = DropoutStreams(seed, grid.data_context, grid.tensor)
    streams.has_kernels = config.parallel.fused_kernels != "torch"
    if world.rank == 0 and (text := dropout_warning(config, world.kind)):
        log.warning(text)
    return streams


def build_engine(
    config: Config,
    world: World,
    streams: DropoutStreams,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
) -> StepEngine:
    """Build the model, fill its weights by name, and put it under the engine for its pipeline size. Collective."""
    check_agreement(world.kind)
    shared = groups_by_ranks(world.grid)
    with sharing_groups(shared):
        module, optimizer = build_weights(config, world, streams, model_provider)
    settings = engine_dict(config, world.grid.topology.world_size)
    mpu = None if config.parallel.has_pipeline else DeepSpeedMpu(world.grid)
    tds.quiet(not config.run.verbose_deepspeed)
    with not_sent(module, arrives=is_asked_for(config, world)), sharing_groups(shared):
        engine, *_ = tds.initialize(model=module, optimizer=optimizer, config=settings, mpu=mpu)
    optimizer.cut_weights(module)
    batch, replicas = config.batch, world.grid.data.size
    numbers: dict[str, Any] = {
        "share": batch.share(replicas, world.grid.data.rank),
        "micro_batch_tokens": batch.batch_size * replicas * config.loss_tokens_per_sample,
    }
    if config.model.num_experts:
        numbers["routers"] = Routers(module, world.grid, sequence_parallel=config.parallel.sequence_parallel)
    built: StepEngine
    if config.parallel.has_pipeline:
        built = PipelineStepEngine(engine, grid=world.grid, streams=streams, **numbers)
    else:
        built = SingleStageEngine(engine, forward_step, grid=world.grid, streams=streams, **numbers)
    return built


def build_weights(
    config: Config, world: World, streams: DropoutStreams, model_provider: Callable[[], torch.nn.Module]
) -> tuple[torch.nn.Module, MixedPrecisionOptimizer]:
    """Return the model, its weights filled by name and where they are trained, and its optimizer. Collective."""
    module = build_model(config, world, model_provider)
    check_chunks(module, config.parallel.chunks, config.parallel.placement)
    check_sequence_is_cut(module, config.parallel.sequence_parallel)
    check_context_is_cut(module, config.parallel.context_parallel_size)
    check_rates(config, module, world)
    device_setup.use_norms(config, module)
    param_init = param_init_of(config, module, world, weight_rule(config))
    if param_init is None:
        put_in_place(config, module, world)
    if config.parallel.compile:
        num_lengths = len(config.batch.lengths.all())
        compile_layers(module, streams, world.device, has_all=not config.parallel.has_pipeline, num_lengths=num_lengths)
    optimizer = make_optimizer(config, module, world, param_init)
    if param_init is not None:
        put_in_place(config, module, world)  # what is left: frozen weights, buffers
    return module, optimizer


def build_model(config: Config, world: World, model_provider: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return what the script's ``model_provider`` builds. Collective.

    Raises:
        ConfigError: its layers cannot be cut into stages as --partition-method says; the same on every rank. Or it
            writes to a weight that has no memory yet.
    """
    try:
        return build(model_provider, arrives=is_asked_for(config, world))
    except PartitionError as error:
        if world.grid.topology.world_size > 1:
            dist.barrier(group=world.grid.host.handle)  # a rank that left earlier would end rank 0, which tells why
        method = config.parallel.partition_method
        raise ConfigError(f"--partition-method {method} cannot cut this model: {error}") from None


def check_chunks(module: torch.nn.Module, chunks: int, placement: str = LOOP) -> None:
    """Check that the script built its pipeline with as many chunks as the flags ask for, and placed as they say.

    Raises:
        ConfigError: it did not; the same on every rank.
    """
    built = getattr(module, "chunks", 1)
    if chunks > 1 and built != chunks:
        raise ConfigError(
            f"--pipeline-chunks must be the chunks that the model was built with, got {chunks} and {built}. Build it "
            f"with tds.PipelineModule(..., chunks={chunks}), or leave the flag out"
        )
    lies = getattr(module, "placement", LOOP)
    if lies != placement:
        raise ConfigError(
            f"--pipeline-placement must be how the model was built, got {placement} and {lies}. Build it with "
            f'tds.PipelineModule(..., placement="{placement}"), or choose a schedule for a {lies}'
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
    config: Config, module: torch.nn.Module, world: World, param_init: ParamInit | None = None
) -> MixedPrecisionOptimizer:
    """Return the optimizer over ``module``'s parameters, which take the run's precision from here on."""
    settings, precision = config.optimizer, config.precision
    table = RateTable.of(config)
    named = [(name, parameter, table.rate_of(name, parameter)) for name, parameter in named_parameters(module)]
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
        data=world.grid.data_context,
        expert_data=world.grid.expert_data,
        zero_stage=settings.zero_stage,
        overlaps_sums=config.parallel.overlap_grad_reduce and not config.parallel.has_pipeline,
        offload=OffloadConfig(settings.offload_optimizer, settings.offload_parameters, not settings.no_pin_memory),
        adam=_adam(config),
        param_init=param_init,
        reduce_bucket_size=config.parallel.reduce_bucket_size,
        allgather_bucket_size=config.parallel.allgather_bucket_size,
        prefetches=config.parallel.stage3_prefetch_bucket_size > 0,
        fuses_accumulation=config.parallel.gradient_accumulation_fusion,
        muon=_muon(settings),
        bf16_states=settings.bf16_states,
        rates={parameter: rate for _, parameter, rate in named if rate is not None},
    )


def check_rates(config: Config, module: torch.nn.Module, world: World) -> None:
    """Check that the tables of rates name parameters of the model, on whichever stage. Collective.

    Raises:
        ConfigError: a pattern fits none; the same on every rank.
    """
    table = RateTable.of(config)
    if table.named or table.decays:
        every = world.grid.host.gather_objects([name for name, _ in named_parameters(module)])
        table.check_names(name for names in every for name in names)


def _muon(settings: OptimizerConfig) -> MuonArgs:
    return MuonArgs(**{each.name: getattr(settings, f"muon_{each.name}") for each in fields(MuonArgs)})


def _adam(config: Config) -> Callable[..., torch.optim.Optimizer] | None:
    """Return what AdamW is, where it is not torch's."""
    if config.optimizer.cpu_adam == "deepspeed":
        return deepspeed_adam
    return device_setup.apex_adam if device_setup.uses_adam(config) else None


def make_scaler(config: Config) -> GradScaler:
    """Return the loss scale: dynamic or fixed for fp16, 1 for every other precision."""
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


def make_learning_rate(config: Config, replicas: int = 1) -> LRScheduler:
    """Return the schedule of the configuration, which follows the samples where its lengths are samples."""
    settings = config.optimizer
    by_samples = settings.lr_decay_samples is not None
    return LRScheduler(
        lr=settings.lr,
        min_lr=settings.min_lr,
        style=settings.lr_decay_style,
        decay_updates=settings.lr_decay_samples or settings.lr_decay_iters or max(config.batch.train_iters, 1),
        warmup=settings.warmup,
        warmup_length=settings.lr_warmup_samples if by_samples else settings.lr_warmup_iters,
        wsd_decay_fraction=settings.wsd_decay_fraction,
        wsd_length=settings.lr_wsd_decay_samples if by_samples else settings.lr_wsd_decay_iters,
        wsd_style=settings.lr_wsd_decay_style,
        consumed=config.batch.sizes(replicas).consumed_after if by_samples else None,
    )


def _known(dtype: str | None) -> str:
    if dtype is None:
        raise RuntimeError("the precision is not resolved yet: call config.resolve_dtype first")
    return dtype
