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


def ten_lines(page: Path) -> str:
    """Return the program that a page shows."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    (program,) = [block for block in blocks if "import tds as deepspeed" in block]
    return program


def copied(place: Path) -> Path:
    """Return a copy of the folder, as a person makes it; git's and Python's leftovers stay behind."""
    return shutil.copytree(TDS, place / "tds", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))


def _run(rank: int, place: str, program: str) -> str:
    """Run ``program`` with the tds in ``place``, of which nothing is loaded yet; return what it prints."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tds", "megatron")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("tds.")]
    sys.path.insert(0, place)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "ten lines", "exec"), {"__name__": "__main__"})
    files = [str(vars(m).get("__file__")) for n, m in sys.modules.items() if n.partition(".")[0] in ("tds", "megatron")]
    strange = [file for file in files if not file.startswith(place) and "deepspeed" not in file]
    assert not strange and any(file.startswith(place) for file in files), strange
    return printed.getvalue()


def check_ten_lines(place: Path) -> None:
    printed = run_ranks(2, _run, str(place), ten_lines(ROOT / "README.md"))
    losses = ast.literal_eval(printed[0])
    assert printed[0] == printed[1] and losses[-1] < losses[0]


def test_the_ten_lines_are_ten_and_the_same_on_each_page() -> None:
    programs = {ten_lines(page) for page in (ROOT / "README.md", ROOT / "docs" / "zh" / "README.md", TDS / "README.md")}
    assert len(programs) == 1
    assert len(programs.pop().splitlines()) == 10


def test_the_copied_folder_runs_the_ten_lines_of_the_readme(tmp_path: Path) -> None:
    copied(tmp_path)
    check_ten_lines(tmp_path)


@pytest.mark.slow  # pip takes seconds; the short run has the copy, and the list of the package's folders below
def test_the_installed_package_runs_the_ten_lines_of_the_readme(tmp_path: Path) -> None:
    source = copied(tmp_path / "source")
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
           "--disable-pip-version-check", "--no-compile", "--target", str(target), str(source)]  # fmt: skip
    done = subprocess.run(pip, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    installed = {path.relative_to(target / "tds") for path in (target / "tds").rglob("*.py")}
    assert installed == {path.relative_to(source) for path in source.rglob("*.py") if "build" not in path.parts}
    check_ten_lines(target)


def test_the_package_lists_its_folders_and_the_repositorys_versions() -> None:
    own = tomllib.loads((TDS / "pyproject.toml").read_text())
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {"tds", *(f"tds.{'.'.join(p.parent.relative_to(TDS).parts)}" for p in TDS.rglob("*/__init__.py"))}
    assert set(own["tool"]["setuptools"]["packages"]) == folders
    assert own["project"]["version"] == root["project"]["version"]
    needs = {each for each in own["project"]["dependencies"] if each.startswith("deepspeed")}
    assert len(needs) == 1 and needs <= set(root["project"]["dependencies"])


@pytest.mark.parametrize("page", [TDS / "README.md"], ids=["tds"])
def test_paths_on_the_page_exist(page: Path) -> None:
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")):
        assert (TDS / name).is_file() or name == "train.py", name
