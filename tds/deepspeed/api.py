"""The names of DeepSpeed that tds uses. No other file imports DeepSpeed or uses its private names.

DeepSpeed's version is checked before all imports. Each private name has a function or a method here, under a name of
ours, and a line in tests/tds/test_deepspeed_contract.py: a new version of DeepSpeed changes only this file. To replace
a private method of DeepSpeed, override the method of ``BaseEngine`` or ``BaseModule`` that calls it. torch's private
names are in ``tds.torch_api``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from tds import device
from tds.deepspeed.alias import theirs
from tds.p2p.process_groups import limit_groups
from tds.torch_api import default_timeout

deepspeed = theirs()

from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT  # noqa: E402
from deepspeed.pipe import LayerSpec as LayerSpec  # noqa: E402
from deepspeed.pipe import TiedLayerSpec as TiedLayerSpec  # noqa: E402
from deepspeed.runtime.activation_checkpointing import checkpointing as checkpointing  # noqa: E402
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer as BF16_Optimizer  # noqa: E402
from deepspeed.runtime.dataloader import RepeatingLoader as RepeatingLoader  # noqa: E402
from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer as FP16_Optimizer  # noqa: E402
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler as DynamicLossScaler  # noqa: E402
from deepspeed.runtime.fp16.loss_scaler import LossScaler as LossScaler  # noqa: E402
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer as FP16_UnfusedOptimizer  # noqa: E402
from deepspeed.runtime.pipe import module as _pipe_module  # noqa: E402
from deepspeed.runtime.pipe.module import PipelineError as PipelineError  # noqa: E402
from deepspeed.runtime.pipe.module import PipelineModule as DeepSpeedModule  # noqa: E402
from deepspeed.runtime.pipe.topology import PipelineParallelGrid as _DeepSpeedGrid  # noqa: E402
from deepspeed.runtime.zero.config import ZeroStageEnum as ZeroStageEnum  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as DeepSpeedZeroOptimizer  # noqa: E402
from deepspeed.utils import groups as _groups  # noqa: E402
from deepspeed.utils import log_dist as log_dist  # noqa: E402
from deepspeed.utils import logger as logger  # noqa: E402
from deepspeed.utils.tensor_fragment import fragment_address as fragment_address  # noqa: E402

GRID_GROUPS = ("ds_model_proc_group", "dp_proc_group", "pp_proc_group", "slice_proc_group")


class BaseEngine(DeepSpeedEngine):
    """DeepSpeed's engine."""

    _curr_ckpt_path: str | None = None

    @property
    def config_given(self) -> dict[str, Any]:
        """The JSON as the program gave it."""
        return self._config._param_dict

    @property
    def pipeline_section(self) -> dict[str, Any]:
        """The section "pipeline" of the JSON, with DeepSpeed's defaults."""
        return self._config.pipeline

    @property
    def sums_dtype(self) -> torch.dtype | None:
        """In which gradients are summed over ranks: the JSON's "communication_data_type"; None: in their own."""
        return None if self._config.communication_data_type is None else self.communication_data_type

    @property
    def asks_for_flops(self) -> bool:
        """Whether the JSON switches DeepSpeed's profiler of FLOPs on."""
        return self._config.flops_profiler_config.enabled

    @property
    def writes_layers_in_parallel(self) -> bool:
        """Whether the JSON has the replicas share the files of the layers."""
        return self._config.checkpoint_parallel_write_pipeline

    @property
    def grad_norm(self) -> float | torch.Tensor:
        """The norm of the last step's gradients; on a device, where the host has not waited for it."""
        return self._global_grad_norm

    @grad_norm.setter
    def grad_norm(self, norm: float | torch.Tensor) -> None:
        self._global_grad_norm = norm

    def get_global_grad_norm(self) -> float:
        """Return the norm of the last step's gradients; waits for it."""
        norm = super().get_global_grad_norm()
        return float(norm) if isinstance(norm, torch.Tensor) else norm

    @property
    def checkpoint_folder(self) -> str | None:
        """Where a checkpoint is written to or read from now; None: nowhere."""
        return self._curr_ckpt_path

    @checkpoint_folder.setter
    def checkpoint_folder(self, folder: str | None) -> None:
        self._curr_ckpt_path = folder

    def take_model_step(self) -> None:
        """Let the optimizer step, and count it."""
        self._take_model_step(None)

    def stage_files(self, load_dir: str, tag: str) -> list[str]:
        """Return the files of a checkpoint that are no layer's."""
        return self._get_all_ckpt_names(load_dir, tag)

    def zero_shapes(self) -> Any:
        """Return the shapes of the parameters whose states ZeRO cuts."""
        return self._get_zero_param_shapes()

    def load_zero_states(self, load_dir: str, tag: str) -> None:
        """Read the optimizer's states from files in ZeRO's form."""
        self._load_zero_checkpoint(load_dir, tag)

    def checkpoint_engine_made(self) -> None:
        """Called once ``checkpoint_engine`` is there."""

    def added_checkpoint_state(self) -> dict[str, Any]:
        """Return what a stage's file is to hold besides DeepSpeed's."""
        return {}

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        self.checkpoint_engine_made()

    def _common_checkpoint_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super()._common_checkpoint_state(*args, **kwargs), **self.added_checkpoint_state()}


