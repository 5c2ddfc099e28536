"""One life of the launcher, and the moments at which it is killed.

The launcher is forked from this process, which has imported torch: a start takes about a second.
"""

from __future__ import annotations

import importlib
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.child_process import die_with_parent
from megatron.launch.__main__ import main
from megatron.training import failure

START, LOAD, STEP, SAVE, END = "start", "load", "step", "save", "end"
PHASES = (START, LOAD, STEP, SAVE)
"""What kills aim at; a run that ends while a kill waits may also be hit in its end."""
WEIGHTS = (2, 2, 4, 4)
SPAN_S = {START: 1.2, LOAD: 0.15, STEP: 0.06, SAVE: 0.15}
"""A kill comes at random within this time after the phase has begun, so some come when the next one has begun."""
MOST_ENTRIES = 3
ONE, ALL, LAUNCHER = "one rank", "all ranks", "the launcher"
VICTIMS = (ONE, ALL, LAUNCHER)
VICTIM_WEIGHTS = (6, 4, 1)


@dataclass(frozen=True)
class Moment:
    """``delay_s`` after rank ``rank`` has come into ``phase`` for the ``entry``-th time the ``victims`` are killed."""

    phase: str
    entry: int
    delay_s: float
    victims: str
    rank: int


def draw_moments(draw: random.Random, num_ranks: int, number: int) -> Iterator[Moment]:
    """Yield ``number`` random moments."""
    for _ in range(number):
        phase = draw.choices(PHASES, WEIGHTS)[0]
        entry = draw.randint(1, MOST_ENTRIES) if phase in (STEP, SAVE) else 1
        victims = draw.choices(VICTIMS, VICTIM_WEIGHTS)[0]
        yield Moment(phase, entry, draw.uniform(0, SPAN_S[phase]), victims, draw.randrange(num_ranks))


def phase_of(at: str) -> str:
    """Return the phase in which a rank notes ``at`` (``megatron.training.failure``)."""
    if at.startswith("loading"):
        return LOAD
    if at.startswith("saving"):
        return SAVE
    if at.startswith(("step", "a step", "the first step")):
        return STEP
    if at.startswith("ending"):
        return END
    return START


MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.agent.server.api",
    "torch.utils.tensorboard",
    "deepspeed",
    "megatron.training.train",
    "megatron.checkpoint.dcp",
    "pretrain_gpt2",
)


def preload() -> None:
    """Import them, on one thread."""
    for name in MODULES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


SCRIPT = Path(__file__).with_name("kill_script.py")

DEADLINE_S = 240.0
"""A start that has not ended by then hangs."""
_POLL_S = 0.002


class Stuck(RuntimeError):
    """A start has not ended in time."""


class Job:
    """The launcher with a run's ranks.

    Args:
        place: folder for what is said and for the launcher's own files.
        life: number of this launcher in the run's history.
        record: folder that the ranks record into.
        max_restarts: starts that the launcher may add by itself.
    """

    def __init__(
        self, place: Path, life: int, record: Path, argv: list[str], num_ranks: int, max_restarts: int
    ) -> None:
        self.place, self.num_ranks = place, num_ranks
        place.mkdir()
        self.code: int | None = None
        own = ["--nproc-per-node", str(num_ranks), "--max-restarts", str(max_restarts), "--preload", ",".join(MODULES)]
        self.pid = _fork([*own, str(SCRIPT), *argv], place, {"KILL_LIFE": str(life), "KILL_RECORD": str(record)})
        self._deadline = time.monotonic() + DEADLINE_S

    @property
    def output(self) -> str:
        return (self.place / "output").read_text(errors="replace")

    def next_start(self, after: int) -> int | None:
        """Wait for a start with a higher number than ``after`` to have all its ranks; None: the launcher has ended."""
        while not self.has_ended():
            number = self._newest()
            if number > after and len(self.ranks()) == self.num_ranks:
                return number
            time.sleep(_POLL_S)
        return None

    def reaches(self, start: int, moment: Moment) -> bool:
        """Wait until ``start`` is at ``moment``; False if the start or the launcher ends before."""
        page = None if moment.phase == START else self._page(start, moment.rank)
        entries, before = int(moment.phase == START), ""
        while entries < moment.entry:
            if self._is_over(start):
                return False
            page = page or self._page(start, moment.rank)
            now = failure.read_position(page[:]).doing if page else ""
            entries += _is_entry(before, now, moment.phase)
            before = now
            time.sleep(_POLL_S)
        end = time.monotonic() + moment.delay_s
        while time.monotonic() < end:
            if self._is_over(start):
                return False
            time.sleep(_POLL_S)
        return True

    def phase(self, start: int, rank: int) -> str:
        """Return the phase in which a rank is."""
        page = self._page(start, rank)
        return phase_of(failure.read_position(page[:]).doing if page else "")

    def kill(self, moment: Moment, draw: random.Random) -> bool:
        """Send SIGKILL to the victims; return whether there was one."""
        ranks = self.ranks()
        if moment.victims == LAUNCHER:
            os.kill(self.pid, signal.SIGKILL)  # the ranks go with it
            _wait_until_gone(ranks, self._deadline)
            return True
        victims = draw.sample(ranks, len(ranks)) if moment.victims == ALL else ranks[moment.rank : moment.rank + 1]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(victims)

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks that live, in the order in which they were started."""
        try:
            words = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return sorted(pid for pid in map(int, words) if _is_alive(pid))

    def has_ended(self) -> bool:
        """Whether the launcher has ended; ``code`` is its exit code then.

        Raises:
            Stuck: it takes too long; it has been ended.
        """
        if self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > self._deadline:
                self.end()
                raise Stuck(f"not ended after {DEADLINE_S:.0f} s:\n{self.output[-3000:]}")
        return self.code is not None

    def end(self) -> None:
        """End the launcher, and with it its ranks, if they still run."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _is_over(self, start: int) -> bool:
        return self.has_ended() or self._newest() != start

    def _newest(self) -> int:
        return max((int(path.name.removeprefix("start-")) for path in self._starts()), default=-1)

    def _starts(self) -> list[Path]:
        return self._found("megatron-launch-*/start-*")

    def _found(self, pattern: str) -> list[Path]:
        """Return the launcher's own files of this name; none where it is just removing them."""
        with suppress(FileNotFoundError):
            return list(self.place.glob(pattern))
        return []

    def _page(self, start: int, rank: int) -> mmap.mmap | None:
        """Return the page in which a rank notes what it is at, once there is one; it outlives the rank."""
        for path in self._found(f"megatron-launch-*/start-{start}/failure.at-{rank}"):
            with suppress(OSError, ValueError), open(path, "rb") as file:
                return mmap.mmap(file.fileno(), failure.SIZE, access=mmap.ACCESS_READ)
        return None


def _is_entry(before: str, now: str, phase: str) -> bool:
    """Whether a rank has come into ``phase``; each step counts. A load may be over before anybody looks."""
    if phase == LOAD:
        return phase_of(before) == START and phase_of(now) != START
    if phase_of(now) != phase:
        return False
    return phase_of(before) != phase or (now.startswith("step ") and now.split(",")[0] != before.split(",")[0])


def _wait_until_gone(pids: list[int], deadline: float) -> None:
    while any(_is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise Stuck(f"ranks {pids} have outlived their launcher")
        time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _fork(argv: list[str], place: Path, env: dict[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        tempfile.tempdir = str(place)
        descriptor = os.open(place / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.update(env, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
        code = main(argv)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
