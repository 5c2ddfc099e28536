"""Adafactor in every layout without a tensor cut: the same weights, and state that goes from one to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt2
import pretrain_t5
from megatron.checkpoint import named_parameters, open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.config import parse
from megatron.mpu.groups import SINGLE
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import Shard
from megatron.optim import MixedPrecisionOptimizer, build_optimizer
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.mock_data import mock_tokenizer, random_data
from megatron.training.setup import build_engine
from megatron.training.state_records import make_moments
from megatron.training.train_progress import TrainProgress
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import GLOBAL_BATCH, VOCAB, check_fp64, compare_layout, make_flags, split_global_batch
from tests.helpers.saved_states import load_state, save_state

ADAFACTOR = "--optimizer adafactor --weight-decay 0.01"
FP64, FP32 = f"--fp64 {ADAFACTOR}", f"--fp32 {ADAFACTOR} --hidden-dropout 0.1"
T5 = (
    "--num-layers 2 --dec-layers 3 --hidden-size 32 --num-attention-heads 4 --enc-seq-length 24 --data-path none "
    f"--vocab-size {VOCAB} --vocab-extra-ids 8 --device cpu --train-iters 20 --lr 1e-2 --attention-dropout 0 "
    "--lr-decay-style inverse-square-root --hidden-dropout 0"
).split()


@pytest.mark.parametrize(
    ("pipe", "data"), [(2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 2), (4, 1), (2, 2)])]
)
def test_every_layout_matches_single_process_weights(pipe: int, data: int) -> None:
    result = compare_layout(1, pipe, data, 4, FP64)
    check_fp64(result)
    assert result.weight <= 1e-10, "relative; the keys' biases move by rounding alone"


def build_training(rank: int, family: str, pipe: int, data: int, extra: str) -> tuple[Any, Any, Any, Any]:
    """Return configuration, world, engine and training data of this rank."""
    micro, gas = split_global_batch(data, 4)
    argv, script, defaults = make_flags(1, pipe, micro_batch_size=micro, gas=gas, extra=extra), pretrain_gpt2, None
    if family == "t5":
        layout = f"--pipe-parallel-size {pipe} --batch-size {micro} --gas {gas} {extra}"
        argv, script, defaults = [*T5, *layout.split()], pretrain_t5, pretrain_t5.DEFAULTS
    config = parse(argv, world_size=pipe * data, family=family, defaults=defaults).with_vocab(VOCAB)
    world = initialize.start(config)
    streams = DropoutStreams(config.run.seed, world.grid.data, world.grid.tensor)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, script.model_provider, script.forward_step)
    return config, world, engine, RunData({"train": random_data(config)} if world.reads_data else {}, None)


def train_losses(engine: Any, config: Any, world: Any, data: Any, first_step: int, last_step: int) -> list[str]:
    """Train steps ``first_step`` to ``last_step``; return the loss of each as a hexadecimal number."""
    train_batches = data.batches("train", config, world, first_step * GLOBAL_BATCH)
    return [float(engine.train_step(train_batches, step).loss).hex() for step in range(first_step, last_step)]


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    optimizer: MixedPrecisionOptimizer = engine.optimizer
    return {name: optimizer.main_param_of(p).detach().clone() for name, p in named_parameters(engine.module)}


def save_and_continue(rank: int, family: str, pipe: int, data: int, extra: str, folder: Path) -> tuple[list[str], Any]:
    """Train three steps, save, train two more."""
    config, world, engine, source = build_training(rank, family, pipe, data, extra)
    train_losses(engine, config, world, source, 0, 3)
    progress = TrainProgress(3, 3, 3 * GLOBAL_BATCH)
    state = {"module": engine.module, "optimizer": engine.optimizer, "world": world, "fingerprint": None}
    save_state(folder, progress, config=config, **state)
    return train_losses(engine, config, world, source, 3, 5), weights_of(engine)


def load_and_continue(rank: int, family: str, pipe: int, data: int, extra: str, folder: Path) -> tuple[list[str], Any]:
    """Load, and train the last two steps."""
    config, world, engine, source = build_training(rank, family, pipe, data, extra)
    state = {"module": engine.module, "optimizer": engine.optimizer, "world": world, "fingerprint": None}
    progress = load_state(folder, config=config, **state)
    return train_losses(engine, config, world, source, progress.step, 5), weights_of(engine)


SLOW_CASES = [("gpt2", 1, 1), ("gpt2", 1, 2), ("gpt2", 2, 1), ("t5", 1, 1), ("t5", 2, 2)]


@pytest.mark.parametrize(
    ("family", "pipe", "data"), [("t5", 2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_resumed_run_is_bitwise_identical(family: str, pipe: int, data: int, tmp_path: Path) -> None:
    run_args = family, pipe, data, FP32, tmp_path
    uninterrupted = run_ranks(pipe * data, save_and_continue, *run_args)
    resumed = run_ranks(pipe * data, load_and_continue, *run_args)
    for (losses, weights), (losses_again, weights_again) in zip(uninterrupted, resumed, strict=True):
        assert losses_again == losses
        assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())


SLOW_MOVES = [((1, 1), case) for case in [(2, 1), (1, 2), (4, 1), (2, 2)]]


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 1), (1, 1)), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_MOVES)]
)
def test_state_loads_into_other_layouts(family: str, saved: Any, loaded: Any, tmp_path: Path) -> None:
    uninterrupted = run_ranks(saved[0] * saved[1], save_and_continue, family, *saved, FP64, tmp_path)
    expected = {name: weight for _, weights in uninterrupted for name, weight in weights.items()}
    for losses, weights in run_ranks(loaded[0] * loaded[1], load_and_continue, family, *loaded, FP64, tmp_path):
        assert [float.fromhex(loss) for loss in losses] == pytest.approx(
            [float.fromhex(loss) for loss in uninterrupted[0][0]], abs=1e-12, rel=0
        )
        assert all((expected[name] - weight).abs().max() <= 1e-12 for name, weight in weights.items())
    _check_state_shapes(tmp_path, family)


def _check_state_shapes(folder: Path, family: str) -> None:
    """The file holds the means of each weight, whole."""
    checkpoint = open_latest(folder / CHECKPOINTS, SINGLE)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names() if name.startswith("optimizer/")}
    assert shapes["optimizer/row_var/embedding.word.weight"] == (VOCAB, 1)
    assert shapes["optimizer/col_var/embedding.word.weight"] == (1, 32)
    if family == "gpt2":
        assert shapes["optimizer/variance/final_norm.weight"] == (32,)
    else:
        assert shapes["optimizer/row_var/decoder.bias.weight"] == (32, 1)
        assert shapes["optimizer/col_var/decoder.bias.weight"] == (1, 4)
    for name in shapes:
        assert checkpoint.read(name, Shard(shapes[name])).abs().max() > 0, name


def test_making_state_moves_no_weight() -> None:
    table = torch.nn.Parameter(torch.randn(5, 4))
    bias = torch.nn.Parameter(torch.tensor([1.0, -0.0, 0.0]))
    before = [table.detach().clone(), bias.detach().clone()]
    optimizer = build_optimizer([table, bias], name="adafactor", lr=0.1, weight_decay=0.1)
    make_moments(optimizer)
    for parameter, old in zip((table, bias), before, strict=True):
        assert torch.equal(parameter.detach().view(torch.int32), old.view(torch.int32)), "signs of zero included"
        state = optimizer.inner.state[parameter]
        assert all((value == 0).all() for key, value in state.items() if key != "step")
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
