"""A short training on random tokens, of which a rank tells the time of its steps and the bytes that it held.

Time and memory are measured in steps of their own, for counting slows a step down. Memory is counted, not read off
the process: the tensors that lie there ahead of a step, and the most that the step adds in torch's allocator
(``benchmarks.memory``). So it is the same in every run and on a busy machine, and means what the estimate means:
bytes of tensors, without Python, libraries, gloo's buffers and what an allocator keeps.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.memory import bytes_alive, measure
from benchmarks.plan_cases import Case
from megatron.arguments import parse, resolve_dtype
from megatron.config import Config
from megatron.models.registry import FAMILIES
from megatron.planner.spawn_ranks import Rank
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.parity import mock_tokenizer, random_data
from megatron.training.setup import build_engine, make_streams

COUNTED_AFTER = 2
"""Steps ahead of the one whose bytes are counted: then every state of the optimizer is there."""


@dataclass
class Measured:
    """What one rank found: its stage, seconds and processor seconds of each step, bytes."""

    stage: int
    steps_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    held_bytes: int = 0
    added_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors that lay there at once in a step."""
        return self.held_bytes + self.added_bytes


def config_of(case: Case, *, is_smoke: bool = False) -> Config:
    """Return the configuration of a training, as the program of its family makes it from the flags."""
    program = program_of(case.family)
    config = parse(
        case.argv(is_smoke=is_smoke),
        world_size=case.ranks,
        family=case.family,
        env={},
        defaults=getattr(program, "DEFAULTS", None),
    )
    return resolve_dtype(config.with_vocab(config.model.vocab_size or 0), "fp32")


def program_of(family: str) -> Any:
    """Return the module of ``pretrain_<family>``."""
    return importlib.import_module(FAMILIES[family].program.removesuffix(".py").replace("/", "."))


def train_rank(rank: Rank, case: Case, is_smoke: bool, steps: int) -> Measured:
    """What each process of ``run_ranks`` does. Collective."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # engines are talkative
        return train(case, is_smoke, steps, rank.meet)


def train(case: Case, is_smoke: bool, steps: int, meet: Callable[[], None] = lambda: None) -> Measured:
    """Train this rank's part of ``case``. Collective.

    Args:
        steps: that are timed, after one ahead of them; 0: none, memory alone.
        meet: lets all ranks begin a step together.
    """
    nothing = bytes_alive()
    config = config_of(case, is_smoke=is_smoke)
    here, program = initialize.start(config), program_of(case.family)
    streams = make_streams(config, here)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, here, streams, program.model_provider, program.forward_step)
    data = RunData({"train": random_data(config)} if here.reads_data else {}, None)
    batches = data.batches("train", config, here)
    found, number = Measured(here.grid.pipe.rank), 0
    for _ in range(max(COUNTED_AFTER, 1 + steps if steps else 0)):
        meet()
        start, cpu_start = time.perf_counter(), time.process_time()
        engine.train_step(batches, number)
        found.steps_s.append(time.perf_counter() - start)
        found.cpu_s.append(time.process_time() - cpu_start)
        number += 1
    gc.collect()
    _wait_for_threads()
    found.held_bytes, found.added_bytes = measure(lambda: engine.train_step(batches, number))
    found.held_bytes -= nothing
    found.steps_s, found.cpu_s = ([], []) if not steps else (found.steps_s[1:], found.cpu_s[1:])
    return found


def _wait_for_threads(turns: int = 40, turn_s: float = 0.01) -> None:
    """Give the threads of gloo time to let go of the messages that they have sent, which outlive the wait for them.

    On a busy machine that may be long after; the time ends when a tenth of it has passed without a change.
    """
    least, quiet = bytes_alive(), 0
    for _ in range(turns):
        time.sleep(turn_s)
        now = bytes_alive()
        least, quiet = min(least, now), 0 if now != least else quiet + 1
        if quiet == turns // 10:
            return
