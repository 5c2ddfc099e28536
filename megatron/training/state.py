"""Everything that a run needs to go on exactly: counters, weights, optimizer, loss scale, random states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron import log
from megatron.checkpoint import Checkpoint, TensorRecord, check_model, open_latest, save
from megatron.checkpoint.folders import CHECKPOINTS as CHECKPOINTS
from megatron.checkpoint.folders import checkpoints_in
from megatron.checkpoint.resize import fill, is_resized
from megatron.config import CheckpointConfig, Config
from megatron.config.checkpoint import DEFAULT_KEPT
from megatron.errors import CheckpointError, marked
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.resume_rules import machine
from megatron.training.state_tensors import (
    make_moments,
    optimizer_records,
    optimizer_steps,
    restore_rng,
    rng_records,
    set_optimizer_steps,
    weight_records,
)
from megatron.training.world import World

Written = TypeVar("Written")


@dataclass
class Progress:
    """How far the run is. ``updates`` leaves out steps that fp16 overflow skipped; the learning rate follows it."""

    step: int = 0
    updates: int = 0
    samples_consumed: int = 0

    @property
    def skipped(self) -> int:
        return self.step - self.updates


@dataclass(frozen=True)
class Taken:
    """What a start takes up of a checkpoint beside its weights.

    Args:
        counters: steps, updates and samples.
        data: where the data goes on, which must be the same.
        optimizer: its moments and the loss scale.
        generators: the states of torch's generators.
    """

    counters: bool = True
    data: bool = True
    optimizer: bool = True
    generators: bool = True

    @classmethod
    def of(cls, flags: CheckpointConfig) -> Taken:
        """Return what the flags of a start say."""
        is_whole = not flags.finetune and not flags.eval_only
        has_state = is_whole and not flags.load_weights_only
        return cls(
            counters=not flags.finetune,
            data=is_whole,
            optimizer=has_state and not flags.no_load_optim,
            generators=has_state and not flags.no_load_rng,
        )


EVERYTHING = Taken()


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
    earlier: int = 0,
    more: Mapping[str, Any] | None = None,
    write: Callable[..., Written] = save,  # type: ignore[assignment]
) -> Written:
    """Write a checkpoint into ``folder / checkpoints`` and return its path. Collective.

    Args:
        order: where each corpus is, of data that say so.
        loaded, earlier: are not deleted, see ``megatron.checkpoint.save``.
        more: what else the state says, as JSON can hold it.
        write: takes what ``megatron.checkpoint.save`` takes; what it returns is returned.

    Raises:
        RuntimeError: in the midst of a step: gradients are held, which no checkpoint keeps.
    """
    records = list(weight_records(module, optimizer))
    if not config.checkpoint.no_save_optim:
        records += optimizer_records(module, optimizer)
    records += rng_records(world)
    state = described(
        progress, config=config, optimizer=optimizer, world=world, fingerprint=fingerprint, order=order, more=more
    )
    kept = {**kept_by(config.checkpoint), "loaded": loaded, "earlier": earlier}
    return write(folder / CHECKPOINTS, progress.step, records, state, world.grid.host, **kept)


def kept_by(flags: CheckpointConfig) -> dict[str, int | None]:
    """Return how many checkpoints the flags keep, in the words of ``megatron.checkpoint.save``."""
    unasked = DEFAULT_KEPT if flags.is_default_interval else None
    return {"keep_last": flags.keep_last, "keep_every": flags.keep_every, "keep_unasked": unasked}


def described(
    progress: Progress,
    *,
    config: Config,
    optimizer: MixedPrecisionOptimizer,
    world: World,
    fingerprint: str | None,
    order: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a checkpoint of now says beside its tensors, as JSON can hold it; the rest as in ``save_state``.

    Raises:
        RuntimeError: in the midst of a step: gradients are held, which no checkpoint keeps.
    """
    _check_between_steps(optimizer)
    return {
        "progress": asdict(progress),
        "scaler": optimizer.scaler.state(),
        "optimizer": config.optimizer.optimizer,
        "optimizer_steps": optimizer_steps(optimizer),
        "model": config.identity(),
        "config": config.to_dict(),
        "layout": asdict(world.grid.topology),
        "data_fingerprint": fingerprint,
        "data_order": order,
        "torch": torch.__version__,
        "machine": machine(world.kind),
        **(more or {}),
    }


