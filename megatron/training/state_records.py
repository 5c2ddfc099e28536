"""Tensor records for a run's state: weights, optimizer moments, random states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
from megatron.optim import MixedPrecisionOptimizer, quantized_state
from megatron.training.world import World


def weight_records(module: torch.nn.Module, optimizer: MixedPrecisionOptimizer) -> Iterator[TensorRecord]:
    """Yield this rank's main params; with ZeRO, this rank's shards."""
    for name, parameter in named_parameters(module):
        main_param = optimizer.main_param_of(parameter) if parameter.requires_grad else parameter
        yield TensorRecord(f"weights/{name}", main_param.detach(), shard_of(main_param), optimizer.owns(parameter))


def optimizer_records(module: torch.nn.Module, optimizer: MixedPrecisionOptimizer) -> Iterator[TensorRecord]:
    """Yield the inner optimizer's state for each weight, except the step count.

    States in 8 bits are copied to fp32 in host memory. After the records are loaded, ``store_quantized`` copies them
    back.
    """
    for name, parameter in named_parameters(module):
        if not parameter.requires_grad:
            continue
        main_param = optimizer.main_param_of(parameter)
        state = optimizer.inner.state.get(main_param, {})
        for key, value in sorted(state.items()):
            if isinstance(value, torch.Tensor) and key != "step":
                value = quantized_state.load(value).cpu() if quantized_state.is_quantized(value) else value
                if value.dim() == 1 < main_param.dim():  # NorMuon's second moments: one vector, equal on all ranks
                    shard, is_owner = Shard(tuple(value.shape)), optimizer.owns_replicated_state(parameter)
                else:
                    shard, is_owner = _shard_of_state(key, value, main_param), optimizer.owns(parameter)
                yield TensorRecord(f"optimizer/{key}/{name}", value, shard, is_owner)


def store_quantized(
    module: torch.nn.Module, optimizer: MixedPrecisionOptimizer, records: Iterable[TensorRecord]
) -> None:
    """Copy loaded ``records`` of ``optimizer_records`` into the states that are stored in 8 bits."""
    values = {record.name: record.tensor for record in records}
    for name, parameter in named_parameters(module):
        if parameter.requires_grad:
            for key, state in optimizer.inner.state.get(optimizer.main_param_of(parameter), {}).items():
                if quantized_state.is_quantized(state):
                    quantized_state.store(state, values[f"optimizer/{key}/{name}"])


def router_records(module: torch.nn.Module, world: World) -> Iterator[TensorRecord]:
    """Yield router state from the last global batch: tokens per expert."""
    is_owner = world.grid.data_context.rank == 0 and world.grid.tensor.rank == 0
    for name, router in named_routers(named_modules(module)).items():
        counts = router.tokens_per_expert
        yield TensorRecord(f"routers/{name}.tokens_per_expert", counts, Shard(tuple(counts.shape)), is_owner)


def rng_records(world: World) -> Iterator[TensorRecord]:
    """Yield torch's generator states on this rank; every rank saves separate states."""
    for device_type, state in device.rng_states(world.device_type).items():
        yield TensorRecord(_rng_name(device_type, world), state, Shard(tuple(state.shape)), True)


def restore_rng(checkpoint: Checkpoint, world: World) -> None:
    """Restore this rank's generator states from ``checkpoint``; generators that it lacks keep their states."""
    states = device.rng_states(world.device_type)
    for device_type, state in states.items():
        name = _rng_name(device_type, world)
        if name in checkpoint.names():
            states[device_type] = checkpoint.read(name, Shard(tuple(state.shape)))
    device.set_rng_states(states)


def optimizer_steps(optimizer: MixedPrecisionOptimizer) -> int:
    """Return the inner optimizer's update count, which Adam's bias correction depends on."""
    for state in optimizer.inner.state.values():
        if "step" in state:
            return int(state["step"])
    return 0


def set_optimizer_steps(optimizer: MixedPrecisionOptimizer, steps: int) -> None:
    """Set the inner optimizer's update count."""
    for state in optimizer.inner.state.values():
        if "step" in state:
            is_python_number = not isinstance(state["step"], torch.Tensor)  # in DeepSpeed's CPU Adam it is an int
            state["step"] = steps if is_python_number else torch.full_like(state["step"], float(steps))


def make_moments(optimizer: MixedPrecisionOptimizer) -> None:
    """Create the inner optimizer's state as zeros, by an update with zero gradients, learning rate and weight decay."""
    groups = optimizer.param_groups
    saved_settings = [(group["lr"], group["weight_decay"]) for group in groups]
    for group in groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
        for main_param in group["params"]:
            main_param.grad = torch.zeros_like(main_param)
    optimizer.update_main_params()
    optimizer.zero_grad()
    for group, (lr, weight_decay) in zip(groups, saved_settings, strict=True):
        group["lr"], group["weight_decay"] = lr, weight_decay


def _shard_of_state(key: str, value: torch.Tensor, main_param: torch.Tensor) -> Shard:
    """Return the shard that ``value`` covers in the global tensor.

    ``value`` has the main param's shape, with size 1 in averaged dimensions (Adafactor's rows and columns). A mean over
    the partition dimension is unsharded. It never covers only a shard of that dimension, because ``build_optimizer``
    rejects Adafactor on sharded weights.
    """
    shard, local_shape = shard_of(main_param), tuple(main_param.shape)
    if len(value.shape) != len(local_shape) or any(
        state_size not in (1, size) for state_size, size in zip(value.shape, local_shape, strict=True)
    ):
        raise RuntimeError(
            f"an optimizer state must have the shape of its main param, or 1 in some dimensions, got {key} of shape "
            f"{tuple(value.shape)} for {local_shape}: it cannot be saved"
        )
    is_mean = [state_size != size for state_size, size in zip(value.shape, local_shape, strict=True)]
    global_shape = tuple(1 if mean else size for mean, size in zip(is_mean, shard.global_shape, strict=True))
    if shard.partition_dim is None or is_mean[shard.partition_dim]:
        return Shard(global_shape)
    return Shard(global_shape, shard.partition_dim, shard.start, shard.length)


def _rng_name(device_type: str, world: World) -> str:
    return f"rng/{device_type}/{world.rank:05d}"
