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
SIZES = {
    pretrain_gpt2: "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --hidden-bias "
    "--init-method-std 0.2",
    pretrain_t5: "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --enc-seq-length 8 --dec-seq-length 8",
    pretrain_llama: "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --num-query-groups 2 --ff-hidden-size 24 "
    "--seq-length 8 --hidden-bias --init-method-std 0.2 --reset-attention-mask --reset-position-ids",
    pretrain_mpt: "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --init-method-std 0.2 "
    "--activation gated-gelu --clip-qkv 0.5 --reset-attention-mask",
    pretrain_bert: "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --init-method-std 0.2",
}
COMMON = (
    f"--vocab-size {VOCAB} --attention-dropout 0 --hidden-dropout 0 --data-path none "
    "--device cpu --train-iters 20 --lr 1e-3 --clip-grad 0"
)
Plant = Callable[[torch.nn.Module], None]


def argv(script: ModuleType, layout: tuple[int, int, int], gas: int, folder: Path | None, extra: str) -> list[str]:
    """Return the command line of a run of ``gas`` micro-batches with 8 samples in total."""
    tensor, pipe, data = layout
    line = f"{SIZES[script]} {COMMON} --model-parallel-size {tensor} --pipe-parallel-size {pipe} --gas {gas} "
    line += f"--batch-size {8 // gas // data} {extra}"
    return line.split() + ([] if folder is None else ["--debug-dump", str(folder)])


def run(
    folder: Path | None,
    layout: tuple[int, int, int] = (1, 1, 1),
    *,
    gas: int = 4,
    extra: str = "--fp64",
    script: ModuleType = pretrain_gpt2,
    steps: int = 2,
    plant: Plant | None = None,
) -> list[Trace]:
    """Train in ``layout`` and return each rank's trace. The ranks write their dumps to ``folder``.

    Args:
        plant: fault injector, called with the model that a rank has built.
    """
    size = layout[0] * layout[1] * layout[2]
    words = argv(script, layout, gas, folder, extra)
    return run_ranks(size, _rank, words, size, script.__name__, steps, plant, deadline_s=100.0)


def _rank(rank: int, words: list[str], size: int, name: str, steps: int, plant: Plant | None) -> Trace:
    script = sys.modules[name]
    family = name.rpartition("pretrain_")[2]
    config = parse(words, world_size=size, family=family, defaults=getattr(script, "DEFAULTS", None)).with_vocab(VOCAB)
    world = initialize.start(config)

    def provider() -> Any:
        model = script.model_provider()
        if plant is not None:
            plant(model)
        return model

    return trace_steps(config, world, random_data(config), provider, script.forward_step, steps=steps)
