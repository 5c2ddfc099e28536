"""Dumps of a small model in any layout, for the tests of the debugger."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import pretrain_gpt2
import pretrain_t5
from examples.bert import pretrain_bert
from examples.llama import pretrain_llama
from examples.mpt import pretrain_mpt
from megatron.config import parse
from megatron.training import initialize
from megatron.training.mock_data import random_data
from megatron.training.parity import Trace, trace_steps
from tests.helpers.harness import run_ranks

VOCAB = 251
MODEL_FLAGS = {
    pretrain_gpt2: "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --hidden-bias "
    "--init-method-std 0.2",
    pretrain_t5: "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --enc-seq-length 8 --dec-seq-length 8",
    pretrain_llama: "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --num-query-groups 2 --ff-hidden-size 24 "
    "--seq-length 8 --hidden-bias --init-method-std 0.2 --reset-attention-mask --reset-position-ids",
    pretrain_mpt: "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --init-method-std 0.2 "
    "--activation gated-gelu --clip-qkv 0.5 --reset-attention-mask",
    pretrain_bert: "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --init-method-std 0.2",
}
COMMON_FLAGS = (
    f"--vocab-size {VOCAB} --attention-dropout 0 --hidden-dropout 0 --data-path none "
    "--device cpu --train-iters 20 --lr 1e-3 --clip-grad 0"
)
FaultInjector = Callable[[torch.nn.Module], None]


def make_argv(script: ModuleType, layout: tuple[int, int, int], gas: int, folder: Path | None, extra: str) -> list[str]:
    """Return the command line of a run of ``gas`` micro-batches with 8 samples in total."""
    tensor, pipe, data = layout
    command_line = (
        f"{MODEL_FLAGS[script]} {COMMON_FLAGS} --model-parallel-size {tensor} --pipe-parallel-size {pipe} --gas {gas} "
    )
    command_line += f"--batch-size {8 // gas // data} {extra}"
    return command_line.split() + ([] if folder is None else ["--debug-dump", str(folder)])


def train_with_dumps(
    folder: Path | None,
    layout: tuple[int, int, int] = (1, 1, 1),
    *,
    gas: int = 4,
    extra: str = "--fp64",
    script: ModuleType = pretrain_gpt2,
    steps: int = 2,
    inject_fault: FaultInjector | None = None,
) -> list[Trace]:
    """Train in ``layout`` and return each rank's trace. The ranks write their dumps to ``folder``.

    Args:
        inject_fault: fault injector, called with the model that a rank has built.
    """
    world_size = layout[0] * layout[1] * layout[2]
    args = make_argv(script, layout, gas, folder, extra)
    return run_ranks(world_size, _run_rank, args, world_size, script.__name__, steps, inject_fault, deadline_s=100.0)


def _run_rank(
    rank: int, args: list[str], world_size: int, script_name: str, steps: int, inject_fault: FaultInjector | None
) -> Trace:
    script = sys.modules[script_name]
    family = script_name.rpartition("pretrain_")[2]
    config = parse(args, world_size=world_size, family=family, defaults=getattr(script, "DEFAULTS", None)).with_vocab(
        VOCAB
    )
    world = initialize.start(config)

    def provider() -> Any:
        model = script.model_provider()
        if inject_fault is not None:
            inject_fault(model)
        return model

    return trace_steps(config, world, random_data(config), provider, script.forward_step, num_steps=steps)
