"""ZeRO 2 and 3 with models of many structures: peak memory, and replicas that call different layers."""

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
OFFLOAD = OffloadConfig(parameters=True)


class ResidualModel(nn.Module):
    """Layers, and weights without gradients: outside of layers, or in each layer."""

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
        for layer_idx, layer in enumerate(self.layers):
            if layer_idx != skip:
                x = x + torch.tanh(layer(x))
        return x


def shard_model(module: nn.Module, stage: int, rank: int, size: int = 2) -> MixedPrecisionOptimizer:
    grid = build_grid(Topology.from_world_size(size, tensor=1, pipe=1), rank)
    optimizer = build_optimizer(module.parameters(), zero_stage=stage, data=grid.data, lr=1e-3)
    optimizer.store.shard_weights(module)
    return optimizer


def measure_peak_bytes(rank: int, spare: str, stage: int) -> list[tuple[int, int]]:
    """Return, for two steps, the peak bytes in backward of unreduced gradients and of gathered weights."""
    gradients.BUCKET_BYTES = 4 * H * H
    module = ResidualModel(spare)
    optimizer = shard_model(module, stage, rank)
    waiting_bytes: list[int] = []
    gathered_bytes = [0]

    def record_bytes(_: torch.Tensor) -> None:
        waiting_bytes.append(sum(g.nbytes for g in optimizer.reducer._arrived.values() if g is not None))
        if optimizer.store.units is not None:
            unit_bytes = [w.untyped_storage().nbytes() for u in optimizer.store.units.units for w in u._full.values()]
            gathered_bytes.append(sum(unit_bytes))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(record_bytes)
    peaks = []
    for _ in range(2):
        waiting_bytes.clear(), gathered_bytes.clear()
        module(torch.ones(2, H)).sum().backward()
        optimizer.end_micro_batch()
        optimizer.step()
        peaks.append((max(waiting_bytes), max(gathered_bytes, default=0)))
    return peaks


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_weights_without_gradients_do_not_delay_reduction(stage: int) -> None:
    """At most two of eight layers are gathered at a time, and gradients wait for one bucket only."""
    layer_bytes = 4 * (H * H + H)
    for spare, num_layers_held in (("", 1), ("in no layer", 1), ("in each layer", 2)):
        for steps in run_ranks(2, measure_peak_bytes, spare, stage):
            assert all(waiting_bytes <= 4 * H * H + LAYERS * 4 * H for waiting_bytes, _ in steps), (spare, steps)
            assert all(gathered_bytes <= 2 * num_layers_held * layer_bytes for _, gathered_bytes in steps), (
                spare,
                steps,
            )


def skip_layer_on_one_replica(rank: int) -> tuple[list[bool], list[list[tuple[int, ...]]]]:
    """Train with a layer that one replica skips in a step; return if gradients are correct, and the bucket order."""
    gradients.BUCKET_BYTES = 1
    module = ResidualModel()
    optimizer = shard_model(module, 2, rank)
    matches = []
    for step, skip in enumerate((-1, 7 if rank else -1, -1)):
        plain = [ResidualModel() for _ in range(2)]
        for replica, replica_model in enumerate(plain):
            replica_model(torch.ones(2, H), 7 if replica and step == 1 else -1).sum().backward()
        module(torch.ones(2, H), skip).sum().backward()
        optimizer.end_micro_batch()
        for param_idx, parameter in enumerate(module.parameters()):
            expected = sum(
                list(p.parameters())[param_idx].grad for p in plain if list(p.parameters())[param_idx].grad is not None
            )
            shard = optimizer.store.partition(parameter).slice(expected, rank)
            matches.append(torch.allclose(optimizer.gradient_of(parameter), shard, atol=1e-6))
        optimizer.zero_grad()
    return matches, [[tuple(p.shape) for p in bucket] for bucket in optimizer.reducer._order._buckets]


def test_bucket_unfilled_on_one_replica_is_reduced() -> None:
    results = run_ranks(2, skip_layer_on_one_replica)
    assert all(all(matches) for matches, _ in results)
    assert results[0][1] == results[1][1], "all replicas have the same order"


def call_different_layers(rank: int, departure: str) -> str:
    """Call different layers on the replicas; return the error, with CHANGED if weights changed before it."""
    module = ResidualModel()
    optimizer = shard_model(module, 3, rank)
    before = [optimizer.main_param_of(p).detach().clone() for p in module.parameters()]
    x = torch.ones(2, H)
    try:
        if departure == "evaluates" and rank == 0:
            with torch.no_grad():
                module(x)
        y = module(x, rank if departure == "skips" else LAYERS - 1 if departure == "ends early" and rank else -1)
        y.sum().backward()
        if departure == "goes on" and rank == 0:
            with torch.no_grad():
                module(x)
        optimizer.end_micro_batch()
        optimizer.step()
    except ValueError as error:
        is_unchanged = all(
            torch.equal(optimizer.main_param_of(p), b) for p, b in zip(module.parameters(), before, strict=True)
        )
        return f"{error}{'' if is_unchanged else ' CHANGED'}"
    return "no error"


