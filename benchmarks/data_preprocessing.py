"""MB/s of a whole preprocessing job, ours and that of the reference, for each tokenizer and number of processes.

Each turn is a fresh process that measures itself, from the start of the job with its tokenizers to the finished files;
imports come before. All contenders of a tokenizer must write the same tokens.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.data_parts import peer
from benchmarks.data_parts.rounds import Bar, ratio_quartiles, take_turns
from benchmarks.data_parts.vocabularies import Kind
from megatron.data import preprocess

OURS, REFERENCE = "ours", "reference"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""What ``os.times`` counts in."""


@dataclass(frozen=True)
class Contender:
    """Who encodes a corpus, with which tokenizer, and in how many processes."""

    kind: str
    who: str
    num_workers: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.num_workers} worker{'s' * (self.num_workers > 1)}, {self.who}"


@dataclass(frozen=True)
class Done:
    """What one turn took, processes that it started included, and a hash of the tokens that it wrote.

    Processor time is counted in clock ticks: ``cpu_s`` is one at least, so that a rate can be taken of it.
    """

    seconds: float
    cpu_s: float
    tokens: str


def measure(
    kinds: Mapping[str, Kind], corpora: Mapping[str, Path], workers: Sequence[int], rounds: int, folder: Path
) -> tuple[dict[str, list[float]], list[Bar]]:
    """Return MB/s of each contender in each round by its name, and the bars.

    Args:
        corpora: the file for each kind.
        folder: where outputs are written; each is deleted before the next.

    Raises:
        RuntimeError: a contender failed, or wrote other tokens than the reference.
    """
    contenders = [Contender(kind, who, count) for kind in kinds for count in workers for who in (OURS, REFERENCE)]
    by_cpu: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    tokens: dict[str, tuple[str, str]] = {}

    def turn(contender: Contender) -> float:
        corpus = corpora[contender.kind]
        done = in_process(job, kinds[contender.kind], contender, corpus, folder / "out")
        first, expected = tokens.setdefault(contender.kind, (contender.name, done.tokens))
        if done.tokens != expected:
            raise RuntimeError(f"contenders must write the same tokens; {contender.name} and {first} do not")
        megabytes = corpus.stat().st_size / 1e6
        by_cpu[contender.name].append(megabytes / done.cpu_s)
        return megabytes / done.seconds

    rates = take_turns({contender.name: partial(turn, contender) for contender in contenders}, rounds)
    return rates, [
        bar_of(kind.bar, rates, by_cpu, Contender(name, OURS, count), Contender(name, REFERENCE, count))
        for name, kind in kinds.items()
        for count in workers
        if kind.bar is not None and count in kind.bar_workers
    ]


def bar_of(
    at_least: float,
    rates: Mapping[str, list[float]],
    by_cpu: Mapping[str, list[float]],
    ours: Contender,
    theirs: Contender,
) -> Bar:
    """Return how many times as fast ``ours`` is, by the clock and by processor time."""
    ratio = ratio_quartiles(rates[ours.name], rates[theirs.name])
    cpu_ratio = ratio_quartiles(by_cpu[ours.name], by_cpu[theirs.name])[1]
    return Bar(f"{ours.name} / reference", at_least, ratio, cpu_ratio)


def job(kind: Kind, contender: Contender, corpus: Path, folder: Path) -> Done:
    """Do one job and return what it took."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prefix = folder / "tokens"
    eod_id = kind.make_tokenizer().eod_id
    started, cpu_started = time.perf_counter(), _cpu_s()
    if contender.who == OURS:
        preprocess.run(
            preprocess.Job(
                inputs=[corpus],
                output_prefix=str(prefix),
                make_tokenizer=kind.make_tokenizer,
                num_workers=contender.num_workers,
                use_gigatoken=kind.use_gigatoken,
            )
        )
    else:
        encoder = peer.Encoder(kind.make_encode, eod_id)
        peer.run(corpus, prefix, encoder, contender.num_workers, kind.chunk_size)
    seconds, cpu_s = time.perf_counter() - started, max(_cpu_s() - cpu_started, TICK_S)
    with open(prefix.with_suffix(".bin"), "rb") as file:
        return Done(seconds, cpu_s, hashlib.file_digest(file, "sha256").hexdigest())


def _cpu_s() -> float:
    """Return processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, run in a process of its own: nothing that one turn has loaded serves the next.

    Raises:
        RuntimeError: it failed; its traceback is the message.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_run, args=(far, function, args))
    process.start()
    far.close()
    try:
        failed, result = near.recv()
    except EOFError:
        failed, result = True, "it died"
    process.join()
    if failed:
        raise RuntimeError(f"{function.__name__} failed: {result}")
    return result


def _run(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((False, function(*args)))
    except Exception:
        pipe.send((True, traceback.format_exc()))
