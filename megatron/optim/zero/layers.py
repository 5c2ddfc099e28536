"""The layers of a model, whose weights are gathered together.

A layer is an element of a ``ModuleList``, ``ModuleDict`` or ``Sequential``. One of which more than half is in a
``ModuleList`` or ``ModuleDict`` of its own, such as an encoder within a ``Sequential``, is cut again: the elements of
that list are layers, and what remains is one. Smaller lists (the norms of a layer, say) cut nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict)


CONTAINERS = (*LISTS, nn.Sequential)


MOST = 0.5
"""Of the weights of a layer: with more of them in its lists it is cut again."""


def layers_of(module: nn.Module, weights: Iterable[nn.Parameter]) -> dict[nn.Module, list[nn.Parameter]]:
    """Return the layers in ``module`` and those of ``weights`` that one layer alone has, in the innermost."""
    holders: dict[nn.Parameter, set[nn.Module | None]] = {weight: set() for weight in weights}
    order: dict[nn.Module | None, None] = {}
    for place, layer in _places(module, None, CONTAINERS):
        order[layer] = None
        for parameter in place.parameters(recurse=False):
            if parameter in holders:
                holders[parameter].add(layer)
    found: dict[nn.Module, list[nn.Parameter]] = {layer: [] for layer in order if layer is not None}
    for parameter, layers in holders.items():
        (layer, *others) = layers
        if layer is not None and not others:
            found[layer].append(parameter)
    return {layer: own for layer, own in found.items() if own}


def _places(
    module: nn.Module, layer: nn.Module | None, lists: tuple[type[nn.Module], ...]
) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Yield each module within ``module`` and the layer that it is of.

    Args:
        lists: whose elements are layers.
    """
    yield module, layer
    for child in module.children():
        if isinstance(module, lists):
            yield from _places(child, child, LISTS if _is_cut(child) else ())
        else:
            yield from _places(child, layer, lists)


def _is_cut(layer: nn.Module) -> bool:
    """Return whether most of ``layer`` is in lists of modules."""
    inside = {p for part in layer.modules() if isinstance(part, LISTS) for p in part.parameters()}
    return sum(p.numel() for p in inside) > MOST * sum(p.numel() for p in layer.parameters())
