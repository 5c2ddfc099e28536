"""Everything that a run needs to go on exactly: counters, weights, optimizer, loss scale, random states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint import Checkpoint, compare_model_config, open_checkpoint, open_latest, save
from megatron.config import Config
from megatron.errors import CheckpointError, marked
from megatron.optim import MixedPrecisionOptimizer
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
    records = list(weight_records(module, optimizer))
    if not config.checkpoint.no_save_optim:
        records += optimizer_records(module, optimizer)
    records += rng_records(world)
    state = {
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
    records = list(weight_records(module, optimizer))
    if wants_optimizer and checkpoint.state["optimizer_steps"]:  # else fp16 has skipped every step: no moments
        make_moments(optimizer)
        records += optimizer_records(module, optimizer)
    checkpoint.load(records)
    optimizer.copy_masters_to_parameters()
    if wants_optimizer:
        optimizer.scaler.load(checkpoint.state["scaler"])
        set_optimizer_steps(optimizer, checkpoint.state["optimizer_steps"])
    if is_whole and not flags.no_load_rng:
        _restore_rng(checkpoint, world)
    return Progress() if flags.finetune else Progress(**checkpoint.state["progress"])


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
    restore_rng(checkpoint, world)
