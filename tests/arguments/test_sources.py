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

MERGED = SOURCES[:-2]
"""The sources that ``merge`` sees: ``config_from_values`` applies the defaults of the family and of the flags."""


def layer(source: Source, key: str = "", **values: Any) -> Layer:
    return Layer(
        source,
        values,
        written={name: f"{source.name} {name} {value}" for name, value in values.items()},
        keys=dict.fromkeys(values, key),
    )


@pytest.mark.parametrize("first", range(len(MERGED)))
def test_the_first_source_that_has_a_field_decides(first: int) -> None:
    found = Scan()
    layers = [layer(source, "optimizer.params.lr", lr=number) for number, source in enumerate(MERGED)][first:]
    (setting,) = merge(layers, found).values()
    assert (setting.value, setting.source) == (first, MERGED[first])
    assert found.problems == []


def test_each_pair_of_sources_that_differ_has_the_stated_effect() -> None:
    for strong, stronger in enumerate(MERGED):
        for weaker in MERGED[strong + 1 :]:
            found = Scan()
            merged = merge([layer(stronger, seed=1), layer(weaker, seed=2)], found)
            assert merged["seed"].source is stronger
            is_error = (stronger, weaker) == (COMMAND_LINE, DEEPSPEED_JSON)
            is_note = (stronger, weaker) == (CONFIG_FILE, DEEPSPEED_JSON)
            assert (len(found.problems), len(found.notes)) == (is_error, is_note)


def test_of_the_json_the_loss_scale_decides_and_the_optimizer_does_not() -> None:
    found = Scan()
    flags, stated = (
        layer(COMMAND_LINE, loss_scale=1, adam_eps=1),
        layer(DEEPSPEED_JSON, "fp16.loss_scale", loss_scale=2),
    )
    merged = merge([flags, stated], found)
    assert merged["loss_scale"].source is DEEPSPEED_JSON and "command line loss_scale 1" in found.ignored
    merged = merge([flags, layer(DEEPSPEED_JSON, "optimizer.params.eps", adam_eps=2)], found)
    assert merged["adam_eps"].source is COMMAND_LINE and "optimizer.params.eps" in found.ignored
    assert found.problems == found.notes == []


def test_a_value_that_is_out_of_range_does_not_count() -> None:
    found = Scan()
    bad = Layer(DEEPSPEED_JSON, {"seed": -1}, invalid={"seed": "seed must be 0 or more"})
    assert merge([bad, layer(PROGRAM, seed=3)], found)["seed"].source is PROGRAM
    assert found.problems == ["seed must be 0 or more"]


@pytest.mark.parametrize("stated", [COMMAND_LINE, CONFIG_FILE, DEEPSPEED_JSON])
@pytest.mark.parametrize("default", [CHECKPOINT, MODEL, RUN_SCRIPT, PROGRAM, DEEPSPEED_DEFAULT])
def test_a_default_that_contradicts_a_related_field_is_dropped(stated: Source, default: Source) -> None:
    merged = merge([layer(stated, data_path="a"), layer(default, sft="b", seed=1)], Scan())
    assert merged.keys() == {"data_path", "seed"}


def test_a_format_that_the_json_disables_is_dropped_or_rejected() -> None:
    disabled = Layer(DEEPSPEED_JSON, {}, excluded={"dtype": ("fp16",)})
    assert merge([disabled, layer(PROGRAM, dtype="fp16")], Scan()) == {}
    found = Scan()
    merge([layer(COMMAND_LINE, dtype="fp16"), disabled], found)
    assert len(found.problems) == 1 and "fp16.enabled false" in found.problems[0]


def test_the_sources_of_lr(tmp_path: Path) -> None:
    """The example of docs/flags.md."""
    (tmp_path / "flags.yaml").write_text("lr: 2e-4\n")
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}))
    words = {
        "flag": ["--lr", "1e-4"],
        "file": ["--config", str(tmp_path / "flags.yaml")],
        "json": ["--deepspeed_config", str(tmp_path / "ds.json")],
    }

    def read(*names: str, script: str = "--lr 4e-4") -> Config:
        line = [word for name in names for word in words[name]]
        return parse(line, world_size=1, env={"MEGATRON_DEFAULTS": script}, defaults={"lr": 5e-4})

    assert read("flag", "file", "json").optimizer.lr == 1e-4
    assert "optimizer.params.lr" in read("flag", "json").ignored
    config = read("file", "json")
    assert config.optimizer.lr == 2e-4 and any("overrides" in note for note in config.notes)
    assert read("json").optimizer.lr == 3e-4
    assert read().optimizer.lr == 4e-4
    assert read(script="").optimizer.lr == 5e-4


def test_a_value_outside_the_optimizer_section_must_agree(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.5}')
    with pytest.raises(ConfigError, match="^the command line and the JSON must agree, got --clip-grad 1 and gradient_"):
        parse(["--clip-grad", "1", "--deepspeed_config", str(tmp_path / "ds.json")], world_size=1, env={})


def test_help_all_lists_the_sources_in_order() -> None:
    text = help_text(is_whole=True)
    places = [text.index(f"{number}. {source.name}: ") for number, source in enumerate(SOURCES, 1)]
    assert places == sorted(places) and "1. checkpoint's schedule" not in help_text()


def test_every_source_has_a_row_in_the_table() -> None:
    declared = [value for value in vars(sources).values() if isinstance(value, Source)]
    assert declared == list(SOURCES)
