"""Runs without a pipeline: on our own engine without DeepSpeed, or on DeepSpeed's engine, with equal results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import pretrain_gpt2
from megatron.config import Config, parse
from megatron.mpu.groups import Group
from megatron.training import global_vars, initialize
from megatron.training.deepspeed_engine import reasons_for_deepspeed
from megatron.training.model_engine import ModelEngine, broadcast_from_first_replica
from megatron.training.parity import mock_tokenizer
from megatron.training.setup import build_engine, make_streams
from tds.gradients import set_reduced_by_optimizer
from tests.helpers import runs
from tests.helpers.harness import run_ranks
from tests.training import test_side_effects as traces

ROOT = Path(__file__).resolve().parents[2]
SCRIPT_WITHOUT_DEEPSPEED = """
import importlib.abc, runpy, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed":
            raise AssertionError("deepspeed is imported")

sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("deepspeed" in sys.modules)
"""
LAYOUTS = {
    "one rank": (1, "--rampup-batch-size 2 2 8"),
    "two tensor ranks": (2, "--model-parallel-size 2 --sequence-parallel --bf16"),
    "two replicas": (2, "--zero-stage 1"),
    "two replicas, ZeRO 3": (2, "--zero-stage 3"),
}


def test_run_without_deepspeed_flags_does_not_import_deepspeed(corpus: Path, tmp_path: Path) -> None:
    """With the JSON that comes with the scripts: training, evaluation, a checkpoint, and a start from it."""
    argv = runs.make_flags(
        corpus, tmp_path / "run", f"--train-iters 2 --deepspeed_config {ROOT / 'ds_config_gpt2.json'}"
    )
    for extra_argv in ([], ["--resume", "--train-iters", "3"]):
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT_WITHOUT_DEEPSPEED, str(ROOT / "pretrain_gpt2.py"), *argv, *extra_argv],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_native_and_deepspeed_engines_are_bitwise_equal(layout: str, corpus: Path, tmp_path: Path) -> None:
    """To the bit: the losses, gradient norms, weights, optimizer states, random numbers and counters of every step."""
    num_ranks, layout_flags = LAYOUTS[layout]
    argv_by_engine = {
        name: runs.make_flags(corpus, tmp_path / name, f"{traces.BASE_FLAGS} {layout_flags} {engine_flags}")
        for name, engine_flags in {"own": "", "deepspeed": "--verbose-deepspeed"}.items()
    }
    rank_traces = run_ranks(num_ranks, traces.trace_all, argv_by_engine, num_ranks, deadline_s=110.0)
    for traces_by_engine in rank_traces:
        assert not traces._first_difference(traces_by_engine["own"], traces_by_engine["deepspeed"])
    assert traces.digest_checkpoint(tmp_path / "own") == traces.digest_checkpoint(tmp_path / "deepspeed")


SMALL_MODEL_FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 32 --data-path none "
    "--device cpu --fp32 --train-iters 2 --batch-size 2 --gas 3 --lr 1e-3"
)


def _build_engines(rank: int, deepspeed_config: dict[str, Any], folder: str) -> list[tuple[str, int, int]]:
    """Return the class of the engine, its samples per step and its steps: as built, and after ``use_deepspeed``."""
    path = Path(folder) / "json"
    path.write_text(json.dumps(deepspeed_config))
    config = parse([*SMALL_MODEL_FLAGS.split(), "--deepspeed_config", str(path)], world_size=1).with_vocab(32)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    engine_facts = []
    engine.engine.global_steps = 3
    for _ in range(2):
        engine_in_use = engine.engine
        engine_facts.append(
            (type(engine_in_use).__name__, engine_in_use.train_batch_size(), engine_in_use.global_steps)
        )
        engine.use_deepspeed()
    return engine_facts


def test_native_engine_is_used_unless_deepspeed_is_required(tmp_path: Path) -> None:
    monitor_config = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    native, monitored = (
        run_ranks(1, _build_engines, deepspeed_config, str(tmp_path))[0] for deepspeed_config in ({}, monitor_config)
    )
    assert native == [("ModelEngine", 6, 3), ("DeepSpeedEngine", 6, 3)]
    assert monitored == [("DeepSpeedEngine", 6, 3)] * 2


def test_deepspeed_layers_in_user_model_require_deepspeed_engine() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert reasons_for_deepspeed(Config(), model) == []
    model[0].set_deepspeed_parallelism = lambda *_: None  # type: ignore[assignment]
    assert reasons_for_deepspeed(Config(), model) == ["layers of DeepSpeed in the model"]


def _broadcast_rank(rank: int) -> list[list[float]]:
    torch.manual_seed(rank)
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.full((2,), float(rank))) for name in ("dense", "expert", "frozen")}
    )
    model["scale"] = torch.nn.Parameter(torch.tensor(float(rank), dtype=torch.bfloat16))
    model["frozen"].requires_grad_(False)
    set_reduced_by_optimizer(model["expert"])
    group = Group((0, 1), rank, dist.group.WORLD)
    broadcast_from_first_replica(model, group, are_sharded=True)
    sharded_values = [value.flatten()[0].item() for value in model.values()]
    broadcast_from_first_replica(model, group, are_sharded=False)
    return [sharded_values, [value.flatten()[0].item() for value in model.values()]]


def test_first_replica_broadcasts_weights_except_experts_and_shards() -> None:
    _, (sharded_values, dense_values) = run_ranks(2, _broadcast_rank)
    assert sharded_values == [1.0, 1.0, 0.0, 1.0] and dense_values == [0.0, 1.0, 0.0, 0.0]


def test_engine_delegates_model_attributes_and_suggests_deepspeed_format() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = "its configuration"  # type: ignore[assignment]
    engine = ModelEngine(model, SimpleNamespace(param_groups=[{"lr": 0.5}]), torch.device("cpu"), micro_batch_size=2,
                         gas=3, num_replicas=4)  # fmt: skip
    assert engine.config == "its configuration" and engine.get_lr() == [0.5]
    assert [name for name, _ in engine.named_parameters()] == ["module.weight", "module.bias"]
    assert engine.train_batch_size() == 24 and engine.train_micro_batch_size_per_gpu() == 2
    engine.set_train_batch_size(16)
    assert engine.gradient_accumulation_steps() == 2
    with pytest.raises(ValueError, match="must be a multiple of 8"):
        engine.set_train_batch_size(17)
    with pytest.raises(AttributeError, match="no attribute 'save_checkpoint'.*--checkpoint-format deepspeed"):
        engine.save_checkpoint("folder")


class DeepSpeedCallingModel(torch.nn.Module):
    """A model of a user's that calls functions of DeepSpeed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = deepspeed.checkpointing.checkpoint(self.inner, x.requires_grad_())
        deepspeed.comm.all_reduce(count := torch.ones(1))
        return output * count


def _train_calling_model(rank: int) -> tuple[str, float]:
    config = parse(SMALL_MODEL_FLAGS.split(), world_size=1).with_vocab(32)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)

    def forward_step(data: Any, model: Any) -> Any:
        loss = model(next(data)).square().mean()
        return loss, {"lm loss": loss}

    engine = build_engine(config, world, streams, DeepSpeedCallingModel, forward_step)
    return type(engine.engine).__name__, engine.train_step(iter([torch.ones(2, 4)] * 3), 0).grad_norm


def test_user_model_may_call_deepspeed_functions_on_native_engine() -> None:
    ((name, norm),) = run_ranks(1, _train_calling_model)
    assert name == "ModelEngine" and norm > 0
