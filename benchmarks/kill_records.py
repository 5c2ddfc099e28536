"""The runs that are killed, what their ranks have recorded over all starts, and what must be true of their folders."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.folders import LATEST, list_checkpoints, newest_first, step_of
from megatron.data import IndexedDatasetBuilder
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from megatron.tokenizer import build
from megatron.training import run_lock
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.train_state import CHECKPOINTS

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
"""name -> (ranks, flags)."""


@dataclass(frozen=True)
class Case:
    """One kind of run.

    Args:
        layout: a name of ``LAYOUTS``.
        interval: steps between saves.
        keep_last: checkpoints to keep; 0: all.
        is_async: saves are written while training goes on.
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
    def most_lost(self) -> int:
        """Steps that a kill may cost: those since the last save, and one save more that was still being written."""
        return self.interval * (2 if self.is_async else 1)

    @property
    def name(self) -> str:
        kept = f", keep {self.keep_last}" if self.keep_last else ""
        return f"{self.layout}, {'async' if self.is_async else 'sync'} save every {self.interval}{kept}"

    def flags(self, prefix: Path, folder: Path) -> list[str]:
        """Return the command line of the run on the token files ``prefix`` in the run folder ``folder``.

        Every start has the same one, as a job that SLURM requeues.
        """
        extra = f"{LAYOUTS[self.layout][1]} --train-iters {self.steps} --save-interval {self.interval}"
        extra += f" --keep-last {self.keep_last}" if self.keep_last else ""
        extra += " --async-save" if self.is_async else ""
        going_on = ["--save", str(folder), "--resume", "--load-if-exists"]
        return [*SIZES, "--data-path", str(prefix), *extra.split(), *going_on]


def write_corpus(folder: Path, num_documents: int = 300, seed: int = 0) -> Path:
    """Write documents of random tokens into ``folder`` and return the prefix of the files."""
    tokenizer, draw = build(tokenizer_path=TOKENIZER), np.random.default_rng(seed)
    prefix = folder / "tokens"
    with IndexedDatasetBuilder(
        prefix, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.identity, eod_id=tokenizer.eod_id
    ) as writer:
        for _ in range(num_documents):
            tokens = draw.integers(0, tokenizer.vocab_size, size=draw.integers(20, 200))
            writer.add(np.array([*tokens, tokenizer.eod_id]))
    return prefix


Number = tuple[int, int]


