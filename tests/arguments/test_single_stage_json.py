"""The effect of each key of DeepSpeed's JSON in a run without a pipeline, which needs no ``deepspeed.initialize``.

Each key has one of four fates: it sets a field of ours, it is read or rejected by our parser, DeepSpeed's engine trains
the run because of its value, or it has no effect and the run reports so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import deepspeed_keys
from megatron.arguments.deepspeed_keys import PASSED, engine_features
from megatron.config import Config, engine_dict, parse

NEEDS_DEEPSPEED: dict[str, tuple[Any, ...]] = {
    "wall_clock_breakdown": (True,),
    "memory_breakdown": (True,),
    "dump_state": (True,),
    "disable_python_gc": (True,),
    "log_level": ("info", "error"),
    "tensorboard": ({"enabled": True, "output_path": "folder"},),
    "wandb": ({"enabled": True, "project": "p"},),
    "csv_monitor": ({"enabled": True},),
    "comet": ({"enabled": True},),
    "flops_profiler": ({"enabled": True, "profile_step": 1},),
    "comms_logger": ({"enabled": True},),
    "timers": ({"throughput": {"enabled": True}}, {"throughput": {"synchronized": False}}),
}
"""Key -> values for which the run trains on DeepSpeed's engine."""
DEFAULTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"), (False, "auto")),
    **{
        key: ({}, {"enabled": False}, {"enabled": "auto"})
        for key in ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger")
    },
    "log_level": ("auto",),
    "timers": ({}, {"throughput": {"enabled": False}}),
    "steps_per_print": ("auto",),
    "zero_allow_untested_optimizer": (True, "auto"),
    "pipeline": ({},),
}
"""Key -> values that ask for nothing: no DeepSpeed and no report."""
REPORTED: dict[str, tuple[Any, ...]] = {
    "steps_per_print": (10,),
    "zero_allow_untested_optimizer": (False,),
    "pipeline": ({"schedule": "gpipe"}, {"activation_checkpoint_interval": 1}),
}
"""Key -> values without effect, which the start table reports."""


def parsed(folder: Path, content: dict[str, Any], line: str = "") -> Config:
    path = folder / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return parse(["--deepspeed_config", str(path), *line.split()], world_size=1, env={})


def notes_of(config: Config, key: str) -> list[str]:
    return [note for note in config.notes if f'"{key}"' in note]


def test_every_key_that_deepspeed_would_be_handed_has_a_fate() -> None:
    assert set(PASSED) == set(NEEDS_DEEPSPEED) | set(REPORTED) == set(DEFAULTS)
    for name, key in PASSED.items():
        assert (key.needs_deepspeed is None) != (key.without_pipeline == ""), name


def test_all_other_keys_never_reached_deepspeed() -> None:
    """What our parser reads, ignores with a reason or rejects; DeepSpeed's engine was given sizes and ZeRO 0 alone."""
    given = engine_dict(Config(), 1)
    sizes = {*deepspeed_keys.VALUES, "zero_optimization"}
    assert set(given) <= {*PASSED, *sizes} and given["zero_optimization"] == {"stage": 0}
    for name, key in deepspeed_keys.VALUES.items():
        assert key.field, name
    for name, key in deepspeed_keys.IGNORED.items():
        assert key.is_ignored and key.about, name
    for section, keys in deepspeed_keys.SECTIONS.items():
        assert section not in PASSED
        for name, key in keys.items():
            is_read = key.field or (key.is_ignored and key.about) or key.kind == deepspeed_keys.OBJECT
            assert is_read or f"{section}.{name}" in ("fp16.enabled", "bf16.enabled", "optimizer.type"), name
    assert all(deepspeed_keys.REJECTED.values())


def cases(table: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
    return [(key, value) for key, values in table.items() for value in values]


@pytest.mark.parametrize(("key", "value"), cases(NEEDS_DEEPSPEED))
def test_a_feature_of_deepspeed_hands_the_run_to_its_engine(tmp_path: Path, key: str, value: Any) -> None:
    config = parsed(tmp_path, {key: value})
    assert engine_features(config.deepspeed) == [key]
    assert engine_dict(config, 1)[key] == value


@pytest.mark.parametrize(("key", "value"), cases(DEFAULTS))
def test_a_feature_that_is_off_needs_no_deepspeed_and_no_report(tmp_path: Path, key: str, value: Any) -> None:
    config = parsed(tmp_path, {key: value})
    assert engine_features(config.deepspeed) == [] and not notes_of(config, key)


@pytest.mark.parametrize(("key", "value"), cases(REPORTED))
def test_a_key_without_effect_is_reported(tmp_path: Path, key: str, value: Any) -> None:
    config = parsed(tmp_path, {key: value})
    assert engine_features(config.deepspeed) == []
    (note,) = notes_of(config, key)
    assert "has no effect" in note


def test_steps_per_print_needs_no_report_where_deepspeed_trains(tmp_path: Path) -> None:
    for content, line in (({"log_level": "info"}, ""), ({}, "--verbose-deepspeed")):
        assert not notes_of(parsed(tmp_path, {"steps_per_print": 10, **content}, line), "steps_per_print")
