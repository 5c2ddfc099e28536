"""ZeRO 2 and 3 with models of many shapes: what is held at most, and replicas that go different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron import log
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from megatron.optim import MixedPrecisionOptimizer, OffloadConfig, build_optimizer
from megatron.optim.zero.layers import layers_of
from megatron.training.step_result import FiniteLossCheck, LossError
from tds import gradients
from tests.helpers.harness import fork_ranks, run_ranks

H, LAYERS = 64, 8
AWAY = OffloadConfig(parameters=True)


class Plain(nn.Module):
    """Layers, and weights that get no gradient: in no layer, or in each."""

    def __init__(self, spare: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(LAYERS))
        if spare == "in no layer":
            self.spare = nn.Linear(H, H)
        elif spare == "in each layer":
            for layer in self.layers:
                layer.spare = nn.Parameter(torch.zeros(H, H))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator).mul_(0.1)

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = x + torch.tanh(layer(x))
        return x


def cut(module: nn.Module, stage: int, rank: int, size: int = 2) -> MixedPrecisionOptimizer:
    grid = build_grid(Topology.of_world(size, tensor=1, pipe=1), rank)
    optimizer = build_optimizer(module.parameters(), zero_stage=stage, data=grid.data, lr=1e-3)
    optimizer.store.shard_weights(module)
    return optimizer


def most_held(rank: int, spare: str, stage: int) -> list[tuple[int, int]]:
    """Return for two steps the most bytes in backward of gradients that wait for their sum, and of gathered weights."""
    gradients.BUCKET_BYTES = 4 * H * H
    module = Plain(spare)
    optimizer = cut(module, stage, rank)
    waiting: list[int] = []
    gathered = [0]

    def look(_: torch.Tensor) -> None:
        waiting.append(sum(g.nbytes for g in optimizer.reducer._arrived.values() if g is not None))
        if optimizer.store.units is not None:
            held = [w.untyped_storage().nbytes() for u in optimizer.store.units.units for w in u._full.values()]
            gathered.append(sum(held))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    found = []
    for _ in range(2):
        waiting.clear(), gathered.clear()
        module(torch.ones(2, H)).sum().backward()
        optimizer.end_micro_batch()
        optimizer.step()
        found.append((max(waiting), max(gathered, default=0)))
    return found


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_weights_without_gradients_hold_nothing_up_from_the_first_micro_batch_on(stage: int) -> None:
    """A layer or two are held of eight: the first is freed before the last is gathered."""
    layer = 4 * (H * H + H)
    for spare, held in (("", 1), ("in no layer", 1), ("in each layer", 2)):
        for steps in run_ranks(2, most_held, spare, stage):
            assert all(waiting <= 4 * H * H + LAYERS * 4 * H for waiting, _ in steps), (spare, steps)
            assert all(gathered <= 2 * held * layer for _, gathered in steps), (spare, steps)


def one_that_comes_late(rank: int) -> tuple[list[bool], list[list[tuple[int, ...]]]]:
    """Train with a weight that a replica leaves out of one step; return whether gradients are right, and the order."""
    gradients.BUCKET_BYTES = 1
    module = Plain()
    optimizer = cut(module, 2, rank)
    same = []
    for step, skip in enumerate((-1, 7 if rank else -1, -1)):
        plain = [Plain() for _ in range(2)]
        for replica, other in enumerate(plain):
            other(torch.ones(2, H), 7 if replica and step == 1 else -1).sum().backward()
        module(torch.ones(2, H), skip).sum().backward()
        optimizer.end_micro_batch()
        for number, parameter in enumerate(module.parameters()):
            wanted = sum(
                list(p.parameters())[number].grad for p in plain if list(p.parameters())[number].grad is not None
            )
            part = optimizer.store.partition(parameter).slice(wanted, rank)
            same.append(torch.allclose(optimizer.gradient_of(parameter), part, atol=1e-6))
        optimizer.zero_grad()
    return same, [[tuple(p.shape) for p in bucket] for bucket in optimizer.reducer._order._buckets]


def test_a_bucket_that_one_replica_alone_does_not_fill_is_summed_all_the_same() -> None:
    found = run_ranks(2, one_that_comes_late)
    assert all(all(same) for same, _ in found)
    assert found[0][1] == found[1][1], "one order for all"


def other_ways(rank: int, way: str) -> str:
    """Let replicas call different layers; return whether weights have changed before the error."""
    module = Plain()
    optimizer = cut(module, 3, rank)
    before = [optimizer.main_param_of(p).detach().clone() for p in module.parameters()]
    x = torch.ones(2, H)
    try:
        if way == "evaluates" and rank == 0:
            with torch.no_grad():
                module(x)
        y = module(x, rank if way == "skips" else LAYERS - 1 if way == "ends early" and rank else -1)
        y.sum().backward()
        if way == "goes on" and rank == 0:
            with torch.no_grad():
                module(x)
        optimizer.end_micro_batch()
        optimizer.step()
    except ValueError as error:
        kept = all(torch.equal(optimizer.main_param_of(p), b) for p, b in zip(module.parameters(), before, strict=True))
        return f"{error}{'' if kept else ' CHANGED'}"
    return "no error"


@pytest.mark.parametrize("way", ["skips", "ends early", "evaluates", "goes on"])
def test_replicas_that_call_other_layers_are_stopped_on_all_ranks_before_a_weight_is_changed(way: str) -> None:
    codes, messages, _ = fork_ranks(2, other_ways, way)
    assert codes == [0, 0] and messages[0] == messages[1]
    assert (
        "same layers in the same order" in messages[0]
        and "use --zero-stage 2" in messages[0]
        and "CHANGED" not in messages[0]
    )
    named = {"skips": "replica 0 gathers layers.1, replica 1 gathers layers.0"}
    named["ends early"] = "replica 0 gathers layers.7, replica 1 gathers layers.6"
    named["goes on"] = "replica 0 gathers layers.0, replica 1 has finished its micro-batch"
    named["evaluates"] = "replica 0 gathers layers.0 in an evaluation, replica 1 gathers layers.0 in training"
    assert named[way] in messages[0]


def test_replicas_of_one_way_are_not_stopped() -> None:
    assert run_ranks(2, other_ways, "alike") == ["no error"] * 2


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Block(nn.Module):
    """A layer whose lists are small beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4))


