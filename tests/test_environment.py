"""Programs that are started with a Python without the project's packages print one line, and only then."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron import environment

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {
    "pretrain_gpt2.py": (),
    "tools/merge_data.py": (),
    "tools/generate.py": ("--load", "x", "--prompt", "a"),
    "-m": ("megatron.launch", "--nproc-per-node", "1", "pretrain_t5.py"),
    "benchmarks/step_time.py": (),
    "benchmarks/kill.py": (),
}
NOT_PROGRAMS = ("__init__.py", "set_up.py", "referee_hook.py")
HELP_ONLY = {
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tools").glob("*.py") if path.name not in NOT_PROGRAMS),
    "examples/own_model.py",
    *sorted(
        str(path.relative_to(ROOT)) for path in [*ROOT.glob("pretrain_*.py"), *ROOT.glob("examples/*/pretrain_*.py")]
    ),
}


def run_program(*args: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program without site-packages, as a Python outside of the environment does."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    command = [sys.executable, "-S", *args]
    return subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_outside_environment_prints_one_line(program: str) -> None:
    result = run_program(program, *PROGRAMS[program])
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert f"this Python ({sys.executable}) lacks " in line and ".venv/bin/activate" in line


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(HELP_ONLY))
def test_help_outside_environment_prints_no_traceback(program: str) -> None:
    result = run_program(program, "--help")
    assert "Traceback" not in result.stderr
    failed = result.returncode == 2 and result.stderr.count("\n") == 1 and ".venv/bin/activate" in result.stderr
    assert result.returncode == 0 or failed, result.stderr


def test_message_names_setup_script_if_environment_is_missing(tmp_path: Path) -> None:
    line = run_program(str(ROOT / "pretrain_gpt2.py"), cwd=tmp_path, MEGATRON_VENV=str(tmp_path / "none")).stderr
    assert f"Run `bash {ROOT}/run_gpt2.sh` once" in line and line.endswith(". none/bin/activate\n")


def test_pytest_outside_environment_prints_one_line(tmp_path: Path) -> None:
    """With a Python that has pytest, but not the project's packages."""
    for name in ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"):
        package = Path(importlib.import_module(name).__file__ or "")
        package = package.parent if package.name == "__init__.py" else package
        (tmp_path / package.name).symlink_to(package)
    result = run_program("-m", "pytest", "tests/test_errors.py", PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert f"this Python ({sys.executable}) lacks torch. " in line and ".venv/bin/activate" in line


def missing_module(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("name", ["torch", "yaml", "torch.distributed", "numpy"])
def test_missing_required_package_is_reported_as_environment_problem(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "is_installed", lambda: False)
    assert f"lacks {name.partition('.')[0]}. " in (environment.problem(missing_module(name)) or "")


@pytest.mark.parametrize(
    "error",
    [
        missing_module("megatron.nothing"),
        missing_module("transformers"),
        ImportError("libcudart.so"),
        ValueError("numpy"),
    ],
)
def test_other_errors_are_not_environment_problems(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_installed", lambda: False)
    assert environment.problem(error) is None


def test_missing_package_inside_environment_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_installed", lambda: True)
    assert environment.problem(missing_module("torch")) is None


@pytest.mark.parametrize(("folder", "is_installed"), [("site-packages", True), ("", False)])
def test_project_counts_as_installed_by_pip_only(
    folder: str, is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build leaves an .egg-info in the repository, which every program started there sees."""
    info = tmp_path / folder / "megatron_tds.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: megatron-tds\nVersion: 1\n")
    monkeypatch.setattr(environment, "ROOT", tmp_path.resolve())
    monkeypatch.setattr(sys, "path", [str(tmp_path / folder)])
    assert len(list(metadata.distributions(name="megatron-tds"))) == 1
    assert environment.is_installed() is is_installed


def test_problem_names_old_python_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert "Python 3.11 or newer is needed, this is 3.9.2" in (environment.problem(TypeError("kw_only")) or "")


def test_hook_passes_other_errors_to_previous_hook(capsys: pytest.CaptureFixture[str]) -> None:
    errors: list[BaseException] = []
    hook = environment.hook_before(lambda error_type, error, trace: errors.append(error))
    error = ValueError("x")
    hook(ValueError, error, None)
    assert errors == [error] and capsys.readouterr().err == ""
