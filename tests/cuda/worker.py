"""Two processes with the simulated device, for the first and the second rank of a case; they run many cases.

``python -m tests.cuda.worker`` imports all modules of a run and forks once. Each process reads pickled requests (a case
and the index of the run) and answers with the outcome or with a traceback. Both exit after a traceback.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
MAX_RANKS = 2
"""Maximum number of ranks of a case that run as processes."""
GONE = "gone"
"""Start of an answer if the other rank, or its own process, has exited."""


class Case(NamedTuple):
    """Training run.

    Args:
        size: number of ranks.
        ranks: the ranks that run as processes; the others are simulated.
        runs_all_phases: evaluate and save after the steps.
    """

    family: str
    argv: tuple[str, ...]
    size: int
    ranks: tuple[int, ...]
    steps: int = 2
    gas: int = 2
    runs_all_phases: bool = True


LOSS_TOKENS, LOSS_HIDDEN, LOSS_VOCAB = 8192, 64, 32000
"""Sizes of the chunked loss. The hidden size is small, so that logits cause nearly all of the traffic."""


class CostCase(NamedTuple):
    """Request to count the kernels of one layer at full size, or of the chunked loss.

    Args:
        name: key of ``layer_cost.SHAPES``, or "loss".
        extra: further flags of the layer. For the loss: "frozen" (the table has no gradient), "cap" (soft-cap), "torch"
            (no Triton kernels).
        is_later_micro_batch: an earlier micro-batch of the step has saved the weights that are quantized to FP8.
    """

    name: str
    extra: str = ""
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    is_later_micro_batch: bool = False


class Failed(AssertionError):
    """A rank of a case failed; the text is its traceback."""


class Worker:
    """Handle of both processes; the end of a ``with`` block stops them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._files: list[tuple[IO[bytes], IO[bytes]]] = []  # (requests, answers) of each process
        self._run_idx = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def run(self, case: Case | CostCase) -> list[Any]:
        """Return the outcome of each rank of ``case``, or the cost of a ``CostCase``.

        Raises:
            Failed: a rank raised an exception.
        """
        if self._process is None:
            self._start()
        self._run_idx += 1
        active_files = self._files[: len(case.ranks)]
        for requests, _ in active_files:
            pickle.dump((case, self._run_idx), requests)
            requests.flush()
        outcomes = [_answer(answers) for _, answers in active_files]
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if errors:
            self._stop()
            raise Failed(f"{case}\n" + "\n".join(sorted(errors, key=lambda text: GONE in text)))
        return outcomes

    def _start(self) -> None:
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda"}
        pipes = [(os.pipe(), os.pipe()) for _ in range(MAX_RANKS)]
        child_fds = [fd for (requests, _), (_, answers) in pipes for fd in (requests, answers)]
        command = [sys.executable, "-m", "tests.cuda.worker", *map(str, child_fds)]
        self._process = subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=child_fds)
        self._files = [(os.fdopen(requests, "wb"), os.fdopen(answers, "rb")) for (_, requests), (answers, _) in pipes]
        for fd in child_fds:
            os.close(fd)

    def _stop(self) -> None:
        for requests, answers in self._files:
            with contextlib.suppress(BrokenPipeError):
                requests.close()
            answers.close()
        self._files = []
        if self._process is not None:
            self._process.wait()
            self._process = None


def _answer(answers: IO[bytes]) -> Any:
    try:
        return pickle.load(answers)
    except EOFError:
        return f"{GONE}: the rank died"


def serve(fds: list[int]) -> None:
    """Load the device, import all modules, fork and answer requests; ``fds`` are the ends of the pipes."""
    from tests.cuda import fake_cuda

    library = fake_cuda.load()
    os.dup2(2, 1)  # DeepSpeed prints to stdout
    from tests.cuda import torch_cuda

    library.set_guard()
    torch_cuda.install()
    from tests.cuda import fused_operators, runs

    fused_operators.install()

    runs.import_all()
    gc.freeze()
    gc.disable()  # garbage is collected between runs
    sockets = socket.socketpair()
    child_pid = os.fork()
    process_idx = 0 if child_pid else 1
    sockets[1 - process_idx].close()
    for fd in fds[2 * (1 - process_idx) :][:2]:
        os.close(fd)
    requests, answers = (os.fdopen(fds[2 * process_idx + n], mode) for n, mode in enumerate(("rb", "wb")))
    while True:
        try:
            case, run_idx = pickle.load(requests)
        except EOFError:
            break
        signal.alarm(DEADLINE_S)
        answer = _outcome(library, case, run_idx, process_idx, sockets[process_idx])
        signal.alarm(0)
        pickle.dump(answer, answers)
        answers.flush()
        if isinstance(answer, str):
            break
    sockets[process_idx].close()
    if child_pid:
        os.waitpid(child_pid, 0)
    os._exit(0)


def _outcome(library: Any, case: Case, run_idx: int, process_idx: int, sock: socket.socket) -> Any:
    """Return the outcome of this process's rank, or a traceback."""
    from tests.cuda import layer_cost
    from tests.cuda.groups import PeerConnection
    from tests.cuda.runs import Run, restore_state

    rank = case.ranks[process_idx]
    peers = {peer: PeerConnection(sock, run_idx) for peer in case.ranks if peer != rank}
    rank_environment = {"RANK": rank, "WORLD_SIZE": case.size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": case.size}
    try:
        with restore_state(library):
            os.environ.update({name: str(value) for name, value in rank_environment.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
            if isinstance(case, layer_cost.CostCase):  # not this module's class, which is __main__'s in this process
                return layer_cost.measure(library, case)
            return Run(library, case, rank, peers).execute()
    except BaseException as error:
        return f"{GONE if isinstance(error, EOFError) else 'failed'}: {traceback.format_exc()}"


if __name__ == "__main__":
    serve([int(fd) for fd in sys.argv[1:]])
