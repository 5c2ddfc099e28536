"""Resume: restore a run from a checkpoint.

| step | file |
|---|---|
| choose the run folder and the checkpoint | ``run_folder.py``, ``checkpoint_source.py``, ``checkpoint/loading.py`` |
| check that the checkpoint fits the run | ``checkpoint_checks.py``; the rules are in ``compatibility.py`` |
| load weights and optimizer | ``restore`` below; ``deepspeed_checkpoint.py``, ``pretrained.py`` for other formats |
| loss scale, random states, counters | ``loss_scale_resume.py``, ``state_records.py``, ``train_progress.py`` |
| position in the data | ``data_resume.py`` |
| states of the callbacks | ``callback_states.py`` |

The checkpointer calls ``resume`` in ``on_train_start``, and ``roll_back_to`` when the stability guard rolls back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint import Checkpoint, TensorRecord, open_newest
from megatron.checkpoint.downloading import fetch_newest
from megatron.checkpoint.huggingface.origin import COPIED_ENTRIES, STATE
from megatron.checkpoint.huggingface.tokenizer import origin_in
from megatron.checkpoint.resized_vocab import fill_resized, is_resized
from megatron.config import Config
from megatron.errors import marked
from megatron.models.common.huggingface_mtp import PREFIX
from megatron.optim import MixedPrecisionOptimizer
from megatron.training import deepspeed_checkpoint, deepspeed_folders
from megatron.training.callback_states import callback_states_in
from megatron.training.checkpoint_checks import check_fits, check_tokenizer, has_moments
from megatron.training.checkpoint_lineage import CheckpointLineage
from megatron.training.checkpoint_source import is_deepspeed_folder
from megatron.training.compatibility import layout_text, warn_of_changes, warn_of_weights
from megatron.training.data_resume import SavedData, check_exclusion, resume_order
from megatron.training.finished_run import finished_text
from megatron.training.loss_scale_resume import restore_scaler
from megatron.training.pretrained import is_pretrained, load_pretrained
from megatron.training.restore_options import EVERYTHING, RestoreOptions
from megatron.training.run_folder import RunPaths
from megatron.training.state_records import (
    make_moments,
    optimizer_records,
    restore_rng,
    router_records,
    set_optimizer_steps,
    store_quantized,
    weight_records,
)
from megatron.training.timeouts import LOADING
from megatron.training.train_progress import TrainProgress
from megatron.training.trainer import Trainer
from megatron.training.world import World


@dataclass(frozen=True)
class ResumedCheckpoint:
    """The checkpoint that a run has resumed from.

    Args:
        path: the checkpoint or Hugging Face folder.
        sequence: the checkpoint's sequence number in its folder.
        is_complete: True if everything was restored, so that a rollback may return to this checkpoint.
        data: training data identity and position; empty if the position was not restored.
        export_metadata: entries for an export to Hugging Face, which this run's checkpoints also store.
        lineage: checkpoints in the folder that belong to this history of the run.
    """

    path: Path
    sequence: int = 0
    is_complete: bool = False
    data: SavedData = SavedData()
    export_metadata: dict[str, Any] = field(default_factory=dict)
    lineage: CheckpointLineage = field(default_factory=CheckpointLineage)


def resume(
    trainer: Trainer, paths: RunPaths, tokenizer: str | None, tokenizer_probe: Mapping[str, Any] | None = None
) -> ResumedCheckpoint | None:
    """Restore the run from the checkpoint that the flags name; return None if they name none. Collective.

    The flags also select which state is restored. A restart by the launcher always restores everything.

    Args:
        tokenizer, tokenizer_probe: the run's tokenizer identity and probe, if known.

    Raises:
        CheckpointError: the checkpoint is damaged or does not fit the run. Nothing has been modified in this case.
    """
    config, flags, world = trainer.config, trainer.config.checkpoint, trainer.world

    # Checkpoint: chosen by run_folder.choose; all ranks together download it from an object store.
    source = paths.source
    if paths.remote is not None and paths.downloads is not None:
        with trainer.phases.during(LOADING), marked(is_of_this_rank=False):
            source = fetch_newest(paths.remote, paths.downloads, world.grid.host, strict=flags.strict_load)
    if source is None:
        return None
    with trainer.phases.during(LOADING):
        if is_pretrained(source):
            load_pretrained(trainer, source)
            export_metadata = {STATE: origin_in(source).state()} if world.rank == 0 else {}
            return ResumedCheckpoint(source, export_metadata=export_metadata)
        checkpoint = open_source(source, world, strict=flags.strict_load)
        metadata = checkpoint.metadata
        options = EVERYTHING if paths.is_restart else RestoreOptions.from_flags(flags)

        # Compatibility: tokenizer, data, model, optimizer.
        order = None
        with marked(is_of_this_rank=False):
            check_tokenizer(metadata, tokenizer, tokenizer_probe, allow_change=flags.allow_vocab_change, config=config)
            if options.data:
                order = resume_order(
                    trainer.data,
                    metadata,
                    config.tokens_per_sample,
                    allow_change=flags.allow_data_change,
                    config=config,
                )
                if trainer.data.has_training:
                    check_exclusion(metadata, trainer.data.exclusion, allow_change=flags.allow_data_change)
            fingerprint = trainer.data.fingerprint if trainer.data.order is None else None
            check_fits(checkpoint, config, fingerprint, options)

        # Weights, optimizer, loss scale, random states, counters.
        if deepspeed_folders.is_deepspeed_checkpoint(checkpoint):
            trainer.engine.use_deepspeed()
            trainer.progress = deepspeed_checkpoint.restore(checkpoint, trainer.engine.engine, config, world, options)
        else:
            trainer.progress = restore_trainer(trainer, checkpoint, options)

        # Position in the data, states of the callbacks.
        if order is not None:
            trainer.data.use_order(order)
        if options.optimizer:
            trainer.load_state_dict(callback_states_in(metadata))
        _log_resume(trainer, checkpoint, options)
    return ResumedCheckpoint(
        checkpoint.path,
        checkpoint.sequence,
        is_complete=options == EVERYTHING,
        data=SavedData.from_metadata(metadata) if options.data else SavedData(),
        export_metadata={name: metadata[name] for name in COPIED_ENTRIES if name in metadata},
        lineage=CheckpointLineage.from_metadata(metadata),
    )


def roll_back_to(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Restore everything except the data position from one of this run's earlier checkpoints. Collective."""
    with marked(is_of_this_rank=False):
        check_fits(checkpoint, trainer.config, None, EVERYTHING)
    trainer.progress = restore_trainer(trainer, checkpoint, EVERYTHING)
    trainer.load_state_dict(callback_states_in(checkpoint.metadata))


