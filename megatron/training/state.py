"""Everything that a run needs to go on exactly: counters, weights, optimizer, loss scale, random states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import device, log
from megatron.checkpoint import (
    Checkpoint,
    TensorRecord,
    compare_model_config,
    named_parameters,
    open_checkpoint,
    open_latest,
    save,
)
from megatron.config import Config
from megatron.errors import CheckpointError, marked
from megatron.mpu.grads import counts_here
from megatron.mpu.shard import Shard, shard_of
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.world import World

CHECKPOINTS = "checkpoints"  # folder of checkpoints in a run folder


@dataclass
class Progress:
    """How far the run is. ``updates`` leaves out steps that fp16 overflow skipped; the learning rate follows it."""

    step: int = 0
    updates: int = 0
    samples_consumed: int = 0

    @property
    def skipped(self) -> int:
        return self.step - self.updates


def save_state(
    folder: Path,
    progress: Progress,
    *,
    config: Config,
    module: torch.nn.Module,
    optimizer: MixedPrecisionOptimizer,
    world: World,
    fingerprint: str | None,
    order: Mapping[str, Any] | None = None,
    loaded: Path | None = None,
) -> Path:
    """Write a checkpoint into ``folder / checkpoints`` and return its path. Collective.

    Args:
        order: where each corpus is, of data that say so.
    """
    records = list(_weight_records(module, optimizer, world))
    if not config.checkpoint.no_save_optim:
        records += _optimizer_records(module, optimizer, world)
    records += _rng_records(world)
    state = {
        "progress": asdict(progress),
        "scaler": optimizer.scaler.state(),
        "optimizer": config.optimizer.optimizer,
        "optimizer_steps": _optimizer_steps(optimizer),
        "model": config.identity(),
        "config": config.to_dict(),
        "layout": asdict(world.grid.topology),
        "data_fingerprint": fingerprint,
        "data_order": order,
        "torch": torch.__version__,
    }
    keep_last = config.checkpoint.keep_last
    return save(
        folder / CHECKPOINTS, progress.step, records, state, world.grid.host, keep_last=keep_last, loaded=loaded
    )


def open_for(source: Path, world: World) -> Checkpoint:
    """Return the checkpoint that ``source`` means: a run folder, its checkpoints folder, or one checkpoint. Collective.

    Raises:
        CheckpointError: there is none there, or none that verifies.
    """
    inner = source / CHECKPOINTS
    place = inner if inner.is_dir() else source
    if (place / "manifest.json").exists():
        return open_checkpoint(place, world.grid.host)
    return open_latest(place, world.grid.host)


def restore(
    checkpoint: Checkpoint,
    *,
    config: Config,
    module: torch.nn.Module,
    optimizer: MixedPrecisionOptimizer,
    world: World,
    fingerprint: str | None,
) -> Progress:
    """Put the state of ``checkpoint`` into model and optimizer; return where to go on. Collective.

    Args:
        fingerprint: of the data; None: nothing is known of them, or it has been compared already.

    Raises:
        CheckpointError: it is of another model or other data; nothing has been changed then.
    """
    flags = config.checkpoint
    is_whole = not flags.finetune and not flags.eval_only
    wants_optimizer = is_whole and not flags.no_load_optim
    with marked(is_of_this_rank=False):
        compare_model_config(checkpoint.state["model"], config.identity())
        if is_whole:
            _check_data(checkpoint, fingerprint, flags.allow_data_change)
        if wants_optimizer:
            _check_moments(checkpoint, config)
    records = list(_weight_records(module, optimizer, world))
    if wants_optimizer and checkpoint.state["optimizer_steps"]:  # else fp16 has skipped every step: no moments
        _make_moments(optimizer)
        records += _optimizer_records(module, optimizer, world)
    checkpoint.load(records)
    optimizer.copy_masters_to_parameters()
    if wants_optimizer:
        optimizer.scaler.load(checkpoint.state["scaler"])
        _set_optimizer_steps(optimizer, checkpoint.state["optimizer_steps"])
    if is_whole and not flags.no_load_rng:
        _restore_rng(checkpoint, world)
    return Progress() if flags.finetune else Progress(**checkpoint.state["progress"])


def _weight_records(
    module: torch.nn.Module, optimizer: MixedPrecisionOptimizer, world: World
) -> Iterator[TensorRecord]:
    for name, parameter in named_parameters(module):
        master = optimizer.master_of(parameter) if parameter.requires_grad else parameter
        yield TensorRecord(f"weights/{name}", master.detach(), shard_of(parameter), _is_owner(parameter, world))


def _optimizer_records(
    module: torch.nn.Module, optimizer: MixedPrecisionOptimizer, world: World
) -> Iterator[TensorRecord]:
    for name, parameter in named_parameters(module):
        if not parameter.requires_grad:
            continue
        state = optimizer.inner.state.get(optimizer.master_of(parameter), {})
        for key, value in sorted(state.items()):
            if isinstance(value, torch.Tensor) and key != "step":
                shard = _shard_of_state(key, value, parameter)
                yield TensorRecord(f"optimizer/{key}/{name}", value, shard, _is_owner(parameter, world))


def _shard_of_state(key: str, value: torch.Tensor, parameter: torch.Tensor) -> Shard:
    """Return where ``value`` lies in its global tensor.

    It has the parameter's shape, or, where it is a mean over dimensions (Adafactor's rows and columns), 1 in those. A
    mean over the cut dimension is whole: ``build_optimizer`` lets nobody take one over a part.
    """
    shard, local = shard_of(parameter), tuple(parameter.shape)
    if len(value.shape) != len(local) or any(
        own not in (1, size) for own, size in zip(value.shape, local, strict=True)
    ):
        raise RuntimeError(
            f"a state of the optimizer must have its parameter's shape, or 1 in some dimensions, got {key} of shape "
            f"{tuple(value.shape)} for {local}: it cannot be saved"
        )
    is_mean = [own != size for own, size in zip(value.shape, local, strict=True)]
    whole = tuple(1 if mean else size for mean, size in zip(is_mean, shard.global_shape, strict=True))
    if shard.partition_dim is None or is_mean[shard.partition_dim]:
        return Shard(whole)
    return Shard(whole, shard.partition_dim, shard.start, shard.length)


def _rng_records(world: World) -> Iterator[TensorRecord]:
    for kind, state in device.rng_states(world.kind).items():
        yield TensorRecord(f"rng/{kind}/{world.rank:05d}", state, Shard(tuple(state.shape)), True)


def _is_owner(parameter: torch.Tensor, world: World) -> bool:
    return world.grid.data.rank == 0 and counts_here(parameter, world.grid.tensor.rank)


def _optimizer_steps(optimizer: MixedPrecisionOptimizer) -> int:
    """Return how many updates the inner optimizer has made: Adam's bias correction depends on it."""
    for state in optimizer.inner.state.values():
        if "step" in state:
            return int(state["step"])
    return 0


