"""The tests mirror the source, and comments and docstrings refer to names that exist."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

from tests.conftest import SLOWEST_FILES

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FILES = sorted(path for folder in ("megatron", "tds") for path in (ROOT / folder).rglob("*.py"))

CROSS_PACKAGE_FOLDERS = (
    "cuda",
    "docs",
    "golden",
    "gpu",
    "helpers",
    "kernels",
    "megatron_core",
    "migration",
    "mutants",
    "parity",
    "reliability",
)
"""Test folders that belong to no single package."""
OUTSIDE_MEGATRON = ("benchmarks", "examples", "tds", "tools")
"""Test folders named after folders of the repository root; the others are named after packages of megatron."""
INDIRECT_TESTS = (
    "launch/test_signals.py",
    "models/common/test_recompute.py",
    "training/test_deepspeed_format.py",
    "training/test_mtp_runs.py",
    "training/test_pretrained.py",
)
"""Test files that reach the code under test by starting a program or through tests/helpers."""
IMPORTS = re.compile(r"^\s*(?:from|import) ((?:benchmarks|megatron|tds|tools)(?:\.\w+)*)", re.MULTILINE)


def test_test_files_are_in_folder_of_tested_package() -> None:
    misplaced = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests")
        if name.parts[0] in CROSS_PACKAGE_FOLDERS or name.as_posix() in INDIRECT_TESTS:
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


def test_slowest_files_exist() -> None:
    assert [file for file in SLOWEST_FILES if not (ROOT / "tests" / file).is_file()] == []


def find_imports(path: Path) -> set[str]:
    """Return the modules of the project that a file imports, anywhere in it, also for types only."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if name in MODULES else node.module for name in names}
    return modules & MODULES.keys()


def test_imports_have_no_cycles() -> None:
    graph = {name: find_imports(path) - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


DOTTED_NAME = re.compile(r"(?<![\w./])((?:megatron|tds)(?:\.[A-Za-z_]\w*)+)")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCE_FILES
}
EXTERNAL_NAMES = {"tds.X", "tds.ops.adam", "tds.ops", "megatron.fp16.loss_scaler", "megatron.optimizer.grad_scaler"}
EXTERNAL_NAMES |= {
    "megatron.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
}
"""Names of DeepSpeed under our package name, and of Megatron-LM."""


def test_dotted_names_in_comments_and_docstrings_exist() -> None:
    missing = []
    for path in SOURCE_FILES:
        for name in DOTTED_NAME.findall(path.read_text(encoding="utf-8")):
            module = next(n for n in (name.rsplit(".", k)[0] for k in range(name.count(".") + 1)) if n in MODULES)
            attribute = name.removeprefix(module).lstrip(".").partition(".")[0]
            text = MODULES[module].read_text(encoding="utf-8")
            if attribute not in ("", "py") and not re.search(rf"\b{attribute}\b", text) and name not in EXTERNAL_NAMES:
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []
