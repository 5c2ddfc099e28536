"""TrainState: everything that a run saves and restores: counters, weights, optimizer, random states."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint import (
    CapturedState,
    Checkpoint,
    RetentionPolicy,
    TensorRecord,
    check_model,
    former,
    open_latest,
)
from megatron.checkpoint.folders import CHECKPOINTS as CHECKPOINTS
from megatron.checkpoint.folders import checkpoints_in
from megatron.checkpoint.resized_vocab import fill, is_resized
from megatron.config import CheckpointConfig, Config
from megatron.config.checkpoint import DEFAULT_KEPT
from megatron.errors import CheckpointError, marked
from megatron.optim import MixedPrecisionOptimizer
from megatron.optim.grad_scaler import GradScaler
from megatron.training.compatibility import data_settings_changed, layout_text, machine
from megatron.training.state_records import (
    make_moments,
    optimizer_records,
    optimizer_steps,
    restore_rng,
    rng_records,
    router_records,
    set_optimizer_steps,
    weight_records,
)
from megatron.training.world import World


@dataclass
class TrainState:
    """The position of the run.

    A skipped step counts as a step and its samples as consumed, but the learning rate does not advance: it follows
    ``updates``, or ``samples_updated`` if the lengths of its schedule are samples. The same holds for samples that a
    rollback leaves out.

    A checkpoint also stores the tokens consumed, which are samples of one length: --seq-length, whatever the schedule.

    Attributes:
        step: steps taken, skipped ones included.
        updates: steps that updated the weights.
        samples_consumed: samples read, or left out after a rollback; the position in the data.
        samples_skipped: samples consumed of which no update was made.
    """

    step: int = 0
    updates: int = 0
    samples_consumed: int = 0
    samples_skipped: int = 0

    @classmethod
    def resumed(cls, state: Mapping[str, Any], tokens_per_sample: int) -> TrainState:
        """Return where a run goes on after the ``state`` of a checkpoint.

        That is the same sample, or with samples of another length the first that begins at or after as many tokens.
        """
        saved = former.progress(state)
        found = cls(**{each.name: saved[each.name] for each in fields(cls)})
        if "tokens_consumed" in saved:
            found.samples_consumed = -(-saved["tokens_consumed"] // tokens_per_sample)
            ratio = Fraction(found.samples_consumed, max(saved["samples_consumed"], 1))
            found.samples_skipped = round(found.samples_skipped * ratio)
        return found

    def saved(self, tokens_per_sample: int) -> dict[str, int]:
        """Return what a checkpoint says of it."""
        return {**asdict(self), "tokens_consumed": self.samples_consumed * tokens_per_sample}

    @property
    def samples_updated(self) -> int:
        """Samples of the updates that were made."""
        return self.samples_consumed - self.samples_skipped

    @property
    def skipped(self) -> int:
        return self.step - self.updates


@dataclass(frozen=True)
class RestoreOptions:
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
    def of(cls, flags: CheckpointConfig) -> RestoreOptions:
        """Return what the flags of a start say."""
        is_whole = not flags.finetune and not flags.eval_only
        has_state = is_whole and not flags.load_weights_only
        return cls(
            counters=not flags.finetune,
            data=is_whole,
            optimizer=has_state and not flags.no_load_optim,
            generators=has_state and not flags.no_load_rng,
        )


EVERYTHING = RestoreOptions()


def capture(
    progress: TrainState,
    *,
    config: Config,
    module: torch.nn.Module,
    optimizer: MixedPrecisionOptimizer,
    world: World,
    fingerprint: str | None,
    order: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> CapturedState:
    """Return the tensors and the metadata that a checkpoint of this step stores. Tensors are not copied.

    Args:
        fingerprint: identity of the training data.
        order: position within each corpus, for data sets that report it.
        extra: further metadata, as JSON can hold it.

    Raises:
        RuntimeError: within a step, while gradients are held, which a checkpoint does not store.
    """
    records = list(weight_records(module, optimizer))
    if not config.checkpoint.no_save_optim:
        records += optimizer_records(module, optimizer)
    records += [*router_records(module, world), *rng_records(world)]
    metadata = capture_metadata(
        progress, config=config, optimizer=optimizer, world=world, fingerprint=fingerprint, order=order, extra=extra
    )
    return CapturedState(progress.step, records, metadata)


def capture_metadata(
    progress: TrainState,
    *,
    config: Config,
    optimizer: MixedPrecisionOptimizer,
    world: World,
    fingerprint: str | None,
    order: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the metadata of ``capture``, without tensors.

    Raises:
        RuntimeError: within a step, while gradients are held, which a checkpoint does not store.
    """
    _check_between_steps(optimizer)
    return {
        "progress": progress.saved(config.tokens_per_sample),
        "scaler": optimizer.scaler.state(),
        "optimizer": config.optimizer.optimizer,
        "optimizer_steps": optimizer_steps(optimizer),
        "model": config.identity(),
        "config": config.to_dict(),
        "layout": world.grid.topology.sizes(),
        "data_fingerprint": fingerprint,
        "data_order": order,
        "torch": torch.__version__,
        "machine": machine(world.kind),
        **(extra or {}),
    }


