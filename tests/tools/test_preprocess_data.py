"""tools/preprocess_data.py as a user starts, kills and resumes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.data import IndexedDataset
from megatron.tokenizer import train
from tests.helpers.preprocess_job import GOOD, lines
from tools import preprocess_data

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"

HELD = """
import os, runpy, signal, sys, time
from pathlib import Path
sys.argv[0] = {tool!r}
sys.path.insert(0, {root!r})
from megatron import files
def hold(operation, path):
    if operation == "create" and path.name.startswith("unit-000002"):
        Path("held").write_text(str(os.getpid()))
        signal.pause()
files.before_operation = hold
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The tool, whose worker stops at the beginning of the third unit and tells its process id."""

HELP = """
import sys, runpy
sys.argv = ["preprocess_data.py", "--help"]
try:
    runpy.run_path({tool!r}, run_name="__main__")
except SystemExit as end:
    assert end.code == 0
assert not {{"torch", "deepspeed", "rich", "jieba", "pyarrow"}} & set(sys.modules), sorted(sys.modules)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tool")
    (path / "t.json").write_bytes(train.train_bpe(GOOD, 300))
    (path / "c.jsonl").write_bytes(lines(*GOOD))
    return path


def arguments(prefix: str, *more: str) -> list[str]:
    given = ["--input", "c.jsonl", "--tokenizer-path", "t.json", "--output-prefix", prefix, "--unit-bytes", "1024"]
    return [*given, "--workers", "1", *more]


def start(folder: Path, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *more]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, **options)


def held(folder: Path, prefix: str) -> tuple[subprocess.Popen[str], int]:
    """Start the tool and return it and the process id of its worker, both at work on the third unit."""
    (folder / "held").unlink(missing_ok=True)
    code = HELD.format(tool=str(TOOL), root=str(TOOL.parents[1]))
    command = [sys.executable, "-c", code, *arguments(prefix)]
    tool = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not ((folder / "held").exists() and (folder / "held").read_text()):
        assert time.monotonic() < deadline and tool.poll() is None, tool.communicate()[1]
        time.sleep(0.01)
    return tool, int((folder / "held").read_text())


def wait_for_end(process: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process}").exists() and "State:\tZ" not in Path(f"/proc/{process}/status").read_text():
        assert time.monotonic() < deadline, "a worker must end with its job"
        time.sleep(0.01)


def test_help_imports_nothing_that_is_slow(tmp_path: Path) -> None:
    code = HELP.format(tool=str(TOOL))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--max-bad-fraction" in done.stdout


def test_a_killed_tool_takes_its_workers_along_and_goes_on(folder: Path) -> None:
    done = start(folder, *arguments("whole"), "--verify")
    assert done.returncode == 0, done.stderr
    assert "60 documents" in done.stderr and "whole is valid: 60 documents" in done.stderr
    assert "tokens: 'document " in done.stderr
    tool, worker = held(folder, "killed")
    second = start(folder, *arguments("killed", "--resume"))
    assert second.returncode == 2 and f"process {tool.pid} does" in second.stderr
    tool.kill()
    tool.communicate()
    wait_for_end(worker)
    resumed = start(folder, *arguments("killed", "--resume"))
    assert resumed.returncode == 0 and "2 of 4 units were finished before" in resumed.stderr, resumed.stderr
    for suffix in (".bin", ".idx", ".meta.json"):
        assert (folder / f"killed{suffix}").read_bytes() == (folder / f"whole{suffix}").read_bytes()
    assert not (folder / "killed.parts").exists()


def test_a_killed_worker_ends_the_tool_with_code_1(folder: Path) -> None:
    tool, worker = held(folder, "worker")
    os.kill(worker, signal.SIGKILL)
    said = tool.communicate(timeout=60)[1]
    assert tool.returncode == 1 and "was killed by SIGKILL" in said and "c.jsonl bytes 2048:3072" in said
    assert "2 of 4 units are finished and saved; --resume" in said and "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_stopped_tool_ends_its_workers_and_says_how_to_go_on(folder: Path, number: signal.Signals) -> None:
    tool, worker = held(folder, "stopped")
    if number == signal.SIGINT:
        os.killpg(tool.pid, number)  # as a terminal does
    else:
        tool.send_signal(number)
    said = tool.communicate(timeout=60)[1]
    assert tool.returncode == 75 and said.splitlines()[-1].startswith("stopped; 2 of 4 units are finished"), said
    wait_for_end(worker)


def test_standard_input_and_bad_lines(folder: Path) -> None:
    given = ["--input", "-", "--tokenizer-path", "t.json", "--output-prefix", "in/c", "--workers", "2"]
    done = start(folder, *given, "--max-bad-lines", "1", input=lines("one", "two").decode() + "x\n")
    assert done.returncode == 0 and "2 documents" in done.stderr and "1 bad line was skipped" in done.stderr
    assert "in/c.bad.jsonl lists it" in done.stderr
    assert IndexedDataset(folder / "in/c").num_documents == 2
    record = json.loads((folder / "in/c.bad.jsonl").read_text())
    assert (record["file"], record["line"], record["byte_offset"]) == ("-", 3, 32)
    failed = start(folder, *given, input="x\n")
    assert failed.returncode == 2 and "-:1 (byte 0): not JSON" in failed.stderr and "Traceback" not in failed.stderr
    assert IndexedDataset(folder / "in/c").num_documents == 2 and not (folder / "in/c.parts").exists()
    refused = start(folder, *given, "--resume")
    assert refused.returncode == 2 and "--resume needs input that can be read again" in refused.stderr


def test_flags_of_a_job_are_refused_in_a_mere_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        preprocess_data.parse_args(["--output-prefix", "whole", "--verify", "--resume", "--format", "jsonl"])
    assert "--format, --resume cannot be used without --input" in capsys.readouterr().err
    assert preprocess_data.parse_args(["--output-prefix", "whole", "--verify", "--seed", "3"]).seed == 3
