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
from benchmarks.gpu.wheels import LEFT_OUT, NEVER, THERE, Target, amiss, read_there, required

ROOT = Path(__file__).resolve().parents[3]
PY312 = Target("3.12")
CARRIED = {"deepspeed", "orjson", "zstandard"}
"""What of pyproject.toml a GPU machine is taken to lack."""

Make = Callable[..., None]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Put a wheel of this name and these requirements into the test's folder."""

    def make(
        file: str, *requires: str, python: str = ">=3.8", size: int = 0, version: str = "1.0", folder: Path = tmp_path
    ) -> None:
        name = file.split("-")[0]
        about = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: {python}"]
        about += [f"Requires-Dist: {one}" for one in requires]
        with zipfile.ZipFile(folder / file, "w") as archive:
            archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(about) + "\n")
            archive.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
            archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
            archive.writestr(f"{name}/data", b"\0" * size)

    return make


def wants(*requirements: str) -> list[Requirement]:
    return [Requirement(one) for one in requirements]


def test_each_requirement_of_the_project_is_carried_or_there_or_left_out_with_a_reason() -> None:
    names = {one.name for one in required()}
    assert names > CARRIED
    for name in names:
        assert (name in CARRIED) + (name in THERE) + (name in LEFT_OUT) == 1, name
    assert names > LEFT_OUT, "a package that nothing requires any more"
    assert {"torch", "numpy"} <= set(THERE)


def test_wheels_that_fit_and_need_nothing_more_are_right(make: Make, tmp_path: Path) -> None:
    make("engine-1.0-py3-none-any.whl", "core==1.0", "there>=2", 'old; python_version < "3.11"', 'x; extra == "all"')
    make("core-1.0-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl")
    assert amiss(wants("engine>=1", "there"), tmp_path, {"there": "2.1"}, PY312) == []
    assert amiss(wants("engine>=1", "there"), tmp_path, {"there": ""}, PY312) == []


@pytest.mark.parametrize(
    ("said", "wanted", "there"),
    [
        ("engine requires lost, which is neither collected nor installed", ["engine"], {}),
        ("other>=2, which is neither collected nor installed (installed: 1.5)", ["other>=2"], {"other": "1.5"}),
        ("pyproject.toml requires engine>=2, collected is 1.0", ["engine>=2"], {"lost": ""}),
        ("engine requires x, which is neither", ["engine[all]"], {"lost": ""}),
        ("requires torch, which must be installed already", ["torch"], {}),
        ("requires nvidia-cublas, which must be installed already", ["nvidia-cublas"], {}),
        ("engine is collected, but nothing requires it", [], {}),
    ],
)  # fmt: skip
def test_what_is_missing_or_superfluous_is_said(
    make: Make, tmp_path: Path, said: str, wanted: list[str], there: dict[str, str]
) -> None:
    make("engine-1.0-py3-none-any.whl", "lost", 'x; extra == "all"')
    problems = amiss(wants(*wanted), tmp_path, there, PY312)
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("engine-1.0-cp311-cp311-manylinux_2_17_x86_64.whl", "does not install on Python 3.12"),
        ("engine-1.0-cp312-cp312-linux_x86_64.whl", "does not install on Python 3.12"),
        ("engine-1.0-cp312-cp312-manylinux_2_39_x86_64.whl", "does not install on Python 3.12"),
        ("engine-1.0-cp312-cp312-manylinux_2_17_aarch64.whl", "does not install on Python 3.12"),
    ],
)
def test_a_wheel_of_another_python_or_machine_is_refused(make: Make, tmp_path: Path, file: str, said: str) -> None:
    make(file)
    assert [said in one for one in amiss(wants("engine"), tmp_path, {}, PY312)] == [True]


def test_a_wheel_for_newer_pythons_a_second_one_and_torch_itself_are_refused(make: Make, tmp_path: Path) -> None:
    make("engine-1.0-py3-none-any.whl", python=">=3.13")
    assert "requires Python >=3.13" in amiss(wants("engine"), tmp_path, {}, PY312)[0]
    make("engine-1.0-py3-none-any.whl")
    make("engine-1.1-py3-none-any.whl", version="1.1")
    assert amiss(wants("engine"), tmp_path, {}, PY312) == ["engine is collected 2 times"]
    (tmp_path / "engine-1.1-py3-none-any.whl").unlink()
    make("triton-1.0-py3-none-any.whl")
    assert "triton-1.0-py3-none-any.whl must be installed already, not collected" in amiss(
        wants("engine"), tmp_path, {}, PY312
    )
    assert all(NEVER.fullmatch(name) for name in ("torch", "nvidia-nccl-cu13", "cuda-bindings"))
    assert not any(NEVER.fullmatch(name) for name in ("torchmetrics", "nvidiax", "deepspeed"))


