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
from megatron.models.common.router import Router
from megatron.mpu.groups import SINGLE
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import shard_of
from megatron.optim import GradScaler
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.mock_data import mock_tokenizer, random_data
from megatron.training.setup import build_engine
from megatron.training.train_progress import TrainProgress
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import GLOBAL_BATCH, VOCAB, batches, flags
from tests.helpers.saved_states import load_state, save_state

SIZES = (
    "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-aux-loss-coeff 0.1"
)
Layout = tuple[int, int, int, str]
"""Tensor, pipe, data, further flags."""


def started(layout: Layout, extra: str) -> tuple[Any, Any, Any, Any]:
    """Return configuration, world, engine and training data of this rank."""
    tensor, pipe, data, more = layout
    micro, gas = batches(data, 4)
    argv = flags(tensor, pipe, micro=micro, gas=gas, extra=f"{SIZES} {extra} {more}")
    config = parse(argv, world_size=tensor * pipe * data).with_vocab(VOCAB)
    here = initialize.start(config)
    streams = DropoutStreams(config.run.seed, here.grid.data, here.grid.tensor)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, here, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    return config, here, engine, RunData({"train": random_data(config)} if here.reads_data else {}, None)


def trained(engine: Any, config: Any, here: Any, data: Any, first: int, last: int) -> list[Any]:
    """Train steps ``first`` to ``last``; return all losses of each as hexadecimal numbers."""
    given = data.batches("train", config, here, first * GLOBAL_BATCH)
    results = [engine.train_step(given, step) for step in range(first, last)]
    return [{"loss": each.loss.hex(), **{n: v.hex() for n, v in each.losses.items()}} for each in results]


def weights_of(engine: Any) -> dict[str, Any]:
    """Return the masters, and weights that are not trained, with where they lie."""
    optimizer, found = engine.optimizer, {}
    for name, parameter in named_parameters(engine.module):
        master = optimizer.main_param_of(parameter) if parameter.requires_grad else parameter
        found[name] = shard_of(master), master.detach().clone()
    return found


def kept(engine: Any, here: Any) -> dict[str, Any]:
    return {"module": engine.module, "optimizer": engine.optimizer, "world": here, "fingerprint": None}


def save_and_go_on(rank: int, layout: Layout, extra: str, folder: Path) -> tuple[list[Any], Any]:
    """Train three steps, save, train two more."""
    config, here, engine, source = started(layout, extra)
    trained(engine, config, here, source, 0, 3)
    save_state(folder, TrainProgress(3, 3, 3 * GLOBAL_BATCH), config=config, **kept(engine, here))
    return trained(engine, config, here, source, 3, 5), weights_of(engine)


def load_and_go_on(rank: int, layout: Layout, extra: str, folder: Path) -> tuple[list[Any], Any]:
    """Load, and train the last two steps."""
    config, here, engine, source = started(layout, extra)
    progress = load_state(folder, config=config, **kept(engine, here))
    return trained(engine, config, here, source, progress.step, 5), weights_of(engine)


def size(layout: Layout) -> int:
    return layout[0] * layout[1] * layout[2]


SLOW, EP = pytest.mark.slow, "--expert-model-parallel-size"


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ((1, 1, 1, ""), "--bf16"),
        pytest.param((1, 2, 1, ""), "--fp32 --hidden-dropout 0.1", marks=SLOW),
        pytest.param((2, 1, 2, "--zero-stage 1"), "--fp32", marks=SLOW),
        pytest.param((1, 1, 2, "--zero-stage 3"), "--bf16", marks=SLOW),
        pytest.param((1, 1, 4, f"{EP} 2 --zero-stage 1"), "--bf16", marks=SLOW),
    ],
)
def test_a_resumed_run_is_bit_for_bit_the_one_that_did_not_stop(layout: Layout, extra: str, tmp_path: Path) -> None:
    """Bias and tokens of each expert too, which the losses of the next step show."""
    whole = run_ranks(size(layout), save_and_go_on, layout, extra, tmp_path)
    resumed = run_ranks(size(layout), load_and_go_on, layout, extra, tmp_path)
    for (losses, weights), (losses_again, weights_again) in zip(whole, resumed, strict=True):
        assert losses_again == losses
        assert set(losses[0]) == {"loss", "moe_aux_loss", "moe_z_loss"}
        assert all(torch.equal(weights_again[name][1], weight) for name, (_, weight) in weights.items())
        biases = [weight for name, (_, weight) in weights.items() if name.endswith("expert_bias")]
        assert all(bias.dtype == torch.float32 and bias.abs().sum() > 0 for bias in biases)


