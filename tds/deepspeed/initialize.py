"""``initialize`` with DeepSpeed's signature: tds's engine for pipeline models, DeepSpeed's for all others."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tds.deepspeed.alias import without_prints
from tds.deepspeed.api import TORCH_DISTRIBUTED_DEFAULT_PORT, deepspeed
from tds.deepspeed.engine import PipelineEngine
from tds.engine.pipeline_json import UNSUPPORTED_SECTIONS, remove_unsupported_sections


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
    arguments = dict(locals())
    if not isinstance(model, deepspeed.PipelineModule) or isinstance(model, deepspeed.DualPipeVModule):
        return deepspeed.initialize(**arguments)
    if mpu is not None:
        raise ValueError(
            f"mpu must be None for a pipeline model, which has its own grid, got {type(mpu).__name__}. Remove it."
        )
    arguments["config"] = _remove_unsupported(config)
    with _use_tds_engine(), without_prints():
        built = deepspeed.initialize(**arguments)
    if not isinstance(built[0], PipelineEngine):
        raise RuntimeError(
            f"deepspeed.initialize must build tds.PipelineEngine for a pipeline model, got {type(built[0]).__module__}."
            f"{type(built[0]).__name__}. Either deepspeed {deepspeed.__version__} does not use the engine class that "
            "tds "
            "sets, or another library has replaced deepspeed.initialize. Import tds before that library, or install "
            "deepspeed 0.19.8"
        )
    return built


def _remove_unsupported(config: Any) -> Any:
    """Remove disabled sections that DeepSpeed may no longer support from the JSON (a dict or a path)."""
    content = config
    if isinstance(config, str) and os.path.isfile(config):
        with open(config) as file:
            content = json.load(file)
    if not isinstance(content, dict) or UNSUPPORTED_SECTIONS.keys().isdisjoint(content):
        return config
    return remove_unsupported_sections(content)


@contextmanager
def _use_tds_engine() -> Iterator[None]:
    """Make ``deepspeed.initialize`` in the block build tds's engine for a pipeline model.

    DeepSpeed still does everything else: configuration, ZeRO contexts, garbage collection.
    """
    deepspeed_engine = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = PipelineEngine
    try:
        yield
    finally:
        deepspeed.PipelineEngine = deepspeed_engine
