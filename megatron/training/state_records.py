"""Tensors of a run's state as records: weights, optimizer moments, random states."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron import device
from megatron.checkpoint import (
    Checkpoint,
    TensorRecord,
    named_parameters,
)
from megatron.models.common.parameters import named_modules
from megatron.models.common.router import named_routers
from megatron.mpu.shard import Shard, shard_of
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.world import World


def weight_records(module: torch.nn.Module, optimizer: MixedPrecisionOptimizer) -> Iterator[TensorRecord]:
    """Yield the main params that this rank holds; with ZeRO a shard of each."""
    for name, parameter in named_parameters(module):
        main_param = optimizer.main_param_of(parameter) if parameter.requires_grad else parameter
        yield TensorRecord(f"weights/{name}", main_param.detach(), shard_of(main_param), optimizer.owns(parameter))


def optimizer_records(module: torch.nn.Module, optimizer: MixedPrecisionOptimizer) -> Iterator[TensorRecord]:
    """Yield the state that the inner optimizer keeps of each weight, but its count of steps."""
    for name, parameter in named_parameters(module):
        if not parameter.requires_grad:
            continue
        main_param = optimizer.main_param_of(parameter)
        state = optimizer.inner.state.get(main_param, {})
        for key, value in sorted(state.items()):
            if isinstance(value, torch.Tensor) and key != "step":
                shard = _shard_of_state(key, value, main_param)
                yield TensorRecord(f"optimizer/{key}/{name}", value, shard, optimizer.owns(parameter))


def router_records(module: torch.nn.Module, world: World) -> Iterator[TensorRecord]:
    """Yield what routers remember of the last global batch: the tokens of each expert."""
    is_owner = world.grid.data_context.rank == 0 and world.grid.tensor.rank == 0
    for name, router in named_routers(named_modules(module)).items():
        counts = router.tokens_per_expert
        yield TensorRecord(f"routers/{name}.tokens_per_expert", counts, Shard(tuple(counts.shape)), is_owner)


def rng_records(world: World) -> Iterator[TensorRecord]:
    """Yield the states of torch's generators on this rank, which are nobody else's."""
    for kind, state in device.rng_states(world.kind).items():
        yield TensorRecord(_rng_name(kind, world), state, Shard(tuple(state.shape)), True)


def restore_rng(checkpoint: Checkpoint, world: World) -> None:
    """Give torch's generators the states that ``checkpoint`` holds of this rank; one that it lacks stays."""
    states = device.rng_states(world.kind)
    for kind, state in states.items():
        name = _rng_name(kind, world)
        if name in checkpoint.names():
            states[kind] = checkpoint.read(name, Shard(tuple(state.shape)))
    device.set_rng_states(states)


def optimizer_steps(optimizer: MixedPrecisionOptimizer) -> int:
    """Return how many updates the inner optimizer has made: Adam's bias correction depends on it."""
    for state in optimizer.inner.state.values():
        if "step" in state:
            return int(state["step"])
    return 0


def set_optimizer_steps(optimizer: MixedPrecisionOptimizer, steps: int) -> None:
    """Let the inner optimizer have made so many updates."""
    for state in optimizer.inner.state.values():
        if "step" in state:
            is_number = not isinstance(state["step"], torch.Tensor)  # DeepSpeed's Adam on the CPU has one
            state["step"] = steps if is_number else torch.full_like(state["step"], float(steps))


def make_moments(optimizer: MixedPrecisionOptimizer) -> None:
    """Let the inner optimizer create its state, all zeros, without moving a weight: no rate, no decay, no gradient."""
    groups = optimizer.param_groups
    kept = [(group["lr"], group["weight_decay"]) for group in groups]
    for group in groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
        for main_param in group["params"]:
            main_param.grad = torch.zeros_like(main_param)
    optimizer.update_main_params()
    optimizer.zero_grad()
    for group, (lr, weight_decay) in zip(groups, kept, strict=True):
        group["lr"], group["weight_decay"] = lr, weight_decay


def _shard_of_state(key: str, value: torch.Tensor, main_param: torch.Tensor) -> Shard:
    """Return where ``value`` lies in its global tensor.

    It has the main param's shape, or, where it is a mean over dimensions (Adafactor's rows and columns), 1 in those. A
    mean over the cut dimension is whole: ``build_optimizer`` lets nobody take one over a part.
    """
    shard, local = shard_of(main_param), tuple(main_param.shape)
    if len(value.shape) != len(local) or any(
        own not in (1, size) for own, size in zip(value.shape, local, strict=True)
    ):
        raise RuntimeError(
            f"a state of the optimizer must have its master's shape, or 1 in some dimensions, got {key} of shape "
            f"{tuple(value.shape)} for {local}: it cannot be saved"
        )
    is_mean = [own != size for own, size in zip(value.shape, local, strict=True)]
    whole = tuple(1 if mean else size for mean, size in zip(is_mean, shard.global_shape, strict=True))
    if shard.partition_dim is None or is_mean[shard.partition_dim]:
        return Shard(whole)
    return Shard(whole, shard.partition_dim, shard.start, shard.length)


def _rng_name(kind: str, world: World) -> str:
    return f"rng/{kind}/{world.rank:05d}"
