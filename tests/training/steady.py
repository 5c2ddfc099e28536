"""Steps of the steady state under a watch of the device, in a process of their own where DeepSpeed must learn of it.

    python -m tests.training.steady cuda gpt2 "--bf16" "--bf16 --offload-optimizer"

prints what was seen with each line of flags as JSON: on "cuda" CUDA's own watch raises where the host waits for it
outside of the one read, on "sim" the copies between the host and the simulated device are counted, none of which a
counter on a CPU can see.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import pretrain_gpt2
import pretrain_t5
from megatron.config import parse
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.mock_data import mock_tokenizer, random_data
from megatron.training.setup import build_engine, make_streams
from tds.loss_reduction import LossReduction
from tests.helpers import layouts, t5_runs
from tests.helpers.host_reads import place, synchronize_is

WARM, STEPS = 2, 3
FAMILIES = {
    "gpt2": (pretrain_gpt2, layouts.flags, layouts.VOCAB, None),
    "t5": (pretrain_t5, t5_runs.RUNS.flags, t5_runs.VOCAB, pretrain_t5.DEFAULTS),
}


def engine_of(family: str, tensor: int = 1, pipe: int = 1, data: int = 1, extra: str = "") -> tuple[Any, Any]:
    """Return an engine for steps of two micro-batches, and the iterator over these, as a run has them. Collective."""
    script, flags, vocab, defaults = FAMILIES[family]
    argv = flags(tensor, pipe, micro=2, gas=2, extra=extra)
    config = parse(argv, world_size=tensor * pipe * data, family=family, defaults=defaults).with_vocab(vocab)
    here = initialize.start(config)
    streams = make_streams(config, here)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, here, streams, script.model_provider, script.forward_step)
    found = RunData({"train": random_data(config)} if here.reads_data else {}, None)
    return engine, found.batches("train", config, here)


def take(engine: Any, batches: Any, steps: Sequence[int]) -> None:
    """Take these steps."""
    for step in steps:
        engine.train_step(batches, step)


@contextmanager
def sync_debug(mode: str | int) -> Iterator[None]:
    """Let CUDA raise ("error") within where the host waits for it, or not ("default")."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def watched_by_cuda(engine: Any, batches: Any) -> list[int]:
    """Return the modes of CUDA's watch, 2 for "error", in which steps of the steady state came to their one read.

    Raises:
        RuntimeError: of CUDA: the host has waited elsewhere.
    """
    plain, seen = LossReduction.read, []

    def read(agreement: LossReduction, *more: torch.Tensor) -> list[float]:
        seen.append(torch.cuda.get_sync_debug_mode())
        with sync_debug("default"):
            return plain(agreement, *more)

    take(engine, batches, range(WARM))

    def refuse() -> None:  # CUDA's watch leaves this call alone
        raise RuntimeError("the host has waited for all work of the device")

    with pytest.MonkeyPatch.context() as patch, sync_debug("error"), synchronize_is(refuse):
        patch.setattr(LossReduction, "read", read)
        take(engine, batches, range(WARM, WARM + STEPS))
    return seen


def is_noticed() -> bool:
    """Return whether CUDA's watch notices a wait."""
    try:
        with sync_debug("error"):
            torch.ones(1, device="cuda").item()
    except RuntimeError:
        return True
    return False


def copies_of_sim(found: list[str]) -> None:
    """From now on note each copy between the host and the simulated device; ahead of the device's first use."""
    from megatron_accelerator_sim import kernels

    plain = kernels._MEMORY["_copy_from"]

    def copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if source.device != target.device:
            end, file = "host" if target.device.type == "cpu" else "device", place().partition(":")[0]
            found.append(f"to the {end} in {file}")
        return plain(source, target, non_blocking)

    kernels._MEMORY["_copy_from"] = copy


def main() -> None:
    kind, family, *lines = sys.argv[1:]
    found: list[str] = []
    if kind == "sim":
        copies_of_sim(found)
    seen: list[Any] = []
    for line in lines:
        engine, batches = engine_of(family, extra=f"{line} --device {kind}")
        if kind == "cuda":
            seen.append({"modes": watched_by_cuda(engine, batches), "notices": is_noticed()})
            continue
        take(engine, batches, range(WARM))
        found.clear()
        take(engine, batches, range(WARM, WARM + STEPS))
        seen.append({name: number / STEPS for name, number in Counter(found).items()})
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()
    os._exit(0)  # no group of one rank to be left


if __name__ == "__main__":
    main()
