"""Check that a checkpoint fits the run: model, data, tokenizer, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron import log
from megatron.checkpoint import Checkpoint, check_model, former
from megatron.config import Config
from megatron.data.blend_resume import TOKENIZER
from megatron.errors import CheckpointError
from megatron.tokenizer import probe
from megatron.tokenizer.identity import is_same
from megatron.training.compatibility import changed_data_settings
from megatron.training.deepspeed_folders import is_deepspeed_checkpoint
from megatron.training.restore_options import RestoreOptions


def check_fits(checkpoint: Checkpoint, config: Config, fingerprint: str | None, options: RestoreOptions) -> None:
    """Check that a checkpoint has the run's model and, depending on ``options``, its data and optimizer.

    Args:
        fingerprint: the run's training data identity; None if it is unknown or ``resume_order`` compares it.

    Raises:
        CheckpointError: model, data or optimizer differ, or the checkpoint has no optimizer state.
    """
    check_model(checkpoint.metadata["model"], config)
    if options.data:
        _check_data(checkpoint, fingerprint, config)
    saved, now = checkpoint.metadata.get("optimizer"), config.optimizer.optimizer
    if options.optimizer and saved != now:
        raise CheckpointError(
            f"--optimizer must match the checkpoint, got --optimizer {now} and {saved} in {checkpoint.path}. "
            "Use the same optimizer, or add --no-load-optim to continue with new optimizer state."
        )
    if options.optimizer:
        _check_second_moments(checkpoint, config)
    if options.optimizer and not is_deepspeed_checkpoint(checkpoint):
        check_moments(checkpoint)


def _check_second_moments(checkpoint: Checkpoint, config: Config) -> None:
    """Raise CheckpointError if adaptive Muon's second moments were saved for another method or other matrices."""
    if config.optimizer.optimizer != "adaptive_muon":
        return
    names = ["adaptive_muon_moment2_method"]
    if config.optimizer.adaptive_muon_moment2_method == "normuon":
        names += ["muon_split_qkv", "muon_split_qkv_heads"]
    saved = former.convert_settings(checkpoint.metadata.get("config", {})).get("optimizer", {})
    for name in names:
        now = getattr(config.optimizer, name)
        if saved.get(name, now) != now:
            raise CheckpointError(
                f"--{name.replace('_', '-')} must match the checkpoint with --optimizer adaptive_muon, got {now} and "
                f"{saved[name]} in {checkpoint.path}. Use the same value, or add --no-load-optim to continue with new "
                "optimizer state."
            )


def has_moments(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint contains optimizer state."""
    return any(name.startswith("optimizer/") for name in checkpoint.names())


def check_moments(checkpoint: Checkpoint) -> None:
    """Check that a native checkpoint contains optimizer state.

    Raises:
        CheckpointError: it was saved with --no-save-optim.
    """
    metadata = checkpoint.metadata
    settings = former.convert_settings(metadata.get("config", {})).get("optimizer", {})
    has_momentum = settings.get("optimizer") == "sgd" and settings.get("sgd_momentum")
    # SGD does not count its steps.
    updates = former.convert_progress(metadata)["updates"] if has_momentum else metadata["optimizer_steps"]
    if updates and not has_moments(checkpoint):
        reason = metadata.get("optimizer_missing") or "it was saved with --no-save-optim"
        raise CheckpointError(
            f"{checkpoint.path} contains no optimizer state ({reason}). "
            "Add --no-load-optim to continue with new optimizer state, or --finetune to start from its weights."
        )


def _check_data(checkpoint: Checkpoint, fingerprint: str | None, config: Config) -> None:
    """Raise CheckpointError if the training data differs, unless --allow-data-change is set."""
    saved = checkpoint.metadata.get("data_fingerprint")
    if not saved or not fingerprint or saved == fingerprint:
        return
    log.debug(f"data: fingerprint {saved} in {checkpoint.path}; now: {fingerprint}")
    changed = changed_data_settings(checkpoint.metadata.get("config", {}), config)
    differences = "; ".join(text for texts in changed.values() for text in texts)
    differences = differences or "the documents or another setting of the samples changed"
    if not config.checkpoint.allow_data_change:
        raise CheckpointError(
            f"the data differ from the data of the checkpoint {checkpoint.path}: {differences}. Samples would be "
            "repeated or lost. Use the previous data and settings, add --allow-data-change to continue after the same "
            "number of tokens, or add --finetune to start from the weights."
        )
    log.info(f"the data differ from the checkpoint ({differences}); continuing after the same number of tokens")


def check_tokenizer(
    metadata: Mapping[str, Any],
    identity: str | None,
    run_probe: Mapping[str, Any] | None = None,
    *,
    allow_change: bool,
    config: Config | None = None,
) -> None:
    """Check that the run has the checkpoint's tokenizer, if both are known.

    Args:
        metadata: checkpoint metadata.
        identity, run_probe: the run's tokenizer identity and probe.
        config: run configuration, used to name the settings that differ.

    Raises:
        CheckpointError: the tokenizers differ; the same on every rank.
    """
    saved = metadata.get("tokenizer")
    text = probe.difference(metadata.get(probe.PROBE), run_probe)
    if text is None and (saved is None or identity is None or is_same(saved, identity)):
        return
    log.debug(f"tokenizer identity in the checkpoint: {saved}; now: {identity}")
    changed = [] if config is None else changed_data_settings(metadata.get("config", {}), config)[TOKENIZER]
    has_same_files = saved is not None and identity is not None and is_same(saved, identity)
    differences = "; ".join([*changed, *([text] if text else [])]) or "its files have changed"
    fix = "Install the previous version of the library" if has_same_files else "Use the previous tokenizer"
    if not allow_change:
        raise CheckpointError(
            f"the tokenizer must match the checkpoint, but {differences}. Token ids would have another meaning. "
            f"{fix}. Add --allow-vocab-change only if the ids have the same meaning, or if the model "
            "is to learn new ones"
        )
    log.info(f"the tokenizer differs from the checkpoint ({differences}); accepted because of --allow-vocab-change")
