"""GPT-2 says the same in every layout: what a plain loop over one process's model says."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pretrain_gpt2
from megatron.config import parse
from megatron.data.mock_dataset import MockTokens
from megatron.errors import NumericsError
from megatron.generate import generate_gpt2
from megatron.mpu.random import DropoutStreams
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.setup import build_engine
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import LAYOUTS, SEQ, VOCAB, make_flags

MODEL = (
    "--untie-embeddings-and-output-weights --init-method-std 0.5 --hidden-dropout 0.5 --make-vocab-size-divisible-by 16"
)
EXTRA = f"--fp64 {MODEL}"
PROMPTS = [[5, 17, 3], [42], [9, 8, 7, 6, 5], [100, 1]]
MAX_NEW_TOKENS = 10
QUICK_LAYOUTS = [(1, 2, 1), (2, 1, 1)]


def build_on_rank(rank: int, tensor: int, pipe: int, data: int, extra: str) -> tuple[Any, Any, Any]:
    """Return configuration, world and engine of this rank."""
    config = parse(
        make_flags(tensor, pipe, micro_batch_size=2, gas=2, extra=extra), world_size=tensor * pipe * data
    ).with_vocab(VOCAB)
    world = initialize.start(config)
    streams = DropoutStreams(config.run.seed, world.grid.data, world.grid.tensor)
    global_vars.set_current(config, SimpleNamespace(eod_id=0), streams)
    return config, world, build_engine(config, world, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)


def generate_on_rank(rank: int, tensor: int, pipe: int, data: int, extra: str, eos_id: int | None) -> list[list[int]]:
    _, _, engine = build_on_rank(rank, tensor, pipe, data, extra)
    return generate_gpt2(engine, PROMPTS, max_new_tokens=MAX_NEW_TOKENS, eos_id=eos_id)


def plain_loop(rank: int, extra: str, eos_id: int | None) -> list[list[int]]:
    """One prompt at a time on the model of one process, without anything of ``megatron.generate``."""
    _, _, engine = build_on_rank(rank, 1, 1, 1, extra)
    model = engine.module.eval()
    rows = []
    for prompt in PROMPTS:
        row = list(prompt)
        while len(row) < len(prompt) + MAX_NEW_TOKENS and not (len(row) > len(prompt) and row[-1] == eos_id):
            with torch.no_grad():
                logits = model(torch.tensor([row]), torch.arange(len(row))[None])  # [s, 1, v]
            row.append(int(logits[-1, 0, :VOCAB].argmax()))
        rows.append(row[len(prompt) :])
    return rows


@functools.cache
def expected_rows(eos_id: int | None = None) -> list[list[int]]:
    return run_ranks(1, plain_loop, EXTRA, eos_id)[0]


@functools.cache
def eos_token() -> int:
    """A token that ends one row early and another not at all."""
    rows = expected_rows()
    return next(token for token in rows[0][2:-2] if any(token not in row for row in rows))


def test_reference_rows_are_diverse() -> None:
    assert len({token for row in expected_rows() for token in row}) > 10
    assert len({len(row) for row in expected_rows(eos_token())}) > 1


@pytest.mark.parametrize(
    "layout",
    [
        *QUICK_LAYOUTS,
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in [(1, 1, 1), *LAYOUTS]
            if layout not in QUICK_LAYOUTS
        ),
    ],
)
def test_every_layout_equals_plain_loop(layout: tuple[int, int, int]) -> None:
    world_size = layout[0] * layout[1] * layout[2]
    assert (
        run_ranks(world_size, generate_on_rank, *layout, EXTRA, eos_token())
        == [expected_rows(eos_token())] * world_size
    )


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["--pipeline-chunks 2", "--reset-attention-mask", "--checkpoint-activations"])
def test_chunks_segments_and_recompute_do_not_change_tokens(extra: str) -> None:
    assert run_ranks(2, generate_on_rank, 1, 2, 1, f"{EXTRA} {extra}", eos_token()) == [expected_rows(eos_token())] * 2


def train_on_rank(rank: int, should_decode: bool) -> tuple[list[str], bool]:
    """Train three steps with dropout on two stages; decode between them, or not."""
    config, world, engine = build_on_rank(rank, 1, 2, 1, f"--fp32 {MODEL}")
    batches = RunData({"train": MockTokens(VOCAB, SEQ, seed=7)} if world.reads_data else {}, None).batches(
        "train", config, world
    )
    losses = []
    for step in range(3):
        losses.append(float(engine.train_step(batches, step).loss).hex())
        if should_decode:
            generate_gpt2(engine, PROMPTS, max_new_tokens=2)
    return losses, engine.module.training


def test_decoding_between_steps_does_not_change_training() -> None:
    without_decoding, with_decoding = run_ranks(2, train_on_rank, False), run_ranks(2, train_on_rank, True)
    assert with_decoding == without_decoding


def generate_with_nan_weights(rank: int) -> str:
    _, _, engine = build_on_rank(rank, 1, 2, 1, EXTRA)
    if rank == 1:
        with torch.no_grad():
            next(engine.module.parameters()).fill_(float("nan"))
    with pytest.raises(NumericsError) as raised:
        generate_gpt2(engine.engine, PROMPTS, max_new_tokens=2)
    return str(raised.value)


def test_nan_weights_raise_on_every_rank() -> None:
    assert all("logits must be finite, got NaN" in message for message in run_ranks(2, generate_with_nan_weights))
