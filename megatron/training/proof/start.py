"""Start of a run's layout check, before process groups are created."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.config import Config
from megatron.training.callbacks.layout_check import LayoutCheck
from megatron.training.proof.check_process import CheckJob, CheckProcess
from megatron.training.proof.policy import check_policy, is_built_in

if TYPE_CHECKING:
    import torch

    from megatron.training.data import DatasetsProvider
    from megatron.training.step_engine import ForwardStep


def start_layout_check(
    config: Config,
    world_size: int,
    device_type: str,
    datasets_provider: DatasetsProvider,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
) -> LayoutCheck | None:
    """Start the layout check on rank 0 if the run has one, and return the callback that reports it.

    Must be called before the first process group and before the device is initialised, because the check is a fork of
    this process. Returns None for a run without training steps.
    """
    if config.checkpoint.eval_only or not config.batch.train_iters:
        return None
    policy = check_policy(config, device_type, world_size, model_provider)
    process = None
    if policy.is_checked and os.environ.get("RANK", "0") == "0":
        own_data = None if is_built_in(datasets_provider) else datasets_provider
        job = CheckJob(config, world_size, device_type, model_provider, forward_step, own_data)
        process = CheckProcess(job)
    return LayoutCheck(policy, process)