@dataclass
class Start:
    """One start of a run; a rank that was killed early has told nothing.

    Args:
        begins: rank -> the step it goes on after.
        loaded: rank -> name of the checkpoint it has taken up.
        steps: rank -> step -> (loss, checksums of the samples read).
        durable: steps of the checkpoints that it has told the launcher of.
        times: of each step that any rank has done, as ``time.time()``.
    """

    begins: dict[int, int] = field(default_factory=dict)
    loaded: dict[int, str | None] = field(default_factory=dict)
    steps: dict[int, dict[int, tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    durable: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max((step for steps in self.steps.values() for step in steps), default=0)


def read_starts(record: Path) -> dict[Number, Start]:
    """Return the starts by (life of the launcher, start in it), in the order of time."""
    starts: dict[Number, Start] = {}
    for path in record.glob("rank-*.jsonl"):
        rank = int(path.stem.removeprefix("rank-"))
        for line in path.read_bytes().splitlines():
            _add(starts, rank, json.loads(line))
    return dict(sorted(starts.items()))


def _add(starts: dict[Number, Start], rank: int, line: dict) -> None:
    start = starts.setdefault(tuple(line["start"]), Start())
    if "begins" in line:
        start.begins[rank], start.loaded[rank] = line["begins"], line["loaded"]
    elif "step" in line:
        start.steps.setdefault(rank, {})[line["step"]] = (line["loss"], tuple(line["tokens"]))
        start.times.append(line["at"])
    else:
        start.durable.append(line["durable"])


def lost_steps(starts: dict[Number, Start]) -> Iterator[int]:
    """Yield, for each start but the first that came so far as to load, the steps that it does again."""
    done = 0
    for index, start in enumerate(starts.values()):
        if index and start.begins:
            yield done - min(start.begins.values())
        done = max(done, start.last_step)


def losses(folder: Path) -> list[tuple[int, str, str]]:
    """Return (step, loss, gradient norm) of the metrics of a run, as hexadecimal numbers."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(r["step"], float(r["loss"]).hex(), float(r["grad_norm"]).hex()) for r in records]


def problems(case: Case, starts: dict[Number, Start], whole: Start) -> Iterator[str]:
    """Yield what the starts of a run have done that the undisturbed run ``whole`` has not."""
    yield from _steps_that_differ(starts, whole)
    yield from _detours(case, starts)
    yield from _samples_lost(case, starts, whole)


def _steps_that_differ(starts: dict[Number, Start], whole: Start) -> Iterator[str]:
    for number, start in starts.items():
        for rank, steps in start.steps.items():
            for step, (loss, tokens) in steps.items():
                wanted_loss, wanted_tokens = whole.steps[rank].get(step, ("none", ()))
                if loss != wanted_loss:
                    yield f"start {number}, rank {rank}: the loss of step {step} is {loss}, undisturbed {wanted_loss}"
                if tokens != wanted_tokens:
                    yield f"start {number}, rank {rank}: step {step} has read other samples than undisturbed"


def _detours(case: Case, starts: dict[Number, Start]) -> Iterator[str]:
    """Each start goes on, all ranks alike, from what was durable, and a kill costs a save interval at most."""
    done = durable = 0
    for number, start in starts.items():
        for begin in set(start.begins.values()):
            if len(set(start.begins.values())) > 1:
                yield f"start {number}: ranks go on after different steps: {start.begins}"
            if begin < durable:
                yield f"start {number} goes on after step {begin}, though the checkpoint of step {durable} was durable"
            if done - begin > case.most_lost:
                yield f"start {number} goes on after step {begin}: {done - begin} steps of {done} are lost"
        for rank, name in start.loaded.items():
            if start.begins[rank] != (int(name.split("-")[1]) if name else 0):
                yield f"start {number}, rank {rank}: goes on after step {start.begins[rank]} with {name}"
        done = max(done, start.last_step)
        durable = max([durable, *start.durable])


def _samples_lost(case: Case, starts: dict[Number, Start], whole: Start) -> Iterator[str]:
    """What counts of a start are the steps up to where the next one goes on; together they read each sample once."""
    for rank in whole.steps:
        path: list[tuple[int, ...]] = []
        for number, start in starts.items():
            if rank in start.begins:
                if start.begins[rank] > len(path):
                    yield f"start {number}, rank {rank}: goes on after step {start.begins[rank]}, {len(path)} are done"
                    break
                del path[start.begins[rank] :]
            path += [tokens for _, (_, tokens) in sorted(start.steps.get(rank, {}).items())]
        read = Counter(sum(path, ()))
        wanted = Counter(sum((tokens for _, (_, tokens) in sorted(whole.steps[rank].items())), ()))
        if read != wanted or any(times > 1 for times in read.values()):
            lost, repeated = sum((wanted - read).values()), sum((read - wanted).values())
            yield f"rank {rank}: {lost} samples lost, {repeated} repeated over {case.steps} steps"


# The folder of a run between two starts, and at its end.

JUNK = (b"", b"step-0000", b"\x00\xff\xfe", b"step-99999999\n")


def broken(run: Path) -> Iterator[str]:
    """Yield what is wrong with the checkpoints of ``run``: what carries a checkpoint's name must be whole."""
    root = run / CHECKPOINTS
    for path in root.glob("step-*") if root.is_dir() else ():
        try:
            found = open_checkpoint(path, SINGLE).state["progress"]["step"]
        except CheckpointError as error:
            yield f"{path.name} is no whole checkpoint: {error}"
            continue
        if found != step_of(path):
            yield f"{path.name} holds the state of step {found}"


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    found = newest_first(list_checkpoints(run / CHECKPOINTS))
    return step_of(found[0]) if found else 0


def spoil_hint(run: Path, draw: random.Random) -> bool:
    """Leave ``latest`` as a kill amidst a write in place might (row A05); return whether there is one."""
    hint = run / CHECKPOINTS / LATEST
    if hint.exists():
        hint.write_bytes(draw.choice(JUNK))
    return hint.exists()


def saving_now(run: Path) -> str:
    """Return "being written", "being removed" or "", by what lies among the checkpoints at this moment."""
    names = [path.name for path in (run / CHECKPOINTS).iterdir()] if (run / CHECKPOINTS).is_dir() else []
    if any(name.startswith(".tmp-") for name in names):
        return "being written"
    return "being removed" if any(name.startswith(".deleted-") for name in names) else ""


def left_over(run: Path, kept: int, *, has_saved: bool) -> Iterator[str]:
    """Yield what a run that is done has left beside its results.

    Args:
        has_saved: the last start has saved. One that finds all steps done writes nothing: what a kill behind the last
            commit has left to tidy is left to the next save.
    """
    root = run / CHECKPOINTS
    for path in [*run.iterdir(), *(root.iterdir() if has_saved else ())]:
        if path.name.startswith(".") or path.name == run_lock.NAME:
            yield f"{path.relative_to(run)} is left behind"
    if not has_saved:
        return
    whole = newest_first(list_checkpoints(root))
    if kept and len(whole) > kept + 1:  # the one that the last start has loaded stays too
        yield f"{len(whole)} checkpoints are left, of which --keep-last wants {kept}"
    if (root / LATEST).read_text().strip() != whole[0].name:
        yield f"{LATEST} does not name the newest checkpoint"
