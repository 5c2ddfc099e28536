"""Small modules that many layers share, wherever these layers lie: a table of position biases, a word table.

    bias = Shared("bias", RelativeBias, num_heads)
    layers = [*[SharingLayerSpec(Layer, sizes, shares={"bias": bias}) for _ in range(12)], Head]

A stage with such layers holds one copy under ``tied_modules``; a built layer finds it as ``self.bias`` and has it among
no children of its own, so the copy has one name and one place in a checkpoint. All parameters are tied: equal on all
holders from the start, their gradients added up over the holders once a step, in the norm once. Buffers are each
holder's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from tds.deepspeed.api import LayerSpec, TiedLayerSpec, deepspeed, grid_of, layer_specs
from tds.param_info import mark_tied_copy


class Shared:
    """A module that layers share: what makes it, and the ``key`` by which all stages know it."""

    def __init__(self, key: str, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        if not key.isidentifier():
            raise ValueError(f"the key of a shared module must be a name such as 'bias', got {key!r}")
        self.key, self.typename, self.args, self.kwargs = key, typename, args, kwargs

    def build(self) -> nn.Module:
        """Return a module of its own."""
        return self.typename(*self.args, **self.kwargs)


_holder: ContextVar[nn.ModuleDict | None] = ContextVar("holder", default=None)


@contextmanager
def held_in(modules: nn.ModuleDict) -> Iterator[nn.ModuleDict]:
    """Let layers built within find what they share in ``modules``, which gets what it lacks."""
    token = _holder.set(modules)
    try:
        yield modules
    finally:
        _holder.reset(token)


class SharingLayerSpec(LayerSpec):
    """A layer that finds shared modules under the names in ``shares``; for ``tds.PipelineModule`` alone.

    Built outside of one, as to count its parameters, it has no such attributes.

    Raises:
        ValueError: when built: the layer has an attribute of such a name already.
    """

    def __init__(
        self, typename: type[nn.Module], *module_args: Any, shares: Mapping[str, Shared], **module_kwargs: Any
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.shares = dict(shares)

    def build(self, log: bool = False) -> nn.Module:
        """Return the layer, with what it shares where ``held_in`` says where that is."""
        layer: nn.Module = super().build(log)
        modules = _holder.get()
        if modules is None:
            return layer
        for name, shared in self.shares.items():
            if hasattr(layer, name):
                raise ValueError(
                    f"{self.typename.__name__} shares a module by the name {name!r}, which is taken there. Take another"
                )
            if shared.key not in modules:
                modules[shared.key] = shared.build()
            _lend(layer, name, modules[shared.key])
        return layer


def _lend(layer: nn.Module, name: str, module: nn.Module) -> None:
    """Set an attribute past ``nn.Module.__setattr__``, which would make a child of it."""
    vars(layer)[name] = module
    vars(layer).setdefault("borrowed_modules", []).append(module)


def layer_parameters(layer: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that a built layer uses, its own and shared ones.

    A layer is a module, a function, or a tied module bound to its function.
    """
    for part in (layer, *getattr(layer, "args", ())):
        if isinstance(part, nn.Module):
            yield from part.parameters()
            for borrowed in vars(part).get("borrowed_modules", ()):
                yield from borrowed.parameters()


def sharing_layers(specs: Sequence[Any]) -> dict[str, list[int]]:
    """Return the numbers of the layers that share each module, by its key; the keys in order.

    Every process must go through the keys in one order, for it makes a process group for each.

    Raises:
        ValueError: one key for two kinds of modules, or for a ``TiedLayerSpec``, too.
    """
    kinds: dict[str, Any] = {spec.key: TiedLayerSpec for spec in specs if isinstance(spec, TiedLayerSpec)}
    found: dict[str, list[int]] = {}
    for number, spec in enumerate(specs):
        for shared in {each.key: each for each in getattr(spec, "shares", {}).values()}.values():
            first = kinds.setdefault(shared.key, shared.typename)
            if first is not shared.typename:
                raise ValueError(
                    f"a key must belong to one shared module, got {shared.key!r} for {first.__name__} and for "
                    f"{shared.typename.__name__} of layer {number}. Give one of them another key."
                )
            found.setdefault(shared.key, []).append(number)
    return dict(sorted(found.items()))


def count_shared(specs: Sequence[Any]) -> list[int]:
    """Return how many parameters to train each layer shares."""
    sizes: dict[str, int] = {}
    for shared in (each for spec in specs for each in getattr(spec, "shares", {}).values()):
        if shared.key not in sizes:
            sizes[shared.key] = sum(p.numel() for p in shared.build().parameters() if p.requires_grad)
    keys = [{each.key for each in getattr(spec, "shares", {}).values()} for spec in specs]
    return [sum(sizes[key] for key in each) for each in keys]


def index_shared_modules(module: Any) -> dict[str, dict[str, Any]]:
    """Return who holds each shared module, in DeepSpeed's form of tied ones (``tied_comms``). Collective over all.

    The copies on all stages but the first that holds one are marked as copies, so that a norm counts each weight once.
    """
    found: dict[str, dict[str, Any]] = {}
    if module.num_stages == 1:
        return found
    for key, layers in sharing_layers(layer_specs(module)).items():
        stages = sorted({module.stage_owner(layer) for layer in layers})
        for ranks in _by_replica(grid_of(module), stages):
            group = deepspeed.comm.new_group(ranks=ranks)
            if module.global_rank not in ranks:
                continue
            held = module.tied_modules[key]
            names = [name for name, _ in held.named_parameters()]
            found[key] = {"ranks": ranks, "group": group, "weight_attr": names, "module": held}
            for parameter in held.parameters():
                mark_tied_copy(parameter, module.global_rank != ranks[0])
    return found


def _by_replica(grid: Any, stages: Sequence[int]) -> Iterator[list[int]]:
    """Yield the ranks of ``stages`` for each replica and slice."""
    slices = range(grid.get_slice_parallel_world_size())
    for data in range(grid.data_parallel_size):
        for number in slices:
            axes = {"data": data, "model": number} if len(slices) > 1 else {"data": data}
            yield [grid.stage_to_global(stage, **axes) for stage in stages]