def test_what_is_missing_is_fetched_with_what_it_needs_and_the_folder_changes_only_if_all_fits(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    make("old-1.0-py3-none-any.whl", folder=out)
    asked = []

    def fetch_into(folder: Path, target: Target) -> wheels.Fetch:
        def fetch(requirement: Requirement) -> None:
            asked.append((requirement.name, target.python))
            make(f"{requirement.name}-1.0-py3-none-any.whl", *needs.get(requirement.name, ()), folder=folder)

        return fetch

    monkeypatch.setattr(wheels, "fetch_into", fetch_into)
    monkeypatch.setattr(wheels, "required", lambda: wants("engine", "numpy", "jieba"))
    needs = {"engine": ["core", "core>=0.5", "torch"], "core": ["engine", "unknown>=3"]}
    arguments = ["--python", "3.13", "--out", str(out)]
    assert wheels.main(arguments) == 1
    assert "error: core requires unknown>=3, collected is 1.0" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["old-1.0-py3-none-any.whl"]
    asked.clear()
    needs["core"] = ["engine"]
    assert wheels.main(arguments) == 0
    assert asked == [("engine", "3.13"), ("core", "3.13")]
    assert sorted(path.name for path in out.iterdir()) == ["core-1.0-py3-none-any.whl", "engine-1.0-py3-none-any.whl"]
    assert "0.0 MB: 2 wheels for Python 3.13" in capsys.readouterr().out
    assert wheels.main([*arguments, "--check"]) == 0


def test_the_version_that_is_tested_here_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.metadata, "version", lambda name: "0.19.8")
    assert wheels.exact(Requirement("deepspeed>=0.19.6,<0.20")) == "deepspeed==0.19.8"
    assert wheels.exact(Requirement("deepspeed>=0.20")) == "deepspeed>=0.20"


def test_a_list_of_what_is_there_is_read_as_pip_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "there.txt"
    path.write_text("# there\nNumPy==2.4.6\ntyping_extensions\ntorch==2.11.0+cu130\nlocal @ file:///x\n\n")
    assert read_there(path) == {"numpy": "2.4.6", "typing-extensions": "", "torch": "2.11.0+cu130", "local": ""}


@pytest.mark.parametrize("arguments", [["--python", "312"], ["--have", "no-such-file"]])
def test_options_that_cannot_be_met_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        wheels.parse_args(arguments)


@pytest.mark.slow
def test_a_python_that_lacks_packages_is_given_the_wheels_once(make: Make, tmp_path: Path) -> None:
    """By run.sh, with this Python's pip; a stand-in answers in the names of the program and of the packages."""
    home, site, tools = tmp_path / "home", tmp_path / "site", tmp_path / "tools"
    (home / "benchmarks" / "gpu").mkdir(parents=True)
    tools.mkdir()
    script = home / "benchmarks" / "gpu" / "run.sh"
    script.write_text((ROOT / "benchmarks" / "gpu" / "run.sh").read_text())
    python = tools / "python3"
    python.write_text(
        '#!/usr/bin/env bash\ncase "$*" in\n  -c*) exit "$LACKS" ;;\n  *benchmarks.gpu*) echo "path $PYTHONPATH" ;;\n'
        f'  *) echo "pip" >> "{tmp_path}/calls"; exec "{sys.executable}" "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    (home / ".gpu-wheels").mkdir()
    make("engine-1.0-py3-none-any.whl", folder=home / ".gpu-wheels")

    def start(lacks: int) -> subprocess.CompletedProcess[str]:
        plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "GPU_WHEELS")}
        settings = {"PYTHON": str(python), "GPU_SITE": str(site), "LACKS": str(lacks)}
        return subprocess.run(["bash", script], env=plain | settings, capture_output=True, text=True, check=False)

    def installs() -> int:
        calls = tmp_path / "calls"
        return calls.read_text().count("pip") if calls.exists() else 0

    assert start(0).stdout == f"path {home}\n" and not site.exists()
    done = start(1)
    assert done.stdout == f"path {home}:{site}\n", done.stderr
    assert (site / "engine" / "data").is_file()
    before = installs()
    assert start(1).stdout == done.stdout
    assert installs() == before + 1, "only --version was asked for"
    make("engine-1.0-py3-none-any.whl", size=10, folder=home / ".gpu-wheels")
    assert start(1).returncode == 0 and (site / "engine" / "data").stat().st_size == 10
    make("core-1.0-cp27-none-any.whl", folder=home / ".gpu-wheels")
    assert (start(1).returncode, "bash benchmarks/gpu/run.sh wheels --python X.Y" in start(1).stderr) == (1, True)


def test_a_package_without_a_wheel_is_built_and_pip_is_asked_for_the_other_python(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str]) -> str:
        commands.append(command)
        if "wheel" in command:
            make("engine-1.0-py3-none-any.whl")
        return "no matching distribution" if "download" in command else ""

    monkeypatch.setattr(wheels, "_run", run)
    wheels.fetch_into(tmp_path, PY312)(Requirement("engine>=1"))
    download, build = commands
    at = download.index("--python-version")
    assert download[at + 1] == "3.12" and download[-1] == "engine>=1" and "--no-deps" in download
    assert {"manylinux_2_28_x86_64", "manylinux2014_x86_64"} <= set(download)
    assert "--no-deps" in build and build[-1] == "engine>=1"
    monkeypatch.setattr(wheels, "_run", lambda command: "no space left\n")
    with pytest.raises(SystemExit, match="lost can neither be downloaded nor built:\nno space left"):
        wheels.fetch_into(tmp_path, PY312)(Requirement("lost"))


def test_deepspeed_is_built_without_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_BUILD_OPS", "1")
    code = "import os, sys; sys.exit(os.environ['DS_BUILD_OPS'])"
    assert wheels._run([sys.executable, "-c", code]) == "0\n\n"


def test_the_wheels_are_gathered_by_the_python_that_set_up_makes(tmp_path: Path) -> None:
    for name, text in (
        ("benchmarks/gpu/run.sh", (ROOT / "benchmarks" / "gpu" / "run.sh").read_text()),
        ("tools/setup.sh", 'PYTHON="echo"\n'),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    words = ["bash", tmp_path / "benchmarks" / "gpu" / "run.sh", "wheels", "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "-m benchmarks.gpu.wheels --check\n"


def test_the_scripts_are_whole() -> None:
    for script in sorted((ROOT / "benchmarks" / "gpu").glob("*.sh")):
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0, script
