"""Gathering updated weights during the next forward: bitwise equal to gathering them in the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from megatron.optim.zero import param_gather
from tds import gradients
from tests.helpers.harness import run_ranks
from tests.helpers.zero_parts import Model, make_model_and_optimizer, make_tokens, take_step

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"stage": 1, "gas": 2},
    "bf16, recomputed, ZeRO 2": {"stage": 2, "gas": 1, "dtype": torch.bfloat16, "recompute": True},
}


def poison_pending(module: nn.Module, optimizer: Any) -> int:
    """Set every shard that is still being gathered to NaN; return the number of weights with such shards."""
    gathers = optimizer.store._deferred_gather
    for weight in gathers._pending:
        partition, rank = optimizer.store.partition(weight), gathers._group.rank
        local_shard = partition.slice(weight.detach(), rank).clone()
        weight.detach().fill_(torch.nan)
        partition.slice(weight.detach(), rank).copy_(local_shard)
    return len(gathers._pending)


def compare_deferred_gather(rank: int, size: int) -> dict[str, Any]:
    """Train with immediate and with deferred gathers; return the differences by case."""
    grid = build_grid(Topology.from_world_size(size, tensor=1, pipe=1), rank)
    gradients.BUCKET_BYTES = 2000
    results = {}
    for case, options in CASES.items():
        settings = dict(options)
        stage, gas = settings.pop("stage"), settings.pop("gas")
        runs = []
        for is_deferred in (False, True):
            param_gather.DEFER_GATHER = is_deferred
            runs.append(make_model_and_optimizer(grid, stage, overlap_grad_reduce=True, **settings))
        (plain, plain_optimizer), (module, deferred_optimizer) = runs
        differences = set()
        for step in range(STEPS):
            losses = []
            for trained_module, optimizer in runs:
                optimizer.policy.accepts_step = (lambda norm: False) if step == 1 else None
                losses.append(take_step(trained_module, optimizer, grid, step, gas))
            assert poison_pending(module, deferred_optimizer) == (
                0 if step == 1 else sum(deferred_optimizer.store.is_sharded(p) for p in module.parameters())
            )
            differences |= {("loss", *losses)} if losses[0] != losses[1] else set()
        with torch.no_grad():
            tokens = make_tokens(rank, 9, 0)
            differences |= set() if torch.equal(plain(tokens), module(tokens)) else {"evaluation"}
        assert not deferred_optimizer.store._deferred_gather._pending, "a forward waits for all weights"
        differences |= {n for n, w in plain.state_dict().items() if not torch.equal(w, module.state_dict()[n])}
        words = module.words.weight
        results[case] = differences, not torch.equal(words, Model().words.weight.to(words.dtype))
    return results


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_deferred_gather_is_bitwise_equal(size: int) -> None:
    for result in run_ranks(size, compare_deferred_gather, size):
        assert result == {case: (set(), True) for case in CASES}


READERS = {
    "state_dict": lambda module, optimizer: module.state_dict(),
    "a layer's state_dict": lambda module, optimizer: module.layers[1].state_dict(),
    "persistent storage": lambda module, optimizer: optimizer.store.persistent_storage(module.words.weight),
    "full weights": lambda module, optimizer: optimizer.store.full_weights(),
    "main params from parameters": lambda module, optimizer: optimizer.refresh_fp32_params(),
    "a load": lambda module, optimizer: optimizer.copy_main_params_to_parameters(),
    "the next update": lambda module, optimizer: optimizer.step(),
}


def find_early_readers(rank: int) -> list[str]:
    """Return the readers that do not wait for pending weights."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    param_gather.DEFER_GATHER = True
    module, optimizer = make_model_and_optimizer(grid, 1, overlap_grad_reduce=True)
    early_readers = []
    for name, read in READERS.items():
        take_step(module, optimizer, grid, 0)
        assert poison_pending(module, optimizer)
        read(module, optimizer)
        if any(weight.isnan().any() for weight in module.parameters()):
            early_readers.append(name)
            optimizer.store.finish_gathers()
    return early_readers


def test_reads_outside_forward_wait_for_gather() -> None:
    assert run_ranks(2, find_early_readers) == [[], []]


def pending_before_layers(rank: int) -> list[list[int]]:
    """Return the number of pending weights before each layer's forward, in the order of the calls."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    param_gather.DEFER_GATHER, gradients.BUCKET_BYTES = True, 1
    module, optimizer = make_model_and_optimizer(grid, 1, overlap_grad_reduce=True)
    take_step(module, optimizer, grid, 0)
    num_pending = []
    for layer in module.layers:
        layer.norm.register_forward_pre_hook(
            lambda *_: num_pending.append(len(optimizer.store._deferred_gather._pending))
        )
    with torch.no_grad():
        module(make_tokens(rank, 1, 0))
    return num_pending


def test_forward_waits_only_for_called_layer() -> None:
    for num_pending in run_ranks(2, pending_before_layers):
        assert num_pending == [6, 0], "norm, up and down of the second layer are pending while the first layer runs"
