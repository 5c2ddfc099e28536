"""What is carried to a GPU machine without a network is all that its Python lacks, fits it, and is not too large."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import wheels
from benchmarks.gpu.wheels import (
    ASSUMED_PACKAGES,
    NEVER_CARRIED,
    UNNEEDED,
    Target,
    find_problems,
    read_packages,
    required_packages,
)

ROOT = Path(__file__).resolve().parents[3]
PY312 = Target("3.12")
BUNDLED = {"deepspeed", "orjson", "zstandard", "fla-core"}
"""What of pyproject.toml a GPU machine is taken to lack."""

MakeWheel = Callable[..., None]


@pytest.fixture
def make_wheel(tmp_path: Path) -> MakeWheel:
    """Put a wheel of this name and these requirements into the test's folder."""

    def make(
        file: str, *requires: str, python: str = ">=3.8", size: int = 0, version: str = "1.0", folder: Path = tmp_path
    ) -> None:
        name = file.split("-")[0]
        metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: {python}"]
        metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
        with zipfile.ZipFile(folder / file, "w") as archive:
            archive.writestr(f"{name}/__init__.py", "")
            archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(metadata) + "\n")
            archive.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
            archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
            archive.writestr(f"{name}/data", b"\0" * size)

    return make


def parse_requirements(*requirements: str) -> list[Requirement]:
    return [Requirement(requirement) for requirement in requirements]


def test_each_requirement_is_bundled_installed_or_excluded() -> None:
    names = {requirement.name for requirement in required_packages()}
    assert names > BUNDLED
    for name in names:
        assert (name in BUNDLED) + (name in ASSUMED_PACKAGES) + (name in UNNEEDED) == 1, name
    assert names > UNNEEDED, "a package that nothing requires any more"
    assert {"torch", "numpy"} <= set(ASSUMED_PACKAGES)


def test_complete_compatible_wheels_pass(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel(
        "engine-1.0-py3-none-any.whl", "core==1.0", "there>=2", 'old; python_version < "3.11"', 'x; extra == "all"'
    )
    make_wheel("core-1.0-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl")
    assert find_problems(parse_requirements("engine>=1", "there"), tmp_path, {"there": "2.1"}, PY312) == []
    assert find_problems(parse_requirements("engine>=1", "there"), tmp_path, {"there": ""}, PY312) == []


@pytest.mark.parametrize(
    ("expected", "requirements", "installed"),
    [
        ("engine requires lost, which is neither collected nor installed", ["engine"], {}),
        ("other>=2, which is neither collected nor installed (installed: 1.5)", ["other>=2"], {"other": "1.5"}),
        ("pyproject.toml requires engine>=2, but 1.0 is collected", ["engine>=2"], {"lost": ""}),
        ("engine requires x, which is neither", ["engine[all]"], {"lost": ""}),
        ("requires torch, which must be installed already", ["torch"], {}),
        ("requires nvidia-cublas, which must be installed already", ["nvidia-cublas"], {}),
        ("engine is collected, but nothing requires it", [], {}),
    ],
)  # fmt: skip
def test_missing_or_superfluous_wheels_are_reported(
    make_wheel: MakeWheel, tmp_path: Path, expected: str, requirements: list[str], installed: dict[str, str]
) -> None:
    make_wheel("engine-1.0-py3-none-any.whl", "lost", 'x; extra == "all"')
    problems = find_problems(parse_requirements(*requirements), tmp_path, installed, PY312)
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("engine-1.0-cp311-cp311-manylinux_2_17_x86_64.whl", "does not install on Python 3.12"),
        ("engine-1.0-cp312-cp312-linux_x86_64.whl", "does not install on Python 3.12"),
        ("engine-1.0-cp312-cp312-manylinux_2_39_x86_64.whl", "does not install on Python 3.12"),
        ("engine-1.0-cp312-cp312-manylinux_2_17_aarch64.whl", "does not install on Python 3.12"),
    ],
)
def test_incompatible_wheel_is_rejected(make_wheel: MakeWheel, tmp_path: Path, file: str, expected: str) -> None:
    make_wheel(file)
    assert [
        expected in requirement for requirement in find_problems(parse_requirements("engine"), tmp_path, {}, PY312)
    ] == [True]


