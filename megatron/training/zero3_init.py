"""Model construction for ZeRO 3: each weight is sharded as soon as it is initialised.

Modules are built on the host with weights that have no memory yet (``megatron.mpu.shard``). The optimizer initialises
them one by one (``ParamInit``): a weight is filled on the host, its shard is copied to the device, and its host memory
is freed. So the host holds one full weight at a time, in addition to weights that modules have filled themselves, and
the device holds only shards.

Weights that a module fills itself, such as biases and norms, are broadcast from the first replica, as in DeepSpeed.
Weights that are initialised by name are the same on all replicas without a broadcast. DeepSpeed's own broadcast is
disabled for both, because full weights no longer exist when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from megatron.checkpoint import named_parameters
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.models.common.parameters import Rule, initialize
from megatron.mpu.groups import Group
from megatron.mpu.shard import init_empty_weights, is_uninitialized
from megatron.optim import (
    ParamInit,
)
from megatron.training.world import World
from tds.gradients import is_reduced_by_optimizer
from tds.param_info import excluded_from_broadcast

CHUNK_BYTES = 32 * 2**20
"""Size of the chunks in which weights are broadcast."""
SHARED_MEMORY_TEXT = "single memory location"
"""Part of torch's error message for writes to a tensor whose elements share memory."""


def is_weight_sharded(config: Config, world: World) -> bool:
    """Return True if each replica keeps only shards of the weights (ZeRO 3)."""
    settings = config.optimizer
    return settings.zero_stage == 3 and (world.grid.data_context.size > 1 or settings.offload_parameters)


def build_module(provider: Callable[[], torch.nn.Module], *, is_deferred: bool) -> torch.nn.Module:
    """Build the model with ``provider``.

    Args:
        is_deferred: True if weights that are initialised by name are materialized later, so that they have no memory
            yet.

    Raises:
        ConfigError: the provider writes to a weight without memory.
    """
    try:
        with init_empty_weights() if is_deferred else nullcontext():
            return provider()
    except RuntimeError as error:
        if not is_deferred or SHARED_MEMORY_TEXT not in str(error):
            raise
        raise ConfigError(
            "--zero-stage 3 initialises the weights of megatron.mpu's layers after the model is built, got a "
            "model_provider that writes to one. Other ZeRO stages would overwrite it, too: leave the write out, or "
            "assign your own nn.Parameter"
        ) from error


def make_param_init(config: Config, module: torch.nn.Module, world: World, rule: Rule) -> ParamInit | None:
    """Make a ``ParamInit`` that initialises the weights of ``module`` one by one; None without ZeRO 3."""
    if not is_weight_sharded(config, world):
        return None
    names = {parameter: name for name, parameter in named_parameters(module)}

    def fill(parameter: torch.nn.Parameter) -> None:
        if is_uninitialized(parameter):
            initialize([(names[parameter], parameter)], seed=config.run.seed, rule=rule)
        else:
            is_expert = is_reduced_by_optimizer(parameter)
            replicas = world.grid.expert_data if is_expert else world.grid.data_context
            broadcast_from_first(parameter.detach(), world.device, replicas)

    return ParamInit(world.device, fill)


@torch.no_grad()
def broadcast_from_first(values: torch.Tensor, device: torch.device, group: Group) -> None:
    """Broadcast host ``values`` from the first rank in ``group`` via ``device``. Collective."""
    if group.size == 1:
        return
    flat = values.contiguous().view(-1)
    for chunk in flat.view(torch.uint8).split(CHUNK_BYTES):
        buffer = chunk.to(device)
        dist.broadcast(buffer, group.ranks[0], group=group.handle)
        chunk.copy_(buffer)
    values.copy_(flat.view_as(values))


@contextmanager
def without_deepspeed_broadcast(module: torch.nn.Module, *, is_deferred: bool) -> Iterator[None]:
    """Prevent DeepSpeed from broadcasting sharded weights and expert weights to the replicas within the context.

    Args:
        is_deferred: as in ``build_module``.
    """
    parameters = list(module.parameters())
    with excluded_from_broadcast(
        p for p in parameters if (is_deferred and p.requires_grad) or is_reduced_by_optimizer(p)
    ):
        yield
