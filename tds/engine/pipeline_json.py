"""The ``pipeline`` section of DeepSpeed's JSON: keys, values and checks."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from tds.engine.trace_window import parse_trace_window
from tds.p2p import process_groups
from tds.schedule import LOOP, FileSchedule, Placement, read_schedule

KEYS = (
    "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned",
    "use_reentrant", "schedule", "schedule_file", "chunks", "placement", "micro_batch_group_size", "trace",
    "trace_steps", "timeout_s", "check_data", "overlap_reduction", "p2p_max_ctas", "backward_split",
    "overlap_forward_backward",
)  # fmt: skip
"""Accepted keys. tds adds the following to the keys of DeepSpeed 0.19: schedule, schedule_file, chunks, placement,
micro_batch_group_size, trace, trace_steps, timeout_s, check_data, overlap_reduction, p2p_max_ctas, backward_split.
"overlap_forward_backward" was removed: it is accepted, and ``log_unused_settings`` reports that it has no effect."""
BACKWARD_SPLITS = {"auto": None, "linear": False, "graph": True}
UNSUPPORTED_SECTIONS = {
    "amp": 'use "bf16" or "fp16"',
    "progressive_layer_drop": "drop layers in your own modules, with torch's random number generator",
    "compression_training": "quantize or prune in your own layers, or after training",
    "eigenvalue": "compute eigenvalues in the program, between steps",
}
"""JSON sections that only DeepSpeed's engine implements, in its forward and backward, and the alternative to each."""


@dataclass(frozen=True)
class PipelineSettings:
    """Settings for a pipeline engine, from the JSON section "pipeline".

    Args:
        schedule: name or function; None: the placement's default.
        group_size: micro-batches that run through a chunk before the next chunk starts; 0: the number of stages.
        timeout: time limit for each wait for another rank; None: no limit.
        checks_data: compare data checksums between the ranks in a replica.
        overlaps_reduction: start all-reduces over replicas during the backward pass.
        max_ctas: maximum CTAs per message on a GPU; 0: NCCL's default.
        splits_by_graph: defer every weight gradient that autograd's graph allows in a split backward. None: only if
            linear layers have less than half of the weights that could be deferred.
        trace: (folder, number of traced steps); None: no trace.
        reduce_bucket_size: elements per gradient bucket; 0: chosen by the number of replicas.
        grad_reduce_dtype: type in which gradients are all-reduced; None: the gradients' type.
        gradient_clipping: maximum gradient norm; 0: no clipping.
    """

    schedule: Any = None
    group_size: int = 0
    timeout: timedelta | None = None
    checks_data: bool = False
    overlaps_reduction: bool = True
    max_ctas: int = process_groups.MAX_CTAS
    splits_by_graph: bool | None = False
    trace: tuple[str, int] | None = None
    reduce_bucket_size: int = 0
    grad_reduce_dtype: torch.dtype | None = None
    gradient_clipping: float = 0.0


def settings_of(
    config: Mapping[str, Any], section: Mapping[str, Any], module: Any, placement: Placement, timeout: timedelta | None
) -> PipelineSettings:
    """Parse the pipeline settings in DeepSpeed's JSON.

    Args:
        config: the full JSON.
        section: its section "pipeline", with defaults filled in.
        module: the model, with recompute already configured.
        timeout: the default time limit.

    Raises:
        ValueError: a key or a value is not valid.
    """
    check_keys(section)
    return PipelineSettings(
        schedule=chosen_schedule(section, module),
        group_size=group_size(section, placement),
        timeout=timeout_of(section, timeout),
        checks_data=should_compare_data(section),
        overlaps_reduction=should_overlap_reduction(section),
        max_ctas=max_ctas(section),
        splits_by_graph=splits_by_graph(section, module),
        trace=parse_trace_window(section),
        reduce_bucket_size=reduce_bucket_size(config),
    )


def check_keys(section: Mapping[str, Any]) -> None:
    """Raise ValueError for unknown keys."""
    unknown = [key for key in section if key not in KEYS]
    if not unknown:
        return
    problems = []
    for key in unknown:
        close_matches = difflib.get_close_matches(str(key), KEYS, n=1)
        problems.append(f'"{key}"' + (f' (did you mean "{close_matches[0]}"?)' if close_matches else ""))
    raise ValueError(f'"pipeline" in the JSON has no {", ".join(problems)}. Its keys are {", ".join(KEYS)}')


def chosen_schedule(section: Mapping[str, Any], module: Any) -> Any:
    """Return the section's schedule: a name, a function, or None.

    A function comes from a config dict in Python, or from a schedule file.

    Raises:
        ScheduleError: a schedule file contains no order, or an order that cannot run.
        ValueError: "chunks", "placement" or an interleaved schedule does not match the module.
    """
    has_chunks = hasattr(module, "chunks")
    chunks, placement = (module.chunks, module.placement) if has_chunks else (1, LOOP)
    setting, schedule = section.get("chunks", chunks), section.get("schedule")
    if not has_chunks and (setting != 1 or schedule == "interleaved"):
        raise ValueError(
            f"several chunks per stage require tds.PipelineModule(..., chunks=c), got a plain {type(module).__name__} "
            f'and "pipeline": {{"schedule": {schedule!r}, "chunks": {setting!r}}}. Build it with tds.PipelineModule.'
        )
    if setting != chunks:
        raise ValueError(
            f'"pipeline": {{"chunks": ...}} in the JSON must be equal to chunks of PipelineModule, got {setting!r} in '
            "the "
            f"JSON and {chunks=} in PipelineModule. The layers are built before the JSON is read: change the module, "
            "or remove the key."
        )
    if section.get("placement", placement) != placement:
        raise ValueError(
            f'"pipeline": {{"placement": ...}} in the JSON must be equal to placement of PipelineModule, got '
            f"{section['placement']!r} in the JSON and {placement!r} in PipelineModule. Build it with "
            "tds.PipelineModule(..., placement=...), or remove the key."
        )
    if (path := section.get("schedule_file")) is not None:
        return _schedule_in(path, section)
    return schedule


