"""Traces of a small BERT in any layout, as ``examples/bert/pretrain_bert.py`` trains it, for the parity tests."""

from __future__ import annotations

import functools

from examples.bert import pretrain_bert
from megatron.config import parse
from megatron.training import world
from megatron.training.parity import Difference, Trace, compare, trace_steps
from megatron.training.stand_in import random_data
from tests.harness import run_ranks
from tests.parity.layouts import batches

VOCAB = 109  # a prime: padded for every tensor size
SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --ff-hidden-size 40 --init-method-std 0.1 "
    f"--vocab-size {VOCAB} --attention-dropout 0 --hidden-dropout 0 --data-path none --device cpu --train-iters 20 "
    "--lr 1e-3 --warmup 0.1 --clip-grad 0.5 --short-seq-prob 0.4"
).split()
VARIANTS = {
    "pairs": "--fp64",
    "words": "--fp64 --bert-no-binary-head --whole-word-masking --short-seq-prob 0 --checkpoint-activations",
    "pairs of whole words": "--fp64 --whole-word-masking",
}


def flags(tensor: int, pipe: int, *, micro: int, gas: int, extra: str = "") -> list[str]:
    """Return the command line of a layout; ``extra`` comes last and wins."""
    layout = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --batch-size {micro} --gas {gas}"
    return [*SIZES, *layout.split(), *extra.split()]


def trace_rank(rank: int, argv: list[str], world_size: int, steps: int, eval_every: int) -> Trace:
    """What each rank runs."""
    config = parse(argv, world_size=world_size, family="bert").with_vocab(VOCAB)
    here = world.start(config)
    scripts = (pretrain_bert.model_provider, pretrain_bert.forward_step)
    return trace_steps(config, here, random_data(config), *scripts, steps=steps, eval_every=eval_every)


@functools.cache
def traces(tensor: int, pipe: int, data: int, extra: str, steps: int, gas: int = 4, eval_every: int = 0) -> list[Trace]:
    """Return each rank's trace in this layout; equal calls run once in a session."""
    micro, gas = batches(data, gas)
    argv = flags(tensor, pipe, micro=micro, gas=gas, extra=extra)
    size = tensor * pipe * data
    return run_ranks(size, trace_rank, argv, size, steps, eval_every, deadline_s=100.0)


def difference(
    tensor: int, pipe: int, data: int, extra: str, steps: int, schedule: str = "", gas: int = 4
) -> Difference:
    """Compare this layout with one process that sees the same global batches, and show what was observed."""
    found = compare(traces(1, 1, 1, extra, steps)[0], traces(tensor, pipe, data, f"{extra} {schedule}", steps, gas))
    print(f"tensor {tensor} pipe {pipe} data {data} {extra} {schedule}: {found}")
    return found
