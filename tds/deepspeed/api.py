"""DeepSpeed's names that tds uses. No other file imports DeepSpeed or uses its private names.

DeepSpeed's version is checked before the imports. Each private name is wrapped by a function or method in this file and
has a line in tests/tds/test_deepspeed_contract.py, so a new DeepSpeed version changes only this file. To replace a
private DeepSpeed method, override the method of ``BaseEngine`` or ``BaseModule`` that wraps it. torch's private names
are in ``tds.torch_api``.
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
from tds.deepspeed.alias import import_deepspeed
from tds.p2p.process_groups import set_group_timeouts
from tds.torch_api import default_timeout

deepspeed = import_deepspeed()

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
    """DeepSpeed's engine, with public names for the private names that tds uses."""

    _curr_ckpt_path: str | None = None

    @property
    def user_config(self) -> dict[str, Any]:
        """The JSON as the program passed it."""
        return self._config._param_dict

    @property
    def pipeline_section(self) -> dict[str, Any]:
        """The JSON section "pipeline", with DeepSpeed's defaults."""
        return self._config.pipeline

    @property
    def grad_reduce_dtype(self) -> torch.dtype | None:
        """Type in which gradients are all-reduced: "communication_data_type" of the JSON; None: the gradients' type."""
        return None if self._config.communication_data_type is None else self.communication_data_type

    @property
    def is_flops_profiler_enabled(self) -> bool:
        """True if the JSON enables DeepSpeed's FLOPs profiler."""
        return self._config.flops_profiler_config.enabled

    @property
    def writes_layers_in_parallel(self) -> bool:
        """True if the JSON distributes the writing of layer files over the replicas."""
        return self._config.checkpoint_parallel_write_pipeline

    @property
    def grad_norm(self) -> float | torch.Tensor:
        """Norm of the last step's gradients; a tensor on the device until the host has waited for it."""
        return self._global_grad_norm

    @grad_norm.setter
    def grad_norm(self, norm: float | torch.Tensor) -> None:
        self._global_grad_norm = norm

    def get_global_grad_norm(self) -> float:
        """Return the norm of the last step's gradients, after waiting for the device."""
        norm = super().get_global_grad_norm()
        return float(norm) if isinstance(norm, torch.Tensor) else norm

    @property
    def checkpoint_folder(self) -> str | None:
        """Folder of the checkpoint that is being written or read; None if there is none."""
        return self._curr_ckpt_path

    @checkpoint_folder.setter
    def checkpoint_folder(self, folder: str | None) -> None:
        self._curr_ckpt_path = folder

    def take_model_step(self) -> None:
        """Step the optimizer and count the step."""
        self._take_model_step(None)

    def stage_files(self, load_dir: str, tag: str) -> list[str]:
        """List the paths of a checkpoint's stage files, which are all files except the layer files."""
        return self._get_all_ckpt_names(load_dir, tag)

    def zero_shapes(self) -> Any:
        """Return the shapes of the parameters whose optimizer states ZeRO shards."""
        return self._get_zero_param_shapes()

    def load_zero_states(self, load_dir: str, tag: str) -> None:
        """Load the optimizer states from files in ZeRO's format."""
        self._load_zero_checkpoint(load_dir, tag)

    def on_checkpoint_engine_set(self) -> None:
        """Hook that runs after ``checkpoint_engine`` is set."""

    def extra_checkpoint_state(self) -> dict[str, Any]:
        """Return the entries to add to a stage's checkpoint file."""
        return {}

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        self.on_checkpoint_engine_set()

    def _common_checkpoint_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super()._common_checkpoint_state(*args, **kwargs), **self.extra_checkpoint_state()}


class BaseModule(DeepSpeedModule):
    """DeepSpeed's ``PipelineModule``; its ``__init__`` calls the methods below."""

    def build_layers(self) -> None:
        """Build the layers within the current bounds and append them to the layers built before."""
        super()._build()

    def set_bounds(self, start: int, stop: int) -> None:
        """Set the bounds of this stage's layers to ``start ... stop``."""
        self._set_bounds(start=start, stop=stop)

    def partition_layers(self, method: Any) -> None:
        """Partition the layers over the stages: set ``parts`` and the bounds of this stage."""
        super()._partition_layers(method=method)

    def count_layer_parameters(self) -> list[int]:
        """Count the trainable parameters of each layer of the model."""
        return super()._count_layer_params()

    def index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Index the ranks, group and module of each tied module by its key."""
        return super()._index_tied_modules()

    def synchronize_tied_weights(self) -> None:
        """Broadcast each tied weight from one copy to all others. Collective over the ranks that hold it."""
        super()._synchronize_tied_weights()

    def select_recomputed_layers(self) -> None:
        """Precompute which runs of layers are recomputed, by ``activation_checkpoint_interval``."""
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
        self.select_recomputed_layers()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        device.convert_parameters(self, fn)
        return super()._apply(fn, recurse)


class ChunkLayers:
    """One chunk's layers, passed as ``self`` to DeepSpeed's ``PipelineModule.forward``.

    All other attributes are read from the module.

    Args:
        start: full-model index of the chunk's first layer.
        layer_range: the chunk's range in ``module.forward_funcs``.
    """

    def __init__(self, module: BaseModule, start: int, layer_range: slice) -> None:
        self._module = module
        self._local_start = start
        self._layer_range = layer_range
        self.micro_offset = 0
        self.is_checkpointable_results: list[bool] = []
        self.is_checkpointable_results_interval: int | None = None

    @property
    def forward_funcs(self) -> list[Any]:
        """The chunk's current layers; ``engine.compile()`` replaces layers that are functions."""
        return self._module.forward_funcs[self._layer_range]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def forward(self, forward_input: Any) -> Any:
        """Run the layers of the chunk."""
        return DeepSpeedModule.forward(self, forward_input)

    def select_recomputed_layers(self) -> None:
        """Precompute which layers of the chunk are recomputed."""
        DeepSpeedModule._precompute_checkpointable_values(self)


