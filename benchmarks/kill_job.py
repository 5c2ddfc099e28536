"""Parts of ``kill.py``: the command line of a run, its launchers, the moments of kills, and the script of its ranks.

The launcher is forked from this process, which has imported torch, so a start takes about a second. This file is also
the script of the ranks: ``pretrain_gpt2.py`` with a record of its starts and steps. Each rank appends lines of JSON to
``$KILL_RECORD/rank-R.jsonl``, one write per line, so that a kill does not truncate a line:

| keys of a line | meaning |
|---|---|
| ``begins``, ``loaded`` | the step after which the start resumes, and the checkpoint that it loaded |
| ``step``, ``loss``, ``tokens`` | a finished step, its loss in hexadecimal, a checksum of each sample read |
| ``durable`` | rank 0 has reported this checkpoint to the launcher |

Each line also has ``start``, the indices of the launcher and of its start, and ``at``, the time.
"""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pretrain_gpt2
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.child_process import die_with_parent
from megatron.data import IndexedDatasetBuilder
from megatron.launch.__main__ import main as launch
from megatron.runtime import progress_file, rank_status
from megatron.tokenizer import build
from megatron.training import Callback, batch_iterators, startup
from megatron.training.callbacks import metrics_writer, speed_monitor
from megatron.training.callbacks.checkpointer import Checkpointer

TOKENIZER = Path(__file__).resolve().parents[1] / "tests" / "golden" / "tokenizer.json"
SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --hidden-bias --batch-size 2 --gas 2 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --lr 3e-3 --warmup 0.1 --log-interval 1 --eval-iters 0 "
    f"--split 900,50,50 --device cpu --progress plain --tokenizer-path {TOKENIZER}"
).split()
LAYOUTS = {
    "t2p2": (4, "--model-parallel-size 2 --pipe-parallel-size 2"),
    "t2d2": (4, "--model-parallel-size 2 --zero-stage 1"),
    "p2d2": (4, "--pipe-parallel-size 2 --zero-stage 1"),
    "p2": (2, "--pipe-parallel-size 2"),
    "d2": (2, ""),
    "one": (1, ""),
}
"""Name -> (number of ranks, flags)."""


@dataclass(frozen=True)
class Case:
    """A type of run.

    Args:
        layout: a name of ``LAYOUTS``.
        interval: steps between saves.
        keep_last: checkpoints to keep; 0 for all.
        is_async: checkpoints are written while training continues.
    """

    layout: str
    steps: int = 12
    interval: int = 1
    keep_last: int = 0
    is_async: bool = False

    @property
    def num_ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def max_lost_steps(self) -> int:
        """Maximum number of steps lost by a kill: one save interval, plus one if a save may be in progress."""
        return self.interval * (2 if self.is_async else 1)

    @property
    def name(self) -> str:
        keep_text = f", keep {self.keep_last}" if self.keep_last else ""
        return f"{self.layout}, {'async' if self.is_async else 'sync'} save every {self.interval}{keep_text}"

    def flags(self, prefix: Path, folder: Path) -> list[str]:
        """Return the command line of the run on the token files ``prefix`` in the run folder ``folder``.

        Every start has the same command line, like a job that SLURM requeues.
        """
        extra = f"{LAYOUTS[self.layout][1]} --train-iters {self.steps} --save-interval {self.interval}"
        extra += f" --keep-last {self.keep_last}" if self.keep_last else ""
        extra += " --async-save" if self.is_async else ""
        resume_flags = ["--save", str(folder), "--resume", "--load-if-exists"]
        return [*SIZES, "--data-path", str(prefix), *extra.split(), *resume_flags]


def write_corpus(folder: Path, num_documents: int = 300, seed: int = 0) -> Path:
    """Write documents of random tokens into ``folder`` and return the prefix of the files."""
    tokenizer, rng = build(tokenizer_path=TOKENIZER), np.random.default_rng(seed)
    prefix = folder / "tokens"
    with IndexedDatasetBuilder(
        prefix, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.identity, eod_id=tokenizer.eod_id
    ) as writer:
        for _ in range(num_documents):
            tokens = rng.integers(0, tokenizer.vocab_size, size=rng.integers(20, 200))
            writer.add(np.array([*tokens, tokenizer.eod_id]))
    return prefix


START, LOAD, STEP, SAVE, END = "start", "load", "step", "save", "end"
PHASES = (START, LOAD, STEP, SAVE)
"""Phases for which kills are drawn. A kill may also hit the end of a run, if the run ends while the kill is pending."""
WEIGHTS = (2, 2, 4, 4)
MAX_DELAY_S = {START: 1.2, LOAD: 0.15, STEP: 0.06, SAVE: 0.15}
"""Phase -> maximum delay in seconds between the start of the phase and a kill, which may hit the next phase."""
MAX_ENTRIES = 3
ONE, ALL, LAUNCHER = "one rank", "all ranks", "the launcher"
VICTIMS = (ONE, ALL, LAUNCHER)
VICTIM_WEIGHTS = (6, 4, 1)


