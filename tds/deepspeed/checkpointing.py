"""save_checkpoint and load_checkpoint in DeepSpeed's directory layout.

Weights are stored in one file per layer (``layer_files``), so they can be loaded with any number of stages and chunks.
Optimizer states are stored in one file per stage, and can be loaded only if every rank has the layers that it had when
they were saved.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tds.deepspeed.api import (
    BF16_Optimizer,
)
from tds.deepspeed.layer_files import layers_to_load, save_tied_modules
from tds.deepspeed.module import layer_indices
from tds.deepspeed.safe_load import UnsafeFileError, make_safe, weights_only
from tds.torch_api import has_learning_rates

_log = logging.getLogger("tds")

LAYOUT_KEY = "tds"
"""Key in a stage's file with the indices of its layers; DeepSpeed's engine returns it as client state."""


class CheckpointError(RuntimeError):
    """Raised if a checkpoint is incomplete, unreadable or does not fit the model."""


class LayerCheckpoints:
    """Mixin of the engine that saves and loads checkpoints; it precedes DeepSpeed's engine in the MRO."""

    module: Any
    grid: Any
    optimizer: Any
    lr_scheduler: Any
    checkpoint_engine: Any
    checkpoint_folder: str | None
    stage_id: int
    global_rank: int
    mp_world_size: int
    seq_dp_world_size: int
    writes_layers_in_parallel: bool
    zero_optimization: Callable[[], bool]
    load_universal_checkpoint: Callable[[], bool]
    stage_files: Callable[[str, str], list[str]]
    load_zero_states: Callable[[str, str], None]
    zero_shapes: Callable[[], Any]
    _loads_optimizer = False

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        is_trusted: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint written by tds or by DeepSpeed. Collective.

        All arguments except ``is_trusted`` are those of DeepSpeed's ``load_checkpoint``.

        Args:
            is_trusted: allow the files to construct any object, which runs their author's code; see ``safe_load``.

        Returns:
            (path, client state), or (None, None) if there is no checkpoint.

        Raises:
            CheckpointError: on some rank, a file is missing or damaged, does not fit the model, or contains a class
                that is not allowed; or the ranks find different checkpoints; or the optimizer states have another
                layout. The model may be partly loaded: load another checkpoint, or end the program.
            ValueError: ``custom_load_fn`` is given; it is not supported, because each layer has its own file.
        """
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn must be None for a pipeline, because each layer is stored in its own file")
        agreed_tag = _agreed_tag(self, load_dir, tag)
        if agreed_tag is None:
            return None, None
        self._loads_optimizer = load_optimizer_states and not load_module_only and self.optimizer is not None
        with self._reading(is_trusted):
            path, state = super().load_checkpoint(  # type: ignore[misc]
                load_dir, agreed_tag, load_module_strict,
                load_optimizer_states and not self._is_bf16_without_zero(), load_lr_scheduler_states, load_module_only,
            )  # fmt: skip
            if path is None or state is None:
                return path, state
            if self._loads_optimizer and self._is_bf16_without_zero():
                self.load_zero_states(load_dir, agreed_tag)
                state.pop("optimizer", None)
        if not load_optimizer_states and not self.zero_optimization():
            # Otherwise the next step would restore the old weights.
            getattr(self.optimizer, "refresh_fp32_params", _no_op)()
        if load_lr_scheduler_states and not load_module_only and not self._loads_optimizer:
            self._set_lr_from_scheduler()
        state.pop(LAYOUT_KEY, None)
        return path, state

    @contextmanager
    def _reading(self, is_trusted: bool) -> Iterator[None]:
        """Read checkpoint files in the block, and raise on every rank if any rank fails. Collective.

        Args:
            is_trusted: allow the files to construct any object; otherwise only allowed classes (``safe_load``).
        """
        safe_load = make_safe(self.checkpoint_engine)
        safe_load.is_trusted, safe_load.last_path = is_trusted, None
        try:
            with nullcontext() if is_trusted else weights_only():
                yield
        except CheckpointError:  # raised on all ranks already
            raise
        except Exception as error:  # a damaged file may raise any error; the other ranks wait in all_ranks_problem
            file = safe_load.last_path or "the checkpoint"
            raise_on_all_ranks(
                str(error) if isinstance(error, UnsafeFileError) else f"{file} cannot be loaded: {error!r}"
            )
        else:
            raise_on_all_ranks(None)
        finally:
            safe_load.is_trusted = False

    def on_checkpoint_engine_set(self) -> None:
        make_safe(self.checkpoint_engine)

    def _is_bf16_without_zero(self) -> bool:
        """Return True for ``BF16_Optimizer`` without ZeRO.

        DeepSpeed saves this optimizer's states in ZeRO's format, but expects the format without ZeRO when it loads
        them.
        """
        return isinstance(self.optimizer, BF16_Optimizer) and not self.zero_optimization()

    def _set_lr_from_scheduler(self) -> None:
        """Set the optimizer's learning rates from the loaded scheduler.

        Needed if the optimizer states are not loaded, because torch saves the learning rates with them.
        """
        if self.optimizer is None or not has_learning_rates(self.lr_scheduler):
            return
        for group, lr in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = lr

    def module_state_dict(self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> Any:
        """Return the stage's state dict; while a checkpoint is saved, write its layer files instead and return None."""
        if self.checkpoint_folder is None:
            options = {"exclude_frozen_parameters": exclude_frozen_parameters, **kwargs}
            return super().module_state_dict(*args, **options)  # type: ignore[misc]
        self.module.checkpoint_parallel_write_pipeline = self.writes_layers_in_parallel
        self.module.save_state_dict(
            self.checkpoint_folder,
            checkpoint_engine=self.checkpoint_engine,
            exclude_frozen_params=exclude_frozen_parameters,
        )
        save_tied_modules(self.module, self.checkpoint_folder, self.checkpoint_engine)
        return None

    def load_module_state_dict(self, checkpoint: Any, strict: bool = True, *args: Any, **kwargs: Any) -> None:
        """Load this stage's layer files while a checkpoint is loaded, or the state dict in ``checkpoint["module"]``."""
        folder, self.checkpoint_folder = self.checkpoint_folder, None
        if folder is None or isinstance(checkpoint.get("module"), dict):
            super().load_module_state_dict(checkpoint, strict, *args, **kwargs)  # type: ignore[misc]
            return
        if self._loads_optimizer:
            raise_on_all_ranks(_layout_error(self, checkpoint))
        raise_on_all_ranks(_load_layers(self, folder, strict))

    def extra_checkpoint_state(self) -> dict[str, Any]:
        return {LAYOUT_KEY: {"layers": layer_indices(self.module)}}


def raise_on_all_ranks(problem: str | None) -> None:
    """Raise on every rank if any rank has a problem. Collective.

    Raises:
        CheckpointError: with the problem of the first rank that has one.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    _raise_first(problems)


def _raise_first(problems: list[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"{problem} (rank {rank})")


def _agreed_tag(engine: LayerCheckpoints, load_dir: str, tag: str | None) -> str | None:
    """Agree on the tag to load; None if no rank has a "latest" file. Collective.

    Raises:
        CheckpointError: the ranks find different tags, or files are missing or unreadable.
    """
    pointer = "latest_universal" if engine.load_universal_checkpoint() else "latest"
    chosen, problem = tag, None
    try:
        chosen = _read_pointer(os.path.join(load_dir, pointer)) if tag is None else str(tag)
        problem = None if chosen is None else _missing_files(engine, load_dir, chosen)
    except Exception as error:  # such as a file system error on one host
        problem = f"{load_dir} cannot be read: {error!r}"
    results: list[tuple[str | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(results, (chosen, problem))
    _raise_first([problem for _, problem in results])
    ranks: dict[str | None, list[int]] = {}
    for rank, (rank_tag, _) in enumerate(results):
        ranks.setdefault(rank_tag, []).append(rank)
    if len(ranks) > 1:
        tags = "; ".join(
            f"{_format_tag(rank_tag, pointer)} on {_format_ranks(tag_ranks)}" for rank_tag, tag_ranks in ranks.items()
        )
        raise CheckpointError(
            f"all ranks must load the same checkpoint, got {tags} in {load_dir}. Make the same folder "
            "visible on every host, or pass the tag"
        )
    if chosen is None and engine.load_universal_checkpoint():
        raise CheckpointError(f"a universal checkpoint requires a file {pointer}, got none in {load_dir}")
    if chosen is None and engine.global_rank == 0:
        _log.warning('no file "%s" in %s: no checkpoint is loaded. Pass the tag if there is one', pointer, load_dir)
    return chosen


def _read_pointer(path: str) -> str | None:
    if not os.path.isfile(path):
        return None
    with open(path) as file:
        return file.read().strip()


def _format_tag(tag: str | None, pointer: str) -> str:
    return f'no file "{pointer}"' if tag is None else f"tag {tag}"


def _format_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if ranks[8:] else ""
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks[:8]))}{more}"


def _no_op() -> None:
    return None


def _missing_files(engine: LayerCheckpoints, load_dir: str, tag: str) -> str | None:
    """Describe this rank's missing or surplus files; None if the file names are in order."""
    folder = os.path.join(load_dir, tag)
    if not engine.stage_files(load_dir, tag):
        return f"a checkpoint must have files mp_rank_*_model_states.pt, got none in {folder}. Check load_dir and tag"
    if engine.load_universal_checkpoint():
        return None
    size = engine.grid.get_slice_parallel_world_size()
    for layer in layers_to_load(engine.module, folder):
        if not os.path.exists(layer.path):
            return (
                f"the layer file {layer.path} does not exist: the checkpoint belongs to another model or is incomplete"
            )
        if layer.num_files != size:
            return (
                f"a layer must have one file per tensor slice, got {layer.num_files} files next to {layer.path} "
                f"for {size} tensor slices. Load with the number of slices with which the checkpoint was saved"
            )
    return None


def _load_layers(engine: LayerCheckpoints, folder: str, strict: bool) -> str | None:
    """Load this stage's layers and describe the first error; None if there is none."""
    for layer in layers_to_load(engine.module, folder):
        try:
            state = engine.checkpoint_engine.load(layer.path, map_location="cpu")
            if layer.is_from_other_layer:
                state = {name: state[name] for name in layer.module.state_dict() if name in state}
            layer.module.load_state_dict(state, strict=strict)
        except Exception as error:  # a damaged file may raise any error
            return f"{layer.path} cannot be loaded: {error}"
    return None


def _layout_error(engine: LayerCheckpoints, checkpoint: dict[str, Any]) -> str | None:
    """Describe the error if the optimizer states of ``checkpoint`` do not fit this rank's parameters, else None."""
    difference = _layout_difference(engine, checkpoint)
    if difference is None:
        return None
    return (
        f"optimizer states can be loaded only if each rank has the same layers as when they were saved: {difference}. "
        "Pass load_optimizer_states=False (--load-weights-only) to load only the weights."
    )


def _layout_difference(engine: LayerCheckpoints, checkpoint: dict[str, Any]) -> str | None:
    saved, current = checkpoint["mp_world_size"], engine.mp_world_size
    if saved != current:
        return f"they were saved with {saved} ranks per replica (stages x tensor slices), now {current}"
    layers = layer_indices(engine.module)
    layout = checkpoint.get(LAYOUT_KEY)
    if layout is not None and layout["layers"] != layers:
        return f"stage {engine.stage_id} had the layers {layout['layers']}, now {layers}"
    if layout is None and layers != list(range(layers[0], layers[-1] + 1)):
        return f"DeepSpeed saves one contiguous run of layers per stage, but stage {engine.stage_id} has {layers}"
    if engine.zero_optimization() or engine._is_bf16_without_zero():
        replicas, current_replicas = checkpoint["dp_world_size"], engine.seq_dp_world_size
        if replicas != current_replicas:
            return f"they were sharded over {replicas} replicas, now over {current_replicas}"
    if engine.zero_optimization():
        shapes, current_shapes = checkpoint["param_shapes"], engine.zero_shapes()
        return (
            None
            if shapes == current_shapes
            else f"ZeRO's states were saved for {_format_shapes(shapes)}, now {_format_shapes(current_shapes)}"
        )
    return _shape_difference(engine.optimizer, checkpoint["optimizer"])


def _format_shapes(shapes: Any) -> str:
    return ", ".join(f"{name} {list(shape)}" for group in shapes or [] for name, shape in group.items()) or "nothing"


def _shape_difference(optimizer: Any, state: Any) -> str | None:
    """Compare the shapes in a torch optimizer state dict with the parameters; other formats have their own checks."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        return None
    indices = [list(group["params"]) for group in state["param_groups"]]
    parameters = [list(group["params"]) for group in optimizer.param_groups]
    if [len(group) for group in indices] != [len(group) for group in parameters]:
        return f"groups of {[len(g) for g in indices]} parameters were saved, now {[len(g) for g in parameters]}"
    for idx, parameter in zip(sum(indices, []), sum(parameters, []), strict=True):
        for name, value in state["state"].get(idx, {}).items():
            if torch.is_tensor(value) and value.dim() > 0 and value.shape != parameter.shape:
                return f"{name} of parameter {idx} was saved as {list(value.shape)}, now {list(parameter.shape)}"
    return None
