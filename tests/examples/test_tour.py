"""The tour: its texts, the selection of sections, and the ends of commands that do not show their fault."""

from __future__ import annotations

import json
import os
import re
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tour import faults, tour
from examples.tour.job import clean_environment
from examples.tour.sections import (
    FAULT_STEP,
    STEPS,
    Command,
    NotDetectedError,
    check_loss_falls,
    compare_losses,
    make_sections,
    select_sections,
)
from examples.tour.texts import TEXTS, Texts, choose_language
from tests.docs.test_docs import check_command

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = make_sections()
NAMES = [section.name for section in SECTIONS]
COMMANDS = [command for section in SECTIONS for commands in section.groups for command in commands]
CLONED_PATHS = (
    "data", "examples", "megatron", "tds", "tools", "run_gpt2.sh", "pretrain_gpt2.py", "ds_config_gpt2.json",
)  # fmt: skip
ENGLISH = Texts("en")

STUB = """\
import sys
from examples.tour import tour
from examples.tour.sections import Command, Section
tour.make_sections = lambda: (Section("train", ({commands},), "first_hour.md", limit_s={limit_s}),)
sys.exit(tour.main([]))
"""
"""A tour of one section with other commands, in a process of its own, since a tour kills all its descendants."""


HEALTHY = r"""
import re, sys
from dataclasses import replace
from examples.tour import tour
from examples.tour.sections import make_sections
def heal(command):
    return replace(command, line=re.sub(r"TOUR_FAULT=\S+", "TOUR_FAULT=", command.line))
def make_healthy_sections():
    sections = make_sections()
    return tuple(replace(one, groups=tuple(tuple(map(heal, commands)) for commands in one.groups)) for one in sections)
tour.make_sections = make_healthy_sections
sys.exit(tour.main(["{name}", "--limit-s", "600"]))
"""
"""The tour with its own commands, but without the faults."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder that looks like a checkout. The tour writes runs there, and the sample data in the checkout."""
    (ROOT / "data").mkdir(exist_ok=True)
    for name in CLONED_PATHS:
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def start_tour(clone: Path, script: str) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(clone), os.environ.get("PYTHONPATH", "")]),
        "LC_ALL": "C.UTF-8",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def start_stub(clone: Path, commands: str, limit_s: float = 60.0) -> subprocess.Popen[str]:
    return start_tour(clone, STUB.format(commands=commands, limit_s=limit_s))


