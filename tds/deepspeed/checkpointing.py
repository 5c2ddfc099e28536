"""save_checkpoint and load_checkpoint in DeepSpeed's directory layout.

Weights are stored in one file per layer (``layer_files``), so any number of stages and chunks loads them. Optimizer
states are stored in one file for each stage and are loaded only where every rank holds the layers that it held then.
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
from tds.deepspeed.layer_files import layers_to_load, save_tied_rest
from tds.deepspeed.module import layer_numbers
from tds.deepspeed.safe_load import UnsafeFileError, make_safe, weights_only
from tds.torch_api import has_rates

_log = logging.getLogger("tds")

LAYOUT_KEY = "tds"
"""Where a stage's file says which layers it is of; DeepSpeed's engine hands it on as client state."""


class CheckpointError(RuntimeError):
    """A checkpoint that is incomplete, or that does not fit the model."""


class LayerCheckpoints:
    """The part of the engine that saves and loads, ahead of DeepSpeed's own in the order of the engine's classes."""

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
        """Load a checkpoint of this engine's or DeepSpeed's; return (path, client state), or (None, None). Collective.

        Args:
            is_trusted: let the files build any object, which runs code of whoever wrote them; see ``safe_loading``.

        Raises:
            CheckpointError: files are missing, damaged, do not fit or name what is not on the list of what they may
                hold, on any rank; ranks find different checkpoints; or optimizer states of another layout. What was
                read by then stays: load another checkpoint, or end the program.
            ValueError: ``custom_load_fn``, which layers in files of their own have no use for.
        """
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn must be None for a pipeline, whose layers lie in files of their own")
        chosen = _agreed_tag(self, load_dir, tag)
        if chosen is None:
            return None, None
        self._loads_optimizer = load_optimizer_states and not load_module_only and self.optimizer is not None
        with self._reading(is_trusted):
            path, state = super().load_checkpoint(  # type: ignore[misc]
                load_dir, chosen, load_module_strict,
                load_optimizer_states and not self._is_bf16_without_zero(), load_lr_scheduler_states, load_module_only,
            )  # fmt: skip
            if path is None or state is None:
                return path, state
            if self._loads_optimizer and self._is_bf16_without_zero():
                self.load_zero_states(load_dir, chosen)
                state.pop("optimizer", None)
        if not load_optimizer_states and not self.zero_optimization():
            getattr(self.optimizer, "refresh_fp32_params", _nothing)()  # else the next step writes the old weights back
        if load_lr_scheduler_states and not load_module_only and not self._loads_optimizer:
            self._take_rate_from_scheduler()
        state.pop(LAYOUT_KEY, None)
        return path, state

    @contextmanager
    def _reading(self, is_trusted: bool) -> Iterator[None]:
        """Read files in here, safely unless they are trusted; an error on any rank is one on all. Collective."""
        engine_load = make_safe(self.checkpoint_engine)
        engine_load.is_trusted, engine_load.last_path = is_trusted, None
        try:
            with nullcontext() if is_trusted else weights_only():
                yield
        except CheckpointError:  # comes from all ranks by itself
            raise
        except Exception as error:  # whatever a damaged file makes torch or DeepSpeed raise: the others wait for word
            file = engine_load.last_path or "the checkpoint"
            all_ranks_problem(
                str(error) if isinstance(error, UnsafeFileError) else f"{file} cannot be loaded: {error!r}"
            )
        else:
            all_ranks_problem(None)
        finally:
            engine_load.is_trusted = False

    def checkpoint_engine_made(self) -> None:
        make_safe(self.checkpoint_engine)

    def _is_bf16_without_zero(self) -> bool:
        """True for the optimizer that saves as with ZeRO and that DeepSpeed's load takes for one without."""
        return isinstance(self.optimizer, BF16_Optimizer) and not self.zero_optimization()

    def _take_rate_from_scheduler(self) -> None:
        """Set the learning rates, which torch keeps with the optimizer's states, to those that the scheduler saved."""
        if self.optimizer is None or not has_rates(self.lr_scheduler):
            return
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def module_state_dict(self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> Any:
        """Write this stage's layers and return None while a checkpoint is saved; else return the stage's state."""
        if self.checkpoint_folder is None:
            options = {"exclude_frozen_parameters": exclude_frozen_parameters, **kwargs}
            return super().module_state_dict(*args, **options)  # type: ignore[misc]
        self.module.checkpoint_parallel_write_pipeline = self.writes_layers_in_parallel
        self.module.save_state_dict(
            self.checkpoint_folder,
            checkpoint_engine=self.checkpoint_engine,
            exclude_frozen_params=exclude_frozen_parameters,
        )
        save_tied_rest(self.module, self.checkpoint_folder, self.checkpoint_engine)
        return None

    def load_module_state_dict(self, checkpoint: Any, strict: bool = True, *args: Any, **kwargs: Any) -> None:
        """Read this stage's layers while a checkpoint is loaded, or take a state given as ``checkpoint["module"]``."""
        folder, self.checkpoint_folder = self.checkpoint_folder, None
        if folder is None or isinstance(checkpoint.get("module"), dict):
            super().load_module_state_dict(checkpoint, strict, *args, **kwargs)  # type: ignore[misc]
            return
        if self._loads_optimizer:
            all_ranks_problem(_other_layout(self, checkpoint))
        all_ranks_problem(_load_layers(self, folder, strict))

    def added_checkpoint_state(self) -> dict[str, Any]:
        return {LAYOUT_KEY: {"layers": layer_numbers(self.module)}}


def all_ranks_problem(problem: str | None) -> None:
    """Raise on every rank what any of them found. Collective.

    Raises:
        CheckpointError: with the problem of the first rank that has one.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    _raise_first(problems)


def _raise_first(problems: list[str | None]) -> None:
    for rank, found in enumerate(problems):
        if found is not None:
            raise CheckpointError(f"{found} (rank {rank})")


def _agreed_tag(engine: LayerCheckpoints, load_dir: str, tag: str | None) -> str | None:
    """Return the tag to load, the same on every rank; None where there is no "latest" anywhere. Collective.

    Raises:
        CheckpointError: ranks find different ones, or files are missing.
    """
    pointer = "latest_universal" if engine.load_universal_checkpoint() else "latest"
    chosen, problem = tag, None
    try:
        chosen = _pointed_at(os.path.join(load_dir, pointer)) if tag is None else str(tag)
        problem = None if chosen is None else _missing_files(engine, load_dir, chosen)
    except Exception as error:  # a file system's errors, of one host alone
        problem = f"{load_dir} cannot be read: {error!r}"
    found: list[tuple[str | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(found, (chosen, problem))
    _raise_first([problem for _, problem in found])
    ranks: dict[str | None, list[int]] = {}
    for rank, (each, _) in enumerate(found):
        ranks.setdefault(each, []).append(rank)
    if len(ranks) > 1:
        tags = "; ".join(f"{_name(each, pointer)} on {_listed(those)}" for each, those in ranks.items())
        raise CheckpointError(
            f"all ranks must load the same checkpoint, got {tags}, in {load_dir}. Let every host see the same folder, "
            "or pass the tag"
        )
    if chosen is None and engine.load_universal_checkpoint():
        raise CheckpointError(f"a universal checkpoint must have a file {pointer}, got none in {load_dir}")
    if chosen is None and engine.global_rank == 0:
        _log.warning('no file "%s" in %s: nothing is loaded. Pass the tag if there is a checkpoint', pointer, load_dir)
    return chosen


def _pointed_at(path: str) -> str | None:
    if not os.path.isfile(path):
        return None
    with open(path) as file:
        return file.read().strip()


def _name(tag: str | None, pointer: str) -> str:
    return f'no file "{pointer}"' if tag is None else f"tag {tag}"


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if ranks[8:] else ""
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks[:8]))}{more}"


def _nothing() -> None:
    return None


def _missing_files(engine: LayerCheckpoints, load_dir: str, tag: str) -> str | None:
    """Return what is wrong with the names of the files that this rank reads."""
    folder = os.path.join(load_dir, tag)
    if not engine.stage_files(load_dir, tag):
        return f"a checkpoint must have files mp_rank_*_model_states.pt, got none in {folder}. Check load_dir and tag"
    if engine.load_universal_checkpoint():
        return None
    size = engine.grid.get_slice_parallel_world_size()
    for layer in layers_to_load(engine.module, folder):
        if not os.path.exists(layer.path):
            return (
                f"each layer must have its file, got no {layer.path}: the checkpoint is of another model or cut short"
            )
        if layer.number_of_files != size:
            return (
                f"a layer must have one file for each tensor slice, got {layer.number_of_files} beside {layer.path} "
                f"and {size} slices here; load with as many slices as saved"
            )
    return None


def _load_layers(engine: LayerCheckpoints, folder: str, strict: bool) -> str | None:
    """Load this stage's layers; return what went wrong."""
    for layer in layers_to_load(engine.module, folder):
        try:
            state = engine.checkpoint_engine.load(layer.path, map_location="cpu")
            if layer.is_elsewhere:
                state = {name: state[name] for name in layer.part.state_dict() if name in state}
            layer.part.load_state_dict(state, strict=strict)
        except Exception as error:  # whatever a damaged file makes torch raise
            return f"{layer.path} cannot be loaded: {error}"
    return None


def _other_layout(engine: LayerCheckpoints, checkpoint: dict[str, Any]) -> str | None:
    """Return why the optimizer states of ``checkpoint`` are not those of this rank's parameters."""
    difference = _difference(engine, checkpoint)
    if difference is None:
        return None
    return (
        f"optimizer states can be loaded only where each rank holds the layers that it held when they were saved: "
        f"{difference}. Pass load_optimizer_states=False to load the weights alone."
    )


def _difference(engine: LayerCheckpoints, checkpoint: dict[str, Any]) -> str | None:
    saved, now = checkpoint["mp_world_size"], engine.mp_world_size
    if saved != now:
        return f"saved on {saved} ranks for each replica (stages x tensor slices), now {now}"
    layers = layer_numbers(engine.module)
    layout = checkpoint.get(LAYOUT_KEY)
    if layout is not None and layout["layers"] != layers:
        return f"stage {engine.stage_id} had the layers {layout['layers']}, now {layers}"
    if layout is None and layers != list(range(layers[0], layers[-1] + 1)):
        return f"DeepSpeed's stages hold one run of layers each, here stage {engine.stage_id} has {layers}"
    if engine.zero_optimization() or engine._is_bf16_without_zero():
        replicas, here = checkpoint["dp_world_size"], engine.seq_dp_world_size
        if replicas != here:
            return f"they were cut over {replicas} replicas, now {here}"
    if engine.zero_optimization():
        shapes, wanted = checkpoint["param_shapes"], engine.zero_shapes()
        return (
            None
            if shapes == wanted
            else f"ZeRO's states were saved for {_format_shapes(shapes)}, now {_format_shapes(wanted)}"
        )
    return _other_shapes(engine.optimizer, checkpoint["optimizer"])


def _format_shapes(shapes: Any) -> str:
    return ", ".join(f"{name} {list(shape)}" for group in shapes or [] for name, shape in group.items()) or "nothing"


def _other_shapes(optimizer: Any, state: Any) -> str | None:
    """Compare the shapes in a state of torch's form with the parameters; other forms check themselves."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        return None
    numbers = [list(group["params"]) for group in state["param_groups"]]
    parameters = [list(group["params"]) for group in optimizer.param_groups]
    if [len(group) for group in numbers] != [len(group) for group in parameters]:
        return f"groups of {[len(g) for g in numbers]} parameters were saved, now {[len(g) for g in parameters]}"
    for number, parameter in zip(sum(numbers, []), sum(parameters, []), strict=True):
        for name, value in state["state"].get(number, {}).items():
            if torch.is_tensor(value) and value.dim() > 0 and value.shape != parameter.shape:
                return f"{name} of parameter {number} was saved as {list(value.shape)}, now {list(parameter.shape)}"
    return None