def _schedule_in(path: Any, section: Mapping[str, Any]) -> FileSchedule:
    """Read the schedule file ``path``; other schedule keys in the section are an error."""
    conflicting = [key for key in ("schedule", "micro_batch_group_size") if section.get(key)]
    if not isinstance(path, (str, os.PathLike)) or conflicting:
        raise ValueError(
            f'"pipeline": {{"schedule_file": ...}} must be the path of a file and excludes "schedule" and '
            f'"micro_batch_group_size", got {path!r}'
            + (f" together with {', '.join(conflicting)}" if conflicting else "")
        )
    return read_schedule(os.fspath(path))


def remove_unsupported_sections(config: dict[str, Any]) -> dict[str, Any]:
    """Remove the ``UNSUPPORTED_SECTIONS``, all of which must be disabled, from a copy of the JSON.

    These sections are removed because newer releases of DeepSpeed, which dropped some of the features, raise an error
    for their sections even if they are disabled.

    Raises:
        NotImplementedError: an unsupported section is enabled.
    """
    for key, alternative in UNSUPPORTED_SECTIONS.items():
        if _is_enabled(config.get(key)):
            raise NotImplementedError(
                f'the pipeline engine of tds does not support "{key}", which the JSON enables. Remove the section, and '
                f"{alternative} instead"
            )
    return {key: value for key, value in config.items() if key not in UNSUPPORTED_SECTIONS}


def _is_enabled(section: Any) -> bool:
    """Return True if ``section`` or a section nested in it is enabled."""
    if not isinstance(section, Mapping):
        return section is True
    return any(_is_enabled(value) for key, value in section.items() if key == "enabled" or isinstance(value, Mapping))


def splits_by_graph(section: Mapping[str, Any], module: Any) -> bool | None:
    """Parse "backward_split" as ``PipelineSettings.splits_by_graph``: True, False or None ("auto").

    Raises:
        ValueError: "backward_split" is not in ``BACKWARD_SPLITS``.
    """
    setting = section.get("backward_split", "auto")
    if setting not in BACKWARD_SPLITS:
        raise ValueError(f'"pipeline": {{"backward_split": ...}} must be "auto", "linear" or "graph", got {setting!r}')
    # Splitting by the graph would recompute each layer twice, so "auto" does not use it with recompute.
    recomputes = bool(getattr(module, "activation_checkpoint_interval", 0))
    return False if setting == "auto" and recomputes else BACKWARD_SPLITS[setting]


def timeout_of(section: Mapping[str, Any], default: timedelta | None) -> timedelta | None:
    """Parse the time limit for a stage's waits for other stages.

    Raises:
        ValueError: "timeout_s" is not a positive number.
    """
    limit = section.get("timeout_s")
    if limit is None:
        return default
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise ValueError(f'"pipeline": {{"timeout_s": ...}} must be a positive number of seconds, got {limit!r}')
    return timedelta(seconds=limit)


def should_compare_data(section: Mapping[str, Any]) -> bool:
    """Return True if a replica's ranks compare data checksums.

    Raises:
        ValueError: "check_data" is neither true nor false.
    """
    return _bool_value(section, "check_data", False)


def should_overlap_reduction(section: Mapping[str, Any]) -> bool:
    """Return True if the all-reduces over the replicas start during the backward pass.

    Raises:
        ValueError: "overlap_reduction" is neither true nor false.
    """
    return _bool_value(section, "overlap_reduction", True)


def max_ctas(section: Mapping[str, Any]) -> int:
    """Parse the maximum CTAs per message between stages on a GPU; 0: NCCL's default.

    Raises:
        ValueError: "p2p_max_ctas" is not a non-negative int.
    """
    value = section.get("p2p_max_ctas", process_groups.MAX_CTAS)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f'"pipeline": {{"p2p_max_ctas": ...}} must be a non-negative integer (0: NCCL\'s default), got {value!r}'
        )
    return value


def group_size(section: Mapping[str, Any], placement: Placement) -> int:
    """Parse the group size for "interleaved" in micro-batches; 0: the number of stages.

    Raises:
        ValueError: "micro_batch_group_size" is not an int of at least the number of stages, or the stages have one
            chunk, or the placement is not "loop".
    """
    value = section.get("micro_batch_group_size", 0)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value != 0 and not (is_number and value >= placement.num_stages):
        raise ValueError(
            '"pipeline": {"micro_batch_group_size": ...} must be an integer of at least the number of stages, got '
            f"{value!r} for {placement.num_stages} stages"
        )
    if value and (placement.num_chunks == 1 or placement.style != LOOP):
        raise ValueError(
            f'"pipeline": {{"micro_batch_group_size": {value}}} needs several chunks per stage and the placement '
            f'"{LOOP}", got {placement.num_chunks} chunks and the placement "{placement.style}". Remove the key'
        )
    return int(value)


def reduce_bucket_size(config: Mapping[str, Any]) -> int:
    """Parse "reduce_bucket_size" in the JSON's "zero_optimization", in elements; 0 if it is not set."""
    section = config.get("zero_optimization")
    value = section.get("reduce_bucket_size", 0) if isinstance(section, Mapping) else 0
    return int(value) if isinstance(value, (int, float)) else 0  # "auto" counts as not set


def _bool_value(section: Mapping[str, Any], key: str, default: bool) -> bool:
    value = section.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f'"pipeline": {{"{key}": ...}} must be true or false, got {value!r}')
    return value