class BaseModule(DeepSpeedModule):
    """DeepSpeed's ``PipelineModule``, whose ``__init__`` calls the methods below."""

    def build_layers(self) -> None:
        """Build the layers within the bounds that were set last, behind those that are there."""
        super()._build()

    def set_bounds(self, start: int, stop: int) -> None:
        """Let this stage hold the layers ``start ... stop``."""
        self._set_bounds(start=start, stop=stop)

    def partition_layers(self, method: Any) -> None:
        """Cut the layers into stages: set ``parts``, and the bounds of this one."""
        super()._partition_layers(method=method)

    def count_layer_parameters(self) -> list[int]:
        """Return how many parameters to train each layer of the model has."""
        return super()._count_layer_params()

    def index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Return who holds each tied module, by its key."""
        return super()._index_tied_modules()

    def synchronize_tied_weights(self) -> None:
        """Give all copies of a tied weight the value of one. Collective over its holders."""
        super()._synchronize_tied_weights()

    def choose_recomputed(self) -> None:
        """Note which runs of layers are recomputed, by ``activation_checkpoint_interval``."""
        super()._precompute_checkpointable_values()

    def _build(self) -> None:
        self.build_layers()

    def _partition_layers(self, method: Any = "uniform") -> None:
        self.partition_layers(method)

    def _count_layer_params(self) -> list[int]:
        return self.count_layer_parameters()

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        return self.index_tied_modules()

    def _synchronize_tied_weights(self) -> None:
        self.synchronize_tied_weights()

    def _precompute_checkpointable_values(self) -> None:
        self.choose_recomputed()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        device.convert_parameters(self, fn)
        return super()._apply(fn, recurse)


class LayerRun:
    """The layers of one chunk as DeepSpeed's ``PipelineModule.forward`` takes them; all else is the module's."""

    def __init__(self, module: BaseModule, start: int, own: slice) -> None:
        self._module = module
        self._local_start = start
        self._own = own
        self.micro_offset = 0
        self.is_checkpointable_results: list[bool] = []
        self.is_checkpointable_results_interval: int | None = None

    @property
    def forward_funcs(self) -> list[Any]:
        """Return the layers as they are now: ``engine.compile()`` replaces those that are functions."""
        return self._module.forward_funcs[self._own]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def forward(self, forward_input: Any) -> Any:
        """Run the layers."""
        return DeepSpeedModule.forward(self, forward_input)

    def choose_recomputed(self) -> None:
        """Note which of them are recomputed."""
        DeepSpeedModule._precompute_checkpointable_values(self)


def grid_of(module: Any) -> Any:
    """Return the process groups of a pipeline module, and the place of this rank in them."""
    return module._grid


def place_of(grid: Any, rank: int) -> Any:
    """Return the coordinates of a global rank: ``pipe``, ``data`` and, with tensor ranks, ``model``."""
    return grid._topo.get_coord(rank)


def places_of(grid: Any) -> list[Any]:
    """Return the coordinates of every rank, in the order of the ranks."""
    return [place for place, _ in sorted(grid._topo.mapping.items(), key=lambda item: item[1])]


class Grid(_DeepSpeedGrid):
    """DeepSpeed's grid, made in a time that grows as the number of ranks: its own looks at all ranks for each rank.

    At 10,000 ranks that is a second in place of several; the lists and groups are the same.
    """

    def __init__(self, topology: Any = None, process_group: Any = None) -> None:
        if topology is not None:
            _index(topology)
        super().__init__(topology, process_group)

    def _build_p2p_groups(self) -> list[list[int]]:
        pipelines = self._topo.get_axis_comm_lists("pipe")
        pairs = ((rank, ranks[(stage + 1) % len(ranks)]) for ranks in pipelines for stage, rank in enumerate(ranks))
        return [[rank, after] for rank, after in sorted(pairs)]


def _index(topology: Any) -> None:
    """Let ``topology`` find the ranks at a place of an axis without a look at all, and a rank's place with one look."""
    ranks_at: dict[tuple[str, int], list[int]] = {}
    for place, rank in topology.mapping.items():
        for axis, index in zip(topology.axes, place, strict=True):
            ranks_at.setdefault((axis, index), []).append(rank)
    topology.get_coord = cache(topology.get_coord)  # asked again and again for the own rank
    topology.get_axis_list = lambda axis, idx: list(ranks_at.get((axis, idx), ()))


