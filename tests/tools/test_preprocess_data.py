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
from tests.helpers.preprocess_job import GOOD_TEXTS, json_lines
from tools import preprocess_data

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"

PAUSED_PROGRAM = """
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

HELP_PROGRAM = """
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
    (path / "t.json").write_bytes(train.train_bpe(GOOD_TEXTS, 300))
    (path / "c.jsonl").write_bytes(json_lines(*GOOD_TEXTS))
    return path


def make_args(prefix: str, *extra: str) -> list[str]:
    base_args = ["--input", "c.jsonl", "--tokenizer-path", "t.json", "--output-prefix", prefix, "--unit-bytes", "1024"]
    return [*base_args, "--workers", "1", *extra]


def run_tool(folder: Path, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, **options)


def start_paused(folder: Path, prefix: str) -> tuple[subprocess.Popen[str], int]:
    """Start the tool and return it and the process id of its worker, both at work on the third unit."""
    (folder / "held").unlink(missing_ok=True)
    code = PAUSED_PROGRAM.format(tool=str(SCRIPT), root=str(SCRIPT.parents[1]))
    command = [sys.executable, "-c", code, *make_args(prefix)]
    tool = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not ((folder / "held").exists() and (folder / "held").read_text()):
        assert time.monotonic() < deadline and tool.poll() is None, tool.communicate()[1]
        time.sleep(0.01)
    return tool, int((folder / "held").read_text())


def wait_for_exit(pid: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, "a worker must end with its job"
        time.sleep(0.01)


def test_help_imports_no_slow_packages(tmp_path: Path) -> None:
    code = HELP_PROGRAM.format(tool=str(SCRIPT))
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "--max-bad-fraction" in result.stdout


def test_killed_tool_stops_workers_and_resumes(folder: Path) -> None:
    result = run_tool(folder, *make_args("whole"), "--verify")
    assert result.returncode == 0, result.stderr
    assert "60 documents" in result.stderr and "whole is valid: 60 documents" in result.stderr
    assert "tokens: 'document " in result.stderr
    tool, worker = start_paused(folder, "killed")
    second = run_tool(folder, *make_args("killed", "--resume"))
    assert second.returncode == 2 and f"process {tool.pid} is writing it" in second.stderr
    tool.kill()
    tool.communicate()
    wait_for_exit(worker)
    resumed = run_tool(folder, *make_args("killed", "--resume"))
    assert resumed.returncode == 0 and "2 of 4 units were finished before" in resumed.stderr, resumed.stderr
    for suffix in (".bin", ".idx", ".meta.json"):
        assert (folder / f"killed{suffix}").read_bytes() == (folder / f"whole{suffix}").read_bytes()
    assert not (folder / "killed.parts").exists()


def test_killed_worker_exits_with_code_1(folder: Path) -> None:
    tool, worker = start_paused(folder, "worker")
    os.kill(worker, signal.SIGKILL)
    output = tool.communicate(timeout=60)[1]
    assert tool.returncode == 1 and "was killed by SIGKILL" in output and "c.jsonl bytes 2048:3072" in output
    assert "2 of 4 units are finished and saved; --resume" in output and "Traceback" not in output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_stops_workers_and_prints_resume_hint(folder: Path, signum: signal.Signals) -> None:
    tool, worker = start_paused(folder, "stopped")
    if signum == signal.SIGINT:
        os.killpg(tool.pid, signum)  # as a terminal does
    else:
        tool.send_signal(signum)
    output = tool.communicate(timeout=60)[1]
    assert tool.returncode == 75 and output.splitlines()[-1].startswith("stopped; 2 of 4 units are finished"), output
    wait_for_exit(worker)


def test_stdin_input_and_bad_lines(folder: Path) -> None:
    args = ["--input", "-", "--tokenizer-path", "t.json", "--output-prefix", "in/c", "--workers", "2"]
    result = run_tool(folder, *args, "--max-bad-lines", "1", input=json_lines("one", "two").decode() + "x\n")
    assert result.returncode == 0 and "2 documents" in result.stderr and "1 bad line was skipped" in result.stderr
    assert "in/c.bad.jsonl lists it" in result.stderr
    assert IndexedDataset(folder / "in/c").num_documents == 2
    record = json.loads((folder / "in/c.bad.jsonl").read_text())
    assert (record["file"], record["line"], record["byte_offset"]) == ("-", 3, 32)
    failed = run_tool(folder, *args, input="x\n")
    assert failed.returncode == 2 and "-:1 (byte 0): not JSON" in failed.stderr and "Traceback" not in failed.stderr
    assert IndexedDataset(folder / "in/c").num_documents == 2 and not (folder / "in/c.parts").exists()
    rejected = run_tool(folder, *args, "--resume")
    assert rejected.returncode == 2 and "--resume needs input that can be read again" in rejected.stderr


def test_verify_rejects_job_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        preprocess_data.parse_args(["--output-prefix", "whole", "--verify", "--resume", "--format", "jsonl"])
    assert "--format, --resume cannot be used without --input" in capsys.readouterr().err
    assert preprocess_data.parse_args(["--output-prefix", "whole", "--verify", "--seed", "3"]).seed == 3
