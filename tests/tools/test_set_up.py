"""The set-up is done once, again when pyproject.toml changes, and anew after an interruption."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "tools" / "set_up.py"


def load_set_up():
    spec = importlib.util.spec_from_file_location("set_up", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The module with a project of its own, no package present, and pip replaced by a list of what it was asked."""
    module = load_set_up()
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project]\ndependencies = ["torch==9.9.0", "no-such-package>=1"]\n'
        '[project.optional-dependencies]\ntest = ["no-such-test-package"]\n'
    )
    module.asked = []
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PROJECT", project)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(module, "run", lambda description, command, without=None: _record_command(module, command))
    return module


def _record_command(module, command: list[str]) -> None:
    module.asked.append(command[1:])
    if "venv" in command:
        make_fake_environment(module.VENV)


def make_fake_environment(venv: Path, lacking: list[str] | None = None, checkout: str = "") -> Path:
    """Make an environment whose Python starts and answers what it lacks (None: it does not answer)."""
    answer = "" if lacking is None else json.dumps([lacking, checkout])
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    return python


def make_other_checkout(tool) -> Path:
    """Make a folder that looks like another checkout."""
    folder = tool.ROOT.parent / f"{tool.ROOT.name}-beside"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def test_torch_is_installed_separately_first(tool):
    assert tool.find_or_create_python("") == str(tool.VENV / "bin" / "python")
    assert [command[1] for command in tool.asked] == ["venv", "pip", "pip"]
    assert tool.asked[1][-1] == "torch==9.9.0"
    assert tool.asked[2][-2:] == ["-e", str(tool.ROOT)]


def test_torch_is_compiled_while_other_packages_install(tool, monkeypatch):
    """An environment in which Python writes no bytecode would else compile torch in each process."""
    packages = tool.VENV / "lib" / "python3.11" / "site-packages"

    def install(description, command, without=None):
        _record_command(tool, command)
        if "venv" in command:
            tool.VENV.joinpath("bin", "python").unlink()
            tool.VENV.joinpath("bin", "python").symlink_to(sys.executable)
        else:
            name = "torch" if command[-1].startswith("torch") else "others"
            (packages / name).mkdir(parents=True)
            (packages / name / "module.py").write_text("x = 1\n")
            (packages / name / "of_python_2.py").write_text("print 'x'\n")
            if name == "others":
                deadline = time.monotonic() + 30
                while not list(packages.glob("torch/__pycache__/module.*")) and time.monotonic() < deadline:
                    time.sleep(0.01)

    monkeypatch.setattr(tool, "run", install)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    start = time.monotonic()
    tool.find_or_create_python("")
    assert time.monotonic() - start < 30 and all("--no-compile" in command for command in tool.asked[1:])
    assert sorted(file.parts[-3] for file in packages.rglob("*.pyc")) == ["others", "torch"]


def test_second_start_installs_no_packages(tool):
    tool.find_or_create_python("")
    tool.asked.clear()
    tool.find_or_create_python("")
    assert tool.asked == []


def test_changed_pyproject_or_extra_reinstalls_packages(tool):
    tool.find_or_create_python("")
    tool.asked.clear()
    tool.find_or_create_python("test")
    tool.PROJECT.write_text(tool.PROJECT.read_text() + "# changed\n")
    tool.find_or_create_python("")
    assert [command[1] for command in tool.asked] == ["pip"] * 4
    assert tool.asked[1][-1].endswith("[test]")


def test_add_installs_missing_extra(tool, monkeypatch, capsys):
    tool.PROJECT.write_text(tool.PROJECT.read_text() + 'eval = ["no-such-harness>=0.4"]\n')
    python = str(make_fake_environment(tool.VENV, lacking=[]))
    tool.install_extra(python, "eval")
    assert tool.asked == [] and capsys.readouterr().err == ""
    make_fake_environment(tool.VENV, lacking=["no-such-harness>=0.4"])
    tool.install_extra(python, "eval")
    assert tool.asked == [["-m", "pip", "install", "no-such-harness>=0.4"]]

    def fail(description, command, without=None):
        raise tool.SetupError(f"{description} failed.")

    monkeypatch.setattr(tool, "run", fail)
    tool.install_extra(python, "eval")
    assert (
        "installing no-such-harness>=0.4 failed. Until then tests that need it are skipped" in capsys.readouterr().err
    )


def test_package_with_our_name_is_installed_into_separate_folder(tool):
    tool.PROJECT.write_text(tool.PROJECT.read_text() + 'megatron-core = ["megatron-core==0.16.1"]\n')
    python = make_fake_environment(tool.VENV, lacking=["megatron-core==0.16.1"])
    tool.install_extra(str(python), "megatron-core")
    folder = str(tool.VENV / "megatron-core")
    command = ["-m", "pip", "install", "--upgrade", "--no-deps", "--target", folder, "megatron-core==0.16.1"]
    assert tool.asked == [command]