def _set_optimizer_steps(optimizer: MixedPrecisionOptimizer, steps: int) -> None:
    for state in optimizer.inner.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], float(steps))


def _make_moments(optimizer: MixedPrecisionOptimizer) -> None:
    """Let the inner optimizer create its state, all zeros, without moving a weight: no rate, no decay, no gradient."""
    groups = optimizer.param_groups
    kept = [(group["lr"], group["weight_decay"]) for group in groups]
    for group in groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
        for master in group["params"]:
            master.grad = torch.zeros_like(master)
    optimizer.inner.step()
    optimizer.zero_grad()
    for group, (lr, weight_decay) in zip(groups, kept, strict=True):
        group["lr"], group["weight_decay"] = lr, weight_decay


def _check_moments(checkpoint: Checkpoint, config: Config) -> None:
    saved, now = checkpoint.state.get("optimizer"), config.optimizer.optimizer
    if saved != now:
        raise CheckpointError(
            f"the optimizer must be that of the checkpoint, got --optimizer {now} and {saved} in {checkpoint.path}. "
            "Give the same one, or add --no-load-optim to go on with a fresh optimizer."
        )
    if not any(name.startswith("optimizer/") for name in checkpoint.names()) and checkpoint.state["optimizer_steps"]:
        raise CheckpointError(
            f"{checkpoint.path} holds no optimizer state (it was saved with --no-save-optim). "
            "Add --no-load-optim to go on with a fresh optimizer, or --finetune to start anew from its weights."
        )


def _check_data(checkpoint: Checkpoint, fingerprint: str | None, allow_change: bool) -> None:
    saved = checkpoint.state.get("data_fingerprint")
    if not saved or not fingerprint or saved == fingerprint:
        return
    told = f"got fingerprint {fingerprint} now and {saved} in {checkpoint.path}"
    if not allow_change:
        raise CheckpointError(
            f"the data must be those of the checkpoint, {told}: samples would be repeated or lost. Give the same "
            "--data-path, --split, --seed and lengths, --allow-data-change to go on at the same number of samples, or "
            "--finetune to start anew from the weights."
        )
    log.info(f"the data are not those of the checkpoint, {told}: going on at the same number of samples")


def _restore_rng(checkpoint: Checkpoint, world: World) -> None:
    saved_layout = checkpoint.state["layout"]
    if saved_layout != asdict(world.grid.topology):
        if world.rank == 0:
            log.info(f"saved as {saved_layout}, now {asdict(world.grid.topology)}: generators start from --seed")
        return
    states = device.rng_states(world.kind)
    for kind, state in states.items():
        name = f"rng/{kind}/{world.rank:05d}"
        if name in checkpoint.names():
            states[kind] = checkpoint.read(name, Shard(tuple(state.shape)))
    device.set_rng_states(states)