def grid_of(module: Any) -> Any:
    """Return the grid of a pipeline module: its process groups and this rank's position in them."""
    return module._grid


def coordinate_of(grid: Any, rank: int) -> Any:
    """Return the coordinates of a global rank: ``pipe``, ``data`` and, with tensor ranks, ``model``."""
    return grid._topo.get_coord(rank)


def coordinates_of(grid: Any) -> list[Any]:
    """List the coordinates of all ranks in rank order."""
    return [coord for coord, _ in sorted(grid._topo.mapping.items(), key=lambda item: item[1])]


class Grid(_DeepSpeedGrid):
    """DeepSpeed's grid, constructed in linear instead of quadratic time in the number of ranks.

    With 10,000 ranks this takes one second instead of several. The lists and groups are equal.
    """

    def __init__(self, topology: Any = None, process_group: Any = None) -> None:
        if topology is not None:
            _index_topology(topology)
        super().__init__(topology, process_group)

    def _build_p2p_groups(self) -> list[list[int]]:
        pipelines = self._topo.get_axis_comm_lists("pipe")
        pairs = ((rank, ranks[(stage + 1) % len(ranks)]) for ranks in pipelines for stage, rank in enumerate(ranks))
        return [[rank, next_rank] for rank, next_rank in sorted(pairs)]


def _index_topology(topology: Any) -> None:
    """Replace ``get_axis_list`` of ``topology`` by an index, and cache ``get_coord``, since both scan all ranks."""
    ranks_at: dict[tuple[str, int], list[int]] = {}
    for coord, rank in topology.mapping.items():
        for axis, index in zip(topology.axes, coord, strict=True):
            ranks_at.setdefault((axis, index), []).append(rank)
    topology.get_coord = cache(topology.get_coord)  # called often for this process's rank
    topology.get_axis_list = lambda axis, idx: list(ranks_at.get((axis, idx), ()))


@contextmanager
def indexed_grid() -> Iterator[None]:
    """Make pipeline modules that are constructed in the block use ``Grid``."""
    original, _pipe_module.PipelineParallelGrid = _pipe_module.PipelineParallelGrid, Grid
    try:
        yield
    finally:
        _pipe_module.PipelineParallelGrid = original


def layer_specs(module: Any) -> list[Any]:
    """Return the layers of the full model as the program passed them."""
    return module._layer_specs


def first_layer_idx(module: Any) -> int:
    """Return the full-model index of the first layer in this stage's most recently built chunk."""
    return module._local_start


def tied_weight(module: Any, submodule: Any, name: str) -> torch.Tensor:
    """Return the weight with the dotted name ``name`` of ``submodule``, a submodule of ``module``."""
    return module._recursive_getattr(submodule, name)


def select_recomputed_layers(module: Any) -> None:
    """Precompute again which layers of ``module`` are recomputed."""
    module._precompute_checkpointable_values()


def set_module_timeouts(module: Any, timeout: timedelta | None = None, extra_groups: Iterable[Any] = ()) -> None:
    """Set the timeout for ``extra_groups`` and for all groups that DeepSpeed created for ``module``.

    Args:
        timeout: the timeout; None: the default group's.
    """
    timeout = default_timeout() if timeout is None else timeout
    if timeout is None:
        return
    set_group_timeouts({*groups_of(module), *extra_groups}, timeout)


@contextmanager
def sharing_groups(known: Mapping[tuple[int, ...], Any] | None = None) -> Iterator[None]:
    """Make DeepSpeed create only one process group per set of ranks in the block.

    Args:
        known: existing groups by their ranks, including groups that this rank is not in. The keys must be equal on all
            ranks.
    """
    comm = deepspeed.comm
    create, groups = comm.new_group, dict(known or {})

    def new_group(ranks: Iterable[int]) -> Any:
        key = tuple(ranks)
        if key not in groups:
            groups[key] = create(list(key))
        return groups[key]

    comm.new_group = new_group
    try:
        yield
    finally:
        comm.new_group = create


def groups_of(module: Any) -> Iterator[Any]:
    """Yield this rank's process groups of a pipeline module, of its grid and of DeepSpeed's engine."""
    candidates = [module.world_group, *(getattr(grid_of(module), name, None) for name in GRID_GROUPS)]
    candidates += [tie["group"] for tie in getattr(module, "tied_comms", {}).values()]
    candidates.append(_groups._WORLD_GROUP)
    for group in candidates:
        if isinstance(group, dist.ProcessGroup):
            yield group


def computes_grad_norm(optimizer: Any) -> bool:
    """Return True if ``optimizer`` computes the norm of its gradients itself, as DeepSpeed's optimizers do."""
    return hasattr(optimizer, "_global_grad_norm")


def use_contiguous_gradients(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Make ZeRO 1 use contiguous gradients regardless of the JSON, so that it accepts reduced gradients."""
    if optimizer.contiguous_gradients:
        return
    optimizer.contiguous_gradients = True
    optimizer._release_ipg_buffers()
    if not optimizer._grad_acc_hooks:
        optimizer.create_gradient_handling_hooks()


@contextmanager
def skip_all_reduce(optimizer: DeepSpeedZeroOptimizer) -> Iterator[None]:
    """Make ZeRO 1's reduction in the block skip the all-reduce over the replicas, which the engine has already done."""
    optimizer.average_tensor = optimizer._add_full_reduction_to_compact_grad_partition
    try:
        yield
    finally:
        del optimizer.average_tensor
