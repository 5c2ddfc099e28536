"""Traces of a small T5 in any layout, as ``pretrain_t5.py`` trains it, for the parity tests."""

from __future__ import annotations

import functools

import pretrain_t5
from megatron.config import parse
from megatron.training import world
from megatron.training.parity import Difference, Trace, compare, trace_steps
from megatron.training.stand_in import random_data
from tests.harness import run_ranks
from tests.parity.layouts import batches

VOCAB = 109  # a prime: padded for every tensor size
SIZES = (
    "--enc-layers 2 --dec-layers 3 --hidden-size 32 --num-attention-heads 4 --enc-seq-length 24 "
    f"--vocab-size {VOCAB} --vocab-extra-ids 8 --attention-dropout 0 --hidden-dropout 0 --data-path none --device cpu "
    "--train-iters 20 --lr 1e-3 --warmup 0.1 --clip-grad 0.5"
).split()
VARIANTS = {
    "t5": "",
    "v1.1": "--activation gated-gelu --untie-embeddings-and-output-weights --reset-attention-mask",
    "ul2": "--denoisers R,X,S --checkpoint-activations",
    "learned": "--position-embedding-type learned --hidden-bias --activation gelu --layernorm-epsilon 1e-5",
}


def flags(tensor: int, pipe: int, *, micro: int, gas: int, extra: str = "") -> list[str]:
    """Return the command line of a layout; ``extra`` comes last and wins."""
    layout = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --batch-size {micro} --gas {gas}"
    return [*SIZES, *layout.split(), *extra.split()]


def trace_rank(rank: int, argv: list[str], world_size: int, steps: int, eval_every: int) -> Trace:
    """What each rank runs."""
    config = parse(argv, world_size=world_size, family="t5", defaults=pretrain_t5.DEFAULTS).with_vocab(VOCAB)
    here = world.start(config)
    scripts = (pretrain_t5.model_provider, pretrain_t5.forward_step)
    return trace_steps(config, here, random_data(config), *scripts, steps=steps, eval_every=eval_every)


@functools.cache
def traces(tensor: int, pipe: int, data: int, extra: str, steps: int, gas: int = 4, eval_every: int = 0) -> list[Trace]:
    """Return each rank's trace in this layout; equal calls run once in a session."""
    micro, gas = batches(data, gas)
    argv = flags(tensor, pipe, micro=micro, gas=gas, extra=extra)
    size = tensor * pipe * data
    return run_ranks(size, trace_rank, argv, size, steps, eval_every, deadline_s=100.0)


def difference(tensor: int, pipe: int, data: int, extra: str, steps: int, schedule: str = "") -> Difference:
    """Compare this layout with one process that sees the same global batches, and show what was observed."""
    found = compare(traces(1, 1, 1, extra, steps)[0], traces(tensor, pipe, data, f"{extra} {schedule}", steps))
    print(f"tensor {tensor} pipe {pipe} data {data} {extra} {schedule}: {found}")
    return found
