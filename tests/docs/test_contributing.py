"""CONTRIBUTING.md: its layers are those that import-linter holds, and its hooks run what run_tests.sh runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]


def held_layers(package: str) -> list[set[str]]:
    """Return the names of each layer of a package, from the top down, as import-linter is told."""
    contracts = [each["layers"] for each in SETTINGS["importlinter"]["contracts"] if each["type"] == "layers"]
    (layers,) = [each for each in contracts if each[0].startswith(f"{package}.")]
    names = [re.split(" [|:] ", layer) for layer in layers if layer.startswith(f"{package}.")]
    return [{name.removeprefix(f"{package}.") for name in layer} for layer in names]


def drawn_layers(package: str) -> list[set[str]]:
    """Return the same from the picture of docs/architecture.md."""
    picture = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("```")[1]
    boxes = re.split(r"^ +(?:megatron|tds)/$", picture, flags=re.M)[["megatron", "tds"].index(package) + 1]
    rows = re.findall(r"(?:^  \|.*\|\n)+", boxes, flags=re.M)
    return [set(re.findall(r"\w+", row)) for row in rows]


@pytest.mark.parametrize("package", ["megatron", "tds"])
def test_the_layers_of_the_picture_are_those_that_are_held(package: str) -> None:
    assert drawn_layers(package) == held_layers(package)


def test_the_layers_of_contributing_are_those_that_are_held() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    block = text.split("import-linter", 1)[1].split("\n\n    ", 1)[1].split("\n\n", 1)[0]
    documented = [set(re.findall(r"\w+", line)) for line in block.splitlines()]
    assert documented == [*held_layers("megatron"), {"tds"}]


def test_every_package_and_file_that_the_picture_holds_is_there_and_none_is_left_out() -> None:
    aside = {"__init__", "__pycache__"}
    for package in ("megatron", "tds"):
        there = {path.stem for path in (ROOT / package).iterdir() if path.is_dir() or path.suffix == ".py"} - aside
        assert set().union(*held_layers(package)) == there


def test_paths_in_the_call_diagrams_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    diagrams = text[text.index("## Who calls whom") : text.index("## Where something new goes")]
    paths = {path for block in diagrams.split("```")[1::2] for path in re.findall(r"[\w/]+\.py", block)}
    assert paths
    assert [path for path in paths if not ((ROOT / "megatron" / path).is_file() or (ROOT / path).is_file())] == []


def test_functions_in_the_call_diagrams_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    diagrams = text[text.index("## Who calls whom") : text.index("## Where something new goes")]
    named = re.findall(r"^ *([\w/]+\.py): (?:(\w+)\.)?(\w+)", "".join(diagrams.split("```")[1::2]), flags=re.M)
    assert len(named) > 50
    for path, of_class, name in named:
        source = next(file for file in (ROOT / "megatron" / path, ROOT / path) if file.is_file()).read_text("utf-8")
        assert re.search(rf"^ *(def|class) {name}\b", source, flags=re.M), f"{path} has no {name}"
        assert not of_class or re.search(rf"^class {of_class}\b", source, flags=re.M), f"{path} has no {of_class}"


def test_the_hooks_of_a_commit_are_checks_of_run_tests() -> None:
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = [hook for repo in settings["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in settings["repos"]} == {"local"} and {hook["language"] for hook in hooks} == {
        "system"
    }
    checks = (ROOT / "run_tests.sh").read_text("utf-8")
    for hook in hooks:
        words = re.fullmatch(r"\.venv/bin/python -m ([a-z ]+?)( --force-exclude)?", hook["entry"])
        assert words is not None and f'"$PYTHON" -m {words[1]}' in checks, hook["entry"]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "mypy"]