def find_processes(word: str) -> Iterator[int]:
    """Yield the ids of the processes with ``word`` in their command line, except those of this test."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_text() and int(path.parent.name) != os.getpid():
                yield int(path.parent.name)
        except OSError:
            continue


@pytest.mark.parametrize("key", TEXTS)
def test_translations_have_same_fields(key: str) -> None:
    english, chinese = ([field for _, field, _, _ in string.Formatter().parse(text) if field] for text in TEXTS[key])
    assert set(english) == set(chinese)
    assert re.search("[\u4e00-\u9fff]", TEXTS[key][1])


def test_every_section_has_texts_and_pages() -> None:
    keys = {f"{name}.{part}" for name in NAMES for part in ("title", "before", "after")}
    assert keys == {key for key in TEXTS if "." in key}
    missing = [
        page for section in SECTIONS for page in (section.page, f"zh/{section.page}")
        if not (ROOT / "docs" / page).is_file()
    ]  # fmt: skip
    assert not missing


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line.rpartition("/")[2])
def test_commands_have_valid_flags_and_variables(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_command(command.line.split())


@pytest.mark.parametrize("command", COMMANDS[1:], ids=lambda command: command.line.rpartition("/")[2])
def test_commands_name_known_faults(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "ignore_documents", lambda: None)
    monkeypatch.setattr(faults, "skip_sums_of_norms", lambda: None)
    faults.apply(re.findall(r"TOUR_FAULT=(\S+)", command.line)[0])
    with pytest.raises(SystemExit):
        faults.apply("kill:soon")


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "en_US.UTF-8"}, "en"),
        ({"LANG": "C.UTF-8", "LC_MESSAGES": "zh_TW"}, "zh"),
        ({"LANG": "zh_CN", "LC_ALL": ""}, "zh"),
    ],
)
def test_locale_selects_language(environment: dict[str, str], expected: str) -> None:
    assert choose_language(environment) == expected


@pytest.mark.parametrize(
    "names, expected", [([], NAMES), (["nan", "leak"], ["nan", "leak"]), (["host", "nan"], ["train", "nan", "host"])]
)
def test_selection_includes_sections_for_comparison(names: list[str], expected: list[str]) -> None:
    assert [section.name for section in select_sections(SECTIONS, names)] == expected


@pytest.mark.parametrize("flags, message", [(["kil"], "got kil"), (["--limit-s", "0"], "got 0")])
def test_invalid_arguments_exit_with_code_2(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        tour.parse_args(SECTIONS, flags)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_commands_run_without_the_callers_variables() -> None:
    environment = {
        "NLAYERS": "7",
        "MEGATRON_PROVE": "0",
        "SLURM_NODEID": "1",
        "HOME": "/home",
        "MEGATRON_VENV": "/venv",
    }
    expected = {"HOME": "/home", "MEGATRON_VENV": "/venv", "DS_ACCELERATOR": "cpu", "PYTHON": sys.executable}
    assert clean_environment(environment) == expected


def write_losses(folder: Path, losses: dict[int, float]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"kind": "train", "step": step, "loss": loss}) for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines))


def test_losses_after_the_fault_are_compared(tmp_path: Path) -> None:
    losses = {1: 7.5, FAULT_STEP + 2: 5.0, STEPS: 4.5}
    write_losses(tmp_path / "train", losses)
    write_losses(tmp_path / "same", losses)
    write_losses(tmp_path / "other", {**losses, STEPS: 4.5 + 1e-6})
    lines = compare_losses("same", 0.0, tmp_path, ENGLISH)
    assert [line.split(":")[0] for line in lines] == [f"step {FAULT_STEP + 2}", f"step {STEPS}"]
    assert compare_losses("other", 1e-5, tmp_path, ENGLISH)
    with pytest.raises(NotDetectedError, match="at most 0, got 1e-06"):
        compare_losses("other", 0.0, tmp_path, ENGLISH)
    assert check_loss_falls(tmp_path, ENGLISH) == []
    write_losses(tmp_path / "train", {1: 7.5, STEPS: 7.4})
    with pytest.raises(NotDetectedError, match="7.5000 to 7.4000"):
        check_loss_falls(tmp_path, ENGLISH)


@pytest.mark.parametrize(
    "commands, message",
    [
        ("(Command('echo fine', 1),)", "must end with code 1, got 0"),
        ("(Command('echo first; echo last', 0, ('^worst',)),)", "must have a line that matches '^worst'"),
        ("(Command('true'), Command('kill -9 $$', 0))", "must end with code 0, got -9"),
    ],
)
def test_undetected_fault_ends_tour_with_code_1(commands: str, message: str, clone: Path) -> None:
    process = start_stub(clone, commands)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and message in output and "1/1" in output
    assert "sections ended as expected" not in output


def test_lines_of_the_output_are_shown(clone: Path) -> None:
    command = "'echo one 1; echo two 2; echo three; exit 5', 5, ('^two', '^one')"
    process = start_stub(clone, f"(Command({command}),)")
    output, _ = process.communicate(timeout=60)
    lines = output.splitlines()
    assert process.returncode == 0 and lines.index("  two 2") < lines.index("  one 1") and "  three" not in lines
    assert "1 of 1 sections ended as expected" in output


ENDLESS = "(Command('setsid sleep {seconds} & echo started; exec sleep {seconds}'),)"


def test_time_limit_ends_all_processes(clone: Path) -> None:
    process = start_stub(clone, ENDLESS.format(seconds=98761.5), limit_s=0.5)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "must end within 0.5 s" in output
    assert not list(find_processes("98761.5"))


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_all_processes(signum: signal.Signals, code: int, clone: Path) -> None:
    seconds = 98762.5 + signum
    process = start_stub(clone, ENDLESS.format(seconds=seconds))
    log = clone / "runs" / "tour" / "train-1-1.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "started" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert not list(find_processes(str(seconds)))


def run_tour(clone: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run(
        ["bash", "run_gpt2.sh", "--tour", *arguments, "--limit-s", "600"],
        cwd=clone, env=env, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("locale", ["en_US.UTF-8", "zh_CN.UTF-8"])
def test_whole_tour_detects_every_fault(locale: str, clone: Path) -> None:
    result = run_tour(clone, LC_ALL=locale)
    assert result.returncode == 0, result.stdout + result.stderr
    texts = Texts(choose_language({"LC_ALL": locale}))
    shown = [
        name for name in NAMES if texts(f"{name}.before") in result.stdout and texts(f"{name}.after") in result.stdout
    ]
    assert shown == NAMES


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_section_runs_by_itself(name: str, clone: Path) -> None:
    result = run_tour(clone, name)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES[1:])
def test_section_without_its_fault_fails(name: str, clone: Path) -> None:
    process = start_tour(clone, HEALTHY.format(name=name))
    output, _ = process.communicate(timeout=1500)
    assert process.returncode == 1, output
    assert ENGLISH(f"{name}.before") in output and ENGLISH(f"{name}.after") not in output
