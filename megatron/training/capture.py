"""Capture a run's tensors and metadata at one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.checkpoint import CapturedState
from megatron.config import Config
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.compatibility import machine_properties
from megatron.training.state_records import (
    optimizer_records,
    optimizer_steps,
    rng_records,
    router_records,
    weight_records,
)
from megatron.training.train_progress import TrainProgress
from megatron.training.world import World


def capture(
    progress: TrainProgress,
    *,
    config: Config,
    module: torch.nn.Module,
    optimizer: MixedPrecisionOptimizer,
    world: World,
    fingerprint: str | None,
    order: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> CapturedState:
    """Return tensors and metadata for a checkpoint at this step. Tensors are not copied.

    Args:
        fingerprint: training data identity.
        order: position within each corpus, for data sets that report it.
        extra: additional JSON-serializable metadata.

    Raises:
        RuntimeError: called within a step, while there are gradients, which a checkpoint does not store.
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
    progress: TrainProgress,
    *,
    config: Config,
    optimizer: MixedPrecisionOptimizer,
    world: World,
    fingerprint: str | None,
    order: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the metadata as in ``capture``, without tensors.

    Raises:
        RuntimeError: called within a step, while there are gradients, which a checkpoint does not store.
    """
    _check_between_steps(optimizer)
    return {
        "progress": progress.to_metadata(config.tokens_per_sample),
        "scaler": optimizer.scaler.state(),
        "optimizer": config.optimizer.optimizer,
        "optimizer_steps": optimizer_steps(optimizer),
        "model": config.identity(),
        "config": config.to_dict(),
        "layout": world.grid.topology.axis_sizes(),
        "data_fingerprint": fingerprint,
        "data_order": order,
        "torch": torch.__version__,
        "machine": machine_properties(world.device_type),
        **(extra or {}),
    }


def _check_between_steps(optimizer: MixedPrecisionOptimizer) -> None:
    if any(main_param.grad is not None for group in optimizer.param_groups for main_param in group["params"]):
        raise RuntimeError(
            "a checkpoint can be saved only between steps, because it does not contain gradients. Save after the "
            "optimizer step"
        )
