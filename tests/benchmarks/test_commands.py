"""Every benchmark runs by a documented command at sizes that take seconds, and imports only what exists."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.helpers.documented_commands import ROOT, Clone, find_smoke_table_problems

SMOKE_COMMANDS = {
    "benchmarks/checkpoint.py": ["python benchmarks/checkpoint.py --json checkpoint.json --smoke --ranks 1"],
    "benchmarks/data.py": ["python benchmarks/data.py --json data.json --smoke"],
    "benchmarks/fp8_gain.py": ["python -m benchmarks.fp8_gain --gpu h200"],
    "benchmarks/gpu/__main__.py": [
        "bash benchmarks/gpu/run.sh --device cpu --out seen train --only 'gpt2 fp32'",
    ],
    "benchmarks/gpu/canary.py": ["python -m benchmarks.gpu.canary --device cpu --only grouped_mm"],
    "benchmarks/gpu/first.py": ["bash benchmarks/gpu/first.sh A --list"],
    "benchmarks/gpu/publish.py": [
        "mkdir copy && cp -rL benchmarks docs megatron README.md copy",  # for the program rewrites its checkout's pages
        "cd copy && python -m benchmarks.gpu.publish",
    ],
    "benchmarks/gpu/references.py": ["python -m benchmarks.gpu.references --list"],
    "benchmarks/gpu/wheels.py": [
        "python -m pip list --format=freeze > there.txt; echo fla-core==0.6.0 >> there.txt",
        "bash benchmarks/gpu/run.sh wheels --python 3.11 --have there.txt --check --out wheels",
    ],
    "benchmarks/kill.py": [
        "python benchmarks/kill.py --kills 300 --kills 1 --steps 4 --layout d2",
    ],
    "benchmarks/pipeline.py": [
        "python benchmarks/pipeline.py --out runs/pipeline --smoke --micro-batches 4 --only side stock 'ours zb-h1'"
    ],
    "benchmarks/plan.py": [  # test_plan.py calibrates and times, which takes a minute
        "python benchmarks/plan.py --memory-only --smoke --only mpt --out runs/plan"
    ],
    "benchmarks/recurrent.py": [
        "python benchmarks/recurrent.py --json recurrent.json --lengths 8 16 --hidden-size 64 --rounds 1",
    ],
    "benchmarks/scaling.py": ["python benchmarks/scaling.py --out runs/scaling"],
    "benchmarks/start_up.py": ["python benchmarks/start_up.py --runs 1 --ranks 1"],
    "benchmarks/step_time.py": [
        "python benchmarks/step_time.py --json step_time.json --contenders ours-compiled hf plain --num-layers 1 "
        "--hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 128 --batch-size 2 --rounds 1 --steps 1 "
        "--product-side 64"
    ],
}
EXEMPT = {
    "benchmarks/gpu/checks.py": "a process of benchmarks/gpu/run.sh",
    "benchmarks/gpu/workers.py": "a process of benchmarks/gpu/run.sh",
    "benchmarks/kill_job.py": "the ranks of benchmarks/kill.py",
}
PACKAGES = ("benchmarks", "megatron", "tds", "tests", "tools")


def test_every_benchmark_has_documented_smoke_command() -> None:
    assert find_smoke_table_problems(SMOKE_COMMANDS, EXEMPT, "benchmarks") == []


@functools.cache
def _find_names(file: Path) -> set[str]:
    """Return the names that a module defines or imports outside of its functions and classes."""
    names: set[str] = set()
    statements: list[ast.stmt] = ast.parse(file.read_text("utf-8")).body
    while statements:
        statement = statements.pop()
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
            statements += [child for child in ast.walk(statement) if isinstance(child, ast.stmt) and child != statement]
        else:
            stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            names |= {node.id for node in stored if isinstance(node.ctx, ast.Store)}
    return names


def _find_missing_imports(source: str) -> list[str]:
    """Return the imports from this repository, at any depth of ``source``, whose module or name does not exist."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in imports:
            if module.partition(".")[0] in PACKAGES and not _exists(ROOT / module.replace(".", "/"), name):
                missing.append(f"{module}.{name}".rstrip("."))
    return missing


def _exists(path: Path, name: str) -> bool:
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return path.is_dir() and (not name or _exists(path / name, ""))
    if not name or (path / name).is_dir() or (path / f"{name}.py").is_file():
        return True
    names = _find_names(file)
    return name in names or "__getattr__" in names  # which makes names when they are asked for


@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_imports_of_programs_exist(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    missing = {file.name: _find_missing_imports(file.read_text("utf-8")) for file in files}
    assert {name: names for name, names in missing.items() if names} == {}


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("from megatron.training.compile import compile_cost", ["megatron.training.compile.compile_cost"]),
        ("from megatron.training.callbacks.compile_meter import process_compile_cost", []),
        ("def measure():\n    from benchmarks.turned import Team", ["benchmarks.turned.Team"]),
        ("import benchmarks.turns, benchmarks.turned", ["benchmarks.turned"]),
        ("from benchmarks import turns, kill_jobs", ["benchmarks.kill_jobs"]),
        ("from benchmarks.gpu import speed, sped", ["benchmarks.gpu.sped"]),
    ],
)
def test_moved_import_is_detected(line: str, missing: list[str]) -> None:
    assert _find_missing_imports(line) == missing


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone(tmp_path_factory.mktemp("clones") / "clone")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("benchmark", SMOKE_COMMANDS)
def test_documented_benchmark_commands_run(benchmark: str, clone: Clone) -> None:
    for command in SMOKE_COMMANDS[benchmark]:
        clone.run(command)
