"""Small modules that many layers share across stages, such as a position bias table or a word embedding.

    bias = Shared("bias", RelativeBias, num_heads)
    layers = [*[SharingLayerSpec(Layer, sizes, shares={"bias": bias}) for _ in range(12)], Head]

A stage with such layers has one copy under ``tied_modules``. A layer accesses it as ``self.bias``, but it is not one of
the layer's children, so the copy has a single name in the model and in checkpoints. All its parameters are tied: they
are equal on all stages from the start, their gradients are summed over the stages once per step, and the norm counts
them once. Buffers are not shared between stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from tds.deepspeed.api import LayerSpec, TiedLayerSpec, deepspeed, grid_of, layer_specs
from tds.param_info import info_of, mark_tied_copy


class Shared:
    """Specification for a shared module: its class, arguments and ``key``, which identifies it on all stages."""

    def __init__(self, key: str, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        if not key.isidentifier():
            raise ValueError(f"the key of a shared module must be an identifier such as 'bias', got {key!r}")
        self.key, self.typename, self.args, self.kwargs = key, typename, args, kwargs

    def build(self) -> nn.Module:
        """Build a new module."""
        return self.typename(*self.args, **self.kwargs)


_shared_modules: ContextVar[nn.ModuleDict | None] = ContextVar("holder", default=None)


@contextmanager
def use_shared_modules(modules: nn.ModuleDict) -> Iterator[nn.ModuleDict]:
    """Make layers built in the block use the shared modules in ``modules``; missing modules are built and added."""
    token = _shared_modules.set(modules)
    try:
        yield modules
    finally:
        _shared_modules.reset(token)


class SharingLayerSpec(LayerSpec):
    """Specification for a layer with shared modules as attributes; only for ``tds.PipelineModule``.

    A layer built outside of a ``PipelineModule``, for example to count its parameters, does not get these attributes.

    Args:
        shares: maps attribute names to shared modules.

    Raises:
        ValueError: (in ``build``) the layer already has an attribute of that name.
    """

    def __init__(
        self, typename: type[nn.Module], *module_args: Any, shares: Mapping[str, Shared], **module_kwargs: Any
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.shares = dict(shares)

    def build(self, log: bool = False) -> nn.Module:
        """Build the layer; inside ``use_shared_modules``, also set its shared modules."""
        layer: nn.Module = super().build(log)
        modules = _shared_modules.get()
        if modules is None:
            return layer
        for name, shared in self.shares.items():
            if hasattr(layer, name):
                raise ValueError(
                    f"{self.typename.__name__} cannot share a module as {name!r}, because it has this attribute. Use "
                    "another name"
                )
            if shared.key not in modules:
                modules[shared.key] = shared.build()
            _set_shared_module(layer, name, modules[shared.key])
        return layer


def _set_shared_module(layer: nn.Module, name: str, module: nn.Module) -> None:
    """Set an attribute without ``nn.Module.__setattr__``, which would register the module as a child."""
    vars(layer)[name] = module
    vars(layer).setdefault("borrowed_modules", []).append(module)


def layer_parameters(layer: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that a built layer uses, including those in shared modules.

    A layer is a module, a function, or a ``functools.partial`` that binds a tied module to its ``forward_fn``.
    """
    if isinstance(layer, nn.Module):
        yield from layer.parameters()
    yield from borrowed_parameters(layer)


def borrowed_parameters(layer: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that a built layer reads from modules outside of it: shared ones, and tied ones."""
    modules = [module for module in getattr(layer, "args", ()) if isinstance(module, nn.Module)]
    for module in modules:
        yield from module.parameters()
    for owner in (layer, *modules):
        for shared_module in vars(owner).get("borrowed_modules", ()) if isinstance(owner, nn.Module) else ():
            yield from shared_module.parameters()


@contextmanager
def initialized_tied_weights(module: Any) -> Iterator[None]:
    """Leave weights that have no values yet out of ``module.tied_comms`` within the block."""
    tied_comms = module.tied_comms
    module.tied_comms = {
        key: {
            **comm,
            "weight_attr": [
                name for name in comm["weight_attr"] if not info_of(attrgetter(name)(comm["module"])).is_uninitialized
            ],
        }
        for key, comm in tied_comms.items()
    }
    try:
        yield
    finally:
        module.tied_comms = tied_comms


def shared_layer_indices(specs: Sequence[Any]) -> dict[str, list[int]]:
    """Index the layers that share each module by its key.

    The keys are sorted, because every process must create their process groups in the same order.

    Raises:
        ValueError: a key is used for two classes, or for a shared module and a ``TiedLayerSpec``.
    """
    class_by_key: dict[str, Any] = {spec.key: TiedLayerSpec for spec in specs if isinstance(spec, TiedLayerSpec)}
    layers_by_key: dict[str, list[int]] = {}
    for layer_idx, spec in enumerate(specs):
        for shared in {item.key: item for item in getattr(spec, "shares", {}).values()}.values():
            expected_class = class_by_key.setdefault(shared.key, shared.typename)
            if expected_class is not shared.typename:
                raise ValueError(
                    f"a key must belong to one shared module, got {shared.key!r} for {expected_class.__name__} and for "
                    f"{shared.typename.__name__} of layer {layer_idx}. Use another key for one of them."
                )
            layers_by_key.setdefault(shared.key, []).append(layer_idx)
    return dict(sorted(layers_by_key.items()))


def count_shared_parameters(specs: Sequence[Any]) -> list[int]:
    """Count the trainable shared parameters of each layer."""
    num_parameters: dict[str, int] = {}
    for shared in (item for spec in specs for item in getattr(spec, "shares", {}).values()):
        if shared.key not in num_parameters:
            num_parameters[shared.key] = sum(p.numel() for p in shared.build().parameters() if p.requires_grad)
    keys = [{item.key for item in getattr(spec, "shares", {}).values()} for spec in specs]
    return [sum(num_parameters[key] for key in item) for item in keys]


def index_shared_modules(module: Any) -> dict[str, dict[str, Any]]:
    """Index each shared module's ranks, group and module in DeepSpeed's ``tied_comms`` format.

    Collective over all ranks. Parameters are marked as copies on all stages except the first that has the module, so
    that a norm counts each weight once.
    """
    tied_comms: dict[str, dict[str, Any]] = {}
    if module.num_stages == 1:
        return tied_comms
    for key, layers in shared_layer_indices(layer_specs(module)).items():
        stages = sorted({module.stage_owner(layer) for layer in layers})
        for ranks in _stage_ranks_by_replica(grid_of(module), stages):
            group = deepspeed.comm.new_group(ranks=ranks)
            if module.global_rank not in ranks:
                continue
            shared_module = module.tied_modules[key]
            names = [name for name, _ in shared_module.named_parameters()]
            tied_comms[key] = {"ranks": ranks, "group": group, "weight_attr": names, "module": shared_module}
            for parameter in shared_module.parameters():
                mark_tied_copy(parameter, module.global_rank != ranks[0])
    return tied_comms


def _stage_ranks_by_replica(grid: Any, stages: Sequence[int]) -> Iterator[list[int]]:
    """Yield the ranks of ``stages`` for each replica and tensor slice."""
    slices = range(grid.get_slice_parallel_world_size())
    for data_rank in range(grid.data_parallel_size):
        for tensor_rank in slices:
            axes = {"data": data_rank, "model": tensor_rank} if len(slices) > 1 else {"data": data_rank}
            yield [grid.stage_to_global(stage, **axes) for stage in stages]
