"""Checkpoint files of layers, one per layer of the whole model.

The names are DeepSpeed's, so its engine and ours read each other's, and any number of stages reads any other's:

| file | holds |
|---|---|
| ``layer_03-model_states.pt``, ``layer_03-model_01-model_states.pt`` | layer 3; its tensor slice 1 |
| ``layer_07-tied-model_states.pt`` | what a stage holds of a tied module beyond its tied weights; DeepSpeed loses it |
| ``shared_bias-model_states.pt``, ``shared_bias-model_01-model_states.pt`` | a module that layers share, by its key |
"""  # noqa: E501

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tds.deepspeed.api import (
    TiedLayerSpec,
    grid_of,
    layer_specs,
    weight_named,
)
from tds.deepspeed.module import layer_numbers
from tds.deepspeed.shared_layers import sharing_layers


@dataclass(frozen=True)
class SavedLayer:
    """A part of this stage that has a state, and the file it is read from.

    ``is_elsewhere``: the file is another layer's, which may hold more than the tied weight that this part has.
    """

    part: Any
    path: str
    number_of_files: int
    is_elsewhere: bool = False


def layers_to_load(module: Any, folder: str) -> Iterator[SavedLayer]:
    """Yield what this stage reads from ``folder``; a path that is not there says which file is missing."""
    slice_rank = grid_of(module).get_slice_parallel_rank()
    for index, layer in enumerate(module.forward_funcs):
        if hasattr(layer, "load_state_dict"):
            files = module.ckpt_layer_path_list(folder, index)
            files = [file for file in files if "-tied-" not in os.path.basename(file)]
            path = files[slice_rank] if slice_rank < len(files) else module.ckpt_layer_path(folder, index)
            yield SavedLayer(layer, path, len(files))
    for key, index in _only_as_functions(module).items():
        own = tied_path(module, folder, index)
        path = own if os.path.exists(own) else _path_of_first(module, key, own)
        yield SavedLayer(module.tied_modules[key], path, grid_of(module).get_slice_parallel_world_size(), path != own)
    for key in _shared_here(module):
        files = glob.glob(os.path.join(glob.escape(folder), f"shared_{key}-*model_states.pt"))
        yield SavedLayer(module.tied_modules[key], shared_path(module, folder, key), len(files))


def save_tied_rest(module: Any, folder: str, checkpoint_engine: Any) -> None:
    """Write what DeepSpeed's own files leave out: shared modules, and tied ones that hold more than tied weights.

    DeepSpeed writes a tied module where it is a layer, and not where only its ``forward_fn`` is. A shared module is
    written by the first stage that holds it.
    """
    if grid_of(module).data_parallel_id != 0:
        return
    for key, index in _only_as_functions(module).items():
        state = module.tied_modules[key].state_dict()
        if not (_has_layer(module, key) and _is_all_tied(module, key, state)):
            checkpoint_engine.save(state_dict=_copied(state), path=tied_path(module, folder, index))
    for key, layers in _shared_here(module).items():
        if min(map(module.stage_owner, layers)) == module.stage_id:
            state = module.tied_modules[key].state_dict()
            checkpoint_engine.save(state_dict=_copied(state), path=shared_path(module, folder, key))


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if torch.is_tensor(value) else value for name, value in state.items()}


def shared_path(module: Any, folder: str, key: str) -> str:
    """Return the path of a shared module's file, which has no layer's number."""
    place, name = os.path.split(module.ckpt_layer_path(folder, 0))
    return os.path.join(place, f"shared_{key}-" + name.split("-", 1)[1])


def tied_path(module: Any, folder: str, local_index: int) -> str:
    """Return the path of a tied module's own file; DeepSpeed's converters pass such names over."""
    place, name = os.path.split(module.ckpt_layer_path(folder, local_index))
    return os.path.join(place, name.replace("-", "-tied-", 1))


def _shared_here(module: Any) -> dict[str, list[int]]:
    """Return the numbers of the layers in the whole model that share each module, for those that this stage holds."""
    own = set(layer_numbers(module))
    return {key: layers for key, layers in sharing_layers(layer_specs(module)).items() if own & set(layers)}


def _only_as_functions(module: Any) -> dict[str, int]:
    """Return the local index of the first layer of each tied module that is no layer itself on this stage."""
    found: dict[str, int] = {}
    for index, number in enumerate(layer_numbers(module)):
        spec = layer_specs(module)[number]
        if isinstance(spec, TiedLayerSpec):
            found.setdefault(spec.key, index)
    layers = [id(layer) for layer in module.forward_funcs]
    return {key: index for key, index in found.items() if id(module.tied_modules[key]) not in layers}


def _tied_specs(module: Any, key: str) -> list[tuple[int, TiedLayerSpec]]:
    return [(n, s) for n, s in enumerate(layer_specs(module)) if isinstance(s, TiedLayerSpec) and s.key == key]


def _has_layer(module: Any, key: str) -> bool:
    return any(spec.forward_fn is None for _, spec in _tied_specs(module, key))


def _is_all_tied(module: Any, key: str, state: dict[str, Any]) -> bool:
    """True if every tensor of ``state`` is a tied weight, which lies in the file of its layer too."""
    part = module.tied_modules[key]
    tied = {weight_named(module, part, name).data_ptr() for name in module.tied_weight_attrs[key]}
    return all(torch.is_tensor(value) and value.data_ptr() in tied for value in state.values())


def _path_of_first(module: Any, key: str, own: str) -> str:
    """Return the file of the first layer that shares the module ``key``, else ``own``, which is not there."""
    folder, name = os.path.split(own)
    for number, _ in _tied_specs(module, key):
        of_number = f"layer_{number:02d}-" + name.split("-", 1)[1]
        for candidate in (of_number.replace("-tied-", "-", 1), of_number):
            if os.path.exists(os.path.join(folder, candidate)):
                return os.path.join(folder, candidate)
    return own