def test_ask_finds_package_in_separate_folder(tmp_path):
    metadata = tmp_path / "no_such_package-2.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: no-such-package\nVersion: 2.0\n")
    tool, python = load_set_up(), Path(sys.executable)
    assert tool.query_python(python, ["no-such-package==2.0"], tmp_path).missing == []
    assert tool.query_python(python, ["no-such-package==1.0"], tmp_path).missing == ["no-such-package==1.0"]
    assert tool.query_python(python, ["no-such-package==2.0"]).missing == ["no-such-package==2.0"]


@pytest.mark.parametrize("is_active", [True, False])
def test_add_does_not_change_foreign_python(tool, capsys, is_active):
    tool.PROJECT.write_text(tool.PROJECT.read_text() + 'eval = ["no-such-harness>=0.4"]\n')
    environment = tool.ROOT / "another" if is_active else tool.VENV
    checkout = make_other_checkout(tool)
    python = str(
        make_fake_environment(
            environment, lacking=["no-such-harness>=0.4"], checkout="" if is_active else str(checkout)
        )
    )
    tool.install_extra(python, "eval")
    message = (
        f"{python} lacks no-such-harness>=0.4: tests that need it are skipped. To install: {python} -m pip install"
    )
    assert tool.asked == [] and message in capsys.readouterr().err


def test_interrupted_setup_restarts_from_scratch(tool, monkeypatch):
    def interrupted(description, command, without=None):
        _record_command(tool, command)
        if "pip" in command:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tool, "run", interrupted)
        tool.find_or_create_python("")
    tool.asked.clear()
    tool.find_or_create_python("")
    assert tool.asked[0][1:3] == ["venv", "--clear"]
    assert len(tool.asked) == 3


def test_second_setup_waits_for_first(tool):
    """Also one of another checkout, with the same environment behind a link."""
    shared = make_other_checkout(tool)
    (shared / ".venv").mkdir()
    tool.VENV.symlink_to(shared / ".venv")
    holder = "import fcntl,os,sys,time; f=os.open(sys.argv[1], 0); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True)"
    holder += "; time.sleep(0.4)"
    first = subprocess.Popen([sys.executable, "-c", holder, str(shared)], stdout=subprocess.PIPE)
    first.stdout.readline()
    start = time.monotonic()
    tool.find_or_create_python("")
    assert time.monotonic() - start > 0.2
    first.wait()
    first.stdout.close()


@pytest.mark.parametrize("is_link", [False, True])
def test_compatible_environment_of_other_checkout_is_used(tool, capsys, is_link):
    other = make_other_checkout(tool)
    if is_link:
        tool.VENV.symlink_to(other / ".venv")
    python = make_fake_environment(tool.VENV.resolve(), [], str(other))
    before = sorted(python.parents[1].rglob("*"))
    pythons = [tool.find_or_create_python(extra) for extra in ("", "test")]
    assert pythons == [str(tool.VENV / "bin" / "python")] * 2
    assert not tool.asked and sorted(python.parents[1].rglob("*")) == before
    output = capsys.readouterr().err
    assert f"using {tool.VENV} unchanged: it belongs to {other}" in output and "lacks" not in output


def test_incompatible_environment_of_other_checkout_raises(tool):
    other = make_other_checkout(tool)
    tool.VENV.symlink_to(other / ".venv")
    make_fake_environment(other / ".venv", ["torch==9.9.0"], str(other))
    with pytest.raises(tool.SetupError, match=r"a link to .*lacks torch==9\.9\.0, and belongs to") as raised:
        tool.find_or_create_python("")
    assert str(other) in str(raised.value) and not tool.asked
    (other / ".venv" / ".set-up-begun").touch()
    with pytest.raises(tool.SetupError, match="belongs to"):
        tool.find_or_create_python("")
    (other / "pyproject.toml").unlink()  # a checkout that is gone, or was this one before it was moved
    tool.find_or_create_python("")
    assert [command[1] for command in tool.asked] == ["venv", "pip", "pip"]


def test_complete_environment_without_stamp_is_checked_once(tool, capsys):
    make_fake_environment(tool.VENV, [], str(tool.ROOT))
    tool.find_or_create_python("")
    make_fake_environment(tool.VENV)
    tool.find_or_create_python("")
    assert not tool.asked and not capsys.readouterr().err


def test_message_names_python_without_packages(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool, "installed_version", lambda name: "9.9.0" if name == "torch" else None)
    make_fake_environment(tool.VENV, ["torch==9.9.0"])
    tool.find_or_create_python("")
    assert f"{tool.VENV} lacks torch==9.9.0: setting up" in capsys.readouterr().err
    assert [command[-1] for command in tool.asked] == ["torch==9.9.0", str(tool.ROOT)]
    tool.VENV.rename(tool.ROOT / "away")
    tool.find_or_create_python("")
    assert f"this Python ({sys.executable}) lacks no-such-package>=1: setting up" in capsys.readouterr().err


