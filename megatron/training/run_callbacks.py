"""A run's callbacks: tables of (condition, class, arguments), in hook order.

A run calls ``callbacks_before_save``, the checkpointer, ``debugging_callbacks``, ``step_callbacks``, the callbacks of
the user's script and of ``--callback``, and finally ``reporting_callbacks``, so that values which a user's callback
adds to the metrics are written. A class is imported only if its condition holds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.mpu.random import DropoutStreams
from megatron.training.data import evaluated_splits
from megatron.training.step_engine import StepEngine
from megatron.training.trainer import Callback
from megatron.training.world import World


class CallbackRow(NamedTuple):
    """One callback.

    Args:
        is_wanted: True if the run has this callback.
        path: ``module:Class`` below ``megatron.training.callbacks``.
        get_args: returns the constructor's arguments; called only if ``is_wanted``.
    """

    is_wanted: bool
    path: str
    get_args: Callable[[], Iterable[Any]] = tuple


def make_callbacks(rows: Iterable[CallbackRow]) -> list[Callback]:
    """Import and construct the callbacks whose condition is true."""
    callbacks = []
    for row in rows:
        if row.is_wanted:
            module, _, name = row.path.partition(":")
            callback_class = getattr(importlib.import_module(f"megatron.training.callbacks.{module}"), name)
            callbacks.append(callback_class(*row.get_args()))
    return callbacks


def callbacks_before_save(config: Config) -> list[CallbackRow]:
    """List callbacks whose ``on_save`` writes records that must be in the run folder before a checkpoint is."""
    is_wanted = bool(config.logging.log_document_losses) and not config.checkpoint.eval_only
    return [CallbackRow(is_wanted, "document_losses:DocumentLosses", lambda: (config,))]


def debugging_callbacks(config: Config, world: World, engine: StepEngine, streams: DropoutStreams) -> list[CallbackRow]:
    """List callbacks that attach to the engine before the first step."""
    profile = config.logging.profile
    return [
        CallbackRow(config.debug.is_enabled, "debugger:Debugger", lambda: (engine, config, world, streams)),
        CallbackRow(profile is not None, "profiler:Profiler", lambda: (config.logging.profiled_steps(),)),
    ]


def step_callbacks(config: Config, parameter_counts: Sequence[int], bytes_before: int) -> list[CallbackRow]:
    """List callbacks that check, measure or save training steps.

    Args:
        parameter_counts: parameter counts from ``start_table.count_parameters``.
        bytes_before: bytes allocated on this rank before the model was built.
    """
    is_training = not config.checkpoint.eval_only
    batch, checkpoint, logging = config.batch, config.checkpoint, config.logging
    stability, parallel = config.stability, config.parallel
    splits = evaluated_splits(config)
    evaluation_interval = batch.eval_interval if splits["valid"] else 0
    return [
        CallbackRow(True, "stability_guard:StabilityGuard", lambda: (stability,)),
        CallbackRow(
            is_training and bool(config.model.num_experts),
            "expert_monitor:ExpertMonitor",
            lambda: (config.model, stability),
        ),
        CallbackRow(logging.log_layer_norms, "layer_norms:LayerNorms"),
        CallbackRow(is_training and config.model.measures_logits, "attention_logits:AttentionLogitLogger"),
        CallbackRow(any(splits.values()), "evaluator:Evaluator", lambda: (evaluation_interval, splits["test"])),
        CallbackRow(
            is_training and bool(logging.eval_tasks),
            "task_evaluator:TaskEvaluator",
            lambda: (logging.eval_tasks, logging.eval_tasks_interval),
        ),
        CallbackRow(bool(stability.drift_interval), "replica_check:ReplicaCheck", lambda: (stability.drift_interval,)),
        CallbackRow(True, "precision_speed:PrecisionSpeedWarning"),
        CallbackRow(True, "speed_monitor:SpeedMonitor", lambda: (parameter_counts,)),
        CallbackRow(is_training, "run_description:RunDescription", lambda: (parameter_counts, bytes_before)),
        CallbackRow(is_training, "disk_space:DiskSpaceWarning", lambda: (parameter_counts,)),
        CallbackRow(bool(parallel.pipeline_trace) and parallel.has_pipeline, "pipeline_picture:PipelinePicture"),
        CallbackRow(
            is_training and bool(checkpoint.export_hf_interval),
            "hf_exporter:HuggingFaceExporter",
            lambda: (checkpoint.export_hf_interval, config.precision.dtype),
        ),
        CallbackRow(
            is_training and bool(checkpoint.save_remote),
            "checkpoint_uploader:CheckpointUploader",
            lambda: (checkpoint.save_remote,),
        ),
    ]


def reporting_callbacks(config: Config, parameter_counts: Sequence[int]) -> list[CallbackRow]:
    """List callbacks that display and record values; ``parameter_counts``: see ``step_callbacks``."""
    return [
        CallbackRow(True, "heartbeat:Heartbeat"),
        CallbackRow(bool(config.logging.sample_prompts), "text_samples:TextSamples", lambda: (config,)),
        CallbackRow(True, "console:Console", lambda: (config.run.progress, config.batch.train_iters, parameter_counts)),
        CallbackRow(config.parallel.compile, "compile_meter:CompileMeter"),
        CallbackRow(True, "straggler:StragglerWarning"),
        CallbackRow(True, "metrics_writer:Metrics"),
        CallbackRow(not config.checkpoint.eval_only, "proof_writer:ProofWriter"),
        CallbackRow(bool(config.logging.wandb_project), "wandb:Wandb"),
        CallbackRow(bool(config.logging.swanlab_project), "swanlab:SwanLab"),
        CallbackRow(bool(config.logging.mlflow_tracking_uri), "mlflow:MLflow"),
        CallbackRow(config.logging.metrics_port is not None, "open_metrics:OpenMetrics"),
    ]
