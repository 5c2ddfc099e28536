"""Model construction for ZeRO 3: each weight is sharded as soon as it is initialised.

The host makes modules whose weights have no memory yet (``megatron.mpu.shard``). The optimizer takes them one by one
(``ParamInit``): a weight is filled on the host, its parts go to the device, and its memory goes back. So
a rank's host holds one weight at a time, beside what modules have filled themselves, and its device the parts.

Weights that a module fills itself, biases and norms among them, are those of the first replica, as DeepSpeed has it;
what is filled by its name is the same on all replicas anyway. DeepSpeed sends neither, for nothing is left to send.
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
from tds.gradients import is_reduced_apart
from tds.param_info import excluded_from_broadcast

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
    """Keep DeepSpeed from broadcasting sharded weights and weights of experts to the replicas."""
    parameters = list(module.parameters())
    with excluded_from_broadcast(p for p in parameters if (arrives and p.requires_grad) or is_reduced_apart(p)):
        yield
