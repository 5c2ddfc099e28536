"""The decision whether a run checks its layout, the same on every rank. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron import accelerators
from megatron.config import Config

VARIABLE = "MEGATRON_PROVE"
"""Environment variable: 0 turns off the default check on CPUs, as the test suite does. --prove takes precedence."""
BUILT_IN_PROGRAMS = "megatron.training.programs"


@dataclass(frozen=True)
class CheckPolicy:
    """The decision on a run's layout check.

    Args:
        skip_reason: why the layout is not checked; "" if it is checked.
        is_reported: ``skip_reason`` is logged.
        waits: the first step waits for the result; otherwise the check runs alongside the steps.
    """

    skip_reason: str = ""
    is_reported: bool = False
    waits: bool = False

    @property
    def is_checked(self) -> bool:
        return not self.skip_reason


def check_policy(config: Config, device_type: str, world_size: int, model_provider: Callable[[], Any]) -> CheckPolicy:
    """Decide whether a run with these settings is checked.

    Args:
        device_type: the run's device.
        world_size: the run's rank count.
    """
    is_requested = config.run.prove is True or config.run.prove_only
    if config.run.prove is False:
        return CheckPolicy("--no-prove")
    if not is_requested and os.environ.get(VARIABLE) == "0":
        return CheckPolicy(f"{VARIABLE}=0")
    if not is_requested and device_type != "cpu":
        return CheckPolicy(f"off by default on {device_type} (--prove turns it on)")
    if world_size == 1:
        return CheckPolicy("one process has nothing to compare with", is_reported=is_requested)
    if device_type not in accelerators.BUILT_IN and not config.run.prove_only:
        return CheckPolicy(f"the adaptors of {device_type} also act on the CPU", is_reported=is_requested)
    if not is_requested and not is_built_in(model_provider):
        return CheckPolicy("the model is the script's own (--prove checks it)", is_reported=True)
    return CheckPolicy(waits=is_requested)


def is_built_in(provider: Callable[..., Any]) -> bool:
    """Return True if a script's function belongs to a built-in program."""
    return str(getattr(provider, "__module__", "")).startswith(BUILT_IN_PROGRAMS)