def retention_of(flags: CheckpointConfig, *, loaded: Path | None = None, earlier: int = 0) -> RetentionPolicy:
    """Return the retention policy of the flags; ``loaded`` and ``earlier`` as in ``RetentionPolicy``."""
    automatic = DEFAULT_KEPT if flags.is_default_interval else None
    return RetentionPolicy(flags.keep_last, flags.keep_every, loaded, automatic, earlier)


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
    taken: RestoreOptions | None = None,
) -> TrainState:
    """Put the state of ``checkpoint`` into model and optimizer; return where to go on. Collective.

    Args:
        fingerprint: of the data; None: nothing is known of them, or it has been compared already.
        taken: None: as the flags say.

    Raises:
        CheckpointError: it is of another model or other data; nothing has been changed then.
    """
    taken = taken or RestoreOptions.of(config.checkpoint)
    with marked(is_of_this_rank=False):
        check_fits(checkpoint, config, fingerprint, taken)
        if taken.optimizer:
            _check_moments(checkpoint)
    records = list(weight_records(module, optimizer))
    if taken.optimizer and not (checkpoint.state["optimizer_steps"] or _has_moments(checkpoint)):
        optimizer.inner.state.clear()  # fp16 had skipped every step, or SGD had no momentum: there were no moments
    elif taken.optimizer:
        make_moments(optimizer)
        records += optimizer_records(module, optimizer)
    if taken.optimizer:
        records += router_records(module, world)
    _load(checkpoint, records, resizes_vocab=config.checkpoint.resize_vocab)
    optimizer.copy_main_params_to_parameters()
    if taken.optimizer:
        restore_scaler(optimizer.scaler, checkpoint.state, config)
        set_optimizer_steps(optimizer, checkpoint.state["optimizer_steps"])
    if taken.generators and layout_text(checkpoint.state["layout"], world.grid.topology) is None:
        restore_rng(checkpoint, world)
    return TrainState.resumed(checkpoint.state, config.tokens_per_sample) if taken.counters else TrainState()


def restore_scaler(scaler: GradScaler, state: Mapping[str, Any], config: Config) -> None:
    """Resume the loss scale of a checkpoint if both scales are dynamic; keep that of a new run otherwise.

    One line reports a loss scale that differs from the checkpoint's.

    Args:
        state: state of the checkpoint.
    """
    saved = dict(state.get("scaler") or {"scale": 1.0, "is_dynamic": False})  # empty in averaged and imported ones
    if "is_dynamic" not in saved:  # written by an earlier version
        precision = former.settings(state.get("config", {})).get("precision", {})
        saved["is_dynamic"] = precision.get("dtype") == "fp16" and not precision.get("loss_scale")
        saved["hysteresis"] = precision.get("hysteresis", scaler.hysteresis)
    scaler.load(saved)
    if (scaler.is_dynamic, scaler.scale) != (saved["is_dynamic"], saved["scale"]):
        log.info(f"{_describe_scale(scaler, config)}; {_describe_saved_scale(saved)}")


def _describe_scale(scaler: GradScaler, config: Config) -> str:
    if not scaler.is_dynamic:
        has_scale = config.precision.dtype == "fp16"
        return (
            f"loss scale: fixed at {scaler.scale:g}" if has_scale else f"loss scale: none in {config.precision.dtype}"
        )
    return f"loss scale: dynamic, starts at {scaler.scale:g}"


def _describe_saved_scale(saved: Mapping[str, Any]) -> str:
    if saved["is_dynamic"]:
        return f"the checkpoint has a dynamic one at {saved['scale']:g}"
    return (
        "the checkpoint has none" if saved["scale"] == 1.0 else f"the checkpoint has a fixed one of {saved['scale']:g}"
    )


def check_fits(checkpoint: Checkpoint, config: Config, fingerprint: str | None, taken: RestoreOptions) -> None:
    """Check that ``checkpoint`` is of this model, these data and this optimizer, as far as they are ``taken``.

    Raises:
        CheckpointError: it is not.
    """
    check_model(checkpoint.state["model"], config)
    if taken.data:
        _check_data(checkpoint, fingerprint, config)
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


def _has_moments(checkpoint: Checkpoint) -> bool:
    return any(name.startswith("optimizer/") for name in checkpoint.names())


def _check_moments(checkpoint: Checkpoint) -> None:
    state = checkpoint.state
    settings = former.settings(state.get("config", {})).get("optimizer", {})
    has_momentum = settings.get("optimizer") == "sgd" and settings.get("sgd_momentum")
    updates = former.progress(state)["updates"] if has_momentum else state["optimizer_steps"]  # SGD counts none
    if updates and not _has_moments(checkpoint):
        raise CheckpointError(
            f"{checkpoint.path} holds no optimizer state (it was saved with --no-save-optim). "
            "Add --no-load-optim to go on with a fresh optimizer, or --finetune to start anew from its weights."
        )


def _check_data(checkpoint: Checkpoint, fingerprint: str | None, config: Config) -> None:
    saved = checkpoint.state.get("data_fingerprint")
    if not saved or not fingerprint or saved == fingerprint:
        return
    log.debug(f"data: fingerprint {saved} in {checkpoint.path}; now: {fingerprint}")
    changed = data_settings_changed(checkpoint.state.get("config", {}), config)
    differences = "; ".join(text for texts in changed.values() for text in texts)
    differences = differences or "its documents or another setting of its samples have changed"
    if not config.checkpoint.allow_data_change:
        raise CheckpointError(
            f"the data must be those of the checkpoint {checkpoint.path}, but {differences}. Samples would be repeated "
            "or lost. Give the former data and settings, --allow-data-change to continue after the same number of "
            "tokens, or --finetune to start from the weights."
        )
    log.info(f"the data are not those of the checkpoint ({differences}); continuing after the same number of tokens")
