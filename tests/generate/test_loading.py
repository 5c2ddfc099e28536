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
from megatron.models.common.generation import DecoderReader, stage_of
from megatron.models.t5.generate import T5Reader
from megatron.mpu.groups import SINGLE, build_grid
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks
from tests.helpers.huggingface_models import build
from tests.helpers.saved_models import save_model

TOKENS = [[5, 17, 3, 60, 2, 9, 44, 8, 7, 12, 30, 31], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22]]


def logits_of(part: Any) -> torch.Tensor | None:
    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    with part.evaluating():
        if hasattr(part.sizes, "enc_layers"):
            reader: Any = T5Reader(part, [TOKENS[1], TOKENS[0][:3]], tokens.shape[1])
        else:
            reader = DecoderReader(part, tokens.shape[1])
        return reader.read(tokens, positions, torch.tensor([11, 8]))


def of_stage(rank: int, run: Path) -> torch.Tensor | None:
    checkpoint = open_folder(run)
    pipe = build_grid(Topology.of_world(2, tensor=1, pipe=2), rank).pipe
    return logits_of(load(checkpoint, saved_config(checkpoint.metadata), pipe=pipe, dtype=torch.float64))


@pytest.mark.parametrize("family", ["gpt2", "t5", "llama"])
def test_a_stage_of_a_checkpoint_computes_what_the_whole_model_does(family: str, tmp_path: Path) -> None:
    near = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10} if family == "t5" else {}
    config = save_model(tmp_path, family, **near)
    model = build(config, SINGLE).double()
    model.load_state_dict({name: w.double() for name, w in read_weights(open_folder(tmp_path)).items()})
    wanted = logits_of(stage_of(model))
    first, last = run_ranks(2, of_stage, tmp_path)
    assert wanted is not None and first is None
    assert float((last - wanted).abs().max() / wanted.abs().max()) < 1e-13


def test_the_decoder_starts_from_its_start_token(tmp_path: Path) -> None:
    save_model(tmp_path, "t5")
    checkpoint = open_folder(tmp_path)
    config = saved_config(checkpoint.metadata)
    vocabulary = vocabulary_of(config, None)
    assert vocabulary is not None and vocabulary.t5 is not None
    part, tokens = load(checkpoint, config), replace(vocabulary.t5, start_id=7)
    prompts = Prompts(vocabulary.tokenizer, tokens)
    found = TextGenerator(part, prompts, max_new_tokens=3).answer(["the lamp"])[0].tokens
    row = prompts.encode("the lamp")
    assert found == generate_t5(part, [row], start_id=7, max_new_tokens=3, eos_id=tokens.eos_id)[0]
    assert found != generate_t5(part, [row], start_id=tokens.eos_id, max_new_tokens=3, eos_id=tokens.eos_id)[0]
