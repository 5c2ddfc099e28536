"""The layers of a model, whose weights ZeRO 3 gathers together.

A layer is an element of a ``ModuleList``, ``ModuleDict`` or ``Sequential``. If an element has more than half of its
weights in a ``ModuleList`` or ``ModuleDict`` (an encoder within a ``Sequential``, for example), it is split further:
the elements of those lists are layers, and so is the remainder. An element with smaller lists, such as the norms of a
layer, is not split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (*LISTS, nn.Sequential)
SPLIT_FRACTION = 0.5
"""A layer is split if its lists contain more than this fraction of its weights."""


def layers_of(module: nn.Module, weights: Iterable[nn.Parameter]) -> dict[nn.Module, list[nn.Parameter]]:
    """Find the layers in ``module``, each with the ``weights`` that belong to no other layer.

    A weight of nested layers belongs to the innermost layer.
    """
    owners: dict[nn.Parameter, set[nn.Module | None]] = {weight: set() for weight in weights}
    order: dict[nn.Module | None, None] = {}
    for inner, layer in _modules_with_layers(module, None, CONTAINERS):
        order[layer] = None
        for parameter in inner.parameters(recurse=False):
            if parameter in owners:
                owners[parameter].add(layer)
    weights_of: dict[nn.Module, list[nn.Parameter]] = {layer: [] for layer in order if layer is not None}
    for parameter, layers in owners.items():
        (layer, *other_layers) = layers
        if layer is not None and not other_layers:
            weights_of[layer].append(parameter)
    return {layer: layer_weights for layer, layer_weights in weights_of.items() if layer_weights}


def _modules_with_layers(
    module: nn.Module, layer: nn.Module | None, lists: tuple[type[nn.Module], ...]
) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Yield each module within ``module`` with the containing layer.

    Args:
        lists: types of containers whose elements are layers.
    """
    yield module, layer
    for child in module.children():
        if isinstance(module, lists):
            yield from _modules_with_layers(child, child, LISTS if _should_split(child) else ())
        else:
            yield from _modules_with_layers(child, layer, lists)


def _should_split(layer: nn.Module) -> bool:
    """Return True if most weights of ``layer`` are in lists of modules."""
    list_params = {p for inner in layer.modules() if isinstance(inner, LISTS) for p in inner.parameters()}
    return sum(p.numel() for p in list_params) > SPLIT_FRACTION * sum(p.numel() for p in layer.parameters())


def is_stage(module: nn.Module) -> bool:
    """Return True if ``module`` is a ``tds.PipelineModule``, which lists the layers that it calls in turn."""
    return hasattr(module, "layers_of")


def called_layers(module: nn.Module, weights: Iterable[nn.Parameter]) -> dict[nn.Module, list[nn.Parameter]]:
    """Find the layers that the forward of ``module`` calls, each with the ``weights`` that no other layer has.

    On a pipeline stage, the layers are those that the stage calls in turn. Weights that a layer reads without
    containing them (``kept_weights``) may belong to a layer of another chunk.
    """
    functions: Any = getattr(module, "forward_funcs", None)
    if functions is None:
        return layers_of(module, weights)
    owners: dict[nn.Parameter, list[nn.Module]] = {weight: [] for weight in weights}
    layers = [function for function in dict.fromkeys(functions) if isinstance(function, nn.Module)]
    for layer in layers:
        for weight in layer.parameters():
            if weight in owners:
                owners[weight].append(layer)
    weights_of = {layer: [w for w in layer.parameters() if owners.get(w) == [layer]] for layer in layers}
    return {layer: layer_weights for layer, layer_weights in weights_of.items() if layer_weights}


def kept_weights(stage: Any, weights: Iterable[nn.Parameter]) -> dict[nn.Parameter, frozenset[int]]:
    """Find the ``weights`` of a pipeline stage that no single layer owns, each with the chunks that read it.

    These are tied weights that a function reads, weights of shared modules, weights of several layers, and weights
    outside of layers, which any chunk may read.
    """
    num_chunks = stage.chunks
    chunks_of: dict[nn.Parameter, set[int]] = {weight: set() for weight in weights}
    layers_of_weight: dict[nn.Parameter, set[nn.Module]] = {weight: set() for weight in chunks_of}
    for chunk in range(num_chunks):
        for weight in stage.borrowed_parameters_of(chunk):
            if weight in chunks_of:
                chunks_of[weight].add(chunk)
        for layer in stage.layers_of(chunk):
            for weight in layer.parameters() if isinstance(layer, nn.Module) else ():
                if weight in layers_of_weight:
                    layers_of_weight[weight].add(layer)
    for weight, layers in layers_of_weight.items():
        if len(layers) > 1:
            chunks_of[weight] |= {c for c in range(num_chunks) if weight in set(stage.parameters_of(c))}
        elif not layers and not chunks_of[weight]:
            chunks_of[weight] |= set(range(num_chunks))
    return {weight: frozenset(chunks) for weight, chunks in chunks_of.items() if chunks}


def weight_reader(layer: nn.Module) -> nn.Module:
    """Return the module whose call reads the weights of ``layer``: itself, or its attribute ``weight_reader``.

    A layer has this attribute if its forward only returns an inner module, which the loss function calls.
    """
    reader: Any = getattr(layer, "weight_reader", layer)
    return reader if isinstance(reader, nn.Module) else layer
