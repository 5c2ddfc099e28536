"""MPT goes on from prompts as its whole model does on all tokens at once, also beyond the length it was made for."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron.checkpoint.huggingface.config import saved_config
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.generate import generate_gpt2, load
from megatron.models.common import masks
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.generation import CachedDecoder, get_model_stage
from megatron.mpu.groups import SINGLE, build_grid
from megatron.mpu.topology import Topology
from tests.helpers.cached_rows import LENGTHS, NUM_STEPS, check_cached_logits, random_rows
from tests.helpers.harness import run_ranks
from tests.helpers.huggingface_models import build_small_model
from tests.helpers.model_samples import fill_weights
from tests.helpers.mpt_samples import mpt_model_args
from tests.helpers.saved_models import save_model

PROMPTS = [[5, 17, 3, 60, 2], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22], [7]]
MAX_NEW_TOKENS = 8


@pytest.mark.parametrize("changes", [{}, {"untie_embeddings": True, "num_attention_heads": 6, "clip_qkv": 0.5}])
@torch.no_grad()
def test_cached_batches_equal_uncached_single_rows(changes: dict) -> None:
    model = fill_weights(DecoderModel(mpt_model_args(max_position_embeddings=4, **changes)).double()).eval()
    rows = random_rows([length + NUM_STEPS for length in LENGTHS], seed=1)
    single_row_logits = [model(row[None])[:, 0] for row in rows]  # each [s, v]
    reader = CachedDecoder(get_model_stage(model), max(LENGTHS) + NUM_STEPS)
    check_cached_logits(reader, rows, single_row_logits)


def test_alibi_bias_is_built_once_per_pass() -> None:
    model = fill_weights(DecoderModel(mpt_model_args(num_layers=4)).double()).eval()
    with patch.object(masks, "alibi_bias", wraps=masks.alibi_bias) as alibi_bias:
        generate_gpt2(model, PROMPTS, max_new_tokens=5)
    assert alibi_bias.call_count == 5


def generate_on_rank(rank: int, run_dir: Path, tensor: int, pipe: int) -> list[list[int]]:
    """Return what this rank of a layout says."""
    checkpoint = open_folder(run_dir)
    config = saved_config(checkpoint.metadata)
    grid = build_grid(Topology.from_world_size(tensor * pipe, tensor=tensor, pipe=pipe), rank)
    stage = load(checkpoint, config, tensor=grid.tensor, pipe=grid.pipe, dtype=torch.float64)
    return generate_gpt2(stage, PROMPTS, max_new_tokens=MAX_NEW_TOKENS)


@pytest.mark.parametrize(
    ("tensor", "pipe"),
    [(2, 2), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in ((2, 1), (1, 4), (4, 1)))],
)
def test_every_layout_equals_plain_loop(tensor: int, pipe: int, tmp_path: Path) -> None:
    config = save_model(tmp_path, "mpt", max_position_embeddings=10)  # less than the second row will have
    model = build_small_model(config, SINGLE).double().eval()
    model.load_state_dict({name: weight.double() for name, weight in read_weights(open_folder(tmp_path)).items()})
    expected = [plain_loop(model, prompt, config.model.vocab_size or 0) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 5
    assert generate_gpt2(model, PROMPTS, max_new_tokens=MAX_NEW_TOKENS) == expected
    world_size = tensor * pipe
    assert run_ranks(world_size, generate_on_rank, tmp_path, tensor, pipe) == [expected] * world_size


@torch.no_grad()
def plain_loop(model: torch.nn.Module, prompt: list[int], vocab_size: int) -> list[int]:
    """Return the likeliest tokens behind ``prompt``, by the whole model on all tokens each time."""
    tokens = list(prompt)
    for _ in range(MAX_NEW_TOKENS):
        tokens.append(int(model(torch.tensor([tokens]))[-1, 0, :vocab_size].argmax()))
    return tokens[len(prompt) :]
