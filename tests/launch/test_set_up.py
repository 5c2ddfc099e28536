"""The set-up is done once, again when pyproject.toml changes, and anew after an interruption."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "tools" / "set_up.py"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The module with a project of its own, no package present, and pip replaced by a list of what it was asked."""
    spec = importlib.util.spec_from_file_location("set_up", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project]\ndependencies = ["torch==9.9.0", "no-such-package>=1"]\n'
        '[project.optional-dependencies]\ntest = ["no-such-test-package"]\n'
    )
    module.asked = []
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PROJECT", project)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "run", lambda what, command: _pretend(module, command))
    return module


def _pretend(module, command: list[str]) -> None:
    module.asked.append(command[1:])
    if "venv" in command:
        (module.VENV / "bin").mkdir(parents=True, exist_ok=True)
        python = module.VENV / "bin" / "python"
        python.write_text("#!/bin/sh\nexit 0\n")
        python.chmod(0o755)


def test_torch_is_installed_first_and_alone(tool):
    assert tool.find_or_make("") == str(tool.VENV / "bin" / "python")
    assert [command[1] for command in tool.asked] == ["venv", "pip", "pip"]
    assert tool.asked[1][-1] == "torch==9.9.0"
    assert tool.asked[2][-2:] == ["-e", str(tool.ROOT)]


def test_the_second_start_installs_nothing(tool):
    tool.find_or_make("")
    tool.asked.clear()
    tool.find_or_make("")
    assert tool.asked == []


def test_a_changed_pyproject_or_another_extra_installs_again_without_a_new_environment(tool):
    tool.find_or_make("")
    tool.asked.clear()
    tool.find_or_make("test")
    tool.PROJECT.write_text(tool.PROJECT.read_text() + "# changed\n")
    tool.find_or_make("")
    assert [command[1] for command in tool.asked] == ["pip"] * 4
    assert tool.asked[1][-1].endswith("[test]")


def test_an_interrupted_set_up_begins_anew(tool, monkeypatch):
    def interrupted(what, command):
        _pretend(tool, command)
        if "pip" in command:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tool, "run", interrupted)
        tool.find_or_make("")
    tool.asked.clear()
    tool.find_or_make("")
    assert tool.asked[0][1:3] == ["venv", "--clear"]
    assert len(tool.asked) == 3


def test_a_second_set_up_waits_for_the_first(tool):
    holder = "import fcntl,sys,time; f=open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True)"
    holder += "; time.sleep(0.4)"
    first = subprocess.Popen([sys.executable, "-c", holder, str(tool.PROJECT)], stdout=subprocess.PIPE)
    first.stdout.readline()
    start = time.monotonic()
    tool.find_or_make("")
    assert time.monotonic() - start > 0.2
    first.wait()
    first.stdout.close()


def test_a_python_with_all_packages_is_used_and_another_torch_only_warned_about(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool, "installed", lambda name: "9.8.1" if name == "torch" else "1.5")
    assert tool.find_or_make("") == sys.executable
    assert "tested with torch==9.9.0, this Python has 9.8.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "specifier", "allowed"),
    [("2.13.0+cpu", "==2.13.0", True), ("0.19.8", ">=0.19.6,<0.20", True), ("0.20.0", ">=0.19.6,<0.20", False),
     ("1.26.4", ">=2,<3", False), ("2.4", ">=2.4.0", True)],
)  # fmt: skip
def test_versions_are_compared_by_number(tool, version, specifier, allowed):
    assert tool.is_allowed(version, specifier) is allowed
