"""Experts' weights in one storage in DeepSpeed's own engine, whose ZeRO moves weights into flat buffers."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch

import tds
from megatron.models.common.experts import stack_expert_weights
from megatron.ops import grouped, stacked_weights
from tests.helpers.harness import run_ranks
from tests.helpers.toys import preload_zero
from tests.models.common.test_experts import make_layer

NUM_STEPS = 3
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}


def train(rank: int, stage: int, settings: dict[str, Any], *, is_stacked: bool) -> list[torch.Tensor]:
    """Train a layer of experts in DeepSpeed's engine; return initial weights, outputs of all steps, final weights."""
    moe = make_layer(hidden_size=16, moe_ffn_hidden_size=24, activation="gated-silu").bfloat16()
    initial_weights = [parameter.detach().clone() for parameter in moe.parameters()]
    if is_stacked:
        stack_expert_weights(moe)
        experts: list[Any] = list(moe.experts.children())
        assert stacked_weights.distance_of([expert.up.weight for expert in experts]) is not None
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, **settings,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.01)
    engine: Any = tds.initialize(model=moe, optimizer=optimizer, config=config)[0]
    outputs = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        y = engine(torch.randn(7, 3, 16, generator=generator).bfloat16())
        engine.backward(y.float().square().mean())
        engine.step()
        outputs.append(y.detach())
    with deepspeed.zero.GatheredParameters(list(moe.parameters()), enabled=stage == 3):
        weights = [parameter.detach().clone() for parameter in moe.parameters()]
    return [*initial_weights, *outputs, *weights]


def train_both(rank: int, stage: int, settings: dict[str, Any]) -> list[list[torch.Tensor]]:
    grouped.IMPLEMENTATION = grouped.GROUPED  # in a forked process
    tds.init_distributed("gloo", verbose=False)
    return [train(rank, stage, settings, is_stacked=is_stacked) for is_stacked in (False, True)]


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        pytest.param(1, FP32_GRADS, id="1, fp32 gradients"),
        *(pytest.param(stage, {}, id=str(stage), marks=pytest.mark.slow) for stage in (1, 2, 3)),
    ],
)
def test_stacked_weights_train_as_separate_ones(stage: int, settings: dict[str, Any]) -> None:
    preload_zero()
    for separate, stacked in run_ranks(2, train_both, stage, settings):
        for expected, actual in zip(separate, stacked, strict=True):
            assert torch.equal(expected, actual)
        num_weights = (len(stacked) - NUM_STEPS) // 2
        changed = [not a.equal(b) for a, b in zip(stacked[:num_weights], stacked[-num_weights:], strict=True)]
        assert all(changed), "a weight was not trained"
