"""Traces of a small LLaMA in any layout, as ``examples/llama/pretrain_llama.py`` trains it, for the parity tests."""

from __future__ import annotations

import functools

from examples.llama import pretrain_llama
from megatron.config import parse
from megatron.training import world
from megatron.training.parity import Difference, Trace, compare, trace_steps
from megatron.training.stand_in import random_data
from tests.harness import run_ranks
from tests.parity import layouts
from tests.parity.layouts import VOCAB, batches

SIZES = [word for word in layouts.SIZES if word != "--hidden-bias"] + "--num-query-groups 2".split()
OF_4 = "--num-attention-heads 8 --num-query-groups 4"
"""Groups for 4 tensor ranks."""
VARIANTS = {
    "plain": "--ff-hidden-size 40",
    "documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "positions": "--reset-position-ids --hidden-bias --rotary-scaling llama3 --rotary-original-positions 8",
    "tied": "--tie-embeddings-and-output-weights --kv-hidden-size 6 --checkpoint-activations --reset-attention-mask",
}


def flags(tensor: int, pipe: int, *, micro: int, gas: int, extra: str = "") -> list[str]:
    """Return the command line of a layout; ``extra`` comes last and wins."""
    layout = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --batch-size {micro} --gas {gas}"
    return [*SIZES, *layout.split(), *extra.split()]


def trace_rank(rank: int, argv: list[str], world_size: int, steps: int, eval_every: int) -> Trace:
    """What each rank runs."""
    config = parse(argv, world_size=world_size, family="llama").with_vocab(VOCAB)
    here = world.start(config)
    scripts = (pretrain_llama.model_provider, pretrain_llama.forward_step)
    return trace_steps(config, here, random_data(config), *scripts, steps=steps, eval_every=eval_every)


@functools.cache
def traces(tensor: int, pipe: int, data: int, extra: str, steps: int, gas: int = 2, eval_every: int = 0) -> list[Trace]:
    """Return each rank's trace in this layout; equal calls run once in a session."""
    micro, gas = batches(data, gas)
    argv = flags(tensor, pipe, micro=micro, gas=gas, extra=extra)
    size = tensor * pipe * data
    return run_ranks(size, trace_rank, argv, size, steps, eval_every, deadline_s=100.0)


def difference(
    tensor: int, pipe: int, data: int, extra: str, steps: int, schedule: str = "", gas: int = 2
) -> Difference:
    """Compare this layout with one process that sees the same global batches, and show what was observed."""
    extra = f"{extra} {OF_4}" if tensor == 4 else extra
    reference = traces(1, 1, 1, extra, steps, gas)[0]
    found = compare(reference, traces(tensor, pipe, data, f"{extra} {schedule}", steps, gas))
    print(f"tensor {tensor} pipe {pipe} data {data} {extra} {schedule}: {found}")
    return found
