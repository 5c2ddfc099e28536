"""Units of a pipeline stage: which weights belong to a layer that the stage calls, and which are kept for an action."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from megatron.optim.zero.layers import called_layers, is_stage, kept_weights, weight_reader


class FakeStage(nn.Module):
    """A stage of two chunks with the interface of ``tds.PipelineModule``.

    The first chunk calls the module "tied", which a function of the second chunk reads, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.layer, self.wrapper = nn.Linear(2, 2), nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 4))
        self.twice = nn.Linear(2, 5)
        self.first, self.second = nn.Sequential(self.twice), nn.Sequential(self.twice)
        self.borrowed, self.outside = nn.Linear(2, 6), nn.Parameter(self.layer.weight.detach().clone())
        function: Any = partial(lambda module, x: x, self.tied)
        self.runs = [[self.tied, self.layer, self.first], [self.second, self.wrapper, function]]
        self.forward_funcs, self.chunks = [layer for run in self.runs for layer in run], 2

    def layers_of(self, chunk: int) -> list[Any]:
        return self.runs[chunk]

    def borrowed_parameters_of(self, chunk: int) -> list[nn.Parameter]:
        return [*self.tied.parameters(), *self.borrowed.parameters()] if chunk == 1 else []

    def parameters_of(self, chunk: int) -> list[nn.Parameter]:
        modules = [layer for layer in self.runs[chunk] if isinstance(layer, nn.Module)]
        return [*(p for module in modules for p in module.parameters()), *self.borrowed_parameters_of(chunk)]


def test_called_layers_have_the_weights_that_no_other_layer_has() -> None:
    stage = FakeStage()
    assert is_stage(stage) and not is_stage(stage.tied)
    layers = called_layers(stage, stage.parameters())
    assert layers == {layer: list(layer.parameters()) for layer in (stage.tied, stage.layer, stage.wrapper)}


def test_weights_of_functions_and_several_layers_are_kept_by_chunk() -> None:
    stage = FakeStage()
    chunks_of = {
        **dict.fromkeys([*stage.tied.parameters(), *stage.borrowed.parameters()], frozenset({1})),
        **dict.fromkeys([*stage.twice.parameters(), stage.outside], frozenset({0, 1})),
    }
    assert kept_weights(stage, stage.parameters()) == chunks_of
    assert kept_weights(stage, stage.layer.parameters()) == {}


def test_layer_may_name_the_module_that_reads_its_weights() -> None:
    layer = nn.Sequential(nn.Linear(2, 2))
    assert weight_reader(layer) is layer
    layer.weight_reader = layer[0]
    assert weight_reader(layer) is layer[0]
