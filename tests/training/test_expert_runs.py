"""Runs of models with experts: resumed bit for bit, in another layout, in fp16 and bf16; what checkpoints hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt2
from megatron.checkpoint import named_parameters, open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.config import parse
from megatron.models.common.experts import Experts
from megatron.models.common.router import Router
from megatron.mpu.groups import SINGLE
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import shard_of
from megatron.ops import grouped, stacked_weights
from megatron.optim import GradScaler
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.mock_data import mock_tokenizer, random_data
from megatron.training.setup import build_engine
from megatron.training.train_progress import TrainProgress
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import GLOBAL_BATCH, VOCAB, make_flags, split_global_batch
from tests.helpers.saved_states import load_state, save_state

EXPERT_ARGS = (
    "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-aux-loss-coeff 0.1"
)
Layout = tuple[int, int, int, str]
"""Tensor, pipe, data, further flags."""


def start_run(layout: Layout, extra: str) -> tuple[Any, Any, Any, Any]:
    """Return configuration, world, engine and training data of this rank."""
    tensor, pipe, data, layout_flags = layout
    micro_batch_size, gas = split_global_batch(data, 4)
    argv = make_flags(
        tensor, pipe, micro_batch_size=micro_batch_size, gas=gas, extra=f"{EXPERT_ARGS} {extra} {layout_flags}"
    )
    config = parse(argv, world_size=tensor * pipe * data).with_vocab(VOCAB)
    world = initialize.start(config)
    streams = DropoutStreams(config.run.seed, world.grid.data, world.grid.tensor)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    return config, world, engine, RunData({"train": random_data(config)} if world.reads_data else {}, None)


def train_steps(engine: Any, config: Any, world: Any, data: Any, first: int, last: int) -> list[Any]:
    """Train steps ``first`` to ``last``; return all losses of each as hexadecimal numbers."""
    train_batches = data.batches("train", config, world, first * GLOBAL_BATCH)
    results = [engine.train_step(train_batches, step) for step in range(first, last)]
    return [{"loss": result.loss.hex(), **{n: v.hex() for n, v in result.losses.items()}} for result in results]


def collect_weights(engine: Any) -> dict[str, Any]:
    """Return the masters, and weights that are not trained, with where they lie."""
    optimizer, weights = engine.optimizer, {}
    for name, parameter in named_parameters(engine.module):
        main_param = optimizer.main_param_of(parameter) if parameter.requires_grad else parameter
        weights[name] = shard_of(main_param), main_param.detach().clone()
    return weights


def state_kwargs(engine: Any, world: Any) -> dict[str, Any]:
    return {"module": engine.module, "optimizer": engine.optimizer, "world": world, "fingerprint": None}


def save_and_continue(rank: int, layout: Layout, extra: str, folder: Path) -> tuple[list[Any], Any]:
    """Train three steps, save, train two more."""
    config, world, engine, source = start_run(layout, extra)
    train_steps(engine, config, world, source, 0, 3)
    save_state(folder, TrainProgress(3, 3, 3 * GLOBAL_BATCH), config=config, **state_kwargs(engine, world))
    return train_steps(engine, config, world, source, 3, 5), collect_weights(engine)


def load_and_continue(rank: int, layout: Layout, extra: str, folder: Path) -> tuple[list[Any], Any]:
    """Load, and train the last two steps."""
    config, world, engine, source = start_run(layout, extra)
    progress = load_state(folder, config=config, **state_kwargs(engine, world))
    return train_steps(engine, config, world, source, progress.step, 5), collect_weights(engine)


def get_world_size(layout: Layout) -> int:
    return layout[0] * layout[1] * layout[2]


SLOW, EP, ETP = pytest.mark.slow, "--expert-model-parallel-size", "--expert-tensor-parallel-size"
SP = "--sequence-parallel"
UNSHARDED = f"{SP} {ETP} 1"


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ((1, 1, 1, ""), "--bf16"),
        pytest.param((1, 2, 1, ""), "--fp32 --hidden-dropout 0.1", marks=SLOW),
        pytest.param((2, 1, 2, "--zero-stage 1"), "--fp32", marks=SLOW),
        pytest.param((1, 1, 2, "--zero-stage 3"), "--bf16", marks=SLOW),
        pytest.param((1, 1, 4, f"{EP} 2 --zero-stage 1"), "--bf16", marks=SLOW),
        pytest.param((1, 1, 4, f"{EP} 2 --zero-stage 3"), "--bf16", marks=SLOW),
        pytest.param((1, 2, 2, f"{EP} 2 --zero-stage 3 --pipeline-schedule zb-h1"), "--bf16", marks=SLOW),
        pytest.param((4, 1, 1, f"{SP} {ETP} 2 {EP} 2"), "--bf16", marks=SLOW),
        pytest.param((2, 1, 2, f"{SP} {EP} 2 --zero-stage 1"), "--bf16 --moe-use-residual", marks=SLOW),
        pytest.param((1, 1, 2, ""), "--bf16 --moe-router-load-balancing-type global_aux_loss", marks=SLOW),
        pytest.param(
            (2, 1, 1, "--sequence-parallel"),
            "--fp32 --moe-router-load-balancing-type seq_aux_loss --moe-expert-capacity-factor 1 "
            "--moe-token-drop-policy random",
            marks=SLOW,
        ),
    ],
)
def test_resumed_run_is_bitwise_equal_to_uninterrupted_run(layout: Layout, extra: str, tmp_path: Path) -> None:
    """Bias and tokens of each expert too, which the losses of the next step show."""
    reference = run_ranks(get_world_size(layout), save_and_continue, layout, extra, tmp_path)
    resumed = run_ranks(get_world_size(layout), load_and_continue, layout, extra, tmp_path)
    for (losses, weights), (resumed_losses, resumed_weights) in zip(reference, resumed, strict=True):
        assert resumed_losses == losses
        assert set(losses[0]) == {"loss", "moe_aux_loss", "moe_z_loss"}
        assert all(torch.equal(resumed_weights[name][1], weight) for name, (_, weight) in weights.items())
        biases = [weight for name, (_, weight) in weights.items() if name.endswith("expert_bias")]
        assert all(bias.dtype == torch.float32 and bias.abs().sum() > 0 for bias in biases)


def load_stacked(rank: int, layout: Layout, extra: str, folder: Path) -> tuple[list[Any], Any]:
    """Load and train as ``load_and_continue``; the weights of experts must still be in one storage at the end."""
    config, world, engine, source = start_run(layout, extra)
    progress = load_state(folder, config=config, **state_kwargs(engine, world))
    losses = train_steps(engine, config, world, source, progress.step, 5)
    for layer in engine.module.modules():
        if isinstance(layer, Experts):
            for name in ("up", "down"):
                weights = [getattr(expert, name).weight for expert in layer.children()]
                assert stacked_weights.distance_of(weights) == weights[0].numel()
    return losses, collect_weights(engine)


@SLOW
def test_resume_keeps_stacked_weights_in_one_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, extra = (1, 1, 1, ""), "--bf16"
    monkeypatch.setattr(grouped, "IMPLEMENTATION", grouped.GROUPED)
    ((expected, expected_weights),) = run_ranks(1, save_and_continue, layout, extra, tmp_path)
    ((losses, weights),) = run_ranks(1, load_stacked, layout, extra, tmp_path)
    assert losses == expected and all(torch.equal(weights[name][1], w) for name, (_, w) in expected_weights.items())


LAYOUT_CHANGES = [
    pytest.param((2, 1, 1, ""), (1, 2, 1, ""), marks=SLOW),
    pytest.param((1, 1, 1, ""), (2, 1, 2, "--sequence-parallel --zero-stage 1"), marks=SLOW),
    pytest.param((1, 1, 2, "--zero-stage 3"), (1, 2, 1, ""), marks=SLOW),
    ((1, 1, 2, f"{EP} 2"), (1, 1, 1, "")),
    pytest.param((2, 1, 1, UNSHARDED), (1, 1, 1, ""), marks=SLOW),
    pytest.param((4, 1, 1, f"{SP} {ETP} 2 {EP} 2"), (1, 1, 2, f"{EP} 2 --zero-stage 1"), marks=SLOW),
    pytest.param((1, 2, 2, f"{EP} 2 --zero-stage 1"), (4, 1, 1, f"{SP} {ETP} 2"), marks=SLOW),
    pytest.param(
        (4, 1, 2, f"{SP} {ETP} 2 {EP} 4 --zero-stage 1"), (2, 1, 2, f"{UNSHARDED} {EP} 4 --zero-stage 3"), marks=SLOW
    ),
    pytest.param((1, 2, 2, f"{EP} 2 --zero-stage 1"), (2, 1, 2, f"{EP} 2 --zero-stage 1"), marks=SLOW),
    pytest.param((2, 1, 1, ""), (1, 1, 4, f"{EP} 4"), marks=SLOW),
    pytest.param((1, 1, 4, f"{EP} 2 --zero-stage 1"), (1, 2, 2, f"{EP} 2"), marks=SLOW),
    pytest.param((1, 2, 2, f"{EP} 2 --zero-stage 3"), (1, 1, 4, f"{EP} 2 --zero-stage 3"), marks=SLOW),
    pytest.param((1, 1, 4, f"{EP} 2 --zero-stage 2"), (1, 2, 2, "--zero-stage 3 --pipeline-chunks 2"), marks=SLOW),
]


def check_layout_change(saved: Layout, loaded: Layout, extra: str, folder: Path) -> None:
    """Save in one layout, continue in another, and compare the losses with those of the run that did not stop."""
    ((expected, _), *_) = run_ranks(get_world_size(saved), save_and_continue, saved, extra, folder)
    for actual, _ in run_ranks(get_world_size(loaded), load_and_continue, loaded, extra, folder):
        for actual_step, expected_step in zip(actual, expected, strict=True):
            assert [float.fromhex(actual_step[n]) for n in actual_step] == pytest.approx(
                [float.fromhex(expected_step[n]) for n in actual_step], abs=1e-12
            )


@pytest.mark.parametrize(("saved", "loaded"), LAYOUT_CHANGES)
def test_checkpoint_resumes_in_another_layout_with_same_losses(saved: Layout, loaded: Layout, tmp_path: Path) -> None:
    check_layout_change(saved, loaded, "--fp64", tmp_path)


@SLOW
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, 1, 2, f"{SP} {EP} 2 --zero-stage 1"), (1, 2, 1, "")),
        ((1, 1, 2, "--zero-stage 3"), (2, 1, 1, SP)),
    ],
)
def test_residual_experts_resume_in_another_layout(saved: Layout, loaded: Layout, tmp_path: Path) -> None:
    check_layout_change(saved, loaded, "--fp64 --moe-use-residual", tmp_path)
    names = set(open_latest(tmp_path / CHECKPOINTS, SINGLE).names())
    assert {f"weights/layers.1.mlp.coefficient.{name}" for name in ("weight", "bias")} <= names


def test_checkpoint_stores_one_tensor_per_expert(tmp_path: Path) -> None:
    run_ranks(1, save_and_continue, (1, 1, 1, ""), "--fp32", tmp_path)
    checkpoint = open_latest(tmp_path / CHECKPOINTS, SINGLE)
    names = set(checkpoint.names())
    for expert_idx in range(4):
        for prefix in ("weights", "optimizer/exp_avg"):
            assert f"{prefix}/layers.2.mlp.experts.{expert_idx}.up.weight" in names
    assert checkpoint.shape("weights/layers.2.mlp.experts.3.down.weight") == (32, 24)
    assert {"weights/layers.2.mlp.router.expert_bias", "routers/layers.2.mlp.router.tokens_per_expert"} <= names
    assert "optimizer/exp_avg/layers.2.mlp.router.expert_bias" not in names


def train_with_loss_scale(rank: int, layout: Layout, scale: float) -> list[Any]:
    """Train three steps with a fixed loss scale; return the losses of each."""
    config, world, engine, source = start_run(layout, "--fp64")
    engine.optimizer.policy.scaler = GradScaler(scale=scale)
    return train_steps(engine, config, world, source, 0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("pipe", [1, 2])
def test_loss_scale_does_not_change_losses(pipe: int) -> None:
    """Backward multiplies the losses of routers by it as the other; powers of two leave every bit."""
    expected, actual = (run_ranks(pipe, train_with_loss_scale, (1, pipe, 1, ""), scale)[0] for scale in (1.0, 1024.0))
    assert actual == expected


def router_states_around_skipped_step(rank: int) -> list[dict[str, Any]]:
    """Return the state of every router before training, after a step that is skipped, and after one that is not."""
    config, world, engine, source = start_run((1, 1, 1, ""), "--fp64 --num-layers 2")
    train_batches = source.batches("train", config, world, 0)
    states = [router_state(engine.module)]
    for is_accepted in (False, True):
        engine.optimizer.policy.accepts_step = lambda norm, answer=is_accepted: answer
        result = engine.train_step(train_batches, 0)
        assert result.is_skipped != is_accepted and result.expert_load.tokens.sum() > 0
        states.append(router_state(engine.module))
    return states


def router_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a router carries from one step to the next, by name."""
    routers = {name: submodule for name, submodule in module.named_modules() if isinstance(submodule, Router)}
    return {
        f"{name}.{key}": getattr(router, key).detach().clone()
        for name, router in routers.items()
        for key in ("tokens_per_expert", "expert_bias", "counts", "dropped", "loss_sums")
    }


def test_skipped_step_preserves_router_shares_and_biases() -> None:
    (states,) = run_ranks(1, router_states_around_skipped_step)
    before, skipped, accepted = states
    assert all(torch.equal(skipped[name], value) for name, value in before.items())
    for name, value in accepted.items():
        is_carried = name.endswith(("tokens_per_expert", "expert_bias"))
        assert (value.count_nonzero() > 0) == is_carried, name