MOVES = [
    pytest.param((2, 1, 1, ""), (1, 2, 1, ""), marks=SLOW),
    pytest.param((1, 1, 1, ""), (2, 1, 2, "--sequence-parallel --zero-stage 1"), marks=SLOW),
    pytest.param((1, 1, 2, "--zero-stage 3"), (1, 2, 1, ""), marks=SLOW),
    ((1, 1, 2, f"{EP} 2"), (1, 1, 1, "")),
    pytest.param((1, 2, 2, f"{EP} 2 --zero-stage 1"), (2, 1, 2, f"{EP} 2 --zero-stage 1"), marks=SLOW),
    pytest.param((2, 1, 1, ""), (1, 1, 4, f"{EP} 4"), marks=SLOW),
    pytest.param((1, 1, 4, f"{EP} 2 --zero-stage 1"), (1, 2, 2, f"{EP} 2"), marks=SLOW),
]


@pytest.mark.parametrize(("saved", "loaded"), MOVES)
def test_state_of_one_layout_goes_on_in_another(saved: Layout, loaded: Layout, tmp_path: Path) -> None:
    ((wanted, _), *_) = run_ranks(size(saved), save_and_go_on, saved, "--fp64", tmp_path)
    for found, _ in run_ranks(size(loaded), load_and_go_on, loaded, "--fp64", tmp_path):
        for one, other in zip(found, wanted, strict=True):
            assert [float.fromhex(one[n]) for n in one] == pytest.approx(
                [float.fromhex(other[n]) for n in one], abs=1e-12
            )


def test_a_checkpoint_has_a_tensor_for_each_expert_by_its_number(tmp_path: Path) -> None:
    run_ranks(1, save_and_go_on, (1, 1, 1, ""), "--fp32", tmp_path)
    found = open_latest(tmp_path / CHECKPOINTS, SINGLE)
    names = set(found.names())
    for number in range(4):
        for kind in ("weights", "optimizer/exp_avg"):
            assert f"{kind}/layers.2.mlp.experts.{number}.up.weight" in names
    assert found.shape("weights/layers.2.mlp.experts.3.down.weight") == (32, 24)
    assert {"weights/layers.2.mlp.router.expert_bias", "routers/layers.2.mlp.router.tokens_per_expert"} <= names
    assert "optimizer/exp_avg/layers.2.mlp.router.expert_bias" not in names


def losses_of(rank: int, layout: Layout, scale: float) -> list[Any]:
    """Train three steps with a fixed loss scale; return the losses of each."""
    config, here, engine, source = started(layout, "--fp64")
    engine.optimizer.policy.scaler = GradScaler(scale=scale)
    return trained(engine, config, here, source, 0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("pipe", [1, 2])
def test_a_loss_scale_changes_nothing(pipe: int) -> None:
    """Backward multiplies the losses of routers by it as the other; powers of two leave every bit."""
    wanted, found = (run_ranks(pipe, losses_of, (1, pipe, 1, ""), scale)[0] for scale in (1.0, 1024.0))
    assert found == wanted


def routers_around_a_skipped_step(rank: int) -> list[dict[str, Any]]:
    """Return the state of every router before training, after a step that is skipped, and after one that is not."""
    config, here, engine, source = started((1, 1, 1, ""), "--fp64 --num-layers 2")
    given = source.batches("train", config, here, 0)
    states = [router_state(engine.module)]
    for is_accepted in (False, True):
        engine.optimizer.policy.accepts_step = lambda norm, answer=is_accepted: answer
        result = engine.train_step(given, 0)
        assert result.is_skipped != is_accepted and result.expert_load.tokens.sum() > 0
        states.append(router_state(engine.module))
    return states


def router_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a router carries from one step to the next, by name."""
    routers = {name: each for name, each in module.named_modules() if isinstance(each, Router)}
    return {
        f"{name}.{key}": getattr(router, key).detach().clone()
        for name, router in routers.items()
        for key in ("tokens_per_expert", "expert_bias", "counts", "dropped", "sums")
    }


def test_a_skipped_step_leaves_shares_and_biases_as_they_were() -> None:
    (states,) = run_ranks(1, routers_around_a_skipped_step)
    before, skipped, taken = states
    assert all(torch.equal(skipped[name], value) for name, value in before.items())
    for name, value in taken.items():
        is_carried = name.endswith(("tokens_per_expert", "expert_bias"))
        assert (value.count_nonzero() > 0) == is_carried, name
