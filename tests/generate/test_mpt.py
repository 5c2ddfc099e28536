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
from megatron.models.common.generation import DecoderReader, stage_of
from megatron.mpu.groups import SINGLE, build_grid
from megatron.mpu.topology import Topology
from tests.helpers.cached_rows import LENGTHS, STEPS, check_passes, rows_of
from tests.helpers.harness import run_ranks
from tests.helpers.huggingface_models import build
from tests.helpers.model_samples import filled
from tests.helpers.mpt_samples import mpt_sizes
from tests.helpers.saved_models import save_model

PROMPTS = [[5, 17, 3, 60, 2], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22], [7]]
NEW = 8


@pytest.mark.parametrize("changes", [{}, {"untie_embeddings": True, "num_attention_heads": 6, "clip_qkv": 0.5}])
@torch.no_grad()
def test_a_cache_and_rows_of_any_length_equal_each_row_alone_without_one(changes: dict) -> None:
    model = filled(DecoderModel(mpt_sizes(max_position_embeddings=4, **changes)).double()).eval()
    rows = rows_of([length + STEPS for length in LENGTHS], seed=1)
    alone = [model(row[None])[:, 0] for row in rows]  # each [s, v]
    reader = DecoderReader(stage_of(model), max(LENGTHS) + STEPS)
    check_passes(reader, rows, alone)


def test_a_pass_makes_its_bias_once_for_all_layers() -> None:
    model = filled(DecoderModel(mpt_sizes(num_layers=4)).double()).eval()
    with patch.object(masks, "alibi_bias", wraps=masks.alibi_bias) as making:
        generate_gpt2(model, PROMPTS, max_new_tokens=5)
    assert making.call_count == 5


def said(rank: int, run: Path, tensor: int, pipe: int) -> list[list[int]]:
    """Return what this rank of a layout says."""
    checkpoint = open_folder(run)
    config = saved_config(checkpoint.metadata)
    grid = build_grid(Topology.of_world(tensor * pipe, tensor=tensor, pipe=pipe), rank)
    part = load(checkpoint, config, tensor=grid.tensor, pipe=grid.pipe, dtype=torch.float64)
    return generate_gpt2(part, PROMPTS, max_new_tokens=NEW)


@pytest.mark.parametrize(
    ("tensor", "pipe"), [(2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (1, 4), (4, 1)))]
)
def test_every_layout_says_what_a_plain_loop_says(tensor: int, pipe: int, tmp_path: Path) -> None:
    config = save_model(tmp_path, "mpt", max_position_embeddings=10)  # less than the second row will have
    model = build(config, SINGLE).double().eval()
    model.load_state_dict({name: w.double() for name, w in read_weights(open_folder(tmp_path)).items()})
    wanted = [plain_loop(model, prompt, config.model.vocab_size or 0) for prompt in PROMPTS]
    assert len({token for row in wanted for token in row}) > 5
    assert generate_gpt2(model, PROMPTS, max_new_tokens=NEW) == wanted
    ranks = tensor * pipe
    assert run_ranks(ranks, said, tmp_path, tensor, pipe) == [wanted] * ranks


@torch.no_grad()
def plain_loop(model: torch.nn.Module, prompt: list[int], vocab_size: int) -> list[int]:
    """Return the likeliest tokens behind ``prompt``, by the whole model on all tokens each time."""
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(model(torch.tensor([tokens]))[-1, 0, :vocab_size].argmax()))
    return tokens[len(prompt) :]
