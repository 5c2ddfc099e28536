"""A process with the device without CUDA, which imports all that a run needs and forks for each case.

``python -m tests.cuda.worker`` reads pickled requests, a list of ranks each, from its standard input and answers each
with the outcomes, or with the traceback of the rank that failed.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120


class Case(NamedTuple):
    """One run: ``ranks`` are those that are processes, of ``size``; an evaluation and a save where it ``is_whole``."""

    family: str
    argv: tuple[str, ...]
    size: int
    ranks: tuple[int, ...]
    steps: int = 2
    gas: int = 2
    is_whole: bool = True


def warming() -> list[Case]:
    """Return runs after which the shapes of most others are known."""
    from tests.cuda.cases import flags

    return [Case(family, flags(family, "--bf16"), 1, (0,), steps=0) for family in ("gpt2", "t5")]


class Failed(AssertionError):
    """A rank of a case has failed; the text is its traceback."""


class Worker:
    """The process, as a test run sees it; a ``with`` block ends it."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda"}
        command = [sys.executable, "-m", "tests.cuda.worker"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=ROOT)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def run(self, case: Case) -> list[Any]:
        """Return what each rank of ``case`` has seen.

        Raises:
            Failed: of a rank.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(case, self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, str):
            raise Failed(f"{case}\n{answer}")
        return answer


def serve() -> None:
    """Load the device, import, and fork for each request."""
    from tests.cuda import fake_cuda

    library = fake_cuda.load()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # DeepSpeed talks
    import gc

    from tests.cuda import torch_cuda

    torch_cuda.install()
    from tests.cuda import runs

    runs.import_all()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    for case in warming():
        runs.warm(library, case)
    gc.freeze()
    while True:
        try:
            case = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(_answer(library, case), answers)
        answers.flush()


def _answer(library: Any, case: Case) -> Any:
    """Return the outcomes of the ranks of ``case``, each in a process of its own, or a traceback."""
    lines = {(a, b): socket.socketpair() for a in case.ranks for b in case.ranks if a < b}
    children = [_fork(library, case, rank, lines) for rank in case.ranks]
    for pair in lines.values():
        for end in pair:
            end.close()
    found = []
    for child, pipe in children:
        with os.fdopen(pipe, "rb") as file:
            text = file.read()
        os.waitpid(child, 0)
        found.append(pickle.loads(text) if text else "the rank died")
    failed = [each for each in found if isinstance(each, str)]
    return failed[0] if failed else found


def _fork(library: Any, case: Case, rank: int, lines: Any) -> tuple[int, int]:
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    os.close(read)
    signal.alarm(DEADLINE_S)
    try:
        from tests.cuda.groups import Line
        from tests.cuda.runs import Run

        own = {b if a == rank else a: pair[0 if a == rank else 1] for (a, b), pair in lines.items() if rank in (a, b)}
        for pair in lines.values():
            for end in pair:
                if end not in own.values():
                    end.close()
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(case.size), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(case.size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
        )  # fmt: skip
        run = Run(library, case, rank, {peer: Line(end) for peer, end in own.items()})
        answer: Any = run.take()
    except BaseException:
        answer = traceback.format_exc()
    with os.fdopen(write, "wb") as file:
        pickle.dump(answer, file)
    os._exit(0)


if __name__ == "__main__":
    serve()
