"""Traces of a small GPT-2 in any layout, for the parity tests."""

from __future__ import annotations

import functools
from typing import Any

import pretrain_gpt2
from megatron.config import parse
from megatron.data.mock_dataset import MockTokens
from megatron.training import initialize
from megatron.training.parity import Difference, Trace, compare, trace_steps
from tests.helpers.harness import run_ranks

VOCAB = 101  # a prime: padded for every tensor size
SEQ = 16
MODEL_FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --hidden-bias "
    f"--seq-length {SEQ} --vocab-size {VOCAB} --init-method-std 0.1 --attention-dropout 0 --hidden-dropout 0 "
    "--data-path none --device cpu --train-iters 20 --lr 1e-3 --warmup 0.1 --clip-grad 0"
).split()

GLOBAL_BATCH = 16
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
"""(tensor, pipe, data) of every grid of 2 and 4 ranks."""


def make_flags(tensor: int, pipe: int, *, micro_batch_size: int, gas: int, extra: str = "") -> list[str]:
    """Return the command line of a layout; ``extra`` is last and takes precedence.

    Multi-latent attention has no biases.
    """
    layout = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --batch-size {micro_batch_size} --gas {gas}"
    flags = [flag for flag in MODEL_FLAGS if flag != "--hidden-bias" or "--multi-latent-attention" not in extra]
    return [*flags, *layout.split(), *extra.split()]


def trace_rank(rank: int, argv: list[str], world_size: int, steps: int, eval_every: int) -> Trace:
    """Trace the training steps on one rank."""
    config = parse(argv, world_size=world_size).with_vocab(VOCAB)
    world = initialize.start(config)
    provider, forward = pretrain_gpt2.model_provider, pretrain_gpt2.forward_step
    data = MockTokens(VOCAB, SEQ, seed=7)
    return trace_steps(config, world, data, provider, forward, num_steps=steps, eval_every=eval_every)


@functools.cache
def trace_layout(
    tensor: int, pipe: int, data: int, micro_batch_size: int, gas: int, extra: str = "--fp64", steps: int = 3,
    eval_every: int = 0, context: int = 1,
) -> list[Trace]:  # fmt: skip
    """Return each rank's trace in this layout; identical calls are run once per session."""
    world_size = tensor * pipe * data * context
    extra = extra if context == 1 else f"{extra} --context-parallel-size {context}"
    argv = make_flags(tensor, pipe, micro_batch_size=micro_batch_size, gas=gas, extra=extra)
    return run_ranks(world_size, trace_rank, argv, world_size, steps, eval_every, deadline_s=100.0)


def trace_one_process(micro_batch_size: int, gas: int, extra: str = "--fp64", **kwargs: Any) -> Trace:
    """Return the trace of one process."""
    return trace_layout(1, 1, 1, micro_batch_size, gas, extra, **kwargs)[0]


def split_global_batch(data: int, gas: int) -> tuple[int, int]:
    """Return the micro-batch size and ``gas`` with which ``data`` replicas have the global batch ``GLOBAL_BATCH``."""
    if GLOBAL_BATCH % (data * gas):
        raise ValueError(f"the global batch {GLOBAL_BATCH} must be a multiple of data {data} x gas {gas}")
    return GLOBAL_BATCH // (data * gas), gas


def compare_layout(
    tensor: int, pipe: int, data: int, gas: int, extra: str, schedule: str = "", context: int = 1, **kwargs: int
) -> Difference:
    """Compare this layout with one process on the same global batches, and print the differences.

    Args:
        schedule: flags that affect the pipeline only.
    """
    reference = trace_one_process(*split_global_batch(1, gas), extra, **kwargs)
    rank_traces = trace_layout(
        tensor, pipe, data, *split_global_batch(data, gas), f"{extra} {schedule}", context=context, **kwargs
    )
    differences = compare(reference, rank_traces)
    print(f"tensor {tensor} pipe {pipe} data {data} context {context} gas {gas} {extra} {schedule}: {differences}")
    return differences


def check_fp64(differences: Difference, max_norm: float = 1e-12) -> None:
    """Check that fp64 agrees with one process (bounds of rows E01, E04, E06, E09, E16 and E17).

    Args:
        max_norm: bound for the gradient norms after the first step. AdamW's division amplifies the rounding of small
            gradients.
    """
    assert differences.expert_tokens == 0
    assert differences.loss <= 1e-12
    assert differences.gradient <= 1e-11, differences.worst_gradient
    assert differences.first_norm <= 1e-13
    assert differences.norm <= max_norm