def open_source(source: Path, world: World, *, strict: bool = False) -> Checkpoint:
    """Open and verify the newest checkpoint in ``source``, in any format. Collective.

    Args:
        source: a run folder, its checkpoint folder, one checkpoint, or a Megatron-LM folder.
        strict: raise if the newest one is damaged, instead of trying older ones.

    Raises:
        CheckpointError: there is no checkpoint that verifies.
    """
    if is_deepspeed_folder(source):
        return deepspeed_folders.open_newest(source, world.grid.host, strict=strict)
    return open_newest(source, world.grid.host, strict=strict)


def restore_trainer(trainer: Trainer, checkpoint: Checkpoint, options: RestoreOptions) -> TrainProgress:
    """Restore the trainer's model and optimizer with ``restore``. Collective."""
    engine = trainer.engine
    return restore(
        checkpoint,
        config=trainer.config,
        module=engine.module,
        optimizer=engine.optimizer,
        world=trainer.world,
        options=options,
    )


def restore(
    checkpoint: Checkpoint,
    *,
    config: Config,
    module: torch.nn.Module,
    optimizer: MixedPrecisionOptimizer,
    world: World,
    options: RestoreOptions,
) -> TrainProgress:
    """Load a checkpoint into model, optimizer and random generators; return the restored counters. Collective.

    The checkpoint must have passed ``check_fits``.

    Raises:
        CheckpointError: a tensor is missing or has another shape; raised on all ranks before anything is copied.
    """
    metadata = checkpoint.metadata

    # Weights (main params) and moments, in one pass over the files.
    records = list(weight_records(module, optimizer))
    if config.checkpoint.finetune:
        records = without_new_mtp(records, checkpoint.names())
    if options.optimizer:
        if metadata["optimizer_steps"] or has_moments(checkpoint):
            make_moments(optimizer)
            records += optimizer_records(module, optimizer)
        else:
            optimizer.inner.state.clear()  # no moments: fp16 skipped every step, or SGD without momentum
        records += router_records(module, world)
    _load_records(checkpoint, records, resizes_vocab=config.checkpoint.resize_vocab)
    store_quantized(module, optimizer, records)
    optimizer.copy_main_params_to_parameters()

    # Loss scale, and the step counts for Adam's bias correction.
    if options.optimizer:
        restore_scaler(optimizer.scaler, metadata, config)
        set_optimizer_steps(optimizer, metadata["optimizer_steps"])

    # Each rank has its own random state, so random states are restored only in the same layout.
    if options.generators and layout_text(metadata["layout"], world.grid.topology) is None:
        restore_rng(checkpoint, world)

    # Counters: learning rate, batch size and run length depend on them.
    return TrainProgress.from_metadata(metadata, config.tokens_per_sample) if options.counters else TrainProgress()


