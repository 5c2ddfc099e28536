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
from megatron.arguments.deepspeed_keys import PASSED_TO_ENGINE, engine_features
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


def parse_json(folder: Path, content: dict[str, Any], line: str = "") -> Config:
    path = folder / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return parse(["--deepspeed_config", str(path), *line.split()], world_size=1, env={})


def key_notes(config: Config, key: str) -> list[str]:
    return [note for note in config.notes if f'"{key}"' in note]


def test_every_passed_key_is_in_one_table() -> None:
    assert set(PASSED_TO_ENGINE) == set(NEEDS_DEEPSPEED) | set(REPORTED) == set(DEFAULTS)
    for name, key in PASSED_TO_ENGINE.items():
        assert (key.needs_deepspeed is None) != (key.without_pipeline == ""), name


def test_other_keys_are_parsed_ignored_or_rejected() -> None:
    """What our parser reads, ignores with a reason or rejects; DeepSpeed's engine was given sizes and ZeRO 0 alone."""
    engine = engine_dict(Config(), 1)
    sizing_keys = {*deepspeed_keys.FIELD_KEYS, "zero_optimization"}
    assert set(engine) <= {*PASSED_TO_ENGINE, *sizing_keys} and engine["zero_optimization"] == {"stage": 0}
    for name, key in deepspeed_keys.FIELD_KEYS.items():
        assert key.field, name
    for name, key in deepspeed_keys.IGNORED.items():
        assert key.is_ignored and key.description, name
    for section, keys in deepspeed_keys.SECTIONS.items():
        assert section not in PASSED_TO_ENGINE
        if section == "curriculum_learning":  # the whole section sets one field
            continue
        for name, key in keys.items():
            is_handled = key.field or (key.is_ignored and key.description) or key.value_type == deepspeed_keys.OBJECT
            assert is_handled or f"{section}.{name}" in ("fp16.enabled", "bf16.enabled", "optimizer.type"), name
    assert all(deepspeed_keys.REJECTED.values())


def key_value_pairs(table: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
    return [(key, value) for key, values in table.items() for value in values]


@pytest.mark.parametrize(("key", "value"), key_value_pairs(NEEDS_DEEPSPEED))
def test_deepspeed_feature_selects_deepspeed_engine(tmp_path: Path, key: str, value: Any) -> None:
    config = parse_json(tmp_path, {key: value})
    assert engine_features(config.deepspeed) == [key]
    assert engine_dict(config, 1)[key] == value


@pytest.mark.parametrize(("key", "value"), key_value_pairs(DEFAULTS))
def test_disabled_feature_needs_no_deepspeed_and_no_note(tmp_path: Path, key: str, value: Any) -> None:
    config = parse_json(tmp_path, {key: value})
    assert engine_features(config.deepspeed) == [] and not key_notes(config, key)


@pytest.mark.parametrize(("key", "value"), key_value_pairs(REPORTED))
def test_key_without_effect_is_noted(tmp_path: Path, key: str, value: Any) -> None:
    config = parse_json(tmp_path, {key: value})
    assert engine_features(config.deepspeed) == []
    (note,) = key_notes(config, key)
    assert "has no effect" in note


def test_steps_per_print_is_not_noted_with_deepspeed_engine(tmp_path: Path) -> None:
    for content, line in (({"log_level": "info"}, ""), ({}, "--verbose-deepspeed")):
        assert not key_notes(parse_json(tmp_path, {"steps_per_print": 10, **content}, line), "steps_per_print")
