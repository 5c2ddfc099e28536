"""``initialize`` with DeepSpeed's signature: pipeline models get our engine, everything else DeepSpeed's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT

from tds.chatter import without_prints
from tds.engine import PipelineEngine


@functools.wraps(deepspeed.initialize, assigned=("__doc__",))
def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Return (engine, optimizer, dataloader, scheduler) as ``deepspeed.initialize`` does. Collective."""
    given = dict(locals())
    if not isinstance(model, deepspeed.PipelineModule) or isinstance(model, deepspeed.DualPipeVModule):
        return deepspeed.initialize(**given)
    if mpu is not None:
        raise ValueError(
            f"mpu must be None for a pipeline model, which brings its own grid, got {type(mpu).__name__}. Leave it out."
        )
    with _our_engine(), without_prints():
        return deepspeed.initialize(**given)


@contextmanager
def _our_engine() -> Iterator[None]:
    """Let ``deepspeed.initialize`` build our engine for a pipeline model.

    All that it does around the engine (configuration, ZeRO contexts, collection of garbage) stays its own.
    """
    stock = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = PipelineEngine
    try:
        yield
    finally:
        deepspeed.PipelineEngine = stock
