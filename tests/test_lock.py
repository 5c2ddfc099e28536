"""The lock files for CUDA: what pyproject.toml requires, each package with its hashes, and not where they were made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tools.test_set_up import load_set_up

ROOT = Path(__file__).resolve().parents[1]
LOCKS = sorted((ROOT / "requirements").glob("cuda-py*.lock"))
every_lock = pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)


def read_pins(path: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the version and the hashes of each package."""
    pinned: dict[str, tuple[str, list[str]]] = {}
    hashes: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if pin := re.fullmatch(r"([a-z0-9][a-z0-9._-]*)==([\w.+!]+) \\", line):
            hashes = []
            pinned[str(canonicalize_name(pin[1]))] = (pin[2], hashes)
        elif digest := re.fullmatch(r"    --hash=sha256:([0-9a-f]{64})(?: \\)?", line):
            hashes.append(digest[1])
        else:
            assert not line or line.lstrip().startswith("#"), f"neither a pin nor a hash nor a comment: {line}"
    return pinned


def test_lock_file_exists_for_oldest_python() -> None:
    assert ROOT / "requirements" / "cuda-py311.lock" in LOCKS


@every_lock
def test_locked_versions_satisfy_requirements(path: Path) -> None:
    locked = read_pins(path)
    for requirement in map(Requirement, load_set_up().requirements("")):
        version, _ = locked[str(canonicalize_name(requirement.name))]
        assert requirement.specifier.contains(version), f"{requirement}, locked is {version}"


@every_lock
def test_each_package_has_hashes(path: Path) -> None:
    locked = read_pins(path)
    assert [name for name, (_, hashes) in locked.items() if not hashes or len(set(hashes)) != len(hashes)] == []
    assert all(len(locked[name][1]) > 5 for name in ("torch", "numpy", "orjson", "tokenizers", "pydantic-core"))


@every_lock
def test_locked_torch_is_cuda_build_with_libraries(path: Path) -> None:
    locked = read_pins(path)
    assert "+" not in locked["torch"][0] and {"triton", "nvidia-cudnn-cu13"} <= set(locked)
    assert any(name.startswith("nvidia-nccl") for name in locked)


@every_lock
def test_lock_header_has_command_and_no_index(path: Path) -> None:
    text = path.read_text("utf-8")
    minor = path.stem.removeprefix("cuda-py3")
    assert f"pip-compile with Python 3.{minor}\n" in text and f"--output-file=requirements/{path.name}" in text
    assert not re.search(r"://|^ *--(index|extra|find|trusted)|@ ", text, re.M)