def test_lists_within_layers_are_cut_again_where_most_weights_are_in_them() -> None:
    def names(module: nn.Module) -> list[str]:
        found = layers_of(module, module.parameters())
        return [name for name, part in module.named_modules() if part in found]

    inner = [f"1.layers.{number}" for number in range(6)]
    assert names(nn.Sequential(nn.Linear(4, 4), Encoder(), nn.Linear(4, 4))) == ["0", "1", *inner, "1.norm"][:-1] + [
        "2"
    ]
    assert names(nn.ModuleDict({"a": nn.Linear(4, 4), "b": Block()})) == ["a", "b"]
    assert names(nn.ModuleList([Block(), nn.ModuleList([Encoder()])])) == ["0", "1.0", *(f"1.0.{n[2:]}" for n in inner)]


def alone(module: nn.Module) -> MixedPrecisionOptimizer:
    """Return an optimizer of ZeRO 3 on one replica, where weights are cut all the same because they are offloaded."""
    optimizer = build_optimizer(module.parameters(), zero_stage=3, offload=AWAY)
    optimizer.store.shard_weights(module)
    return optimizer


def test_an_encoder_in_a_sequential_computes_as_it_did() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Encoder(), nn.Linear(4, 4))
    x = torch.ones(3, 4)
    wanted = module(x)
    gradients = torch.autograd.grad(wanted.sum(), list(module.parameters()))
    optimizer = alone(module)
    found = module(x)
    assert torch.equal(found, wanted)
    found.sum().backward()
    optimizer.end_micro_batch()
    assert all(torch.equal(optimizer.gradient_of(p), g) for p, g in zip(module.parameters(), gradients, strict=True))


def test_the_largest_unit_is_told_and_warned_of_where_it_is_most(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[tuple[str, str]] = []
    log.warn_once.cache_clear()
    monkeypatch.setattr(log, "info", lambda text: messages.append(("info", text)))
    monkeypatch.setattr(log, "warning", lambda text: messages.append(("warning", text)))
    flat = nn.Module()
    for number in range(4):
        setattr(flat, f"layer{number}", nn.Linear(4, 4))
    for module in (Plain(), flat):
        alone(module)
    assert [kind for kind, _ in messages] == ["info", "warning"]
    assert "8 units, the largest with 12% of the weights: layers.0" in messages[0][1]
    assert "100% of the weights: weights outside of layers" in messages[1][1] and "ModuleList" in messages[1][1]


def test_a_loss_that_is_no_number_under_zero_3_says_where_nan_may_be_from() -> None:
    messages = {}
    for stage in (0, 3):
        module = Plain()
        optimizer = alone(module) if stage else build_optimizer(module.parameters())
        judge = FiniteLossCheck(optimizer)
        judge.take_loss(float("nan"))
        with pytest.raises(LossError) as caught:
            optimizer.policy.accepts_step(1.0)
        messages[stage] = str(caught.value)
    assert "weights are read outside of the forward" in messages[3] and "use --zero-stage 2" in messages[3]
    assert messages[3].startswith(messages[0])


def with_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.Sequential(*(torch.nn.utils.weight_norm(nn.Linear(H, H)) for _ in range(2)))


class Sparse(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picked = torch.eye(2).to_sparse().requires_grad_()
        return torch.sparse.mm(picked, super().forward(x))


@pytest.mark.parametrize(
    "make", [with_weight_norm, lambda: Sparse(nn.Linear(H, H))], ids=["a hook that reads weights", "a sparse tensor"]
)
def test_hooks_and_tensors_of_other_kinds_see_the_weights(make: Callable[[], Any]) -> None:
    module, x = make(), torch.ones(2, H)
    wanted = module(x)
    optimizer = alone(module)
    found = module(x)
    assert torch.equal(found, wanted)
    found.sum().backward()
    optimizer.end_micro_batch()


def test_a_part_that_is_called_first_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    module = Plain()
    alone(module)
    monkeypatch.setattr(log, "warning", messages.append)
    module.layers[2](torch.ones(2, H))
    module(torch.ones(2, H))
    assert not messages
