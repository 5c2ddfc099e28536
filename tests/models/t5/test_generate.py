"""T5 says the same in every layout: what a plain loop over one process's model says, and what Hugging Face's says."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pretrain_t5
from megatron.checkpoint import named_parameters
from megatron.config import parse
from megatron.generate import generate_t5
from megatron.models.common.generation import pad_rows
from megatron.models.t5.huggingface import model_fields, to_ours
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5Model
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import shard_of
from megatron.training import global_vars, initialize
from megatron.training.setup import build_engine
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import LAYOUTS, VOCAB
from tests.helpers.model_samples import make_full_weight

BASE_FLAGS = (
    "--num-layers 2 --dec-layers 3 --hidden-size 32 --num-attention-heads 4 --enc-seq-length 16 --batch-size 2 --gas 2 "
    f"--vocab-size {VOCAB} --make-vocab-size-divisible-by 16 --hidden-dropout 0.5 --attention-dropout 0 --fp64 "
    "--data-path none --device cpu --train-iters 1 --lr 1e-3"
)
SEGMENTS = "--reset-attention-mask"
LEARNED = "--position-embedding-type learned --hidden-bias --max-position-embeddings 32"
SOURCES = [[5, 17, 3, 60, 2], [42, 1], [9, 8, 7, 6, 5, 4, 3], [100, 1]]
START_ID, MAX_NEW_TOKENS = 0, 8
QUICK_LAYOUTS = [(1, 2, 1), (2, 1, 1)]


def start_engine(rank: int, tensor: int, pipe: int, data: int, extra: str) -> Any:
    """Return the engine of this rank, around known weights."""
    argv = f"{BASE_FLAGS} --model-parallel-size {tensor} --pipe-parallel-size {pipe} {extra}".split()
    config = parse(argv, world_size=tensor * pipe * data, family="t5", defaults=pretrain_t5.DEFAULTS).with_vocab(VOCAB)
    world = initialize.start(config)
    streams = DropoutStreams(config.run.seed, world.grid.data, world.grid.tensor)
    global_vars.set_current(config, SimpleNamespace(eod_id=0), streams)
    engine = build_engine(config, world, streams, pretrain_t5.model_provider, pretrain_t5.forward_step)
    with torch.no_grad():
        for name, parameter in named_parameters(engine.module):
            shard = shard_of(parameter)
            shard.unpadded(parameter).copy_(shard.narrow(make_full_weight(name, shard.global_shape)))
    return engine


def generate_rows(rank: int, tensor: int, pipe: int, data: int, extra: str, eos_id: int | None) -> list[list[int]]:
    engine = start_engine(rank, tensor, pipe, data, extra)
    return generate_t5(engine, SOURCES, start_id=START_ID, max_new_tokens=MAX_NEW_TOKENS, eos_id=eos_id)


def generate_by_plain_loop(rank: int, extra: str, eos_id: int | None) -> list[list[int]]:
    """One source at a time on the model of one process, without anything of ``megatron.generate``."""
    model = start_engine(rank, 1, 1, 1, extra).module.eval()
    rows = []
    for source in SOURCES:
        row = [START_ID]
        while len(row) <= MAX_NEW_TOKENS and not (len(row) > 1 and row[-1] == eos_id):
            with torch.no_grad():
                logits = model(torch.tensor([source]), torch.tensor([row]))  # [s_d, 1, v]
            row.append(int(logits[-1, 0, :VOCAB].argmax()))
        rows.append(row[1:])
    return rows


@functools.cache
def expected_rows(extra: str = "", eos_id: int | None = None) -> list[list[int]]:
    return run_ranks(1, generate_by_plain_loop, extra, eos_id)[0]


@functools.cache
def pick_eos() -> int:
    """A token that ends one row early and another not at all."""
    rows = expected_rows()
    return next(token for row in rows for token in row[1:-2] if any(token not in row for row in rows))


def test_plain_loop_rows_are_diverse() -> None:
    assert len({token for row in expected_rows() for token in row}) > 6
    assert len({tuple(row) for row in expected_rows()}) == len(SOURCES)
    assert len({len(row) for row in expected_rows("", pick_eos())}) > 1


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
def test_every_layout_generates_same_rows(layout: tuple[int, int, int]) -> None:
    world_size = layout[0] * layout[1] * layout[2]
    assert (
        run_ranks(world_size, generate_rows, *layout, SEGMENTS, pick_eos())
        == [expected_rows("", pick_eos())] * world_size
    )


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "--pipeline-chunks 2", f"{SEGMENTS} --checkpoint-activations", LEARNED])
def test_chunks_recompute_and_learned_positions_generate_same_rows(extra: str) -> None:
    expected = expected_rows(LEARNED if extra == LEARNED else "")
    assert run_ranks(2, generate_rows, 1, 2, 1, extra, None) == [expected] * 2


def make_reference(is_tied: bool) -> Any:
    """Return a random T5ForConditionalGeneration whose words are far apart, in fp64."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=3, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        feed_forward_proj="relu" if is_tied else "gated-gelu", tie_word_embeddings=is_tied,
        scale_decoder_outputs=is_tied,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_generation_matches_hugging_face(is_tied: bool) -> None:
    hf_model = make_reference(is_tied)
    fields = model_fields(hf_model.config) | {"untie_embeddings": not is_tied}
    model = T5Model(T5ModelArgs(**fields, make_vocab_size_divisible_by=16)).double()
    our_weights = to_ours(hf_model.state_dict(), 4, is_untied=not is_tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard_of(parameter).unpadded(parameter).copy_(our_weights[name])
    tokens, last_idxs = pad_rows(SOURCES)
    mask = (torch.arange(tokens.shape[1]) <= last_idxs[:, None]).long()
    generate_args = {
        "attention_mask": mask,
        "do_sample": False,
        "num_beams": 1,
        "max_new_tokens": MAX_NEW_TOKENS,
        "use_cache": False,
    }
    plain = generate_t5(model, SOURCES, start_id=0, max_new_tokens=MAX_NEW_TOKENS)
    eos_id = next(token for row in plain for token in row[1:-2] if any(token not in row for row in plain))
    generated = hf_model.generate(tokens, eos_token_id=eos_id, pad_token_id=0, **generate_args)[:, 1:].tolist()
    expected = [row[: row.index(eos_id) + 1] if eos_id in row else row for row in generated]
    assert len({len(row) for row in expected}) > 1
    assert generate_t5(model, SOURCES, start_id=0, eos_id=eos_id, max_new_tokens=MAX_NEW_TOKENS) == expected
