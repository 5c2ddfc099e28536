"""A copy of the tree with one planted mistake, and the tests run there.

Importing torch and DeepSpeed takes longer than most selections of tests. So one process per session imports them, and
none of our own code, and forks for each mistake: this file run as a script is that process. It reads lines
``{"tree": ..., "tests": [...], "log": ..., "deadline_s": ...}`` and answers each with pytest's exit code.

The copy stays from one mistake to the next, and with it what Python has compiled of all other files: the changed one is
put back, files that tests have left are removed, and where anything else differs the copy is made anew.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

DEADLINE_S = 100.0
COPIED = (
    "megatron",
    "tds",
    "tests",
    "tools",
    "benchmarks",
    "examples",
    "docs",
    "mkdocs.yml",
    "CHANGELOG.md",
    "README.md",
    "CONTRIBUTING.md",
    "Dockerfile",
    "LICENSE",
    "requirements",
    "pretrain_bert.py",
    "pretrain_gpt.py",
    "pretrain_gpt2.py",
    "pretrain_t5.py",
    "run_gpt2.sh",
    "run_t5.sh",
    "ds_config_gpt2.json",
    "ds_config_t5.json",
    "pyproject.toml",
    ".gitignore",
)
TIMED_OUT = -1
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


class Outcome(NamedTuple):
    """pytest's exit code (1: tests failed, 0: all passed) and what it wrote."""

    code: int
    text: str


class Runner:
    """Copies ``root`` into ``folder`` and runs tests there; a ``with`` block ends the process behind it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder, self._num_runs = root, folder, 0
        self._files: dict[Path, tuple[int, int]] = {}  # of the copy, as it was made; none: there is no copy
        self._server = _start_server()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.communicate()  # the end of its input ends it

    def run(
        self, tests: tuple[str, ...], change: tuple[str, str, str] | None = None, deadline_s: float = DEADLINE_S
    ) -> Outcome:
        """Run ``tests`` in a copy that is as new, after ``change`` = (file, old text, new text)."""
        tree = self.folder / "tree"
        self._renew(tree)
        if change is not None:
            self._plant(tree / change[0], *change[1:])
        log = self.folder / "log"
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {"tree": str(tree), "tests": tests, "log": str(log), "deadline_s": deadline_s}
        try:
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
        except BaseException:  # its answer, which is yet to come, must not be taken for that to the next request
            self._server.kill()
            self._server.wait()
            self._server = _start_server()
            raise
        finally:
            if change is not None:
                shutil.copy2(self.root / change[0], tree / change[0])
        return Outcome(code, log.read_text(errors="replace"))

    def _plant(self, path: Path, old: str, new: str) -> None:
        """Change the file, at a time of its own: Python knows what it has compiled by size and second."""
        replace_once(path, old, new)
        self._num_runs += 1
        stamp = time.time() + self._num_runs
        os.utime(path, (stamp, stamp))

    def _renew(self, tree: Path) -> None:
        """Make the copy, or have the one there is as it was made."""
        if self._files:
            now = _files_in(tree)
            for path in now.keys() - self._files.keys():
                path.unlink()
            if {path: now.get(path) for path in self._files} == self._files:
                return
        self._copy_to(tree)
        self._files = _files_in(tree)

    def _copy_to(self, tree: Path) -> None:
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        for name in COPIED:
            source = self.root / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, tree / name)


def _files_in(tree: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of each file, but for what Python has compiled."""
    found = {}
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = Path(folder, name)
            facts = path.lstat()
            found[path] = facts.st_size, facts.st_mtime_ns
    return found


def _start_server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )


def replace_once(path: Path, old: str, new: str) -> None:
    """Replace ``old``, which must occur exactly once, by ``new`` in the file ``path``."""
    text = path.read_text(encoding="utf-8")
    count = text.count(old)
    if count != 1 or old == new:
        raise ValueError(f"the text to change must occur once in {path.name}, found {count} times: {old!r}")
    path.write_text(text.replace(old, new), encoding="utf-8")


def serve() -> None:
    """Import what is slow, then fork for each line of standard input."""
    import hypothesis  # noqa: F401 - of which pytest would otherwise rewrite all asserts in each child
    import numpy  # noqa: F401
    import orjson  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo
    import torch._inductor.codecache

    torch.set_num_threads(1)
    requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed talks while it is imported
    import deepspeed.pipe  # noqa: F401

    gc.freeze()  # children need not go over it, nor copy it
    for line in requests:
        answers.write(f"{_in_fork(json.loads(line))}\n")
        answers.flush()


def _in_fork(request: dict[str, Any]) -> int:
    child = os.fork()
    if not child:
        _become_pytest(request)
    end = time.monotonic() + request["deadline_s"]
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return TIMED_OUT


def _become_pytest(request: dict[str, Any]) -> None:
    """Run pytest in the copy and end; in a session of its own, so that nothing of it is left after the deadline."""
    import pytest

    code = 99
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)  # a server that is killed takes its pytest along
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(request["tree"])
        sys.path[0] = request["tree"]
        code = int(pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--all", *request["tests"]]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