@contextmanager
def indexed_grid() -> Iterator[None]:
    """Let pipeline modules that are made within have a ``Grid``."""
    theirs, _pipe_module.PipelineParallelGrid = _pipe_module.PipelineParallelGrid, Grid
    try:
        yield
    finally:
        _pipe_module.PipelineParallelGrid = theirs


def layer_specs(module: Any) -> list[Any]:
    """Return the layers of the whole model as the program gave them."""
    return module._layer_specs


def first_layer(module: Any) -> int:
    """Return the number in the whole model of the first layer that was built last on this stage."""
    return module._local_start


def weight_named(module: Any, part: Any, name: str) -> torch.Tensor:
    """Return the weight of ``part`` by a name with dots."""
    return module._recursive_getattr(part, name)


def choose_recomputed(module: Any) -> None:
    """Let ``module`` note anew which of its layers are recomputed."""
    module._precompute_checkpointable_values()


def limit_waits(module: Any, limit: timedelta | None = None, more: Iterable[Any] = ()) -> None:
    """Give every group that DeepSpeed made for ``module``, and ``more``, the time limit: by default that of the
    default group."""
    limit = default_timeout() if limit is None else limit
    if limit is None:
        return
    limit_groups({*groups_of(module), *more}, limit)


@contextmanager
def sharing_groups(known: Mapping[tuple[int, ...], Any] | None = None) -> Iterator[None]:
    """Let DeepSpeed make one process group, not several, of one set of ranks.

    Args:
        known: groups that are there, by their ranks, with those that this rank is not in: the same ranks on every rank.
    """
    comm = deepspeed.comm
    make, made = comm.new_group, dict(known or {})

    def new_group(ranks: Iterable[int]) -> Any:
        key = tuple(ranks)
        if key not in made:
            made[key] = make(list(key))
        return made[key]

    comm.new_group = new_group
    try:
        yield
    finally:
        comm.new_group = make


def groups_of(module: Any) -> Iterator[Any]:
    """Yield the process groups of a pipeline module, its grid and DeepSpeed's engine that this rank is in."""
    made = [module.world_group, *(getattr(grid_of(module), name, None) for name in GRID_GROUPS)]
    made += [tie["group"] for tie in getattr(module, "tied_comms", {}).values()]
    made.append(_groups._WORLD_GROUP)
    for group in made:
        if isinstance(group, dist.ProcessGroup):
            yield group


def has_own_norm(optimizer: Any) -> bool:
    """Return whether ``optimizer`` takes the norm of its gradients itself, as those of DeepSpeed do."""
    return hasattr(optimizer, "_global_grad_norm")


def make_contiguous(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Let ZeRO 1's ``optimizer`` keep gradients in one buffer, whatever the JSON says: so it takes over sums."""
    if optimizer.contiguous_gradients:
        return
    optimizer.contiguous_gradients = True
    optimizer._release_ipg_buffers()
    if not optimizer._grad_acc_hooks:
        optimizer.create_gradient_handling_hooks()


@contextmanager
def summed_already(optimizer: DeepSpeedZeroOptimizer) -> Iterator[None]:
    """Let ZeRO 1's reduction go through all but the sum and mean over replicas."""
    optimizer.average_tensor = optimizer._add_full_reduction_to_compact_grad_partition
    try:
        yield
    finally:
        del optimizer.average_tensor
