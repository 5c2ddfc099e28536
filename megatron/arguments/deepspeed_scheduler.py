"""The "scheduler" section of DeepSpeed's JSON: WarmupLR, WarmupDecayLR and WarmupCosineLR with a linear warm-up.

A section whose params are all "auto" has no effect: the flags determine the schedule. All other schedules are not
supported, including DeepSpeed's default, the logarithmic warm-up.

Our schedule is two steps earlier than DeepSpeed's, whose first two updates have the learning rate 0. In the decay of
WarmupCosineLR the difference is one step.

Source: DeepSpeed, runtime/lr_schedules.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

AUTO = "auto"
START_PARAMS = ("warmup_min_lr", "warmup_min_ratio")
"""Parameters for the learning rate at step 0, which must be 0."""


class Scheduler(NamedTuple):
    """A type of scheduler.

    Args:
        style: value of --lr-decay-style.
        params: parameter -> its default; None if there is none.
    """

    style: str
    params: Mapping[str, Any]


_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log", "last_batch_iteration": -1}
SCHEDULERS = {
    "WarmupLR": Scheduler("constant", {**_WARMUP, "warmup_min_lr": 0.0, "warmup_max_lr": None}),
    "WarmupDecayLR": Scheduler(
        "linear", {**_WARMUP, "total_num_steps": None, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3}
    ),
    "WarmupCosineLR": Scheduler(
        "cosine", {**_WARMUP, "total_num_steps": None, "warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4}
    ),
}


def is_supported(section: Any) -> bool:
    """Return True if the scheduler's type is supported and its warm-up is linear."""
    if not isinstance(section, dict) or section.get("type") not in SCHEDULERS:
        return False
    params = section.get("params")
    return isinstance(params, dict) and params.get("warmup_type") == "linear"


def problems(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each invalid parameter in a supported section."""
    name = section["type"]
    known, params = SCHEDULERS[name].params, section["params"]
    for key, value in params.items():
        full_key = f"scheduler.params.{key}"
        if key not in known:
            yield f"{full_key} is not a parameter of {name}, whose parameters are {', '.join(known)}"
        elif key == "warmup_type" or value == AUTO:
            continue
        elif not isinstance(value, (int, float)) or isinstance(value, bool):
            yield f"{full_key} must be a number, got {value!r}"
        elif key in START_PARAMS and value != 0:
            yield f"{full_key} {value} is not supported: the warm-up starts at 0. Use 0"
        elif key == "last_batch_iteration" and value != -1:
            yield f"{full_key} {value} is not supported: a checkpoint determines the step. Use -1"
        elif key.endswith("num_steps") and (value < 1 or value != int(value)):
            yield f"{full_key} must be a positive integer, got {value}"
    if "total_num_steps" in known and "total_num_steps" not in params:
        yield f"scheduler.params.total_num_steps is required by {name}"


def scheduler_values(json: Mapping[str, Any], lr: float) -> dict[str, tuple[str, Any]]:
    """Convert the section to field -> (key, value); {} if it is not supported.

    Args:
        lr: maximum learning rate, from the flags or the optimizer section.
    """
    section: dict[str, Any] = json.get("scheduler") or {}
    if not is_supported(section):
        return {}
    style, known = SCHEDULERS[section["type"]]
    params = {**known, **section["params"]}
    keyed_values: dict[str, tuple[str, Any]] = {"lr_decay_style": ("scheduler.type", style)}

    if style == "linear":
        keyed_values["min_lr"] = ("scheduler.type", 0.0)
    for key, value in params.items():
        if value in (AUTO, None):
            continue
        full_key = f"scheduler.params.{key}"
        if key == "warmup_max_lr":
            keyed_values["lr"] = (full_key, value)
        elif key == "warmup_num_steps":
            keyed_values["lr_warmup_iters"] = (full_key, max(2, int(value)))
        elif key == "total_num_steps":
            keyed_values["lr_decay_iters"] = (full_key, int(value))
        elif key == "cos_min_ratio":
            keyed_values["min_lr"] = (full_key, lr * value)
    return keyed_values
