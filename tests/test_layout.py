"""The tests mirror the source, and comments and docstrings refer to names that exist."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("megatron", "tds") for path in (ROOT / folder).rglob("*.py"))

ACROSS = ("cuda", "docs", "golden", "gpu", "helpers", "migration", "mutants", "parity", "reliability")
"""Test folders that belong to no single package."""
OUTSIDE_MEGATRON = ("benchmarks", "examples", "tds", "tools")
"""Test folders named after folders of the repository root; the others are named after packages of megatron."""
INDIRECT = (
    "launch/test_signals.py",
    "models/common/test_recompute.py",
    "training/test_deepspeed_format.py",
    "training/test_pretrained.py",
)
"""Test files that reach the code under test by starting a program or through tests/helpers."""
IMPORTS = re.compile(r"^\s*(?:from|import) ((?:benchmarks|megatron|tds|tools)(?:\.\w+)*)", re.MULTILINE)


def test_test_files_are_in_the_folder_of_the_package_they_import() -> None:
    misplaced = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests")
        if name.parts[0] in ACROSS or name.as_posix() in INDIRECT:
            continue
        source = name.parent if name.parts[0] in OUTSIDE_MEGATRON else "megatron" / name.parent
        package = ".".join(source.parts)
        imported = set(IMPORTS.findall(path.read_text(encoding="utf-8")))
        parent = package.rpartition(".")[0]
        is_near = any(f"{module}.".startswith(f"{package}.") or module == parent for module in imported)
        if not (ROOT / source).is_dir():
            misplaced.append(f"{name}: there is no {source}")
        elif imported and not is_near and source.parts[0] != "examples":
            misplaced.append(f"{name}: imports {', '.join(sorted(imported))}")
    assert misplaced == []


def test_the_files_scheduled_first_exist() -> None:
    assert [file for file in LONGEST if not (ROOT / "tests" / file).is_file()] == []


def imports_of(path: Path) -> set[str]:
    """Return the modules of the project that a file imports, anywhere in it, also for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found & MODULES.keys()


def test_no_import_is_part_of_a_circle() -> None:
    graph = {name: imports_of(path) - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


DOTTED_NAME = re.compile(r"(?<![\w./])((?:megatron|tds)(?:\.[A-Za-z_]\w*)+)")
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
EXTERNAL = {"tds.X", "tds.ops.adam", "tds.ops", "megatron.fp16.loss_scaler", "megatron.optimizer.grad_scaler"}
EXTERNAL |= {
    "megatron.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
}
"""Names of DeepSpeed under our package name, and of Megatron-LM."""


def test_dotted_names_in_comments_and_docstrings_exist() -> None:
    missing = []
    for path in FILES:
        for name in DOTTED_NAME.findall(path.read_text(encoding="utf-8")):
            known = next(n for n in (name.rsplit(".", k)[0] for k in range(name.count(".") + 1)) if n in MODULES)
            rest = name.removeprefix(known).lstrip(".").partition(".")[0]
            text = MODULES[known].read_text(encoding="utf-8")
            if rest not in ("", "py") and not re.search(rf"\b{rest}\b", text) and name not in EXTERNAL:
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []
