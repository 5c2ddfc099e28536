"""Export a checkpoint of ours to Megatron-LM's format ``torch_dist``."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron import files
from megatron.checkpoint.huggingface.folder import new_folder
from megatron.checkpoint.one_process import WEIGHTS, read_full, weight_names
from megatron.checkpoint.opened_checkpoint import Checkpoint
from megatron.checkpoint.torch_dist.arguments import SavedRun, arguments_of, check_gelu, scheduler_state
from megatron.checkpoint.torch_dist.folder import BACKEND, COMMON, FORMAT_FILE, POINTER, TorchDistFolder
from megatron.checkpoint.torch_dist.index import ChunkedTensor, TorchDistIndex
from megatron.checkpoint.torch_dist.names import LAYERS, Place, stored_places
from megatron.checkpoint.torch_dist.settings import build_config, setting_values
from megatron.checkpoint.torch_dist.writer import TensorEntry, write_entries
from megatron.config import Config
from megatron.config.layer_types import has_experts
from megatron.errors import CheckpointError, ConfigError
from megatron.models.common.huggingface import WeightMapping, weight_to_hf
from megatron.ops.activations import is_gated

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MODULES_WITH_EXTRA_STATE = (
    "self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention", "mlp.linear_fc1",
    "mlp.linear_fc2", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2",
)  # fmt: skip
"""Modules of a layer for which Megatron-Core stores an object; it is None unless the module computes in fp8."""
_EXPERT_MODULES = ("linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class ExportOptions:
    """Form of the optimizer state in an export.

    Args:
        uses_distributed_optimizer: the run in Megatron-LM has --use-distributed-optimizer.
        has_torch_adam: Megatron-LM uses torch's AdamW, because neither Apex nor Transformer Engine is installed.
        has_expert_parallelism: the run has --expert-model-parallel-size above 1.
        dtype: weight type in training; None: as in the run that saved the checkpoint.
    """

    uses_distributed_optimizer: bool = False
    has_torch_adam: bool = False
    has_expert_parallelism: bool = False
    dtype: str | None = None


def export_torch_dist(checkpoint: Checkpoint, output: Path, options: ExportOptions) -> tuple[Path, list[str]]:
    """Write ``checkpoint`` into the folder ``output``/iter_N; return this folder, and notes for the user.

    Only one tensor is in memory at a time.

    Raises:
        CheckpointError: Megatron-Core has no such model, or the optimizer is not Adam.
        ConfigError: ``output`` has a checkpoint for this iteration, or cannot be written.
    """
    run = SavedRun.from_metadata(checkpoint.metadata)
    check_gelu(run.config)
    states = sorted({name.split("/")[1] for name in checkpoint.names() if name.startswith("optimizer/")})
    if states not in ([], sorted(_MOMENTS)):
        raise CheckpointError(f"{checkpoint.path} must have the states of AdamW for an export, got {', '.join(states)}")
    args = arguments_of(run, uses_distributed_optimizer=options.uses_distributed_optimizer, has_optimizer=bool(states))
    if options.dtype is not None:
        args |= {"bf16": options.dtype == "bf16", "fp16": options.dtype == "fp16"}
    dtype = _DTYPES[options.dtype or run.dtype]
    entries = list(_entries(checkpoint, run.config, dtype, states, options))
    _check_round_trip(checkpoint, run, args, entries)
    folder = output / f"iter_{checkpoint.step:07d}"
    if folder.exists():
        raise ConfigError(f"--output must not contain {folder.name}, got {output}. Name another folder")
    files.make_folder(output)
    with new_folder(folder) as temporary:
        write_entries(temporary, entries, _extra_states(run.config))
        common = _common_state(checkpoint, run, args, dtype, states, options)
        buffer = io.BytesIO()
        torch.save(common, buffer)
        files.write_bytes(temporary / COMMON, buffer.getvalue())
        backend = {"sharded_backend": BACKEND, "sharded_backend_version": 1, "common_backend": "torch"}
        files.write_bytes(temporary / FORMAT_FILE, json.dumps({**backend, "common_backend_version": 1}).encode())
    files.replace_bytes(output / POINTER, str(checkpoint.step).encode())
    return folder, list(_notes(run, states))


def _notes(run: SavedRun, states: list[str]) -> Iterator[str]:
    if not states:
        yield "the checkpoint has no optimizer state: continue in Megatron-LM with --no-load-optim or --finetune"
    elif run.optimizer.lr_step_offset == 0:
        yield (
            "the run has --lr-step-offset 0: its last step had the learning rate of Megatron-LM's next step, which "
            "therefore occurs twice"
        )


def _entries(
    checkpoint: Checkpoint, config: Config, dtype: torch.dtype, states: list[str], options: ExportOptions
) -> Iterator[TensorEntry]:
    """Yield all tensor chunks: weights, main params (if they are stored separately), and optimizer states."""
    is_stacked = not config.model.num_experts or config.model.moe_layer_freq.strip() == "1"
    has_main_params = bool(states) and (options.uses_distributed_optimizer or dtype != torch.float32)
    main_param = "param" if options.uses_distributed_optimizer else "fp32_param"
    for name in weight_names(checkpoint):
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        is_expert_layer = layer is not None and has_experts(config.model, layer)
        places = stored_places(name, is_stacked=is_stacked, has_experts=is_expert_layer)
        if not places:
            raise CheckpointError(f"{checkpoint.path}: Megatron-Core's GPT has no weight for {name}")
        shape = checkpoint.shape(WEIGHTS + name)
        mapping = _mapping(name, shape, config)
        is_trained = f"optimizer/exp_avg/{name}" in checkpoint.names()
        sources = [("", WEIGHTS + name, dtype if is_trained or not states else checkpoint.dtype(WEIGHTS + name))]
        if is_trained:
            if has_main_params:
                sources.append((f"optimizer.state.{main_param}.", WEIGHTS + name, torch.float32))
            sources += [(f"optimizer.state.{state}.", f"optimizer/{state}/{name}", torch.float32) for state in states]
        for place in places:
            leading = _leading_sizes(place, config)
            for prefix, source, source_dtype in sources:
                yield TensorEntry(
                    prefix + place.name,
                    (*leading, *shape),
                    (*place.element, *[0] * len(shape)),
                    (*[1] * len(leading), *shape),
                    source_dtype,
                    partial(_read_rows, checkpoint, source, mapping),
                )


def _leading_sizes(place: Place, config: Config) -> tuple[int, ...]:
    """List the sizes of the dimensions in which layers and experts are stacked."""
    sizes: list[int] = []
    if place.element:
        is_layer_in_name = place.name.removeprefix(LAYERS)[0].isdigit()
        sizes = [] if is_layer_in_name else [config.model.num_layers]
        sizes += [config.model.num_experts] * (len(place.element) - len(sizes))
    return tuple(sizes)


def _mapping(name: str, shape: tuple[int, ...], config: Config) -> WeightMapping:
    if is_gated(config.model.activation) and name.rpartition(".")[0].endswith(".up"):
        return WeightMapping(("rows",), num_blocks=shape[0] // 2, num_packed=2)
    return WeightMapping(("rows",))


def _read_rows(checkpoint: Checkpoint, name: str, mapping: WeightMapping) -> torch.Tensor:
    """Read the tensor ``name`` with its rows in Megatron-Core's order."""
    return weight_to_hf(mapping, read_full(checkpoint, name))["rows"]


def _check_round_trip(
    checkpoint: Checkpoint, run: SavedRun, args: Mapping[str, Any], entries: list[TensorEntry]
) -> None:
    """Check that the export's arguments and names describe the same model when they are read.

    Raises:
        CheckpointError: lists the settings that Megatron-LM does not have.
    """
    tensors = {entry.name: ChunkedTensor("F32", entry.shape, ()) for entry in entries}
    folder = TorchDistFolder(checkpoint.path, TorchDistIndex(tensors, {}), args, checkpoint.step)
    exported, saved = build_config(setting_values(folder)).identity(), run.config.identity()
    keys = [key for key in {**saved, **exported} if key != "family" and saved.get(key) != exported.get(key)]
    if keys:
        listed = ", ".join(f"{key} {saved.get(key)}" for key in keys)
        raise CheckpointError(f"{checkpoint.path} has settings that Megatron-LM's GPT does not have: {listed}")


def _extra_states(config: Config) -> dict[str, Any]:
    """Build the objects that Megatron-Core requests for each layer's modules."""
    model, objects = config.model, {}
    is_stacked = not model.num_experts or model.moe_layer_freq.strip() == "1"
    for layer in range(model.num_layers):
        prefix, offset, size = (
            (LAYERS, f"{layer}", f"{model.num_layers}") if is_stacked else (f"{LAYERS}{layer}.", "0", "1")
        )
        for module in _MODULES_WITH_EXTRA_STATE:
            objects[f"{prefix}{module}._extra_state/shard_{offset}_{size}"] = [None]
        if has_experts(model, layer):
            for module in _EXPERT_MODULES:
                for expert in range(model.num_experts):
                    offsets = (
                        f"{offset}.{expert}_{size}.{model.num_experts}"
                        if is_stacked
                        else f"{expert}_{model.num_experts}"
                    )
                    objects[f"{prefix}mlp.experts.experts.{module}._extra_state/shard_{offsets}"] = [None]
    return objects


def _common_state(
    checkpoint: Checkpoint,
    run: SavedRun,
    args: Mapping[str, Any],
    dtype: torch.dtype,
    states: list[str],
    options: ExportOptions,
) -> dict[str, Any]:
    """Build the content of ``common.pt``.

    Source: Megatron-LM, megatron/training/checkpointing.py, ``generate_state_dict``.
    """
    content_metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if options.uses_distributed_optimizer:
        content_metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        content_metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    common = {
        "args": argparse.Namespace(**args, params_dtype=dtype),
        "checkpoint_version": 3.0,
        "iteration": checkpoint.step,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content_metadata,
    }
    if not states:
        return common
    steps = int(checkpoint.metadata["optimizer_steps"])
    make_state: Callable[[bool], dict[str, Any]] = partial(_optimizer_state, run, steps, dtype, options, checkpoint)
    has_two = bool(run.config.model.num_experts) and options.has_expert_parallelism
    common["optimizer"] = {0: make_state(False), 1: make_state(True)} if has_two else make_state(False)
    common["opt_param_scheduler"] = scheduler_state(run)
    return common


def _optimizer_state(
    run: SavedRun, steps: int, dtype: torch.dtype, options: ExportOptions, checkpoint: Checkpoint, is_expert: bool
) -> dict[str, Any]:
    """Build the state of one of Megatron-Core's optimizers without its tensors.

    Args:
        is_expert: the experts' optimizer, which is separate with expert parallelism.
    """
    settings = run.optimizer
    group = {
        "is_expert_parallel": is_expert, "default_config": True, "lr_mult": 1.0, "is_decoupled_lr": False,
        "max_lr": settings.lr, "min_lr": settings.min_lr, "lr": settings.lr, "bias_correction": True,
        "betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_eps,
        "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
        "fused": None, "decoupled_weight_decay": True,
    }  # fmt: skip
    if options.uses_distributed_optimizer or not options.has_torch_adam:  # torch's AdamW counts by parameter
        group["step"] = steps
    groups = [{**group, "wd_mult": 1.0, "weight_decay": settings.weight_decay}]
    if not is_expert or run.config.model.hidden_bias:
        groups.append({**group, "wd_mult": 0.0, "weight_decay": 0.0})
    state: dict[str, Any] = {"param_groups": groups}
    if not options.uses_distributed_optimizer:
        state["state"] = {"common_step": torch.tensor(float(steps))} if options.has_torch_adam else {}
        if dtype == torch.float32:
            return state
    state = {"optimizer": state}
    if options.uses_distributed_optimizer:
        state["param_state_sharding_type"] = "fully_reshardable"
    scaler = checkpoint.metadata.get("scaler") or {}
    if dtype == torch.float16 and scaler.get("is_dynamic"):
        state["grad_scaler"] = {
            "scale": torch.tensor([float(scaler["scale"])]),
            "growth_tracker": int(scaler["good_steps"]) % max(int(run.precision.get("loss_scale_window") or 1000), 1),
            "hysteresis_tracker": int(scaler["overflows_left"]),
        }
    return state
