"""MTPFeatures: flags for multi-token prediction, named as in Megatron-LM, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.config.option import option
from megatron.config.pipeline_layout import FLAG as LAYOUT_FLAG
from megatron.config.pipeline_layout import num_mtp_layers, parse_layout

_option = partial(
    option, family_kind="decoder", elsewhere="multi-token prediction is supported in decoders only; remove it"
)

TRAINING = ("mtp_loss_scaling_factor",)
"""Fields that affect how a model is trained but not what it computes."""


@dataclass(frozen=True, kw_only=True)
class MTPFeatures:
    """Multi-token prediction for a decoder; a base of ``ModelConfig``."""

    mtp_num_layers: int = _option(
        0,
        "number of multi-token prediction layers D: layer k predicts the token k + 1 positions ahead, as in "
        "DeepSeek-V3; they train with the model on the last pipeline stage, and evaluation and generation ignore "
        "them; 0: none",
        minimum=0,
    )
    mtp_loss_scaling_factor: float = _option(
        0.1,
        "weight of the multi-token prediction losses: the loss to train on is loss + this / D x the sum of "
        "mtp_1_loss ... mtp_D_loss, each a mean over the targets of its layer",
        minimum=0,
    )


def mtp_problems(config: Any) -> Iterator[str]:
    """Yield an error message for each setting in ``config``, a decoder ``Config``, that excludes --mtp-num-layers."""
    model, parallel, depth = config.model, config.parallel, config.model.mtp_num_layers
    if not depth:
        yield from _layout_problems(config)
        return
    if not model.num_layers:
        yield f"--mtp-num-layers {depth} needs a decoder with at least one layer, got --num-layers 0. Raise it"
    shortest = min(_sequence_lengths(config))
    if depth >= shortest:
        yield (
            "--mtp-num-layers must be below the sequence length, because layer k predicts the token k + 1 positions "
            f"ahead, got {depth} and {shortest}. Lower it"
        )
    if model.embed_layernorm:
        yield (
            f"--mtp-num-layers {depth} does not support --embed-layernorm: the last stage has no copy of this norm. "
            "Remove one of them"
        )
    if parallel.has_pipeline and parallel.partition_method != "balanced":
        yield (
            f"--mtp-num-layers {depth} needs all multi-token prediction layers on the last pipeline stage, which "
            f"--partition-method {parallel.partition_method} does not ensure. Use --partition-method balanced"
        )
    yield from _layout_problems(config)


def _sequence_lengths(config: Any) -> list[int]:
    """List all sequence lengths in the run; an invalid schedule, which is reported elsewhere, is ignored."""
    try:
        return list(config.batch.seq_lengths.all())
    except ValueError:
        return [config.batch.seq_length]


def _layout_problems(config: Any) -> Iterator[str]:
    """Yield an error message for a wrong number or position of m in --pipeline-model-parallel-layout."""
    depth, layout = config.model.mtp_num_layers, config.parallel.pipeline_layout
    if layout is None or not config.parallel.has_pipeline:
        return
    try:
        chunks = parse_layout(layout)
    except ValueError:  # reported by ``ParallelConfig.problems``
        return
    count = num_mtp_layers(chunks)
    if count != depth:
        yield (
            f"{LAYOUT_FLAG} must contain one m for each multi-token prediction layer, got {count} m and "
            f"--mtp-num-layers {depth} in {layout!r}. Write {'m' * min(depth, 4) or 'no m'} before L"
        )
    if count != chunks[-1].count("m"):
        yield (
            f"{LAYOUT_FLAG} must have every m in the last chunk, next to L, because the multi-token prediction layers "
            f"share the hidden states and the loss of the last stage, got {layout!r}. Move them there"
        )
