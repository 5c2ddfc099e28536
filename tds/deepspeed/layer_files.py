"""Layer checkpoint files, one per layer in the full model.

The files have DeepSpeed's names. DeepSpeed's engine and tds's can load each other's files, with any number of stages:

| file | content |
|---|---|
| ``layer_03-model_states.pt``, ``layer_03-model_01-model_states.pt`` | layer 3; its tensor slice 1 |
| ``layer_07-tied-model_states.pt`` | a stage's copy of a tied module, if it has more state than its tied weights |
| ``shared_bias-model_states.pt``, ``shared_bias-model_01-model_states.pt`` | the shared module with the key "bias" |
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
    tied_weight,
)
from tds.deepspeed.module import layer_indices
from tds.deepspeed.shared_layers import shared_layer_indices


@dataclass(frozen=True)
class SavedLayer:
    """A module on this stage that has state, and the file from which it is loaded.

    Attributes:
        module: the module.
        path: the file.
        num_files: number of existing files for this module, one per tensor slice.
        is_from_other_layer: the file belongs to another layer and may contain more tensors than this module's tied
            weight.
    """

    module: Any
    path: str
    num_files: int
    is_from_other_layer: bool = False


def layers_to_load(module: Any, folder: str) -> Iterator[SavedLayer]:
    """Yield the modules that this stage loads from ``folder``, even if their files are missing."""
    slice_rank = grid_of(module).get_slice_parallel_rank()
    for index, layer in enumerate(module.forward_funcs):
        if hasattr(layer, "load_state_dict"):
            files = module.ckpt_layer_path_list(folder, index)
            files = [file for file in files if "-tied-" not in os.path.basename(file)]
            path = files[slice_rank] if slice_rank < len(files) else module.ckpt_layer_path(folder, index)
            yield SavedLayer(layer, path, len(files))
    for key, index in _function_only_modules(module).items():
        tied = tied_path(module, folder, index)
        path = tied if os.path.exists(tied) else _first_tied_path(module, key, tied)
        yield SavedLayer(module.tied_modules[key], path, grid_of(module).get_slice_parallel_world_size(), path != tied)
    for key in _shared_layers_on_stage(module):
        files = glob.glob(os.path.join(glob.escape(folder), f"shared_{key}-*model_states.pt"))
        yield SavedLayer(module.tied_modules[key], shared_path(module, folder, key), len(files))


def save_tied_modules(module: Any, folder: str, checkpoint_engine: Any) -> None:
    """Save the modules that DeepSpeed does not save: shared modules and tied-module copies.

    DeepSpeed saves a tied module only on stages where the module itself is a layer. On a stage where only its
    ``forward_fn`` is a layer, this function saves the stage's copy, unless all its state is in tied weights. A shared
    module is saved by the first stage that has it.
    """
    if grid_of(module).data_parallel_id != 0:
        return
    for key, index in _function_only_modules(module).items():
        state = module.tied_modules[key].state_dict()
        if not (_has_layer(module, key) and _is_all_tied(module, key, state)):
            checkpoint_engine.save(state_dict=_clone_state(state), path=tied_path(module, folder, index))
    for key, layers in _shared_layers_on_stage(module).items():
        if min(map(module.stage_owner, layers)) == module.stage_id:
            state = module.tied_modules[key].state_dict()
            checkpoint_engine.save(state_dict=_clone_state(state), path=shared_path(module, folder, key))


def _clone_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if torch.is_tensor(value) else value for name, value in state.items()}


def shared_path(module: Any, folder: str, key: str) -> str:
    """Return a shared module's file path, which contains the key instead of a layer index."""
    directory, name = os.path.split(module.ckpt_layer_path(folder, 0))
    return os.path.join(directory, f"shared_{key}-" + name.split("-", 1)[1])


def tied_path(module: Any, folder: str, local_index: int) -> str:
    """Return the file path of this stage's copy of a tied module. DeepSpeed's converters ignore such names."""
    directory, name = os.path.split(module.ckpt_layer_path(folder, local_index))
    return os.path.join(directory, name.replace("-", "-tied-", 1))


def _shared_layers_on_stage(module: Any) -> dict[str, list[int]]:
    """Map each shared module of this stage to the indices of all model layers that share it."""
    local_layers = set(layer_indices(module))
    return {
        key: layers for key, layers in shared_layer_indices(layer_specs(module)).items() if local_layers & set(layers)
    }


def _function_only_modules(module: Any) -> dict[str, int]:
    """Map each tied module that is not itself a layer on this stage to the local index of its first layer."""
    first_idx: dict[str, int] = {}
    for index, layer_idx in enumerate(layer_indices(module)):
        spec = layer_specs(module)[layer_idx]
        if isinstance(spec, TiedLayerSpec):
            first_idx.setdefault(spec.key, index)
    layers = [id(layer) for layer in module.forward_funcs]
    return {key: index for key, index in first_idx.items() if id(module.tied_modules[key]) not in layers}


def _tied_specs(module: Any, key: str) -> list[tuple[int, TiedLayerSpec]]:
    return [
        (layer_idx, spec)
        for layer_idx, spec in enumerate(layer_specs(module))
        if isinstance(spec, TiedLayerSpec) and spec.key == key
    ]


def _has_layer(module: Any, key: str) -> bool:
    return any(spec.forward_fn is None for _, spec in _tied_specs(module, key))


def _is_all_tied(module: Any, key: str, state: dict[str, Any]) -> bool:
    """Return True if every tensor of ``state`` is a tied weight, which the file of the tied layer also contains."""
    tied_module = module.tied_modules[key]
    tied = {tied_weight(module, tied_module, name).data_ptr() for name in module.tied_weight_attrs[key]}
    return all(torch.is_tensor(value) and value.data_ptr() in tied for value in state.values())


def _first_tied_path(module: Any, key: str, default_path: str) -> str:
    """Find the file of the first layer tied by ``key``; ``default_path`` if no such file exists."""
    folder, name = os.path.split(default_path)
    for layer_idx, _ in _tied_specs(module, key):
        layer_file = f"layer_{layer_idx:02d}-" + name.split("-", 1)[1]
        for candidate in (layer_file.replace("-tied-", "-", 1), layer_file):
            if os.path.exists(os.path.join(folder, candidate)):
                return os.path.join(folder, candidate)
    return default_path
