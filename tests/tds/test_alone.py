"""tds in a project that has nothing else of ours: as a copied folder and as an installed package."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import deepspeed  # noqa: F401 - here rather than in each forked rank, seconds
import pytest

from tests.helpers.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TDS = ROOT / "tds"


def read_example(path: Path) -> str:
    """Return the program that a page shows."""
    blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    (program,) = [block for block in blocks if "import tds as deepspeed" in block]
    return program


def copy_tds(folder: Path) -> Path:
    """Return a copy of the folder, as a person makes it; git's and Python's leftovers stay behind."""
    return shutil.copytree(TDS, folder / "tds", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))


def _run_example(rank: int, folder: str, program: str) -> str:
    """Run ``program`` with the tds in ``folder``, of which nothing is loaded yet; return what it prints."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tds", "megatron")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("tds.")]
    sys.path.insert(0, folder)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(program, "ten lines", "exec"), {"__name__": "__main__"})
    files = [str(vars(m).get("__file__")) for n, m in sys.modules.items() if n.partition(".")[0] in ("tds", "megatron")]
    foreign_files = [file for file in files if not file.startswith(folder) and "deepspeed" not in file]
    assert not foreign_files and any(file.startswith(folder) for file in files), foreign_files
    return output.getvalue()


def check_example(folder: Path) -> None:
    outputs = run_ranks(2, _run_example, str(folder), read_example(ROOT / "README.md"))
    losses = ast.literal_eval(outputs[0])
    assert outputs[0] == outputs[1] and losses[-1] < losses[0]


def test_readme_example_has_ten_lines_and_is_same_in_all_readmes() -> None:
    programs = {
        read_example(path) for path in (ROOT / "README.md", ROOT / "docs" / "zh" / "README.md", TDS / "README.md")
    }
    assert len(programs) == 1
    assert len(programs.pop().splitlines()) == 10


def test_copied_folder_runs_readme_example(tmp_path: Path) -> None:
    copy_tds(tmp_path)
    check_example(tmp_path)


@pytest.mark.slow  # pip takes seconds; the short run has the copy, and the list of the package's folders below
def test_installed_package_runs_readme_example(tmp_path: Path) -> None:
    source = copy_tds(tmp_path / "source")
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
           "--disable-pip-version-check", "--no-compile", "--target", str(target), str(source)]  # fmt: skip
    result = subprocess.run(pip, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    installed = {path.relative_to(target / "tds") for path in (target / "tds").rglob("*.py")}
    assert installed == {path.relative_to(source) for path in source.rglob("*.py") if "build" not in path.parts}
    check_example(target)


def test_package_lists_its_folders_and_matches_repository_versions() -> None:
    package = tomllib.loads((TDS / "pyproject.toml").read_text())
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {"tds", *(f"tds.{'.'.join(p.parent.relative_to(TDS).parts)}" for p in TDS.rglob("*/__init__.py"))}
    assert set(package["tool"]["setuptools"]["packages"]) == folders
    assert package["project"]["version"] == root["project"]["version"]
    requirements = {
        requirement for requirement in package["project"]["dependencies"] if requirement.startswith("deepspeed")
    }
    assert len(requirements) == 1 and requirements <= set(root["project"]["dependencies"])


@pytest.mark.parametrize("path", [TDS / "README.md"], ids=["tds"])
def test_readme_paths_exist(path: Path) -> None:
    for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8")):
        assert (TDS / name).is_file() or name == "train.py", name
