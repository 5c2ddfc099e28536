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
from tests.helpers.host_reads import find_caller, replace_synchronize

NUM_WARMUP_STEPS, NUM_STEPS = 2, 3
FAMILIES = {
    "gpt2": (pretrain_gpt2, layouts.make_flags, layouts.VOCAB, None),
    "t5": (pretrain_t5, t5_runs.RUNS.make_flags, t5_runs.VOCAB, pretrain_t5.DEFAULTS),
}


def make_engine(family: str, tensor: int = 1, pipe: int = 1, data: int = 1, extra_args: str = "") -> tuple[Any, Any]:
    """Return an engine for steps of two micro-batches, and the iterator over these, as a run has them. Collective."""
    script, make_flags, vocab_size, defaults = FAMILIES[family]
    argv = make_flags(tensor, pipe, micro_batch_size=2, gas=2, extra=extra_args)
    config = parse(argv, world_size=tensor * pipe * data, family=family, defaults=defaults).with_vocab(vocab_size)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, script.model_provider, script.forward_step)
    run_data = RunData({"train": random_data(config)} if world.reads_data else {}, None)
    return engine, run_data.batches("train", config, world)


def run_steps(engine: Any, batches: Any, steps: Sequence[int]) -> None:
    """Take these steps."""
    for step in steps:
        engine.train_step(batches, step)


@contextmanager
def cuda_sync_debug(mode: str | int) -> Iterator[None]:
    """Let CUDA raise ("error") within where the host waits for it, or not ("default")."""
    previous_mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(previous_mode)


def record_sync_modes(engine: Any, batches: Any) -> list[int]:
    """Return the modes of CUDA's watch, 2 for "error", in which steps of the steady state came to their one read.

    Raises:
        RuntimeError: of CUDA: the host has waited elsewhere.
    """
    original_read, modes = LossReduction.read, []

    def read(reduction: LossReduction, *extra_tensors: torch.Tensor) -> list[float]:
        modes.append(torch.cuda.get_sync_debug_mode())
        with cuda_sync_debug("default"):
            return original_read(reduction, *extra_tensors)

    run_steps(engine, batches, range(NUM_WARMUP_STEPS))

    def raise_on_sync() -> None:  # CUDA's watch leaves this call alone
        raise RuntimeError("the host has waited for all work of the device")

    with pytest.MonkeyPatch.context() as monkeypatch, cuda_sync_debug("error"), replace_synchronize(raise_on_sync):
        monkeypatch.setattr(LossReduction, "read", read)
        run_steps(engine, batches, range(NUM_WARMUP_STEPS, NUM_WARMUP_STEPS + NUM_STEPS))
    return modes


def is_wait_detected() -> bool:
    """Return whether CUDA's watch notices a wait."""
    try:
        with cuda_sync_debug("error"):
            torch.ones(1, device="cuda").item()
    except RuntimeError:
        return True
    return False


def record_sim_copies(copies: list[str]) -> None:
    """From now on note each copy between the host and the simulated device; ahead of the device's first use."""
    from megatron_accelerator_sim import kernels

    original_copy = kernels._MEMORY["_copy_from"]

    def recorded_copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if source.device != target.device:
            destination, caller_file = (
                "host" if target.device.type == "cpu" else "device",
                find_caller().partition(":")[0],
            )
            copies.append(f"to the {destination} in {caller_file}")
        return original_copy(source, target, non_blocking)

    kernels._MEMORY["_copy_from"] = recorded_copy


def main() -> None:
    device_type, family, *flag_lines = sys.argv[1:]
    copies: list[str] = []
    if device_type == "sim":
        record_sim_copies(copies)
    results: list[Any] = []
    for flag_line in flag_lines:
        engine, batches = make_engine(family, extra_args=f"{flag_line} --device {device_type}")
        if device_type == "cuda":
            results.append({"modes": record_sync_modes(engine, batches), "notices": is_wait_detected()})
            continue
        run_steps(engine, batches, range(NUM_WARMUP_STEPS))
        copies.clear()
        run_steps(engine, batches, range(NUM_WARMUP_STEPS, NUM_WARMUP_STEPS + NUM_STEPS))
        results.append({name: count / NUM_STEPS for name, count in Counter(copies).items()})
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()
    os._exit(0)  # no group of one rank to be left


if __name__ == "__main__":
    main()
