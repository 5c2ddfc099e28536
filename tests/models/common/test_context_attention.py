"""Attention with context parallelism on CUDA: chunks of queries without a mask, also with attention dropout."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.models.common import context_attention
from megatron.models.common.context_attention import ContextAttention
from megatron.models.common.masks import Masks
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.context_parallel import local_positions
from megatron.mpu.groups import Group
from megatron.mpu.philox_dropout import PhiloxDropout
from megatron.mpu.random import DropoutStreams
from tests.helpers.model_samples import small_model_args
from tests.helpers.whole import random_tensor

NUM_RANKS, LENGTH = 2, 48


def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("this attention function needs a mask")


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_chunks_attend_to_all_preceding_keys(rank: int, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    group = Group(tuple(range(NUM_RANKS)), rank)
    query, key = random_tensor(1, 2, 2, LENGTH, 4), random_tensor(2, 2, 2, LENGTH, 4)
    value = torch.eye(LENGTH, dtype=torch.float64).expand(2, 2, -1, -1)  # attention returns the probabilities
    monkeypatch.setattr(context_attention, "_gather_keys_and_values", lambda *_: (key, value, nullcontext()))
    positions = local_positions(LENGTH // NUM_RANKS, group)
    attend = ContextAttention(fail, fail, small_model_args(), ParallelContext(context=group))
    dropped = attend(*(x[:, :, positions] for x in (query, key, value)), **({"dropout": rate} if rate else {}))
    scores = (query @ key.transpose(2, 3) / 2).masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf)
    probabilities = scores.softmax(-1)[:, :, positions]
    is_kept = dropped != 0
    assert (dropped - probabilities / (1 - rate))[is_kept].abs().max() <= 1e-12
    assert is_kept[probabilities != 0].double().mean().item() == pytest.approx(1 - rate, abs=0.03 if rate else 0)


@pytest.mark.parametrize(
    ("device_type", "settings", "is_layout_independent", "needs_mask"),
    [
        ("cuda", {"attention_dropout": 0.1}, False, False),
        ("cuda", {"attention_dropout": 0.1}, True, True),
        ("cuda", {"attention_dropout": 0.0}, True, False),
        ("cuda", {"attention_dropout": 0.1, "attn_logit_softcapping": 5.0}, False, True),
        ("cpu", {"attention_dropout": 0.1}, False, True),
    ],
)
def test_mask_is_needed_only_without_a_kernel(
    device_type: str, settings: dict[str, float], is_layout_independent: bool, needs_mask: bool
) -> None:
    streams = PhiloxDropout(1) if is_layout_independent else DropoutStreams()
    parallel = ParallelContext(context=Group(tuple(range(NUM_RANKS)), 0), streams=streams)
    x: Any = SimpleNamespace(device=torch.device(device_type))
    assert Masks(small_model_args(**settings), parallel)._needs_causal_mask(x) == needs_mask
