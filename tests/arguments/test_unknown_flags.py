"""--ignore-unknown-flags drops unknown flags with a warning; without it they are errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.training.dry_run import ignored_text

IGNORE_FLAG = "--ignore-unknown-flags"


def parse_line(line: str, env: dict[str, str] | None = None) -> Config:
    return parse(line.split(), world_size=1, env=env or {})


def test_unknown_flag_raises_by_default() -> None:
    with pytest.raises(ConfigError, match="^unknown flag --zebra-mode; --help-all lists all flags$"):
        parse_line("--zebra-mode 3")


def test_unknown_flags_are_dropped_with_values_and_reported() -> None:
    config = parse_line(f"--zebra-mode 3 4 --lr 0.5 --quagga=a.b {IGNORE_FLAG} --stripes")
    assert config.dropped == {
        "--zebra-mode 3 4": "--ignore-unknown-flags dropped --zebra-mode 3 4",
        "--quagga a.b": "--ignore-unknown-flags dropped --quagga a.b",
        "--stripes": "--ignore-unknown-flags dropped --stripes",
    }
    assert config.optimizer.lr == 0.5 and not config.ignored


def test_misspelled_flag_is_dropped_with_suggestion() -> None:
    config = parse_line(f"{IGNORE_FLAG} --num-layer 3")
    assert config.dropped == {
        "--num-layer 3": "--ignore-unknown-flags dropped --num-layer 3; did you mean --num-layers?"
    }
    assert config.model.num_layers == parse_line("").model.num_layers


def test_other_problems_still_raise() -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_line(f"{IGNORE_FLAG} --zebra 1 --lr x --fp8-param-gather")
    assert "2 problems" in str(exc_info.value) and "--zebra" not in str(exc_info.value)


@pytest.mark.parametrize("is_in_file", [True, False])
def test_unknown_file_keys_and_defaults_are_dropped(is_in_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    switch = "ignore-unknown-flags: true\n" if is_in_file else ""
    path.write_text(f"zebra: 3\nlr: 0.5\nokapi:\n  legs: 4\n{switch}")
    line, env = f"--config {path}", {"MEGATRON_DEFAULTS": f"--quagga 1 {'' if is_in_file else IGNORE_FLAG}"}
    config = parse_line(line, env)
    assert list(config.dropped) == ["zebra", "okapi", "--quagga 1"] and config.optimizer.lr == 0.5
    path.write_text("zebra: 3\n")
    with pytest.raises(
        ConfigError, match=r"(?s)run.yaml:1: unknown key zebra.*MEGATRON_DEFAULTS: unknown flag --quagga"
    ):
        parse_line(line, {"MEGATRON_DEFAULTS": "--quagga 1"})


def test_strict_flags_excludes_ignore_unknown_flags() -> None:
    with pytest.raises(ConfigError, match="^--strict-flags and --ignore-unknown-flags exclude each other"):
        parse_line(f"--strict-flags {IGNORE_FLAG}")


def test_start_table_counts_ignored_flags() -> None:
    assert ignored_text(parse_line("--use-mcore-models")) == "1 flag has no effect: --use-mcore-models"
    assert ignored_text(parse_line("--use-mcore-models --deepspeed")).startswith("2 flags have no effect: ")
