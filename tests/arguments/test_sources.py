"""The order of the sources of a value, and the merge of their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse, sources
from megatron.arguments.help import help_text
from megatron.arguments.scan import Scan
from megatron.arguments.sources import (
    CHECKPOINT,
    COMMAND_LINE,
    CONFIG_FILE,
    DEEPSPEED_DEFAULT,
    DEEPSPEED_JSON,
    MODEL,
    PROGRAM,
    RUN_SCRIPT,
    SOURCES,
    Layer,
    Source,
    merge,
)
from megatron.config import Config
from megatron.errors import ConfigError

MERGED_SOURCES = SOURCES[:-2]
"""The sources that ``merge`` sees: ``config_from_values`` applies the defaults of the family and of the flags."""


def make_layer(source: Source, key: str = "", **values: Any) -> Layer:
    return Layer(
        source,
        values,
        written={name: f"{source.name} {name} {value}" for name, value in values.items()},
        keys=dict.fromkeys(values, key),
    )


@pytest.mark.parametrize("first_idx", range(len(MERGED_SOURCES)))
def test_strongest_source_sets_value(first_idx: int) -> None:
    scanned = Scan()
    layers = [
        make_layer(source, "optimizer.params.lr", lr=source_idx) for source_idx, source in enumerate(MERGED_SOURCES)
    ][first_idx:]
    (setting,) = merge(layers, scanned).values()
    assert (setting.value, setting.source) == (first_idx, MERGED_SOURCES[first_idx])
    assert scanned.problems == []


def test_conflicting_sources_raise_or_are_noted() -> None:
    for stronger_idx, stronger in enumerate(MERGED_SOURCES):
        for weaker in MERGED_SOURCES[stronger_idx + 1 :]:
            scanned = Scan()
            merged = merge([make_layer(stronger, seed=1), make_layer(weaker, seed=2)], scanned)
            assert merged["seed"].source is stronger
            is_error = (stronger, weaker) == (COMMAND_LINE, DEEPSPEED_JSON)
            is_note = (stronger, weaker) == (CONFIG_FILE, DEEPSPEED_JSON)
            assert (len(scanned.problems), len(scanned.notes)) == (is_error, is_note)


def test_json_loss_scale_wins_and_json_optimizer_loses() -> None:
    scanned = Scan()
    flag_layer, json_layer = (
        make_layer(COMMAND_LINE, loss_scale=1, adam_eps=1),
        make_layer(DEEPSPEED_JSON, "fp16.loss_scale", loss_scale=2),
    )
    merged = merge([flag_layer, json_layer], scanned)
    assert merged["loss_scale"].source is DEEPSPEED_JSON and "command line loss_scale 1" in scanned.ignored
    merged = merge([flag_layer, make_layer(DEEPSPEED_JSON, "optimizer.params.eps", adam_eps=2)], scanned)
    assert merged["adam_eps"].source is COMMAND_LINE and "optimizer.params.eps" in scanned.ignored
    assert scanned.problems == scanned.notes == []


def test_out_of_range_value_is_skipped() -> None:
    scanned = Scan()
    invalid_layer = Layer(DEEPSPEED_JSON, {"seed": -1}, invalid={"seed": "seed must be 0 or more"})
    assert merge([invalid_layer, make_layer(PROGRAM, seed=3)], scanned)["seed"].source is PROGRAM
    assert scanned.problems == ["seed must be 0 or more"]


@pytest.mark.parametrize("explicit", [COMMAND_LINE, CONFIG_FILE, DEEPSPEED_JSON])
@pytest.mark.parametrize("default", [CHECKPOINT, MODEL, RUN_SCRIPT, PROGRAM, DEEPSPEED_DEFAULT])
def test_default_conflicting_with_related_field_is_dropped(explicit: Source, default: Source) -> None:
    merged = merge([make_layer(explicit, data_path="a"), make_layer(default, sft="b", seed=1)], Scan())
    assert merged.keys() == {"data_path", "seed"}


def test_dtype_disabled_by_json_is_dropped_or_raises() -> None:
    json_layer = Layer(DEEPSPEED_JSON, {}, excluded={"dtype": ("fp16",)})
    assert merge([json_layer, make_layer(PROGRAM, dtype="fp16")], Scan()) == {}
    scanned = Scan()
    merge([make_layer(COMMAND_LINE, dtype="fp16"), json_layer], scanned)
    assert len(scanned.problems) == 1 and "fp16.enabled false" in scanned.problems[0]


def test_lr_sources_follow_documented_order(tmp_path: Path) -> None:
    """The example of docs/flags.md."""
    (tmp_path / "flags.yaml").write_text("lr: 2e-4\n")
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}))
    words = {
        "flag": ["--lr", "1e-4"],
        "file": ["--config", str(tmp_path / "flags.yaml")],
        "json": ["--deepspeed_config", str(tmp_path / "ds.json")],
    }

    def parse_sources(*names: str, script: str = "--lr 4e-4") -> Config:
        line = [word for name in names for word in words[name]]
        return parse(line, world_size=1, env={"MEGATRON_DEFAULTS": script}, defaults={"lr": 5e-4})

    assert parse_sources("flag", "file", "json").optimizer.lr == 1e-4
    assert "optimizer.params.lr" in parse_sources("flag", "json").ignored
    config = parse_sources("file", "json")
    assert config.optimizer.lr == 2e-4 and any("overrides" in note for note in config.notes)
    assert parse_sources("json").optimizer.lr == 3e-4
    assert parse_sources().optimizer.lr == 4e-4
    assert parse_sources(script="").optimizer.lr == 5e-4


def test_json_value_outside_optimizer_must_match_flag(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.5}')
    with pytest.raises(ConfigError, match="^the command line and the JSON must agree, got --clip-grad 1 and gradient_"):
        parse(["--clip-grad", "1", "--deepspeed_config", str(tmp_path / "ds.json")], world_size=1, env={})


def test_help_all_lists_sources_in_order() -> None:
    text = help_text(show_all=True)
    positions = [text.index(f"{level}. {source.name}: ") for level, source in enumerate(SOURCES, 1)]
    assert positions == sorted(positions) and "1. checkpoint's schedule" not in help_text()


def test_every_source_is_in_sources_table() -> None:
    declared = [value for value in vars(sources).values() if isinstance(value, Source)]
    assert declared == list(SOURCES)
