"""Updated weights that come while the next forward runs: the bits of those that are waited for in the step."""

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
from tests.helpers.zero_parts import Model, make, take_step, tokens_of

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"stage": 1, "gas": 2},
    "bf16, recomputed, ZeRO 2": {"stage": 2, "gas": 1, "dtype": torch.bfloat16, "recomputes": True},
}


def spoil(module: nn.Module, optimizer: Any) -> int:
    """Let every part that is on its way be NaN; return how many weights have such parts."""
    gathers = optimizer.store._deferred_gather
    for weight in gathers._due:
        cut, rank = optimizer.store.partition(weight), gathers._group.rank
        own = cut.slice(weight.detach(), rank).clone()
        weight.detach().fill_(torch.nan)
        cut.slice(weight.detach(), rank).copy_(own)
    return len(gathers._due)


def both_ways(rank: int, size: int) -> dict[str, Any]:
    """Train with weights that are here at once and with such as come later; return by kind what differs."""
    grid = build_grid(Topology.of_world(size, tensor=1, pipe=1), rank)
    gradients.BUCKET_BYTES = 2000
    found = {}
    for kind, how in KINDS.items():
        settings = dict(how)
        stage, gas = settings.pop("stage"), settings.pop("gas")
        sides = []
        for later in (False, True):
            param_gather.GATHERS_LATER = later
            sides.append(make(grid, stage, overlap_grad_reduce=True, **settings))
        (plain, a), (module, b) = sides
        different = set()
        for step in range(STEPS):
            losses = []
            for each, optimizer in sides:
                optimizer.policy.accepts_step = (lambda norm: False) if step == 1 else None
                losses.append(take_step(each, optimizer, grid, step, gas))
            assert spoil(module, b) == (0 if step == 1 else sum(b.store.is_sharded(p) for p in module.parameters()))
            different |= {("loss", *losses)} if losses[0] != losses[1] else set()
        with torch.no_grad():
            tokens = tokens_of(rank, 9, 0)
            different |= set() if torch.equal(plain(tokens), module(tokens)) else {"evaluation"}
        assert not b.store._deferred_gather._due, "a forward needs all of them"
        different |= {n for n, w in plain.state_dict().items() if not torch.equal(w, module.state_dict()[n])}
        words = module.words.weight
        found[kind] = different, not torch.equal(words, Model().words.weight.to(words.dtype))
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_weights_that_come_later_have_the_bits_of_those_that_come_at_once(size: int) -> None:
    for found in run_ranks(size, both_ways, size):
        assert found == {kind: (set(), True) for kind in KINDS}


READERS = {
    "state_dict": lambda module, optimizer: module.state_dict(),
    "a layer's state_dict": lambda module, optimizer: module.layers[1].state_dict(),
    "kept": lambda module, optimizer: optimizer.store.persistent_storage(module.words.weight),
    "weights_gathered": lambda module, optimizer: optimizer.store.full_weights(),
    "masters from parameters": lambda module, optimizer: optimizer.refresh_fp32_params(),
    "a load": lambda module, optimizer: optimizer.copy_main_params_to_parameters(),
    "the next update": lambda module, optimizer: optimizer.step(),
}


def readers(rank: int) -> list[str]:
    """Return who reads weights that have not come."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    param_gather.GATHERS_LATER = True
    module, optimizer = make(grid, 1, overlap_grad_reduce=True)
    early = []
    for name, read in READERS.items():
        take_step(module, optimizer, grid, 0)
        assert spoil(module, optimizer)
        read(module, optimizer)
        if any(weight.isnan().any() for weight in module.parameters()):
            early.append(name)
            optimizer.store.finish_gathers()
    return early


def test_whoever_reads_weights_outside_of_a_forward_waits_for_them() -> None:
    assert run_ranks(2, readers) == [[], []]


def waits(rank: int) -> list[list[int]]:
    """Return how many weights are on their way before each layer's forward, in the order of the calls."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    param_gather.GATHERS_LATER, gradients.BUCKET_BYTES = True, 1
    module, optimizer = make(grid, 1, overlap_grad_reduce=True)
    take_step(module, optimizer, grid, 0)
    seen = []
    for layer in module.layers:
        layer.norm.register_forward_pre_hook(lambda *_: seen.append(len(optimizer.store._deferred_gather._due)))
    with torch.no_grad():
        module(tokens_of(rank, 1, 0))
    return seen


def test_a_forward_waits_for_the_layer_that_it_calls_alone() -> None:
    for seen in run_ranks(2, waits):
        assert seen == [6, 0], "norm, up and down of the second layer come while the first one runs"
