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
from tests.helpers.toy_family import register_toy_family

SEQ, STEPS = 16, 3
MODEL_FLAGS = (
    f"--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length {SEQ} --vocab-size {VOCAB} --toy-size 5"
)
RUN_FLAGS = "--init-method-std 0.1 --data-path none --device cpu --train-iters 20 --lr 1e-3 --clip-grad 0 --fp64"
MODEL_FIELDS = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": VOCAB, "toy_size": 5}


@pytest.fixture(autouse=True)
def toy(tmp_path: Path) -> Iterator[None]:
    with register_toy_family(tmp_path):
        yield


def model_provider() -> torch.nn.Module:
    config, grid = get_config(), mpu.get_grid()
    parallel = models.ParallelContext(grid.tensor, get_streams(), config.parallel.sequence_parallel)
    module: torch.nn.Module = registry.build_model(config, parallel, grid.topology, pretrain_gpt2.get_batch_pipe)
    return module


def trace_rank(rank: int, layout: str, world_size: int) -> Trace:
    config = parse(f"{MODEL_FLAGS} {RUN_FLAGS} {layout}".split(), world_size=world_size, family="toy").with_vocab(VOCAB)
    world, data = initialize.start(config), MockTokens(VOCAB, SEQ, seed=7)
    return trace_steps(config, world, data, model_provider, pretrain_gpt2.forward_step, num_steps=STEPS)


def make_full_model() -> tuple[Any, Config]:
    """Return an unsharded model of random weights, and its configuration."""
    config = config_from_values(MODEL_FIELDS, family="toy")
    model = registry.build_model(config, models.ParallelContext())
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model, config


@pytest.mark.parametrize(
    "extra", [pytest.param("", marks=pytest.mark.slow), " --sequence-parallel --checkpoint-activations"]
)
def test_two_by_two_ranks_match_one_process(extra: str) -> None:
    layout = "--model-parallel-size 2 --pipe-parallel-size 2 --batch-size 2 --gas 4"
    (expected,) = run_ranks(1, trace_rank, "--batch-size 2 --gas 4", 1)
    difference = compare(expected, run_ranks(4, trace_rank, layout + extra, 4))
    check_fp64(difference)
    assert expected.losses[0] != expected.losses[-1]
    assert "embedding.position.weight" in expected.weights


def test_weight_round_trip_is_bitwise(tmp_path: Path) -> None:
    model, config = make_full_model()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_first(tmp_path / "run" / "checkpoints", weights, config, "none", {})
    export(open_folder(tmp_path / "run"), tmp_path / "theirs")
    exported = read_tensors(tmp_path / "theirs")
    assert {"words.weight", "blocks.1.key.weight"} < set(exported) and not set(exported) & set(weights)
    assert read_json(tmp_path / "theirs", "config.json")["toy_size"] == 5
    saved, restored_config = import_folder(tmp_path / "theirs", tmp_path / "back")
    restored_weights = read_weights(open_folder(saved))
    assert (restored_config.family, restored_config.family_config.toy_size, restored_config.model.activation) == (
        "toy",
        5,
        "relu",
    )
    assert set(restored_weights) == set(weights) and all(
        restored_weights[name].equal(weights[name]) for name in weights
    )


def test_generation_matches_uncached_model_and_checkpoint(tmp_path: Path) -> None:
    model, config = make_full_model()
    (row,) = generate_gpt2(model, [[1, 2, 3]], max_new_tokens=4)
    tokens = torch.tensor([[1, 2, 3, *row]])
    with torch.no_grad():
        logits = model(tokens, torch.arange(7).unsqueeze(0))  # [s, b, v]
    assert row == logits[2:6, 0].argmax(1).tolist()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_first(tmp_path / "run" / "checkpoints", weights, config, "none", {})
    assert generate_gpt2(load(open_folder(tmp_path / "run"), config), [[1, 2, 3]], max_new_tokens=4) == [row]


def test_model_and_costs_use_toy_family() -> None:
    model, config = make_full_model()
    assert model.model_args.family == "toy" and config.family == "toy"
    assert registry.costs_of(config).num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_help_lists_toy_flags() -> None:
    toy_help = help_text(family="toy", show_all=True)
    assert "--toy-size" in toy_help and "bash run_gpt2.sh --model toy" in toy_help
    assert "--toy-size" not in help_text(family="gpt2", show_all=True)
