"""Steps of one engine, in a process of its own: where the host waits for the device, or how it does without memory.

    python -m benchmarks.gpu.workers.steps reads FILE gpt2 --device cuda --bf16 --gas 4
    python -m benchmarks.gpu.workers.steps pressure FILE gpt2 --device cuda --bf16 --deterministic
    python -m benchmarks.gpu.workers.steps ease FILE gpt2 --device cuda --bf16 --deterministic

writes what was seen to FILE as JSON. "pressure" limits torch's allocator from the third step on, "ease" does not.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.arguments import parse
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.parity import mock_tokenizer, random_data
from megatron.training.setup import build_engine, make_streams

ROOT = Path(__file__).resolve().parents[3]
OURS = (f"{ROOT}/megatron/", f"{ROOT}/tds/")
VOCAB = 512
WATCHED = range(1, 3)
"""Steps 2 and 3, counted from 0."""
PRESSED = range(2, 6)
MIB = 2**20
SMALL = 2**19
"""Bytes of what fills torch's small blocks, of which no larger tensor is made."""
SLACK = 64 * MIB


def engine_of(family: str, argv: list[str]) -> tuple[Any, Any]:
    """Return an engine on this process's device and an iterator over micro-batches of random tokens."""
    script = importlib.import_module(f"pretrain_{family}")
    argv = [
        *f"--data-path none --vocab-size {VOCAB} --train-iters 20 --hidden-dropout 0 --attention-dropout 0".split(),
        *argv,
    ]
    config = parse(argv, world_size=1, family=family, defaults=getattr(script, "DEFAULTS", None)).with_vocab(VOCAB)
    here = initialize.start(config)
    streams = make_streams(config, here)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, here, streams, script.model_provider, script.forward_step)
    return engine, RunData({"train": random_data(config)}, None).batches("train", config, here)


def place() -> str:
    """Return the innermost function of the project that is being run, as "tds/loss.py:read"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@contextmanager
def warned() -> Iterator[list[str]]:
    """Yield a list that gets a line for each time that the host waits for CUDA: by CUDA's own watch.

    That leaves waits for the whole device alone, so these are counted by their calls.
    """
    from deepspeed.accelerator import get_accelerator

    found: list[str] = []

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            found.append(f"wait in {place()}")

    def whole(*_: Any, **__: Any) -> None:
        found.append(f"synchronize in {place()}")

    owners = (torch.cuda, torch.accelerator, get_accelerator())
    plain = [owner.synchronize for owner in owners]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for owner in owners:
                owner.synchronize = whole
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for owner, call in zip(owners, plain, strict=True):
                owner.synchronize = call


@contextmanager
def counted() -> Iterator[list[str]]:
    """The same on a CPU, where the calls that would wait are counted."""
    from tests.helpers import host_reads

    with host_reads.counted() as found:
        yield found


def reads(family: str, argv: list[str]) -> dict[str, Any]:
    """Return how often the host waited in steps 2 and 3 together, by place, and whether a wait is noticed at all."""
    engine, batches = engine_of(family, argv)
    is_cuda = engine.device.type == "cuda" if isinstance(engine.device, torch.device) else "cuda" in str(engine.device)
    number = engine.num_micro_batches * WATCHED.stop
    batches = iter([next(batches) for _ in range(number)])  # what is read of samples is of the host
    for step in range(WATCHED.start):
        engine.train_step(batches, step)
    watch = warned if is_cuda else counted
    with watch() as found:
        for step in WATCHED:
            engine.train_step(batches, step)
    with watch() as planted:
        torch.ones(1, device=engine.device).item()
    return {"steps": len(WATCHED), "found": Counter(found), "is_noticed": len(planted) == 1}


def squeeze(peak: int) -> int:
    """Leave torch's allocator too little for a step unless it frees what it keeps, and then enough; return its limit.

    What it keeps are small blocks, which no larger tensor can have. The limit is that of this process: it fails as a
    full device does, whatever the size of the device.
    """
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    garbage = [torch.empty(SMALL, dtype=torch.uint8, device="cuda") for _ in range((peak - held + SLACK) // SMALL)]
    del garbage
    limit = torch.cuda.memory_reserved() + 4 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    return limit


def under_pressure(family: str, argv: list[str], *, is_pressed: bool) -> dict[str, Any]:
    """Return the losses of six steps, and what the allocator did in the last four."""
    engine, batches = engine_of(family, argv)
    losses = [engine.train_step(batches, step).loss.hex() for step in range(PRESSED.start)]
    peak = torch.cuda.max_memory_reserved()
    limit = squeeze(peak) if is_pressed else 0
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    losses += [engine.train_step(batches, step).loss.hex() for step in PRESSED]
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
    return {"losses": losses, "retries": retries, "peak": peak, "limit": limit}


def main() -> None:
    """Do what the command line says."""
    what, file, family, *argv = sys.argv[1:]
    if what == "reads":
        seen = reads(family, argv)
    else:
        seen = under_pressure(family, argv, is_pressed=what == "pressure")
    Path(file).write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # no group of one rank to be left


if __name__ == "__main__":
    main()
