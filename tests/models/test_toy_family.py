"""A decoder of settings and names alone trains, is cut, writes text and goes to Hugging Face's names and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt2
from megatron import models, mpu
from megatron.arguments import config_from_values, parse
from megatron.arguments.help import help_text
from megatron.checkpoint.huggingface.convert import export, import_folder, save_first
from megatron.checkpoint.huggingface.folder import read_json, read_tensors
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.config import Config
from megatron.data.mock_dataset import MockTokens
from megatron.generate import generate_gpt2
from megatron.generate.load_model import load
from megatron.models import registry
from megatron.training import get_config, get_streams, initialize
from megatron.training.parity import Trace, compare, trace_steps
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import VOCAB, check_fp64
from tests.helpers.toy_family import toy_family

SEQ, STEPS = 16, 3
SIZES = f"--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length {SEQ} --vocab-size {VOCAB} --toy-size 5"
RUN = "--init-method-std 0.1 --data-path none --device cpu --train-iters 20 --lr 1e-3 --clip-grad 0 --fp64"
SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": VOCAB, "toy_size": 5}


@pytest.fixture(autouse=True)
def toy(tmp_path: Path) -> Iterator[None]:
    with toy_family(tmp_path):
        yield


def provider() -> torch.nn.Module:
    config, grid = get_config(), mpu.get_grid()
    place = models.ParallelContext(grid.tensor, get_streams(), config.parallel.sequence_parallel)
    module: torch.nn.Module = registry.build_model(config, place, grid.topology, pretrain_gpt2.get_batch_pipe)
    return module


def trace_rank(rank: int, layout: str, world_size: int) -> Trace:
    config = parse(f"{SIZES} {RUN} {layout}".split(), world_size=world_size, family="toy").with_vocab(VOCAB)
    here, data = initialize.start(config), MockTokens(VOCAB, SEQ, seed=7)
    return trace_steps(config, here, data, provider, pretrain_gpt2.forward_step, steps=STEPS)


def whole_model() -> tuple[Any, Config]:
    """Return a model of random weights in one piece, and its configuration."""
    config = config_from_values(SMALL, family="toy")
    model = registry.build_model(config, models.ParallelContext())
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model, config


@pytest.mark.parametrize(
    "extra", [pytest.param("", marks=pytest.mark.slow), " --sequence-parallel --checkpoint-activations"]
)
def test_two_by_two_ranks_train_as_one_process(extra: str) -> None:
    layout = "--model-parallel-size 2 --pipe-parallel-size 2 --batch-size 2 --gas 4"
    (alone,) = run_ranks(1, trace_rank, "--batch-size 2 --gas 4", 1)
    found = compare(alone, run_ranks(4, trace_rank, layout + extra, 4))
    check_fp64(found)
    assert alone.losses[0] != alone.losses[-1]
    assert "embedding.position.weight" in alone.weights


def test_weights_go_to_their_names_and_back_bit_for_bit(tmp_path: Path) -> None:
    model, config = whole_model()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_first(tmp_path / "run" / "checkpoints", weights, config, "none", {})
    export(open_folder(tmp_path / "run"), tmp_path / "theirs")
    theirs = read_tensors(tmp_path / "theirs")
    assert {"words.weight", "blocks.1.key.weight"} < set(theirs) and not set(theirs) & set(weights)
    assert read_json(tmp_path / "theirs", "config.json")["toy_size"] == 5
    saved, back = import_folder(tmp_path / "theirs", tmp_path / "back")
    again = read_weights(open_folder(saved))
    assert (back.family, back.own.toy_size, back.model.activation) == ("toy", 5, "relu")
    assert set(again) == set(weights) and all(again[name].equal(weights[name]) for name in weights)


def test_it_goes_on_from_a_prompt_as_the_model_without_a_cache_and_from_a_checkpoint(tmp_path: Path) -> None:
    model, config = whole_model()
    (row,) = generate_gpt2(model, [[1, 2, 3]], max_new_tokens=4)
    tokens = torch.tensor([[1, 2, 3, *row]])
    with torch.no_grad():
        logits = model(tokens, torch.arange(7).unsqueeze(0))  # [s, b, v]
    assert row == logits[2:6, 0].argmax(1).tolist()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_first(tmp_path / "run" / "checkpoints", weights, config, "none", {})
    assert generate_gpt2(load(open_folder(tmp_path / "run"), config), [[1, 2, 3]], max_new_tokens=4) == [row]


def test_its_parts_are_its_own() -> None:
    model, config = whole_model()
    assert model.sizes.family == "toy" and config.family == "toy"
    assert registry.costs_of(config).num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_help_has_its_flags() -> None:
    toy = help_text(family="toy", is_whole=True)
    assert "--toy-size" in toy and "bash run_gpt2.sh --model toy" in toy
    assert "--toy-size" not in help_text(family="gpt2", is_whole=True)
