"""CONTRIBUTING.md: its floors are those that import-linter holds, and its hooks run what run_tests.sh runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]


def held_floors() -> list[set[str]]:
    """Return the packages of each floor from F1 up, as import-linter is told."""
    (layers,) = [each["layers"] for each in SETTINGS["importlinter"]["contracts"] if each["type"] == "layers"]
    floors = [{name.removeprefix("megatron.") for name in layer.split(" | ")} for layer in reversed(layers)]
    first = next(number for number, floor in enumerate(floors) if "config" in floor)
    return floors[first:]


def told_floors(page: str) -> list[set[str]]:
    """Return the packages of megatron that a page has on each floor from F1 up."""
    rows = re.findall(r"^(?:    |\| )F[1-9] (.*)$", (ROOT / page).read_text("utf-8"), flags=re.M)
    named = {name for floor in held_floors() for name in floor}
    order = 1 if page == "CONTRIBUTING.md" else -1
    return [set(re.findall(r"\w+", row)) & named for row in rows][::order]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_floors_of_the_page_are_those_that_are_held(page: str) -> None:
    assert len(held_floors()) == 5
    assert told_floors(page) == held_floors()


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


def test_what_may_print_is_what_the_linter_lets_print() -> None:
    quiet = {place for place, rules in SETTINGS["ruff"]["lint"]["per-file-ignores"].items() if "T20" in rules}
    assert quiet == {"tools/*", "benchmarks/*", "tests/*"} and "T20" in SETTINGS["ruff"]["lint"]["select"]
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text("utf-8").split())
    assert "`tools/`, `benchmarks/` and tests may print" in text
