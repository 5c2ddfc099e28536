"""``pretrain_t5.py`` trains for many steps in every layout as in one process: Adam, clipping, spans, evaluation."""

from __future__ import annotations

import functools

import pytest

import pretrain_t5
from megatron.config import parse
from megatron.training import world
from megatron.training.parity import Difference, Trace, compare, trace_steps
from megatron.training.stand_in import random_data
from tests.harness import run_ranks
from tests.parity.layouts import LAYOUTS, batches, check_fp64

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
    layout = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --batch-size {micro} --gas {gas}"
    argv = [*SIZES, *layout.split(), *extra.split()]
    size = tensor * pipe * data
    return run_ranks(size, trace_rank, argv, size, steps, eval_every, deadline_s=100.0)


def difference(tensor: int, pipe: int, data: int, extra: str, steps: int, schedule: str = "") -> Difference:
    """Compare this layout with one process that sees the same global batches, and show what was observed."""
    found = compare(traces(1, 1, 1, extra, steps)[0], traces(tensor, pipe, data, f"{extra} {schedule}", steps))
    print(f"tensor {tensor} pipe {pipe} data {data} {extra} {schedule}: {found}")
    return found


@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "variant", "schedule"),
    [
        (2, 2, 1, "v1.1", "--pipeline-split-rank 1"),
        (1, 2, 2, "ul2", "--pipeline-schedule zb-h1"),
        (1, 4, 1, "t5", "--partition-method uniform"),
        (1, 2, 1, "learned", "--pipeline-chunks 2"),
    ],
)
def test_steps_equal_one_process(tensor: int, pipe: int, data: int, variant: str, schedule: str) -> None:
    """Rows E01, E04, E06, E10, E16 and E17."""
    check_fp64(difference(tensor, pipe, data, f"--fp64 {VARIANTS[variant]}", 4, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_twenty_steps_equal_one_process(tensor: int, pipe: int, data: int, variant: str) -> None:
    check_fp64(difference(tensor, pipe, data, f"--fp64 {VARIANTS[variant]}", 20))


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, 2, 3])
def test_the_seam_may_be_fixed_by_hand(split: int) -> None:
    check_fp64(difference(1, 4, 1, "--fp64 --enc-layers 3", 3, f"--pipeline-split-rank {split}"))


def test_evaluation_is_that_of_one_process_and_leaves_training_as_it_was() -> None:
    """Row E20, with dropout."""
    extra = "--fp64 --attention-dropout 0.1 --hidden-dropout 0.1"
    one = traces(1, 1, 1, extra, 3, eval_every=1)[0]
    plain, evaluated = traces(1, 2, 1, extra, 3), traces(1, 2, 1, extra, 3, eval_every=1)
    assert [trace.losses for trace in plain] == [trace.losses for trace in evaluated]
    for trace in evaluated:
        assert max(abs(a - b) for a, b in zip(trace.eval_losses, one.eval_losses, strict=True)) <= 1e-12
        assert trace.eval_losses[0] != trace.eval_losses[-1] and trace.losses != trace.eval_losses
