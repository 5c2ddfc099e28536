"""Parts of a checkpoint, loaded for generation, are the model that was saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import saved_config
from megatron.checkpoint.huggingface.tokenizer import vocabulary_of
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.generate import generate_t5, load
from megatron.generate.text import Prompts, TextGenerator
from megatron.models.common.generation import CachedDecoder, get_model_stage
from megatron.models.t5.generate import CachedT5
from megatron.mpu.groups import SINGLE, build_grid
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks
from tests.helpers.huggingface_models import build_small_model
from tests.helpers.saved_models import save_model

TOKENS = [[5, 17, 3, 60, 2, 9, 44, 8, 7, 12, 30, 31], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22]]


def compute_logits(stage: Any) -> torch.Tensor | None:
    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    with stage.evaluation_mode():
        if hasattr(stage.args, "enc_layers"):
            reader: Any = CachedT5(stage, [TOKENS[1], TOKENS[0][:3]], tokens.shape[1])
        else:
            reader = CachedDecoder(stage, tokens.shape[1])
        return reader.read(tokens, positions, torch.tensor([11, 8]))


def compute_stage_logits(rank: int, run: Path) -> torch.Tensor | None:
    checkpoint = open_folder(run)
    pipe = build_grid(Topology.from_world_size(2, tensor=1, pipe=2), rank).pipe
    return compute_logits(load(checkpoint, saved_config(checkpoint.metadata), pipe=pipe, dtype=torch.float64))


@pytest.mark.parametrize("family", ["gpt2", "t5", "llama"])
def test_loaded_stages_compute_full_model_logits(family: str, tmp_path: Path) -> None:
    t5_options = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10} if family == "t5" else {}
    config = save_model(tmp_path, family, **t5_options)
    model = build_small_model(config, SINGLE).double()
    model.load_state_dict({name: weight.double() for name, weight in read_weights(open_folder(tmp_path)).items()})
    expected = compute_logits(get_model_stage(model))
    first, last = run_ranks(2, compute_stage_logits, tmp_path)
    assert expected is not None and first is None
    assert float((last - expected).abs().max() / expected.abs().max()) < 1e-13


def test_t5_decoder_uses_start_token(tmp_path: Path) -> None:
    save_model(tmp_path, "t5")
    checkpoint = open_folder(tmp_path)
    config = saved_config(checkpoint.metadata)
    vocabulary = vocabulary_of(config, None)
    assert vocabulary is not None and vocabulary.t5 is not None
    stage, tokens = load(checkpoint, config), replace(vocabulary.t5, start_id=7)
    prompts = Prompts(vocabulary.tokenizer, tokens)
    answer_tokens = TextGenerator(stage, prompts, max_new_tokens=3).answer(["the lamp"])[0].tokens
    row = prompts.encode("the lamp")
    assert answer_tokens == generate_t5(stage, [row], start_id=7, max_new_tokens=3, eos_id=tokens.eos_id)[0]
    assert answer_tokens != generate_t5(stage, [row], start_id=tokens.eos_id, max_new_tokens=3, eos_id=tokens.eos_id)[0]
