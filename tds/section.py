"""The "pipeline" section of DeepSpeed's JSON: its keys, and what they ask for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tds.module import PipelineModule

KEYS = (
    "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned",
    "use_reentrant", "schedule", "chunks", "trace", "trace_steps", "timeout_s", "check_data",
    "overlap_reduction",
)  # fmt: skip
"""DeepSpeed 0.19's, and ours: schedule, chunks, trace, trace_steps, timeout_s, check_data, overlap_reduction."""

UNSUPPORTED = {
    "amp": 'use "bf16" or "fp16"',
    "progressive_layer_drop": "drop layers in your own modules, by torch's random numbers",
    "compression_training": "quantize or prune in your own layers, or after training",
    "eigenvalue": "take eigenvalues in the program, between steps",
}
"""Sections of the JSON that act in the forward and backward of DeepSpeed's own engine, and what to do without them."""


def check_keys(section: Mapping[str, Any]) -> None:
    """Raise ValueError for keys that nobody reads."""
    unknown = [key for key in section if key not in KEYS]
    if not unknown:
        return
    told = []
    for key in unknown:
        close = difflib.get_close_matches(str(key), KEYS, n=1)
        told.append(f'"{key}"' + (f' (did you mean "{close[0]}"?)' if close else ""))
    raise ValueError(f'"pipeline" in the JSON has no {", ".join(told)}; its keys are {", ".join(KEYS)}')


def chosen_schedule(section: Mapping[str, Any], module: Any) -> Any:
    """Return the schedule that the section asks for: a name, a function (from a program's own dict), or None.

    Raises:
        ValueError: chunks or an interleaved schedule that do not agree with the module.
    """
    has_chunks = isinstance(module, PipelineModule)
    chunks = module.chunks if has_chunks else 1
    asked, schedule = section.get("chunks", chunks), section.get("schedule")
    if not has_chunks and (asked != 1 or schedule == "interleaved"):
        raise ValueError(
            f"a stage of several chunks needs tds.PipelineModule(..., chunks=c), got a plain {type(module).__name__} "
            f'and "pipeline": {{"schedule": {schedule!r}, "chunks": {asked!r}}}. Build it with tds.PipelineModule.'
        )
    if asked != chunks:
        raise ValueError(
            f'"pipeline": {{"chunks": ...}} in the JSON must be the module\'s, got {asked!r} there and {chunks=} in '
            "PipelineModule. The layers are built before the JSON is read: change the module, or leave the key out."
        )
    return schedule


def accepted(given: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON without the sections of ``UNSUPPORTED``, all of which must be switched off.

    DeepSpeed refuses some of them even so, since it has dropped what they are for.

    Raises:
        NotImplementedError: one of them is enabled.
    """
    for key, instead in UNSUPPORTED.items():
        if _is_enabled(given.get(key)):
            raise NotImplementedError(
                f'the pipeline engine of tds does not act on "{key}" in the JSON, got it enabled; {instead}, and take '
                "the section out"
            )
    return {key: value for key, value in given.items() if key not in UNSUPPORTED}


def _is_enabled(section: Any) -> bool:
    """Return whether ``section``, or a section within, says so."""
    if not isinstance(section, Mapping):
        return section is True
    return any(_is_enabled(value) for key, value in section.items() if key == "enabled" or isinstance(value, Mapping))


def is_auto(schedule: Any) -> bool:
    """True if the engine is to choose the schedule by itself."""
    return isinstance(schedule, str) and schedule.lower() == "auto"


def wait_limit(section: Mapping[str, Any], default: timedelta | None) -> timedelta | None:
    """Return how long a stage waits for another.

    Raises:
        ValueError: "timeout_s" is no positive number.
    """
    limit = section.get("timeout_s")
    if limit is None:
        return default
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise ValueError(f'"pipeline": {{"timeout_s": ...}} must be a positive number of seconds, got {limit!r}')
    return timedelta(seconds=limit)


def compares_data(section: Mapping[str, Any]) -> bool:
    """Return whether the ranks of a replica are to compare checksums of what they have read.

    Raises:
        ValueError: "check_data" is neither true nor false.
    """
    return _switch(section, "check_data", False)


def overlaps_reduction(section: Mapping[str, Any]) -> bool:
    """Return whether sums over replicas are to start while the backward runs.

    Raises:
        ValueError: "overlap_reduction" is neither true nor false.
    """
    return _switch(section, "overlap_reduction", True)


def _switch(section: Mapping[str, Any], key: str, default: bool) -> bool:
    asked = section.get(key, default)
    if not isinstance(asked, bool):
        raise ValueError(f'"pipeline": {{"{key}": ...}} must be true or false, got {asked!r}')
    return asked