def test_newer_python_duplicate_and_torch_wheels_are_rejected(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel("engine-1.0-py3-none-any.whl", python=">=3.13")
    assert "requires Python >=3.13" in find_problems(parse_requirements("engine"), tmp_path, {}, PY312)[0]
    make_wheel("engine-1.0-py3-none-any.whl")
    make_wheel("engine-1.1-py3-none-any.whl", version="1.1")
    assert find_problems(parse_requirements("engine"), tmp_path, {}, PY312) == ["engine is collected 2 times"]
    (tmp_path / "engine-1.1-py3-none-any.whl").unlink()
    make_wheel("triton-1.0-py3-none-any.whl")
    assert "triton-1.0-py3-none-any.whl must be installed already, not collected" in find_problems(
        parse_requirements("engine"), tmp_path, {}, PY312
    )
    assert all(NEVER_CARRIED.fullmatch(name) for name in ("torch", "nvidia-nccl-cu13", "cuda-bindings"))
    assert not any(NEVER_CARRIED.fullmatch(name) for name in ("torchmetrics", "nvidiax", "deepspeed"))


def test_fetch_resolves_dependencies_and_replaces_folder_at_once(
    make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    make_wheel("old-1.0-py3-none-any.whl", folder=out)
    requests = []

    def fetch_into(folder: Path, target: Target) -> wheels.Fetch:
        def fetch(requirement: Requirement) -> None:
            requests.append((requirement.name, target.python))
            make_wheel(
                f"{requirement.name}-1.0-py3-none-any.whl", *dependencies.get(requirement.name, ()), folder=folder
            )

        return fetch

    monkeypatch.setattr(wheels, "fetch_into", fetch_into)
    monkeypatch.setattr(wheels, "required_packages", lambda: parse_requirements("engine", "numpy", "jieba"))
    dependencies = {"engine": ["core", "core>=0.5", "torch"], "core": ["engine", "unknown>=3"]}
    arguments = ["--python", "3.13", "--out", str(out)]
    assert wheels.main(arguments) == 1
    assert "error: core requires unknown>=3, but 1.0 is collected" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["old-1.0-py3-none-any.whl"]
    requests.clear()
    dependencies["core"] = ["engine"]
    assert wheels.main(arguments) == 0
    assert requests == [("engine", "3.13"), ("core", "3.13")]
    assert sorted(path.name for path in out.iterdir()) == ["core-1.0-py3-none-any.whl", "engine-1.0-py3-none-any.whl"]
    assert "0.0 MB: 2 wheels for Python 3.13" in capsys.readouterr().out
    assert wheels.main([*arguments, "--check"]) == 0


def test_bundled_version_equals_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.metadata, "version", lambda name: "0.19.8")
    assert wheels.pin_version(Requirement("deepspeed>=0.19.6,<0.20")) == "deepspeed==0.19.8"
    assert wheels.pin_version(Requirement("deepspeed>=0.20")) == "deepspeed>=0.20"


def test_installed_packages_are_read_from_pip_freeze(tmp_path: Path) -> None:
    path = tmp_path / "there.txt"
    path.write_text("# there\nNumPy==2.4.6\ntyping_extensions\ntorch==2.11.0+cu130\nlocal @ file:///x\n\n")
    assert read_packages(path) == {"numpy": "2.4.6", "typing-extensions": "", "torch": "2.11.0+cu130", "local": ""}


@pytest.mark.parametrize("arguments", [["--python", "312"], ["--have", "no-such-file"]])
def test_invalid_options_are_rejected(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        wheels.parse_args(arguments)


@pytest.mark.slow
def test_missing_packages_are_installed_from_wheels_once(make_wheel: MakeWheel, tmp_path: Path) -> None:
    """By run.sh, with this Python's pip; a stand-in answers in the names of the program and of the packages."""
    home, site, tools = tmp_path / "home", tmp_path / "site", tmp_path / "tools"
    (home / "benchmarks" / "gpu").mkdir(parents=True)
    tools.mkdir()
    for name in ("run.sh", "install.sh"):
        (home / "benchmarks" / "gpu" / name).write_text((ROOT / "benchmarks" / "gpu" / name).read_text())
    script = home / "benchmarks" / "gpu" / "run.sh"
    python = tools / "python3"
    python.write_text(
        '#!/usr/bin/env bash\ncase "$*" in\n  -c*) exit "$LACKS" ;;\n  *benchmarks.gpu*) echo "path $PYTHONPATH" ;;\n'
        f'  *) echo "pip" >> "{tmp_path}/calls"; exec "{sys.executable}" "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    (home / ".gpu-wheels").mkdir()
    make_wheel("engine-1.0-py3-none-any.whl", folder=home / ".gpu-wheels")

    def start(exit_code: int) -> subprocess.CompletedProcess[str]:
        clean_env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "GPU_WHEELS")}
        settings = {"PYTHON": str(python), "GPU_SITE": str(site), "LACKS": str(exit_code)}
        return subprocess.run(["bash", script], env=clean_env | settings, capture_output=True, text=True, check=False)

    def count_installs() -> int:
        calls = tmp_path / "calls"
        return calls.read_text().count("pip") if calls.exists() else 0

    assert start(0).stdout == f"path {home}\n" and not site.exists()
    result = start(1)
    assert result.stdout == f"path {home}:{site}\n", result.stderr
    assert (site / "engine" / "data").is_file()
    assert list((site / "engine" / "__pycache__").glob("__init__.*.pyc")), "modules are compiled beforehand"
    before = count_installs()
    assert start(1).stdout == result.stdout
    assert count_installs() == before + 1, "only --version was asked for"
    make_wheel("engine-1.0-py3-none-any.whl", size=10, folder=home / ".gpu-wheels")
    assert start(1).returncode == 0 and (site / "engine" / "data").stat().st_size == 10
    make_wheel("core-1.0-cp27-none-any.whl", folder=home / ".gpu-wheels")
    assert (start(1).returncode, "bash benchmarks/gpu/run.sh wheels --python X.Y" in start(1).stderr) == (1, True)


def test_package_without_wheel_is_built_for_target_python(
    make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str]) -> str:
        commands.append(command)
        if "wheel" in command:
            make_wheel("engine-1.0-py3-none-any.whl")
        return "no matching distribution" if "download" in command else ""

    monkeypatch.setattr(wheels, "_run", run)
    wheels.fetch_into(tmp_path, PY312)(Requirement("engine>=1"))
    download, build = commands
    idx = download.index("--python-version")
    assert download[idx + 1] == "3.12" and download[-1] == "engine>=1" and "--no-deps" in download
    assert {"manylinux_2_28_x86_64", "manylinux2014_x86_64"} <= set(download)
    assert "--no-deps" in build and build[-1] == "engine>=1"
    monkeypatch.setattr(wheels, "_run", lambda command: "no space left\n")
    with pytest.raises(SystemExit, match="lost can neither be downloaded nor built:\nno space left"):
        wheels.fetch_into(tmp_path, PY312)(Requirement("lost"))


def test_deepspeed_is_built_without_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_BUILD_OPS", "1")
    code = "import os, sys; sys.exit(os.environ['DS_BUILD_OPS'])"
    assert wheels._run([sys.executable, "-c", code]) == "0\n\n"


def test_wheels_command_uses_python_of_setup(tmp_path: Path) -> None:
    for name, text in (
        ("benchmarks/gpu/run.sh", (ROOT / "benchmarks" / "gpu" / "run.sh").read_text()),
        ("tools/setup.sh", 'PYTHON="echo"\n'),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = ["bash", tmp_path / "benchmarks" / "gpu" / "run.sh", "wheels", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "-m benchmarks.gpu.wheels --check\n"


def test_shell_scripts_have_valid_syntax() -> None:
    for script in sorted((ROOT / "benchmarks" / "gpu").glob("*.sh")):
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0, script
