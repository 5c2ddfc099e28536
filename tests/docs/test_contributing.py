"""CONTRIBUTING.md: its layers are those that import-linter holds, and its hooks run what run_tests.sh runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]


def read_contract_layers(package: str) -> list[set[str]]:
    """Return the names of each layer of a package, from the top down, as import-linter is told."""
    contracts = [
        contract["layers"] for contract in SETTINGS["importlinter"]["contracts"] if contract["type"] == "layers"
    ]
    (layers,) = [contract for contract in contracts if contract[0].startswith(f"{package}.")]
    names = [re.split(" [|:] ", layer) for layer in layers if layer.startswith(f"{package}.")]
    return [{name.removeprefix(f"{package}.") for name in layer} for layer in names]


def read_diagram_layers(package: str) -> list[set[str]]:
    """Return the same from the picture of docs/architecture.md."""
    diagram = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("```")[1]
    boxes = re.split(r"^ +(?:megatron|tds)/$", diagram, flags=re.M)[["megatron", "tds"].index(package) + 1]
    rows = re.findall(r"(?:^  \|.*\|\n)+", boxes, flags=re.M)
    return [set(re.findall(r"\w+", row)) for row in rows]


@pytest.mark.parametrize("package", ["megatron", "tds"])
def test_diagram_layers_equal_import_contracts(package: str) -> None:
    assert read_diagram_layers(package) == read_contract_layers(package)


def test_contributing_layers_equal_import_contracts() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    block = text.split("import-linter", 1)[1].split("\n\n    ", 1)[1].split("\n\n", 1)[0]
    documented = [set(re.findall(r"\w+", line)) for line in block.splitlines()]
    assert documented == [*read_contract_layers("megatron"), {"tds"}]


def test_contract_layers_cover_all_packages() -> None:
    ignored = {"__init__", "__pycache__"}
    for package in ("megatron", "tds"):
        existing = {path.stem for path in (ROOT / package).iterdir() if path.is_dir() or path.suffix == ".py"} - ignored
        assert set().union(*read_contract_layers(package)) == existing


def test_paths_in_call_diagrams_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    diagrams = text[text.index("## Who calls whom") : text.index("## Where something new goes")]
    paths = {path for block in diagrams.split("```")[1::2] for path in re.findall(r"[\w/]+\.py", block)}
    assert paths
    assert [path for path in paths if not ((ROOT / "megatron" / path).is_file() or (ROOT / path).is_file())] == []


def test_functions_in_call_diagrams_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    diagrams = text[text.index("## Who calls whom") : text.index("## Where something new goes")]
    references = re.findall(r"^ *([\w/]+\.py): (?:(\w+)\.)?(\w+)", "".join(diagrams.split("```")[1::2]), flags=re.M)
    assert len(references) > 50
    for path, class_name, name in references:
        source = next(file for file in (ROOT / "megatron" / path, ROOT / path) if file.is_file()).read_text("utf-8")
        assert re.search(rf"^ *(def|class) {name}\b", source, flags=re.M), f"{path} has no {name}"
        assert not class_name or re.search(rf"^class {class_name}\b", source, flags=re.M), f"{path} has no {class_name}"


def test_pre_commit_hooks_are_checks_of_run_tests() -> None:
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = [hook for repo in settings["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in settings["repos"]} == {"local"} and {hook["language"] for hook in hooks} == {
        "system"
    }
    checks = (ROOT / "run_tests.sh").read_text("utf-8")
    for hook in hooks:
        match = re.fullmatch(r"\.venv/bin/python -m ([a-z ]+?)( --force-exclude)?", hook["entry"])
        assert match is not None and f'"$PYTHON" -m {match[1]}' in checks, hook["entry"]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "mypy"]
