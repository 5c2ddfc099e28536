"""ZeRO 3 on a pipeline stage: what each action gathers and keeps, on one replica whose weights are offloaded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.optim import MixedPrecisionOptimizer, OffloadConfig, build_optimizer
from megatron.optim.zero.stage3 import OTHER_WEIGHTS

H = 16


class Layer(nn.Module):
    """A residual layer that also reads the weight of a module outside of it."""

    def __init__(self, table: nn.Linear) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(H, H), nn.LayerNorm(H)
        vars(self)["table"] = table  # not registered, as ``tds.SharingLayerSpec`` does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) * self.table.weight[0]


def apply_head(table: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ table.weight.t()


class Stage(nn.Module):
    """A stage of one chunk: two layers and a function, which read one table.

    Args:
        recomputes: recompute the layers and the function in backward, as one group.
    """

    chunks = 1

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"table": nn.Linear(H, H, bias=False)})
        table: Any = self.tied_modules["table"]
        self.first, self.second = Layer(table), Layer(table)
        self.forward_funcs: list[Any] = [self.first, self.second, partial(apply_head, table)]
        self.activation_checkpoint_interval = 3 if recomputes else 0
        generator = torch.Generator().manual_seed(2)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def layers_of(self, chunk: int) -> list[Any]:
        return self.forward_funcs

    def borrowed_parameters_of(self, chunk: int) -> list[nn.Parameter]:
        return list(self.tied_modules.parameters())

    def parameters_of(self, chunk: int) -> list[nn.Parameter]:
        return list(self.parameters())

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        for function in self.forward_funcs:
            x = function(x)
        return x

    def forward(self, x: torch.Tensor, chunk: int = 0) -> torch.Tensor:
        if self.activation_checkpoint_interval:
            return checkpoint(self.run_layers, x, use_reentrant=False)
        return self.run_layers(x)


def make_sharded_stage(recomputes: bool) -> tuple[Stage, MixedPrecisionOptimizer]:
    stage = Stage(recomputes)
    optimizer = build_optimizer(stage.parameters(), zero_stage=3, offload=OffloadConfig(parameters=True))
    optimizer.store.shard_weights(stage)
    return stage, optimizer


def gathered_names(optimizer: MixedPrecisionOptimizer) -> set[str]:
    assert optimizer.store.units is not None
    return {unit.name for unit in optimizer.store.units.units if unit.is_gathered}


@pytest.mark.parametrize("recomputes", [False, True])
def test_alternating_micro_batches_compute_the_gradients_of_full_weights(recomputes: bool) -> None:
    inputs = [torch.ones(2, H).mul(factor).requires_grad_() for factor in (0.5, 1.5)]
    reference = Stage(recomputes=False)
    torch.stack([reference(x).sin().sum() for x in inputs]).sum().backward()
    stage, optimizer = make_sharded_stage(recomputes)
    losses = []
    for x in inputs:
        optimizer.store.begin_action("Forward", 0)
        output = stage(x)
        assert gathered_names(optimizer) == {OTHER_WEIGHTS}, "the loss may read the table"
        with optimizer.store.reading_weights():
            losses.append((output * stage.tied_modules["table"].weight.sum().detach() * 0 + output).sin().sum())
    for loss in losses:
        optimizer.store.begin_action("Backward", 0)
        assert gathered_names(optimizer) == ({OTHER_WEIGHTS} if recomputes else set())
        loss.backward()
        optimizer.store.end_action()
        assert gathered_names(optimizer) == set()
    for expected, parameter in zip(reference.parameters(), stage.parameters(), strict=True):
        gradient = optimizer.gradient_of(parameter)
        assert expected.grad is not None and gradient is not None
        torch.testing.assert_close(gradient, expected.grad)


def test_evaluation_without_a_schedule_frees_all_weights() -> None:
    stage, optimizer = make_sharded_stage(recomputes=False)
    with torch.no_grad():
        output = stage(torch.ones(1, H))
    assert output.isfinite().all() and gathered_names(optimizer) == set()
    with optimizer.store.full_weights():
        optimizer.store.begin_action("Forward", 0)
        assert gathered_names(optimizer) == {"first", "second", OTHER_WEIGHTS}
    assert gathered_names(optimizer) == set()
