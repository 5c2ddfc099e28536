"""TorchDistCheckpoint: a Megatron-Core checkpoint with the interface of ours, so that every layout can load it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.huggingface.weights import expected_weights
from megatron.checkpoint.metadata import FileInfo, Manifest, TensorEntry
from megatron.checkpoint.opened_checkpoint import Checkpoint
from megatron.checkpoint.rank_errors import as_checkpoint_error, gather_verdict
from megatron.checkpoint.tensor_record import TensorRecord
from megatron.checkpoint.torch_dist.folder import BACKEND, TorchDistFolder, read_folder
from megatron.checkpoint.torch_dist.index import ChunkedTensor
from megatron.checkpoint.torch_dist.names import NOT_WEIGHTS, Place, candidates, locate
from megatron.checkpoint.torch_dist.reader import PlaceSlice, TorchDistReader, place_shape
from megatron.checkpoint.torch_dist.settings import build_config, setting_values
from megatron.config import Config
from megatron.errors import CheckpointError, marked
from megatron.models.common.huggingface import WeightMapping, read_into
from megatron.mpu.groups import Group
from megatron.mpu.topology import Topology
from megatron.ops.activations import is_gated

_STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_MAIN_PARAMS = ("fp32_param", "param", "master_param")
"""Names of the main params among the states of an optimizer; the last two are those of a distributed optimizer."""
_GATED_ROWS = re.compile(r".*\.up\.(weight|bias)")
_ROUTER_COUNTS = "routers/{}.tokens_per_expert"
_OTHER_FORM = (
    "it was saved in a form that only Megatron-LM can read, {}: save the checkpoint once more in Megatron-LM with "
    "--dist-ckpt-optim-fully-reshardable"
)


class TorchDistCheckpoint(Checkpoint):
    """A Megatron-Core checkpoint. Main params, moments and counters have our names; nothing is converted in advance.

    Reading a slice of a weight reads only the corresponding rows of Megatron-Core's tensors.

    Args:
        folder: the checkpoint, as read by ``read_folder``.
        config: our configuration for its model.
        stated_fields: names of settings that the checkpoint states.
        world: the ranks that load together.

    Raises:
        CheckpointError: tensors are missing, unknown, or have other shapes than the model.
    """

    def __init__(self, folder: TorchDistFolder, config: Config, stated_fields: set[str], world: Group) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in expected_weights(config).items()}
        self._places = _find_places(folder, shapes)
        self._prefixes, index, missing_reason = _find_states(folder, self._places, shapes)
        self._routers = {
            _ROUTER_COUNTS.format(name.removesuffix(".weight")): config.model.num_experts
            for name in shapes
            if name.endswith(".router.weight")
        }
        index |= {name: TensorEntry("I64", (num_experts,), ()) for name, num_experts in self._routers.items()}
        self._weights_are_gated = is_gated(config.model.activation)
        self._folder, self._tensor_reader = folder, TorchDistReader(folder.path, folder.index)
        metadata = _build_metadata(folder, config, stated_fields, missing_reason)
        files = {path.name: FileInfo(path.stat().st_size, 0) for path in sorted(folder.path.glob("*.distcp"))}
        super().__init__(folder.path, Manifest(folder.iteration, folder.iteration, metadata, files, index), world)

    def _load(self, records: list[TensorRecord], world: Group) -> None:
        def fill_all() -> None:
            with as_checkpoint_error(), torch.no_grad():
                self.check((record.name, record.shard) for record in records)
                for record in records:
                    self._fill(record)

        gather_verdict(world, fill_all, lambda _: None)

    def _fill(self, record: TensorRecord) -> None:
        target = record.shard.unpadded(record.tensor.detach())
        if record.name in self._routers:
            target.zero_()  # Megatron-Core does not store the tokens of each expert
        elif target.numel():
            prefix, name = self._prefixes[record.name]
            tensors = self._folder.index.tensors
            slices = {
                str(idx): PlaceSlice(
                    self._tensor_reader, prefix + place.name, place.element, tensors[prefix + place.name]
                )
                for idx, place in enumerate(self._places[name])
            }
            mapping = self._mapping(name, slices)
            read_into(target, mapping, slices, {key: part.shape for key, part in slices.items()}, record.shard)

    def _mapping(self, name: str, slices: Mapping[str, PlaceSlice]) -> WeightMapping:
        """Describe the row order of our weight: in a gated layer, all gates, then all values."""
        if not (self._weights_are_gated and _GATED_ROWS.fullmatch(name)):
            return WeightMapping(tuple(slices))
        num_packed = 2 // len(slices)
        return WeightMapping(tuple(slices), num_blocks=slices["0"].shape[0] // num_packed, num_packed=num_packed)


@marked(is_of_this_rank=False)
def open_torch_dist(path: Path, world: Group) -> TorchDistCheckpoint:
    """Open the Megatron-Core checkpoint in the folder ``iter_N``. Collective.

    Raises:
        CheckpointError: it is incomplete or damaged, or its model is not supported; raised on all ranks.
    """
    opened: list[TorchDistCheckpoint] = []

    def open_path() -> None:
        folder = read_folder(path)
        values = setting_values(folder)
        opened.append(TorchDistCheckpoint(folder, build_config(values), set(values), world))

    gather_verdict(world, open_path, lambda _: None)
    return opened[0]


def _find_places(folder: TorchDistFolder, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Place, ...]]:
    """Map our weight names to their places in the checkpoint.

    Raises:
        CheckpointError: lists weights that are missing or have another shape, and tensors without a weight of ours.
    """
    tensors = folder.index.tensors
    places = {name: locate(name, tensors) for name in shapes}
    problems, num_used = [], Counter[str]()
    for name, parts in places.items():
        if not parts or any(not _has_element(part, tensors[part.name]) for part in parts):
            problems.append(f"{name}: missing")
            continue
        num_used.update(part.name for part in parts)
        actual = [place_shape(part, tensors[part.name]) for part in parts]
        if (sum(shape[0] for shape in actual), *actual[0][1:]) != shapes[name]:
            problems.append(
                f"{name}: {parts[0].name} has the shape {list(actual[0])}, the model needs {list(shapes[name])}"
            )
    for parts in places.values():
        for part in parts:
            num_elements = math.prod(tensors[part.name].shape[: len(part.element)])
            if num_used[part.name] not in (0, num_elements):
                num_used[part.name] = 0  # reported once
                problems.append(f"{part.name}: {num_elements} layers and experts are stacked, more than the model has")
    used = {part.name for parts in places.values() for part in parts}
    used |= {place.name for name in places for place in candidates(name)}  # a norm may have two names
    unknown = [name for name in tensors if name not in used and not NOT_WEIGHTS.fullmatch(name)]
    problems += [f"{name}: no such tensor in this model" for name in unknown]
    if problems:
        listed = "; ".join(problems[:10])
        raise CheckpointError(
            f"{folder.path} does not fit the model of its arguments ({len(problems)} tensors): {listed}"
        )
    return places


def _has_element(place: Place, tensor: ChunkedTensor) -> bool:
    return all(idx < size for idx, size in zip(place.element, tensor.shape, strict=False))


def _find_states(
    folder: TorchDistFolder, places: Mapping[str, tuple[Place, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[str, str]], dict[str, TensorEntry], str]:
    """Find the main params and the optimizer states.

    Returns:
        Name in our checkpoints -> (prefix of the tensor's name, our weight); the index of these names; and the reason
        why the optimizer's state cannot be read, "" if it can.
    """
    tensors = folder.index.tensors
    states = {match[1]: None for name in tensors if (match := _STATE.fullmatch(name))}
    prefixes, index, num_left_out = {}, {}, 0

    def fits(prefix: str, parts: tuple[Place, ...]) -> bool:
        return all(
            prefix + part.name in tensors and tensors[prefix + part.name].shape == tensors[part.name].shape
            for part in parts
        )

    for name, parts in places.items():
        main_params = [f"optimizer.state.{key}." for key in _MAIN_PARAMS if key in states]
        prefix = next((prefix for prefix in main_params if fits(prefix, parts)), "")
        prefixes[f"weights/{name}"] = prefix, name
        for state in states:
            if state not in _MAIN_PARAMS:
                prefix = f"optimizer.state.{state}."
                if fits(prefix, parts):
                    prefixes[f"optimizer/{state}/{name}"] = prefix, name
                else:
                    num_left_out += any(prefix + part.name in tensors for part in parts)
    for our_name, (prefix, name) in prefixes.items():
        index[our_name] = TensorEntry(tensors[prefix + places[name][0].name].dtype, shapes[name], ())
    has_other_form = num_left_out or any(name.startswith("optimizer.distributed.") for name in tensors)
    if not has_other_form:
        return prefixes, index, ""
    prefixes = {name: value for name, value in prefixes.items() if not name.startswith("optimizer/")}
    index = {name: index[name] for name in prefixes}
    return prefixes, index, _OTHER_FORM.format(folder.sharding or "flat tensors")


def _build_metadata(
    folder: TorchDistFolder, config: Config, stated_fields: set[str], missing_reason: str
) -> dict[str, Any]:
    """Build the metadata of ``megatron.training.capture`` for a Megatron-LM run."""
    args = folder.args
    consumed = int(args.get("consumed_train_samples") or 0)
    updated = int(folder.scheduler.get("num_steps", consumed))
    updates = folder.adam_steps if folder.adam_steps is not None else folder.iteration
    sections = config.to_dict()
    for name, section in sections.items():
        if isinstance(section, dict) and name not in ("model", config.family):
            sections[name] = {key: value for key, value in section.items() if key in stated_fields}
    topology = Topology(
        pipe=int(args.get("pipeline_model_parallel_size") or 1),
        data=int(args.get("data_parallel_size") or 1),
        tensor=int(args.get("tensor_model_parallel_size") or 1),
        context=int(args.get("context_parallel_size") or 1),
    )
    return {
        "format": BACKEND,
        "progress": {
            "step": folder.iteration,
            "updates": updates,
            "samples_consumed": consumed,
            "samples_skipped": max(consumed - updated, 0),
            "tokens_consumed": consumed * int(args.get("seq_length") or 0),
        },
        "scaler": _scaler_state(folder.scaler, args),
        "optimizer": config.optimizer.optimizer,
        "optimizer_steps": updates,
        "optimizer_missing": missing_reason,
        "model": config.identity(),
        "config": sections,
        "layout": topology.axis_sizes(),
        "data_fingerprint": None,
        "data_order": None,
        "torch": None,
    }


def _scaler_state(scaler: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an fp16 run's dynamic loss-scale state; empty for other runs."""
    if not args.get("fp16") or args.get("loss_scale") or not scaler:
        return {}
    return {
        "scale": float(scaler["scale"]),
        "good_steps": int(scaler["growth_tracker"]),
        "overflows_left": max(int(scaler["hysteresis_tracker"]), 1),
        "is_dynamic": True,
        "hysteresis": int(args.get("hysteresis") or 2),
    }