def without_new_mtp(records: list[TensorRecord], saved_names: Iterable[str]) -> list[TensorRecord]:
    """Return ``records`` without multi-token prediction layers that the checkpoint lacks; they keep initial weights."""
    names = set(saved_names)
    new_names = [
        record.name for record in records if record.name.startswith(f"weights/{PREFIX}") and record.name not in names
    ]
    if new_names:
        log.info("the checkpoint lacks multi-token prediction layers of this run, which start from initial weights")
    return [record for record in records if record.name not in new_names]


def _load_records(checkpoint: Checkpoint, records: list[TensorRecord], *, resizes_vocab: bool) -> None:
    """Fill the records; ``resized_vocab.fill_resized`` handles tables with a resized vocabulary. Collective."""
    saved_shapes = {name: checkpoint.shape(name) for name in checkpoint.names()} if resizes_vocab else {}
    resized = [
        record
        for record in records
        if record.name in saved_shapes and is_resized(saved_shapes[record.name], record.shard.global_shape)
    ]
    resized_names = {record.name for record in resized}
    checkpoint.load([record for record in records if record.name not in resized_names])
    for record in resized:
        read_shard = functools.partial(checkpoint.read, record.name)
        fill_resized(record.shard.unpadded(record.tensor), record.shard, saved_shapes[record.name], read_shard)


def _log_resume(trainer: Trainer, checkpoint: Checkpoint, options: RestoreOptions) -> None:
    """Log what was loaded and how this run differs from the one that saved the checkpoint."""
    config, world, metadata = trainer.config, trainer.world, checkpoint.metadata
    log.info(f"loaded {checkpoint.path}: resuming after step {trainer.progress.step}")
    if layout_change := layout_text(metadata["layout"], world.grid.topology):
        rng_note = "; torch's generators start from --seed" if options.generators else ""
        log.info(f"{layout_change}: each rank reads the slices that it needs{rng_note}")
    if world.rank == 0:
        if options.data:
            warn_of_changes(metadata, config, world.device_type)
        else:
            warn_of_weights(metadata.get("config", {}), config, checkpoint.path)
    if not trainer.steps_left and not config.checkpoint.eval_only:
        log.info(finished_text(trainer))