def test_installed_torch_is_not_reinstalled(tool):
    make_fake_environment(tool.VENV, ["no-such-package>=1"])
    tool.find_or_create_python("")
    assert [command[-2:] for command in tool.asked] == [["-e", str(tool.ROOT)]]


def test_ask_reports_missing_packages_and_checkout():
    """The true answer, of this Python, in place of the stand-ins above."""
    command = [sys.executable, str(SOURCE), "ask", "pytest>=1", "pytest>=9999", "torch==0.0.1", "no-such-package"]
    lacking, checkout = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert lacking == ["pytest>=9999", "torch==0.0.1", "no-such-package"]
    assert not checkout or Path(checkout).is_absolute()


def test_run_filters_already_satisfied_lines(capfd):
    tool = load_set_up()
    message = "print('Requirement already satisfied: a in b'); print('Collecting c')"
    tool.run("installing", [sys.executable, "-c", message], without=tool.SATISFIED_PREFIX)
    assert capfd.readouterr() == ("", "set-up: installing\nCollecting c\n")
    failing = f"{message}; import sys; sys.stderr.write('ERROR: no room\\n'); sys.exit(3)"
    with pytest.raises(tool.SetupError, match="failed with code 3"):
        tool.run("installing", [sys.executable, "-c", failing], without=tool.SATISFIED_PREFIX)
    assert "ERROR: no room" in capfd.readouterr().err


def test_complete_python_is_used_and_other_torch_warns(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool, "installed_version", lambda name: "9.8.1" if name == "torch" else "1.5")
    assert tool.find_or_create_python("") == sys.executable
    assert "tested with torch==9.9.0, this Python has 9.8.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "specifier", "allowed"),
    [("2.13.0+cpu", "==2.13.0", True), ("0.19.8", ">=0.19.6,<0.20", True), ("0.20.0", ">=0.19.6,<0.20", False),
     ("1.26.4", ">=2,<3", False), ("2.4", ">=2.4.0", True)],
)  # fmt: skip
def test_versions_are_compared_numerically(tool, version, specifier, allowed):
    assert tool.is_allowed(version, specifier) is allowed


@pytest.mark.parametrize(
    ("choice", "index"),
    [("cu130", "https://download.pytorch.org/whl/cu130"), ("cpu", "https://download.pytorch.org/whl/cpu"),
     ("file:///mirror/whl/cu128", "file:///mirror/whl/cu128")],
)  # fmt: skip
def test_torch_index_applies_to_torch_only(tool, monkeypatch, choice, index):
    monkeypatch.setenv("TORCH_INDEX", choice)
    tool.find_or_create_python("")
    assert tool.asked[1][-3:] == ["--index-url", index, "torch==9.9.0"]
    assert "--index-url" not in tool.asked[2]


def test_torch_uses_default_index_without_variable(tool):
    tool.find_or_create_python("")
    assert tool.asked[1][-3:] == ["install", "--no-compile", "torch==9.9.0"]


@pytest.mark.parametrize("choice", ["13.0", "cuda13", "cu13", "cpu/"])
def test_invalid_torch_build_is_rejected_before_setup(tool, monkeypatch, choice):
    monkeypatch.setenv("TORCH_INDEX", choice)
    with pytest.raises(tool.SetupError, match=f"such as cu130, cu128, rocm6.4 or cpu, .* got {choice}"):
        tool.find_or_create_python("")
    assert not tool.asked


@pytest.mark.parametrize(
    ("text", "build"),
    [("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cu130"), ("cuda = None\nhip = None\n", "cpu"),
     ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.4'\n", ""), ("cuda_version = '1'\n", "")],
)  # fmt: skip
def test_installed_torch_build_is_reported_and_unchanged(tool, monkeypatch, capsys, text, build):
    make_fake_environment(tool.VENV, [], str(tool.ROOT))
    file = tool.VENV / "lib" / "python3.11" / "site-packages" / "torch" / "version.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert tool.installed_build(tool.VENV) == build
    for choice in ("cu128", "https://mirror/whl/cu128", build, "https://mirror/simple"):
        monkeypatch.setenv("TORCH_INDEX", choice)
        tool.find_or_create_python("")
        message = f"TORCH_INDEX selects cu128, but the torch in {tool.VENV} is a {build} build: remove {tool.VENV}"
        assert (message in capsys.readouterr().err) == (bool(build) and "cu128" in choice)
    assert not tool.asked


def test_installed_build_matches_torch_version():
    import torch

    cuda = (torch.version.cuda or "").replace(".", "")
    build = "" if torch.version.hip else f"cu{cuda}" if cuda else "cpu"
    assert load_set_up().installed_build(Path(torch.__file__).parents[4]) == build


def test_pip_uses_index_of_environment(monkeypatch, capfd):
    """A mirror: PIP_INDEX_URL=... bash run_gpt2.sh."""
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    tool = load_set_up()
    tool.run("asking pip", [sys.executable, "-m", "pip", "config", "list"])
    assert ":env:.index-url='https://mirror.example/simple'" in capfd.readouterr().err
