"""--prove-only: check the layout of a run without starting the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron import device, log
from megatron.config import Config
from megatron.training.proof.check_process import PROVE_ONLY_LIMIT_S, CheckJob, CheckProcess
from megatron.training.proof.check_result import NOT_CHECKED, OK, CheckResult
from megatron.training.proof.policy import check_policy, is_built_in

if TYPE_CHECKING:
    import torch

    from megatron.training.data import DatasetsProvider
    from megatron.training.step_engine import ForwardStep


def prove_only(
    config: Config,
    world_size: int,
    datasets_provider: DatasetsProvider,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
) -> int:
    """Check the layout on rank 0, and log the result.

    Returns:
        The exit code: 0 if the layout is correct or has only one process, otherwise 1.
    """
    result = check_now(config, world_size, datasets_provider, model_provider, forward_step)
    log.info(f"{result.line()}, {result.seconds:.1f} s")
    return 0 if result.state == OK or world_size == 1 else 1


def check_now(
    config: Config,
    world_size: int,
    datasets_provider: DatasetsProvider,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
) -> CheckResult:
    """Run the layout check, at the usual priority and with the limit ``PROVE_ONLY_LIMIT_S``."""
    requested = config.parallel.device
    device_type = device.choose() if requested == "auto" else requested
    policy = check_policy(config, device_type, world_size, model_provider)
    if not policy.is_checked:
        return CheckResult(NOT_CHECKED, policy.skip_reason)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import megatron.training.setup  # noqa: F401 - imports DeepSpeed, which selects its device by the variable

    own_data = None if is_built_in(datasets_provider) else datasets_provider
    providers = (model_provider, forward_step, own_data)
    job = CheckJob(config, world_size, device_type, *providers, limit_s=PROVE_ONLY_LIMIT_S, niceness=0)
    process = CheckProcess(job)
    try:
        return process.wait()
    finally:
        process.close()
