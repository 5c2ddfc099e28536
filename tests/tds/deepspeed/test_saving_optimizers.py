"""Checkpoints under each of DeepSpeed's optimizers: a resumed run equals one that never stopped."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine as deepspeed_engine

import tds
from tds.deepspeed.checkpointing import CheckpointError
from tests.helpers.harness import GROUP_TIMEOUT_S, run_ranks
from tests.helpers.toys import Toy, _share_groups, preload_zero

ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}


class _FakeFusedAdam(torch.optim.AdamW):
    """In place of DeepSpeed's FusedAdam, which has to be compiled, so that FP16_Optimizer is taken."""


CONFIGS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "fp16, fused": (_FakeFusedAdam, FP16),
    "fp32, ZeRO 1": (torch.optim.AdamW, ZERO),
    "fp16": (torch.optim.AdamW, FP16),
    "fp16, ZeRO 1": (torch.optim.AdamW, {**FP16, **ZERO}),
    "bf16": (torch.optim.AdamW, {"bf16": {"enabled": True}}),
    "bf16, ZeRO 1": (torch.optim.AdamW, {"bf16": {"enabled": True}, **ZERO}),
}


@pytest.fixture(autouse=True)
def _enable_fp16_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DeepSpeed take fp16 on a CPU, and a fused optimizer that is none."""
    preload_zero()
    accelerator = type(get_accelerator())
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda self: True)
    monkeypatch.setattr(accelerator, "supported_dtypes", lambda self: [torch.float32, torch.float16, torch.bfloat16])
    monkeypatch.setattr(deepspeed_engine, "FusedAdam", _FakeFusedAdam)


def _loss(output: torch.Tensor, labels: Any) -> torch.Tensor:
    return ((output.float() - labels[0].float()) ** 2).mean()


def _engine(config_name: str, bounds: list[int]) -> Any:
    optimizer, config = CONFIGS[config_name]
    toy = Toy("chain", dtype=torch.float32)
    module = tds.PipelineModule(toy.layer_specs(), num_stages=len(bounds) - 1, loss_fn=_loss, partition_method=bounds)
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, **config}
    return tds.initialize(model=module, optimizer=optimizer(module.parameters(), lr=0.02), config=config)[0]


def _train_steps(engine: Any, *steps: int) -> list[float]:
    toy, dtype = Toy("chain", dtype=torch.float32), next(engine.module.parameters()).dtype
    first = 100 * engine.grid.get_data_parallel_rank()
    return [
        float(
            engine.train_batch(
                iter([(x.to(dtype), y) for x, y in (toy.make_batch(first + 10 * step + i) for i in range(4))])
            )
        )
        for step in steps
    ]


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().float() for name, p in engine.module.named_parameters()}


def _save_and_resume(rank: int, folder: str, config_names: list[str]) -> list[Any]:
    tds.init_distributed("gloo", verbose=False)
    _share_groups()
    results = []
    for config_name in config_names:
        engine = _engine(config_name, [0, 2, 5])
        _train_steps(engine, 0, 1)
        engine.save_checkpoint(f"{folder}/{config_name}")
        uninterrupted = _train_steps(engine, 2, 3), _weights(engine)
        resumed = _engine(config_name, [0, 2, 5])
        resumed.load_checkpoint(f"{folder}/{config_name}")
        resumed_run = _train_steps(resumed, 2, 3), _weights(resumed)
        weights_only = _engine(config_name, [0, 3, 5])
        weights_only.load_checkpoint(f"{folder}/{config_name}", load_optimizer_states=False)
        weights_only.optimizer.param_groups[0]["lr"] = 0.0
        loaded = _weights(weights_only)
        _train_steps(weights_only, 2)
        results.append((config_name, uninterrupted, resumed_run, loaded, _weights(weights_only)))
    return results


@pytest.mark.parametrize(
    ("ranks", "config_names"),
    [(2, list(CONFIGS)[:2]), pytest.param(4, list(CONFIGS), marks=pytest.mark.slow)],
    ids=["two", "all"],
)
def test_all_optimizers_resume_and_load_only_weights(tmp_path: Path, ranks: int, config_names: list[str]) -> None:
    for results in run_ranks(ranks, _save_and_resume, str(tmp_path), config_names):
        for config_name, uninterrupted, resumed_run, loaded, stepped in results:
            assert uninterrupted[0] == resumed_run[0], config_name
            assert all(torch.equal(resumed_run[1][name], weight) for name, weight in uninterrupted[1].items()), (
                config_name
            )
            assert all(torch.equal(stepped[name], weight) for name, weight in loaded.items()), config_name


def _load_truncated_states(rank: int, folder: str) -> tuple[str, float]:
    """Save two replicas' states under ZeRO 1, cut those of one, and load."""
    tds.init_distributed("gloo", verbose=False)
    _share_groups()
    engine = _engine("fp32, ZeRO 1", [0, 5])
    _train_steps(engine, 0)
    engine.save_checkpoint(folder, tag="cut")
    if rank == 0:
        os.truncate(f"{folder}/cut/zero_pp_rank_1_mp_rank_00_optim_states.pt", 1000)
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        engine.load_checkpoint(folder)
    return str(raised.value), time.monotonic() - start


def test_truncated_zero_states_raise_on_all_replicas(tmp_path: Path) -> None:
    for message, seconds in run_ranks(2, _load_truncated_states, str(tmp_path)):
        assert "zero_pp_rank_1_mp_rank_00_optim_states.pt cannot be loaded: " in message and message.endswith(
            "(rank 1)"
        ), message
        assert seconds < GROUP_TIMEOUT_S / 2
