"""The processes of the contenders: they stay for a whole case and wait while the others take their turns."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.pipe.case import Case, Contender
from benchmarks.pipe.team import Failure, Order, work

START_METHODS = ("forkserver", "spawn", "fork")
FAREWELL_S = 5.0


class Team:
    """The ranks of one contender."""

    def __init__(self, case: Case, contender: Contender, context: Any, folder: str) -> None:
        self.contender = contender
        self.pipes: list[Connection] = []
        self.processes = []
        self.pids: list[int] = []
        for rank in range(contender.num_ranks(case)):
            near, far = context.Pipe()
            process = context.Process(target=work, args=(case, contender, rank, folder, far), daemon=True)
            process.start()
            far.close()
            self.pipes.append(near)
            self.processes.append(process)

    def ready(self) -> None:
        """Wait until every rank is built."""
        self.pids = self._answers()

    def ask(self, order: Order) -> list[Any]:
        """Give ``order`` to every rank and return their answers.

        Raises:
            RuntimeError: a rank failed or died; its traceback is in the message.
        """
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # one that has gone left its traceback, or is missed below
                pipe.send(order)
        return self._answers()

    def close(self) -> None:
        """End every rank, by force where it does not go."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(FAREWELL_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()

    def _answers(self) -> list[Any]:
        """Return one answer of each rank; the first failure ends the wait, for the others may hang."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            for pipe in wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = Failure("died")
                if isinstance(answers[rank], Failure):
                    raise RuntimeError(f'"{self.contender.name}", rank {rank}: {answers[rank].told}')
        return [answers[rank] for rank in range(len(self.pipes))]


@contextmanager
def assembled(case: Case, contenders: Sequence[Contender], start_method: str) -> Iterator[dict[str, Team]]:
    """Yield a team for each contender, by name; afterwards none of their processes is left."""
    context = prepared(start_method)
    teams: dict[str, Team] = {}
    with tempfile.TemporaryDirectory(prefix="pipeline-benchmark-") as place:
        try:
            for index, contender in enumerate(contenders):
                folder = os.path.join(place, str(index))
                os.mkdir(folder)
                teams[contender.name] = Team(case, contender, context, folder)
                teams[contender.name].ready()
            yield teams
        finally:
            for team in teams.values():
                team.close()


def prepared(start_method: str) -> Any:
    """Return the way to start processes: one thread each, and from a server that has imported torch already."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler that counts memory is talkative
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["benchmarks.pipe.preload"])
    return context