@pytest.mark.parametrize("departure", ["skips", "ends early", "evaluates", "goes on"])
def test_replicas_calling_different_layers_stop_before_update(departure: str) -> None:
    codes, messages, _ = fork_ranks(2, call_different_layers, departure)
    assert codes == [0, 0] and messages[0] == messages[1]
    assert (
        "same layers in the same order" in messages[0]
        and "use --zero-stage 2" in messages[0]
        and "CHANGED" not in messages[0]
    )
    expected_messages = {"skips": "replica 0 gathers layers.1, replica 1 gathers layers.0"}
    expected_messages["ends early"] = "replica 0 gathers layers.7, replica 1 gathers layers.6"
    expected_messages["goes on"] = "replica 0 gathers layers.0, replica 1 has finished its micro-batch"
    expected_messages["evaluates"] = (
        "replica 0 gathers layers.0 in an evaluation, replica 1 gathers layers.0 in training"
    )
    assert expected_messages[departure] in messages[0]


def test_replicas_calling_same_layers_are_not_stopped() -> None:
    assert run_ranks(2, call_different_layers, "alike") == ["no error"] * 2


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
    """A layer with only a small part of its weights in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4))


def test_nested_layer_lists_are_split_where_most_weights_are() -> None:
    def names(module: nn.Module) -> list[str]:
        layers = layers_of(module, module.parameters())
        return [name for name, submodule in module.named_modules() if submodule in layers]

    inner_names = [f"1.layers.{layer_idx}" for layer_idx in range(6)]
    assert names(nn.Sequential(nn.Linear(4, 4), Encoder(), nn.Linear(4, 4))) == ["0", "1", *inner_names, "1.norm"][
        :-1
    ] + ["2"]
    assert names(nn.ModuleDict({"a": nn.Linear(4, 4), "b": Block()})) == ["a", "b"]
    assert names(nn.ModuleList([Block(), nn.ModuleList([Encoder()])])) == [
        "0",
        "1.0",
        *(f"1.0.{n[2:]}" for n in inner_names),
    ]


def make_offloaded_optimizer(module: nn.Module) -> MixedPrecisionOptimizer:
    """Return an optimizer of ZeRO 3 on one replica, where weights are gathered because they are offloaded."""
    optimizer = build_optimizer(module.parameters(), zero_stage=3, offload=OFFLOAD)
    optimizer.store.shard_weights(module)
    return optimizer


def test_encoder_in_sequential_computes_same_output() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Encoder(), nn.Linear(4, 4))
    x = torch.ones(3, 4)
    expected = module(x)
    gradients = torch.autograd.grad(expected.sum(), list(module.parameters()))
    optimizer = make_offloaded_optimizer(module)
    output = module(x)
    assert torch.equal(output, expected)
    output.sum().backward()
    optimizer.end_micro_batch()
    assert all(torch.equal(optimizer.gradient_of(p), g) for p, g in zip(module.parameters(), gradients, strict=True))


def test_largest_unit_is_logged_and_dominant_unit_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[tuple[str, str]] = []
    log.warn_once.cache_clear()
    monkeypatch.setattr(log, "info", lambda text: messages.append(("info", text)))
    monkeypatch.setattr(log, "warning", lambda text: messages.append(("warning", text)))
    flat = nn.Module()
    for layer_idx in range(4):
        setattr(flat, f"layer{layer_idx}", nn.Linear(4, 4))
    for module in (ResidualModel(), flat):
        make_offloaded_optimizer(module)
    assert [level for level, _ in messages] == ["info", "warning"]
    assert "8 units, the largest with 12% of the weights: layers.0" in messages[0][1]
    assert "100% of the weights: weights outside of layers" in messages[1][1] and "ModuleList" in messages[1][1]


def test_nonfinite_loss_under_zero_3_reports_possible_cause() -> None:
    messages = {}
    for stage in (0, 3):
        module = ResidualModel()
        optimizer = make_offloaded_optimizer(module) if stage else build_optimizer(module.parameters())
        loss_check = FiniteLossCheck(optimizer)
        loss_check.record_loss(float("nan"))
        with pytest.raises(LossError) as caught:
            optimizer.policy.accepts_step(1.0)
        messages[stage] = str(caught.value)
    assert "weights are read outside of the forward" in messages[3] and "use --zero-stage 2" in messages[3]
    assert messages[3].startswith(messages[0])


def with_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.Sequential(*(torch.nn.utils.weight_norm(nn.Linear(H, H)) for _ in range(2)))


class SparseSequential(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picked = torch.eye(2).to_sparse().requires_grad_()
        return torch.sparse.mm(picked, super().forward(x))


@pytest.mark.parametrize(
    "make_module",
    [with_weight_norm, lambda: SparseSequential(nn.Linear(H, H))],
    ids=["a hook that reads weights", "a sparse tensor"],
)
def test_hooks_and_sparse_tensors_read_weights(make_module: Callable[[], Any]) -> None:
    module, x = make_module(), torch.ones(2, H)
    expected = module(x)
    optimizer = make_offloaded_optimizer(module)
    output = module(x)
    assert torch.equal(output, expected)
    output.sum().backward()
    optimizer.end_micro_batch()


def test_calling_submodule_first_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    module = ResidualModel()
    make_offloaded_optimizer(module)
    monkeypatch.setattr(log, "warning", messages.append)
    module.layers[2](torch.ones(2, H))
    module(torch.ones(2, H))
    assert not messages
