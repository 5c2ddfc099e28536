"""The layers of a model, whose weights ZeRO 3 gathers together.

A layer is an element of a ``ModuleList``, ``ModuleDict`` or ``Sequential``. If an element has more than half of its
weights in a ``ModuleList`` or ``ModuleDict`` (an encoder within a ``Sequential``, for example), it is split further:
the elements of those lists are layers, and so is the remainder. An element with smaller lists, such as the norms of a
layer, is not split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