@dataclass(frozen=True)
class Moment:
    """Time of a kill: ``delay_s`` seconds after ``rank`` has entered ``phase`` for the ``entry``-th time."""

    phase: str
    entry: int
    delay_s: float
    victims: str
    rank: int


def draw_moments(rng: random.Random, num_ranks: int, num_moments: int) -> Iterator[Moment]:
    """Yield ``num_moments`` random moments."""
    for _ in range(num_moments):
        phase = rng.choices(PHASES, WEIGHTS)[0]
        entry = rng.randint(1, MAX_ENTRIES) if phase in (STEP, SAVE) else 1
        victims = rng.choices(VICTIMS, VICTIM_WEIGHTS)[0]
        yield Moment(phase, entry, rng.uniform(0, MAX_DELAY_S[phase]), victims, rng.randrange(num_ranks))


def phase_of(operation: str) -> str:
    """Return the phase of a rank whose current operation is ``operation`` (``megatron.runtime.exit_guard``)."""
    if operation.startswith("loading"):
        return LOAD
    if operation.startswith("saving"):
        return SAVE
    if operation.startswith(("step", "a step", "the first step")):
        return STEP
    if operation.startswith("ending"):
        return END
    return START


MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.agent.server.api",
    "torch.utils.tensorboard",
    "deepspeed",
    "megatron.training.setup",
    "megatron.training.callbacks.checkpointer",
    "megatron.checkpoint.dcp",
    "pretrain_gpt2",
)


def preload() -> None:
    """Import ``MODULES`` and limit torch to one thread."""
    for name in MODULES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


DEADLINE_S = 240.0
"""Seconds after which a launcher that has not ended is killed and counts as hanging."""
_POLL_S = 0.002


class JobTimeoutError(RuntimeError):
    """A launcher or its ranks did not end in time."""


class Job:
    """The launcher and the ranks of a run.

    Args:
        folder: folder for the output and for the launcher's own files.
        launcher_idx: index of this launcher among the launchers of the run.
        record_dir: folder for the records of the ranks.
        max_restarts: maximum number of restarts by the launcher.
    """

    def __init__(
        self, folder: Path, launcher_idx: int, record_dir: Path, argv: list[str], num_ranks: int, max_restarts: int
    ) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        folder.mkdir()
        self.code: int | None = None
        launcher_flags = [
            "--nproc-per-node",
            str(num_ranks),
            "--max-restarts",
            str(max_restarts),
            "--preload",
            ",".join(MODULES),
        ]
        self.pid = fork_launcher(
            [*launcher_flags, __file__, *argv], folder, {"KILL_LIFE": str(launcher_idx), "KILL_RECORD": str(record_dir)}
        )
        self._deadline = time.monotonic() + DEADLINE_S

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def next_start(self, after: int) -> int | None:
        """Wait until a start later than ``after`` has all its ranks; return its index, None if the launcher ends."""
        while not self.has_ended():
            newest = self._newest_start()
            if newest > after and len(self.ranks()) == self.num_ranks:
                return newest
            time.sleep(_POLL_S)
        return None

    def wait_for_moment(self, start: int, moment: Moment) -> bool:
        """Wait until ``start`` reaches ``moment``; return False if the start or the launcher ends before."""
        status_map = None if moment.phase == START else self._map_status_file(start, moment.rank)
        entries, previous = int(moment.phase == START), ""
        while entries < moment.entry:
            if self._is_over(start):
                return False
            status_map = status_map or self._map_status_file(start, moment.rank)
            current = rank_status.parse_status(status_map[:]).operation if status_map else ""
            entries += _is_entry(previous, current, moment.phase)
            previous = current
            time.sleep(_POLL_S)
        end = time.monotonic() + moment.delay_s
        while time.monotonic() < end:
            if self._is_over(start):
                return False
            time.sleep(_POLL_S)
        return True

    def phase(self, start: int, rank: int) -> str:
        """Return the current phase of a rank."""
        status_map = self._map_status_file(start, rank)
        return phase_of(rank_status.parse_status(status_map[:]).operation if status_map else "")

    def kill(self, moment: Moment, rng: random.Random) -> bool:
        """Send SIGKILL to the victims; return True if there was one."""
        ranks = self.ranks()
        if moment.victims == LAUNCHER:
            os.kill(self.pid, signal.SIGKILL)  # the ranks die with it
            _wait_until_gone(ranks, self._deadline)
            return True
        victims = rng.sample(ranks, len(ranks)) if moment.victims == ALL else ranks[moment.rank : moment.rank + 1]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(victims)

    def ranks(self) -> list[int]:
        """Return the process ids of the live ranks, in the order in which they were started."""
        try:
            words = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return sorted(pid for pid in map(int, words) if _is_alive(pid))

    def has_ended(self) -> bool:
        """Return True if the launcher has ended, and set ``code`` to its exit code.

        Raises:
            JobTimeoutError: the deadline has passed; the launcher was killed.
        """
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > self._deadline:
                self.kill_launcher()
                raise JobTimeoutError(f"the launcher did not end within {DEADLINE_S:.0f} s:\n{self.output[-3000:]}")
        return self.code is not None

    def kill_launcher(self) -> None:
        """Kill the launcher, and with it its ranks, if it still runs."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _is_over(self, start: int) -> bool:
        return self.has_ended() or self._newest_start() != start

    def _newest_start(self) -> int:
        return max((int(path.name.removeprefix("start-")) for path in self._starts()), default=-1)

    def _starts(self) -> list[Path]:
        return self._glob("megatron-launch-*/start-*")

    def _glob(self, pattern: str) -> list[Path]:
        """Return the launcher's own files that match ``pattern``; [] while it removes them."""
        with suppress(FileNotFoundError):
            return list(self.folder.glob(pattern))
        return []

    def _map_status_file(self, start: int, rank: int) -> mmap.mmap | None:
        """Return the memory map of a rank's status file, which outlives the rank; None if it does not exist yet."""
        for path in self._glob(f"megatron-launch-*/start-{start}/failure.at-{rank}"):
            with suppress(OSError, ValueError), open(path, "rb") as file:
                return mmap.mmap(file.fileno(), rank_status.BUFFER_BYTES, access=mmap.ACCESS_READ)
        return None


