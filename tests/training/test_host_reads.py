"""In the steady state the host waits for the device once a step: for losses and gradient norm, in one copy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import pretrain_gpt2
from megatron.config import parse
from megatron.training import arguments, world
from megatron.training.assembly import build_engine, make_streams
from megatron.training.data import RunData
from megatron.training.parity import stand_in_tokenizer
from megatron.training.stand_in import RandomTokens
from tests.harness import run_ranks
from tests.parity.layouts import SEQ, VOCAB, flags
from tests.training.host_reads import counted

WARM, STEPS = 2, 3
ONCE = {"tolist in tds/agreement.py:read": 1}
"""Of every step, on every rank."""
HEADERS = {"tolist in tds/header.py:decode_header": 1}
"""Of the first message that a stage receives in a step; of a header of the host under gloo and NCCL alike."""


def engine_of(argv: list[str], size: int) -> tuple[Any, Any]:
    """Return an engine and its micro-batches, made ahead of all steps."""
    config = parse(argv, world_size=size).with_vocab(VOCAB)
    here = world.start(config)
    streams = make_streams(config, here)
    arguments.set_current(config, stand_in_tokenizer(config), streams)
    engine = build_engine(config, here, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    data = RunData({"train": RandomTokens(VOCAB, SEQ, seed=7)} if here.reads_data else {}, None)
    batches = data.batches("train", config, here)
    if batches is None:
        return engine, None
    return engine, iter([next(batches) for _ in range((WARM + STEPS) * config.batch.gas)])


def reads(rank: int, argv: list[str], size: int) -> dict[str, float]:
    """Return by place how often the host waited in each step of the steady state."""
    engine, batches = engine_of(argv, size)
    for step in range(WARM):
        engine.train_step(batches, step)
    with counted() as found:
        for step in range(WARM, WARM + STEPS):
            engine.train_step(batches, step)
    return {name: number / STEPS for name, number in Counter(found).items()}


@pytest.mark.parametrize(
    ("pipe", "data", "extra"),
    [
        (1, 1, "--fp32 --clip-grad 1"),
        (1, 2, "--bf16 --zero-stage 1 --checkpoint-activations --eod-mask-loss --reset-attention-mask"),
        (1, 2, "--fp32 --zero-stage 2"),
    ],
    ids=["one rank", "two replicas", "cut gradients"],
)
def test_one_stage_waits_once_in_a_step(pipe: int, data: int, extra: str) -> None:
    for found in run_ranks(pipe * data, reads, flags(1, pipe, micro=2, gas=2, extra=extra), pipe * data):
        assert found == ONCE


def test_a_stage_of_a_pipeline_waits_once_in_a_step_and_for_headers() -> None:
    argv = flags(1, 2, micro=2, gas=2, extra="--fp32 --clip-grad 1")
    first, last = run_ranks(2, reads, argv, 2)
    assert first == ONCE
    assert last == ONCE | HEADERS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA's own watch over waits of the host")
def test_cuda_sees_one_wait_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by CUDA: nothing but the one read may wait."""
    argv = flags(1, 1, micro=2, gas=2, extra="--bf16 --device cuda --clip-grad 1")

    def watched(rank: int) -> int:
        engine, batches = engine_of(argv, 1)
        for step in range(WARM):
            engine.train_step(batches, step)
        read, number = type(engine)._agree, 0

        def let(agreement: Any) -> Any:
            plain = agreement.read

            def reading(*more: Any) -> Any:
                nonlocal number
                number += 1
                torch.cuda.set_sync_debug_mode("default")
                told = plain(*more)
                torch.cuda.set_sync_debug_mode("error")
                return told

            agreement.read = reading
            return agreement

        monkeypatch.setattr(type(engine), "_agree", lambda self, meter: let(read(self, meter)))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(WARM, WARM + STEPS):
                engine.train_step(batches, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return number

    assert watched(0) == STEPS
