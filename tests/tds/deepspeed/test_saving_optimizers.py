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


class _Fused(torch.optim.AdamW):
    """In place of DeepSpeed's FusedAdam, which has to be compiled, so that FP16_Optimizer is taken."""


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "fp16, fused": (_Fused, FP16),
    "fp32, ZeRO 1": (torch.optim.AdamW, ZERO),
    "fp16": (torch.optim.AdamW, FP16),
    "fp16, ZeRO 1": (torch.optim.AdamW, {**FP16, **ZERO}),
    "bf16": (torch.optim.AdamW, {"bf16": {"enabled": True}}),
    "bf16, ZeRO 1": (torch.optim.AdamW, {"bf16": {"enabled": True}, **ZERO}),
}


@pytest.fixture(autouse=True)
def _ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DeepSpeed take fp16 on a CPU, and a fused optimizer that is none."""
    preload_zero()
    accelerator = type(get_accelerator())
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda self: True)
    monkeypatch.setattr(accelerator, "supported_dtypes", lambda self: [torch.float32, torch.float16, torch.bfloat16])
    monkeypatch.setattr(deepspeed_engine, "FusedAdam", _Fused)


def _loss(output: torch.Tensor, labels: Any) -> torch.Tensor:
    return ((output.float() - labels[0].float()) ** 2).mean()


def _engine(kind: str, bounds: list[int]) -> Any:
    optimizer, config = KINDS[kind]
    toy = Toy("chain", dtype=torch.float32)
    module = tds.PipelineModule(toy.specs(), num_stages=len(bounds) - 1, loss_fn=_loss, partition_method=bounds)
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, **config}
    return tds.initialize(model=module, optimizer=optimizer(module.parameters(), lr=0.02), config=config)[0]


def _steps(engine: Any, *steps: int) -> list[float]:
    toy, dtype = Toy("chain", dtype=torch.float32), next(engine.module.parameters()).dtype
    first = 100 * engine.grid.get_data_parallel_rank()
    return [
        float(
            engine.train_batch(iter([(x.to(dtype), y) for x, y in (toy.batch(first + 10 * s + i) for i in range(4))]))
        )
        for s in steps
    ]


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().float() for name, p in engine.module.named_parameters()}


def _resumed(rank: int, place: str, kinds: list[str]) -> list[Any]:
    tds.init_distributed("gloo", verbose=False)
    _share_groups()
    results = []
    for kind in kinds:
        engine = _engine(kind, [0, 2, 5])
        _steps(engine, 0, 1)
        engine.save_checkpoint(f"{place}/{kind}")
        straight = _steps(engine, 2, 3), _weights(engine)
        other = _engine(kind, [0, 2, 5])
        other.load_checkpoint(f"{place}/{kind}")
        again = _steps(other, 2, 3), _weights(other)
        third = _engine(kind, [0, 3, 5])
        third.load_checkpoint(f"{place}/{kind}", load_optimizer_states=False)
        third.optimizer.param_groups[0]["lr"] = 0.0
        loaded = _weights(third)
        _steps(third, 2)
        results.append((kind, straight, again, loaded, _weights(third)))
    return results


@pytest.mark.parametrize(
    ("ranks", "kinds"), [(2, list(KINDS)[:2]), pytest.param(4, list(KINDS), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_every_optimizer_resumes_and_takes_weights_alone(tmp_path: Path, ranks: int, kinds: list[str]) -> None:
    for results in run_ranks(ranks, _resumed, str(tmp_path), kinds):
        for kind, straight, again, loaded, stepped in results:
            assert straight[0] == again[0], kind
            assert all(torch.equal(again[1][name], weight) for name, weight in straight[1].items()), kind
            assert all(torch.equal(stepped[name], weight) for name, weight in loaded.items()), kind


def _saved_and_loaded(rank: int, place: str) -> tuple[str, float]:
    """Save two replicas' states under ZeRO 1, cut those of one, and load."""
    tds.init_distributed("gloo", verbose=False)
    _share_groups()
    engine = _engine("fp32, ZeRO 1", [0, 5])
    _steps(engine, 0)
    engine.save_checkpoint(place, tag="cut")
    if rank == 0:
        os.truncate(f"{place}/cut/zero_pp_rank_1_mp_rank_00_optim_states.pt", 1000)
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        engine.load_checkpoint(place)
    return str(raised.value), time.monotonic() - began


def test_states_of_zero_that_are_cut_on_one_replica_stop_both(tmp_path: Path) -> None:
    for message, seconds in run_ranks(2, _saved_and_loaded, str(tmp_path)):
        assert "zero_pp_rank_1_mp_rank_00_optim_states.pt cannot be loaded: " in message and message.endswith(
            "(rank 1)"
        ), message
        assert seconds < GROUP_TIMEOUT_S / 2
