"""Resume the training data at the position stored in a checkpoint.

Data sets report their position as an ``order`` (``megatron.data.blended_dataset.SampleOrder``); a user's data sets may
have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from megatron import log
from megatron.checkpoint import former
from megatron.checkpoint.torch_dist.folder import BACKEND as TORCH_DIST
from megatron.config import Config
from megatron.data import resumed_order
from megatron.data.blend_resume import SAME_LENGTH
from megatron.data.blended_dataset import SampleOrder
from megatron.data.megatron_order.order import MegatronOrder
from megatron.data.megatron_order.resume import check_megatron_resume
from megatron.errors import CheckpointError
from megatron.training.compatibility import changed_data_settings
from megatron.training.data import RunData


class SavedData(NamedTuple):
    """Training data in a checkpoint: its identity, and the position in each corpus."""

    fingerprint: str | None = None
    order: Mapping[str, Any] | None = None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> SavedData:
        """Read the saved data from checkpoint metadata."""
        return cls(metadata.get("data_fingerprint"), metadata.get("data_order"))


def resume_order(
    data: RunData, metadata: Mapping[str, Any], tokens_per_sample: int | None = None, *, allow_change: bool,
    config: Config | None = None,
) -> SampleOrder | None:  # fmt: skip
    """Return the sample order that continues the checkpoint's; None if the data set has no order.

    Args:
        metadata: checkpoint metadata.
        tokens_per_sample: the run's tokens per sample; None: as in the checkpoint.
        config: run configuration, used to name the settings that differ from the checkpoint's.

    Raises:
        CheckpointError: the checkpoint has other data or stores no position; the same on every rank.
    """
    ratio = _length_ratio(metadata, tokens_per_sample)
    if data.order is None:
        return None
    saved = metadata.get("data_order") or metadata.get("data_fingerprint")
    consumed = metadata["progress"]["samples_consumed"]
    if not saved:
        if consumed and not _continues_megatron_order(metadata, config):
            _check_unknown_data(consumed, allow_change)
        return data.order
    settings = {} if config is None else changed_data_settings(metadata.get("config", {}), config)
    order: SampleOrder
    if isinstance(data.order, MegatronOrder):
        order = data.order
        lines = check_megatron_resume(order, saved, consumed, allow_change=allow_change, settings=settings)
    else:
        order, lines = resumed_order(
            data.order, saved, consumed, allow_change=allow_change, ratio=ratio, settings=settings
        )
    for line in lines:
        log.info(line)
    return order


def _length_ratio(metadata: Mapping[str, Any], tokens_per_sample: int | None) -> Fraction:
    """Return the checkpoint's tokens per sample divided by the run's; if they differ, log the next sample."""
    progress = former.convert_progress(metadata) if metadata["progress"] else {}
    samples, tokens = progress.get("samples_consumed", 0), progress.get("tokens_consumed")
    if not samples or tokens is None or tokens_per_sample is None or tokens == samples * tokens_per_sample:
        return SAME_LENGTH
    log.info(
        f"data: samples have {tokens_per_sample} tokens, and {tokens // samples} in the checkpoint: continuing at "
        f"sample {-(-tokens // tokens_per_sample)}, the first that begins at or after the {tokens} consumed tokens"
    )
    return Fraction(tokens, samples * tokens_per_sample)


def _continues_megatron_order(metadata: Mapping[str, Any], config: Config | None) -> bool:
    """Return True if the checkpoint is Megatron-LM's and the run reads the samples in Megatron-LM's order."""
    return metadata.get("format") == TORCH_DIST and config is not None and config.data.has_megatron_order


def _check_unknown_data(consumed: int, allow_change: bool) -> None:
    """Reject a checkpoint without a data identity, unless --allow-data-change is given."""
    problem = f"the checkpoint does not identify the data of its {consumed} consumed samples"
    if not allow_change:
        raise CheckpointError(
            f"{problem}: some samples may be repeated. Use the data set that it was trained on, add "
            "--allow-data-change to continue as if they were the first samples of the current data, or add --finetune "
            "to start from the weights."
        )
    log.info(f"data: {problem}; continuing as if they were the first samples of the current data")


EXCLUSION = "excluded_documents"
"""Key of the digest of --exclude in checkpoint metadata."""


def check_exclusion(metadata: Mapping[str, Any], exclusion: str | None, *, allow_change: bool) -> None:
    """Check that a resumed run still excludes documents if the checkpoint's run did. A new or changed list is logged.

    Args:
        exclusion: digest of this run's list; None without --exclude.

    Raises:
        CheckpointError: the checkpoint has a list, but this run has none; the same on every rank.
    """
    saved = metadata.get(EXCLUSION)
    if saved == exclusion:
        return
    if exclusion is None and not allow_change:
        raise CheckpointError(
            f"the run of the checkpoint excluded documents (--exclude, list {saved}), but this run has no list: their "
            "tokens would be trained on again. Set --exclude, or add --allow-data-change"
        )
    change = "new" if saved is None else f"was {saved}"
    log.info(f"data: --exclude: list {exclusion or 'none'} ({change}); the order of the samples does not change")


def data_to_save(data: RunData, samples_consumed: int, loaded: SavedData) -> SavedData:
    """Return the training data identity and the position after ``samples_consumed`` samples.

    Args:
        loaded: the entries in the resumed checkpoint; a run without training data passes them on.
    """
    if not data.has_training:
        return loaded
    return SavedData(data.fingerprint, None if data.order is None else data.order.state(samples_consumed))