def open_for(source: Path, world: World, *, strict: bool = False) -> Checkpoint:
    """Return the checkpoint that ``source`` means: a run folder, its checkpoints folder, or one checkpoint. Collective.

    Args:
        strict: the newest must verify; else an older one may be taken.

    Raises:
        CheckpointError: there is none there, or none that verifies.
    """
    return open_latest(checkpoints_in(source), world.grid.host, strict=strict)


def restore(
    checkpoint: Checkpoint,
    *,
    config: Config,
    module: torch.nn.Module,
    optimizer: MixedPrecisionOptimizer,
    world: World,
    fingerprint: str | None,
    taken: Taken | None = None,
) -> Progress:
    """Put the state of ``checkpoint`` into model and optimizer; return where to go on. Collective.

    Args:
        fingerprint: of the data; None: nothing is known of them, or it has been compared already.
        taken: None: as the flags say.

    Raises:
        CheckpointError: it is of another model or other data; nothing has been changed then.
    """
    taken = taken or Taken.of(config.checkpoint)
    with marked(is_of_this_rank=False):
        check_fits(checkpoint, config, fingerprint, taken)
        if taken.optimizer:
            _check_moments(checkpoint)
    records = list(weight_records(module, optimizer))
    if taken.optimizer and not checkpoint.state["optimizer_steps"]:
        optimizer.inner.state.clear()  # fp16 had skipped every step: there were no moments
    elif taken.optimizer:
        make_moments(optimizer)
        records += optimizer_records(module, optimizer)
    _load(checkpoint, records, resizes_vocab=config.checkpoint.resize_vocab)
    optimizer.copy_masters_to_parameters()
    if taken.optimizer:
        optimizer.scaler.load(checkpoint.state["scaler"])
        set_optimizer_steps(optimizer, checkpoint.state["optimizer_steps"])
    if taken.generators and checkpoint.state["layout"] == asdict(world.grid.topology):
        restore_rng(checkpoint, world)
    return Progress(**checkpoint.state["progress"]) if taken.counters else Progress()


def check_fits(checkpoint: Checkpoint, config: Config, fingerprint: str | None, taken: Taken) -> None:
    """Check that ``checkpoint`` is of this model, these data and this optimizer, as far as they are ``taken``.

    Raises:
        CheckpointError: it is not.
    """
    check_model(checkpoint.state["model"], config)
    if taken.data:
        _check_data(checkpoint, fingerprint, config.checkpoint.allow_data_change)
    saved, now = checkpoint.state.get("optimizer"), config.optimizer.optimizer
    if taken.optimizer and saved != now:
        raise CheckpointError(
            f"the optimizer must be that of the checkpoint, got --optimizer {now} and {saved} in {checkpoint.path}. "
            "Give the same one, or add --no-load-optim to go on with a fresh optimizer."
        )


def _load(checkpoint: Checkpoint, records: list[TensorRecord], *, resizes_vocab: bool) -> None:
    """Fill the records, tables of a vocabulary that has grown or shrunk by its rule. Collective."""
    held = {name: checkpoint.shape(name) for name in checkpoint.names()} if resizes_vocab else {}
    resized = [r for r in records if r.name in held and is_resized(held[r.name], r.shard.global_shape)]
    other = {record.name for record in resized}
    checkpoint.load([record for record in records if record.name not in other])
    for record in resized:
        read = functools.partial(checkpoint.read, record.name)
        fill(record.shard.unpadded(record.tensor), record.shard, held[record.name], read)


def _check_between_steps(optimizer: MixedPrecisionOptimizer) -> None:
    if any(master.grad is not None for group in optimizer.param_groups for master in group["params"]):
        raise RuntimeError(
            "a checkpoint can be saved between steps only: gradients are held, which it would not keep. Save after "
            "the optimizer's step"
        )


def _check_moments(checkpoint: Checkpoint) -> None:
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
