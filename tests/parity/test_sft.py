"""Fine-tuning on conversations is one process in every layout, and prompts have no gradient."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt2
from megatron import mpu
from megatron.config import Config, parse
from megatron.data.sft_dataset import ConversationFile, SFTDataset
from megatron.tokenizer import build
from megatron.tokenizer.chat import find_template
from megatron.training import global_vars, initialize, setup
from megatron.training.data import RunData
from megatron.training.parity import Trace, compare, trace_steps
from megatron.training.world import World
from tests.helpers.chats import CHATML, CONVERSATIONS, make_messages, write_conversations, write_tokenizer
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import check_fp64

SEQ = 96
SIZES = (
    f"--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings {SEQ} --hidden-bias --fp64 "
    f"--seq-length {SEQ} --init-method-std 0.1 --attention-dropout 0 --hidden-dropout 0 --device cpu --train-iters 20 "
    "--lr 1e-3 --clip-grad 0"
)


@pytest.fixture(scope="module", autouse=True)
def conversations() -> None:
    data_dir()  # here, so that all ranks that are forked have the same


@functools.cache
def data_dir() -> Path:
    path = Path(tempfile.mkdtemp())
    write_tokenizer(path, CHATML)
    write_conversations(
        path / "c.jsonl", [*CONVERSATIONS, make_messages("a", "b"), make_messages("a longer question", "no")] * 4
    )
    return path


def make_config_and_data(extra_flags: str, world_size: int) -> tuple[Config, SFTDataset, Any]:
    tokenizer = build("TokenizersJSON", tokenizer_path=data_dir())
    argv = f"{SIZES} --sft {data_dir() / 'c.jsonl'} --tokenizer-path {data_dir()} {extra_flags}".split()
    config = parse(argv, world_size=world_size).with_vocab(tokenizer.vocab_size)
    file: Any = ConversationFile(data_dir() / "c.jsonl", find_template(tokenizer), capacity=SEQ + 1)
    dataset = SFTDataset(file, documents=(0, file.num_documents), seq_length=SEQ, seed=5, packing="best-fit")
    return config, dataset, tokenizer


def trace_rank(rank: int, extra_flags: str, world_size: int) -> Trace:
    config, dataset, tokenizer = make_config_and_data(extra_flags, world_size)
    world = initialize.start(config)
    providers = pretrain_gpt2.model_provider, pretrain_gpt2.forward_step
    return trace_steps(config, world, dataset, *providers, num_steps=2, tokenizer=tokenizer)


@functools.cache
def serial_trace() -> Trace:
    return run_ranks(1, trace_rank, "--batch-size 2 --gas 4", 1, deadline_s=100.0)[0]


LAYOUTS = {
    "tensor 2 pipe 2": ("--model-parallel-size 2 --pipe-parallel-size 2 --batch-size 2 --gas 4", 4),
    "data 2": ("--batch-size 2 --gas 2", 2),
    "pipe 2 zb-h1": ("--pipe-parallel-size 2 --pipeline-schedule zb-h1 --batch-size 1 --gas 8", 2),
    "context 2": ("--context-parallel-size 2 --batch-size 2 --gas 4", 2),
    "sequence parallel, zero 2": (
        "--model-parallel-size 2 --sequence-parallel --zero-stage 2 --batch-size 2 --gas 2", 4,
    ),
}  # fmt: skip
SLOW_LAYOUTS = list(LAYOUTS)[1:]


@pytest.mark.parametrize(
    "layout", [name if name not in SLOW_LAYOUTS else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_layout_equals_single_process(layout: str) -> None:
    layout_flags, world_size = LAYOUTS[layout]
    ranks = run_ranks(world_size, trace_rank, layout_flags, world_size, deadline_s=100.0)
    diff = compare(serial_trace(), ranks)
    check_fp64(diff)


def test_prompts_have_no_gradient() -> None:
    """Of what the last norm gives, at every position whose next token the assistant does not say."""
    (masked,) = run_ranks(1, check_gradient_positions, deadline_s=60.0, init=False)
    assert masked == (True, True, True)


def check_gradient_positions(rank: int) -> tuple[bool, ...]:
    mpu.initialize_model_parallel()
    config, dataset, tokenizer = make_config_and_data("--batch-size 2", 1)
    world = World("cpu", torch.device("cpu"), mpu.get_grid(), 0)
    global_vars.set_current(config, tokenizer, setup.make_streams(config, world))
    model = pretrain_gpt2.model_provider()
    setup.initialize_and_move(config, model, world)
    hidden_states: list[torch.Tensor] = []

    def save_hidden(module: torch.nn.Module, inputs: Any, hidden: torch.Tensor) -> None:
        hidden.retain_grad()
        hidden_states.append(hidden)

    model.final_norm.register_forward_hook(save_hidden)
    batches: Any = RunData({"train": dataset}, None).batches("train", config, world)
    batch = next(iter(batches))
    (total, count), _ = pretrain_gpt2.forward_step(iter([batch]), model)
    total.backward()
    gradient = hidden_states[0].grad.transpose(0, 1).abs().amax(-1)  # [b, s]
    is_trained = batch["loss_mask"][:, 1:].bool() & (batch["segments"][:, 1:] == batch["segments"][:, :-1])
    return (
        bool((gradient[~is_trained] == 0).all()),
        bool((gradient[is_trained] > 0).all()),
        int(count) == int(is_trained.sum()),
    )
