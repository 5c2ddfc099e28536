"""Launchers for tests, forked from the test process, which has imported torch. Their ranks are tiny scripts.

Each rank follows a plan, a list of words:

* ``sleep:S``, ``wait`` (sleep for a minute), ``exit:CODE``, ``raise``, ``quit`` (``os._exit(0)``), ``segv``,
  ``kill`` (SIGKILL to itself)
* ``save``: on SIGTERM exit with 75; ``leave``: on SIGTERM print the failure file and exit with 4; ``stubborn``: ignore
  SIGTERM
* ``tell:STEP``: record a durable checkpoint, of STEP times the number of this start; ``at:TEXT``: record the current
  operation; ``run`` and ``done``: record that the run has started or ended
* ``child``: start a child process
* ``then``: separates the words of the first start (before it) from the words of later starts (after it)
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

from megatron.launch.__main__ import main
from tests.helpers.large_pages import use_large_pages

RANK_SCRIPT = """\
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
place = sys.argv[1]

def save(number, frame):
    time.sleep(0.1)
    os._exit(75)

def leave(number, frame):
    with open(os.environ["MEGATRON_FAILURE_FILE"]) as file:
        os.write(2, f"rank {rank} leaves: {file.read()}".encode())
    os._exit(4)

plan = json.loads(sys.argv[2])[rank]
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if "then" in plan:
    plan = plan[plan.index("then") + 1 :] if start else plan[: plan.index("then")]
for word in plan:
    if word in ("save", "leave"):
        signal.signal(signal.SIGTERM, {"save": save, "leave": leave}[word])
    elif word == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(f"{place}/{rank}.tmp", "w") as file:
    json.dump({"pid": os.getpid(), "argv": sys.argv[3:], "env": dict(os.environ)}, file)
os.rename(f"{place}/{rank}.tmp", f"{place}/{rank}.json")
while len([name for name in os.listdir(place) if name.endswith(".json")]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.005)
for word in plan:
    action, _, value = word.partition(":")
    if action == "sleep":
        time.sleep(float(value))
    elif action == "exit":
        sys.exit(int(value))
    elif action == "raise":
        raise RuntimeError("planted")
    elif action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "wait":
        time.sleep(60)
    elif action == "child":
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        with open(f"{place}/child", "w") as file:
            file.write(str(child.pid))
    elif action == "tell":
        from megatron.runtime import progress_file
        progress_file.report_committed_step(int(value) * (start + 1))
    elif action == "at":
        from megatron.runtime import rank_status
        rank_status.open_status_file()
        rank_status.write_coordinates(f"rank {rank} (stage {rank}, tensor 0, data 0)")
        rank_status.write_operation(value)
    elif action in ("run", "done"):
        from megatron.runtime import rank_status
        rank_status.open_status_file()
        rank_status.write_state(rank_status.RUNNING if action == "run" else "")
    elif action == "quit":
        os._exit(0)
    elif action == "segv":
        import ctypes
        from megatron.runtime.exit_guard import enable_crash_traces
        enable_crash_traces()
        ctypes.string_at(0)
"""


class Job:
    """A launcher and its ranks."""

    def __init__(
        self,
        folder: Path,
        plans: list[list[str]],
        *flags: str,
        nproc_per_node: int | None = None,
        ranks_folder: Path | None = None,
        script: Path | None = None,
        arguments: list[str] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.ranks_folder = ranks_folder or folder
        if script is None:
            script = folder / "script.py"
            script.write_text(RANK_SCRIPT)
        self._output = folder / "output"
        argv = ["--nproc-per-node", str(nproc_per_node or len(plans)), *flags]
        if "--master-port" not in flags:
            argv += ["--master-port", str(find_free_port())]
        argv += [str(script), *([str(self.ranks_folder), json.dumps(plans)] if arguments is None else arguments)]
        self.start_time = time.monotonic()
        self.pid = _fork(argv, self._output)
        self.exit_code: int | None = None

    def wait_for_ranks(self, num_ranks: int, deadline_s: float = 10.0) -> list[dict]:
        """Return the record of each rank, once all ranks have started."""
        deadline = time.monotonic() + deadline_s
        paths = [self.ranks_folder / f"{rank}.json" for rank in range(num_ranks)]
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks did not begin: {self.output}")
            time.sleep(0.01)
        return [json.loads(path.read_text()) for path in paths]

    def wait_for_output(self, text: str, deadline_s: float = 10.0) -> None:
        """Wait until the job has printed ``text``."""
        deadline = time.monotonic() + deadline_s
        while text not in self.output:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not said: {text!r} in {self.output}")
            time.sleep(0.005)

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self, deadline_s: float = 20.0) -> int:
        """Return the launcher's exit code; kill it after the deadline."""
        deadline = time.monotonic() + deadline_s
        while self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"the launcher did not end: {self.output}")
            else:
                time.sleep(0.005)
        self.duration_s = time.monotonic() - self.start_time
        return self.exit_code

    @property
    def output(self) -> str:
        return self._output.read_text()


def is_alive(pid: int) -> bool:
    """Return True if this process runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def find_free_port() -> int:
    """Return a port that is currently free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _fork(argv: list[str], output: Path) -> int:
    use_large_pages()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        tempfile.tempdir = str(output.parent)  # a killed launcher does not remove its temporary folder
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        code = main(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