def _is_entry(previous: str, current: str, phase: str) -> bool:
    """Return True if a rank has entered ``phase`` between two readings of its operation.

    Each step is an entry. A load may be too short for a reading, so leaving START counts as entering it.
    """
    if phase == LOAD:
        return phase_of(previous) == START and phase_of(current) != START
    if phase_of(current) != phase:
        return False
    return phase_of(previous) != phase or (
        current.startswith("step ") and current.split(",")[0] != previous.split(",")[0]
    )


def _wait_until_gone(pids: list[int], deadline: float) -> None:
    while any(_is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise JobTimeoutError(f"ranks {pids} have outlived their launcher")
        time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def fork_launcher(argv: list[str], folder: Path, env: dict[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        tempfile.tempdir = str(folder)
        descriptor = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.update(env, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
        code = launch(argv)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def save_activity(run: Path) -> str:
    """Return "being written", "being removed" or "" according to the files in the checkpoints folder."""
    names = [path.name for path in (run / CHECKPOINTS).iterdir()] if (run / CHECKPOINTS).is_dir() else []
    if any(name.startswith(".tmp-") for name in names):
        return "being written"
    return "being removed" if any(name.startswith(".deleted-") for name in names) else ""


# Code that a rank executes.

_samples_read: list[int] = []


@functools.cache
def _record_file() -> int:
    path = Path(os.environ["KILL_RECORD"], f"rank-{os.environ['RANK']}.jsonl")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def record(**fields: Any) -> None:
    """Append a line to this rank's record."""
    start = [int(os.environ["KILL_LIFE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    os.write(_record_file(), json.dumps({"start": start, "at": time.time(), **fields}).encode() + b"\n")


class Recorder(Callback):
    """Callback that records the start of the run and each finished step."""

    def on_train_start(self) -> None:
        checkpointer = self.trainer.find(Checkpointer)
        loaded = checkpointer.loaded if checkpointer else None
        record(begins=self.trainer.progress.step, loaded=loaded.name if loaded else None)

    def on_after_update(self, result: Any) -> None:
        record(step=self.trainer.progress.step, loss=float(result.loss).hex(), tokens=list(_samples_read))
        _samples_read.clear()


def record_run() -> None:
    """Record samples and durable checkpoints of the run, and disable plots and the speed measurement."""
    speed_monitor.MATMUL_S = 0.0
    metrics_writer.plot_losses = lambda *_: None
    next_batch, note_durable = batch_iterators.TimedBatches.__next__, progress_file.report_committed_step

    def record_batch(batches: batch_iterators.TimedBatches) -> Any:
        batch = next_batch(batches)
        _samples_read.extend(zlib.crc32(row.numpy().tobytes()) for row in batch["text"])
        return batch

    def note_durable_and_record(step: int) -> None:
        note_durable(step)
        record(durable=step)

    progress_file.report_committed_step = note_durable_and_record
    batch_iterators.TimedBatches.__next__ = record_batch  # type: ignore[method-assign]


if __name__ == "__main__":
    record_run()
    startup.pretrain(
        pretrain_gpt2.train_valid_test_datasets_provider,
        pretrain_gpt2.model_provider,
        pretrain_gpt2.forward_step,
        name="gpt2",
        callbacks=[Recorder()],
    )
