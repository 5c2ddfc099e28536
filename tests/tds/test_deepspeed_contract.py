"""Each private name of DeepSpeed that tds touches, so that a new version that moves one says so here."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.comm.torch import build_shm_op
from deepspeed.moe.utils import split_params_grads_into_shared_and_expert_params
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine import (
    DecoupledCheckpointEngine,
    FastCheckpointEngine,
    TorchCheckpointEngine,
)
from deepspeed.runtime.config import get_pipeline_config
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.pipe import topology as pipe_topology
from deepspeed.runtime.pipe.module import PipelineError
from deepspeed.runtime.utils import CheckOverflow, get_weight_norm, is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch.distributed import distributed_c10d

from tds import torch_api
from tds.deepspeed import api as deepspeed_api
from tds.deepspeed.alias import PRINTING_MODULES
from tds.deepspeed.api import GRID_GROUPS
from tds.engine.pipeline_json import KEYS
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine


def _source(obj: Any) -> str:
    return inspect.getsource(obj)


def test_initialize_looks_up_pipeline_engine_by_global_name() -> None:
    assert "PipelineEngine" in deepspeed.initialize.__code__.co_names
    assert deepspeed.initialize.__globals__ is vars(deepspeed)


def test_take_model_step_uses_expected_names() -> None:
    source = _source(DeepSpeedEngine._take_model_step)
    for name in ("clip_fp32_gradients", "_global_grad_norm", "overflow", "skipped_steps", "lr_scheduler.step",
                 "global_steps", "global_samples", "zero_grad"):  # fmt: skip
        assert name in source, name
    assert list(inspect.signature(DeepSpeedEngine._take_model_step).parameters) == ["self", "lr_kwargs"]


@pytest.mark.parametrize(
    "name",
    [
        "_partition_layers",
        "_set_bounds",
        "_synchronize_tied_weights",
        "_index_tied_modules",
        "_count_layer_params",
        "_is_checkpointable",
        "_precompute_checkpointable_values",
        "get_tied_weights_and_groups",
        "mpu",
    ],
)
def test_pipeline_module_has_private_methods(name: str) -> None:
    assert callable(getattr(deepspeed.PipelineModule, name))


def test_pipeline_module_passes_partition_method() -> None:
    assert "self._partition_layers(method=partition_method)" in _source(deepspeed.PipelineModule.__init__)


def test_tied_modules_are_indexed_by_sorted_key() -> None:
    """And in the order of their keys: a set's differs between processes, and each makes a group for every key."""
    source = _source(deepspeed.PipelineModule._index_tied_modules)
    assert "for key in sorted(tie_keys)" in source
    for name in ("'ranks'", "'group'", "'weight_attr'", "'module'", "if self._topo.get_dim('pipe') == 1"):
        assert name in source, name
    init = _source(deepspeed.PipelineModule.__init__)
    statements = (
        "self.tied_modules = ",
        "self._build()",
        "self._index_tied_modules()",
        "self._synchronize_tied_weights()",
    )
    positions = [init.index(statement) for statement in statements]
    assert positions == sorted(positions)
    assert "self._count_layer_params()" in _source(deepspeed.PipelineModule._partition_layers)
    assert "layer.build()" in _source(deepspeed.PipelineModule._build)


def test_silenced_modules_use_builtin_print() -> None:
    for module in map(importlib.import_module, PRINTING_MODULES):
        assert "print(" in _source(module)
        assert "print" not in vars(module) or vars(module)["print"] is print


@pytest.mark.parametrize(
    "name",
    ["get_pipe_parallel_group", "get_data_parallel_group", "get_slice_parallel_group", "get_slice_parallel_rank",
     "get_model_parallel_group", "get_data_parallel_rank", "get_stage_id", "get_global_rank", "stage_to_global"],
)  # fmt: skip
def test_grid_has_expected_methods(name: str) -> None:
    assert callable(getattr(pipe_topology.PipelineParallelGrid, name))


def test_bf16_optimizer_stores_fp32_gradients() -> None:
    source = _source(BF16_Optimizer)
    assert "self.fp32_groups_gradients.append" in source and "self.bf16_groups.append" in source
    assert list(inspect.signature(BF16_Optimizer.update_hp_grads).parameters) == ["self", "clear_lp_grads"]
    assert callable(BF16_Optimizer.clear_lp_grads)


def test_checkpointing_has_expected_names() -> None:
    assert callable(checkpointing.non_reentrant_checkpoint) and callable(checkpointing.reset)
    flags = ("PARTITION_ACTIVATIONS", "CPU_CHECKPOINT", "CONTIGUOUS_CHECKPOINTING")
    assert all(getattr(checkpointing, name) is False for name in flags)
    assert (checkpointing.mp_rank, checkpointing.mp_size, checkpointing.mp_group) == (0, 1, None)
    assert "no_checkpointing" in _source(checkpointing.is_activation_to_checkpoint)
    default = inspect.signature(deepspeed.PipelineModule.__init__).parameters["activation_checkpoint_func"].default
    assert default is checkpointing.checkpoint
    assert issubclass(PipelineError, Exception)
    assert "deepspeed_shm_comm" in ALL_OPS
    assert "deepspeed.ops.__compatible_ops__.get(builder.NAME, False)" in _source(build_shm_op)


def test_pipeline_config_keys_are_known() -> None:
    assert set(get_pipeline_config({})) <= set(KEYS)


def test_python_process_groups_are_supported_by_torch() -> None:
    """As tds.p2p.host_copies does; of the names of an operation torch 2.11 has the first, 2.13 the second or both."""
    assert "issubclass(type(backend_class), ProcessGroup)" in _source(distributed_c10d._new_process_group_helper)
    for name in ("_set_default_backend", "_register_backend", "_get_backend", "_start_coalescing", "_end_coalescing"):
        assert callable(getattr(dist.ProcessGroup, name)), name
    assert callable(dist.ProcessGroupGloo._set_sequence_number_for_group) and callable(dist.Work._source_rank)
    for names in (("_allgather_base", "all_gather_single"), ("_reduce_scatter_base", "reduce_scatter_single")):
        assert any(hasattr(dist.ProcessGroup, name) for name in names), names


def test_process_groups_accept_timeouts() -> None:
    assert list(inspect.signature(distributed_c10d._set_pg_timeout).parameters) == ["timeout", "group"]
    assert all(f"self.{name} = " in _source(pipe_topology.PipelineParallelGrid) for name in GRID_GROUPS)
    assert "self.world_group = " in _source(deepspeed.PipelineModule.__init__)
    assert hasattr(groups, "_WORLD_GROUP")


def test_pipeline_groups_are_created_through_dist_new_group() -> None:
    for function in (pipe_topology.PipelineParallelGrid.__init__, deepspeed.PipelineModule.__init__):
        assert "dist.new_group(ranks=" in _source(function) and function.__globals__["dist"] is deepspeed.comm
    assert "dist.new_group(ranks=" in _source(deepspeed.PipelineModule._index_tied_modules)
    assert list(inspect.signature(deepspeed.comm.new_group).parameters) == ["ranks"]


def test_torch_has_expected_private_names() -> None:
    weight, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(3))
    torch._C._swap_tensor_impl(weight, other)
    assert weight.shape == (3,) and other.shape == (2,)
    before = weight._version
    with torch.no_grad():
        weight.add_(1)
    assert weight._version == before + 1
    assert list(inspect.signature(torch.nn.Module._apply).parameters) == ["self", "fn", "recurse"]
    assert callable(distributed_c10d._get_default_group) and hasattr(dist.ProcessGroup, "_device_types")
    assert hasattr(dist.ProcessGroupGloo._Options, "_timeout")
    assert isinstance(dist.ProcessGroup.bound_device_id, property)
    split = inspect.signature(dist.split_group).parameters
    assert {"split_ranks", "timeout", "pg_options"} <= set(split)
    assert ("backend" in split) == (torch.torch_version.TorchVersion(torch.__version__) >= "2.12")
    assert "default_pg.bound_device_id" in _source(dist.split_group)
    if dist.is_nccl_available():
        options = torch_api.nccl_options(4, timedelta(seconds=7))
        assert options.config.max_ctas == 4 and options._timeout == timedelta(seconds=7)
    record = torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)
    assert isinstance(json.loads(record), dict)
    torch._foreach_mul_([weight.data], 2.0)
    assert weight.tolist() == [4.0] * 3
    assert torch._foreach_norm([weight.data], 2, dtype=torch.float64)[0].item() == 48**0.5
    memory = torch.zeros(4)
    assert memory[:2]._base is memory and memory._base is None
    assert torch._C._is_alias_of(memory[:2], memory[2:]) and not torch._C._is_alias_of(memory, torch.zeros(4))
    assert torch._C._current_graph_task_id() == -1 and callable(torch._C._will_engine_execute_node)


def _grid_of(grid_class: Any, topology: Any, rank: int, num_ranks: int) -> dict[str, Any]:
    backend = mock.Mock(get_rank=lambda group=None: rank, get_world_size=lambda group=None: num_ranks)
    with (
        mock.patch("deepspeed.comm.comm.cdb", backend),
        mock.patch("deepspeed.comm.new_group", lambda ranks: tuple(ranks)),
        mock.patch("builtins.print"),
    ):
        grid = grid_class(topology=topology)
        stages = [grid.stage_to_global(stage) for stage in range(grid.pipe_parallel_size)]
        return vars(grid) | {"_topo": None, "stages": stages, "slice": grid.get_slice_parallel_rank()}


@pytest.mark.parametrize("dims", [(2, 2, 3), (4, 1, 2), (1, 2, 2), (3, 4)])
def test_grid_equals_deepspeed_grid(dims: tuple[int, ...]) -> None:
    """All that it holds, on every rank; with axes pipe, data and tensor, and without tensor ranks."""
    topology_class = (
        pipe_topology.PipeModelDataParallelTopology if len(dims) == 3 else pipe_topology.PipeDataParallelTopology
    )
    num_ranks = math.prod(dims)
    for rank in range(num_ranks):
        tds_vars = _grid_of(deepspeed_api.Grid, topology_class(*dims), rank, num_ranks)
        deepspeed_vars = _grid_of(pipe_topology.PipelineParallelGrid, topology_class(*dims), rank, num_ranks)
        assert tds_vars == deepspeed_vars
    grid = mock.Mock(_topo=topology_class(*dims))
    assert deepspeed_api.coordinates_of(grid) == [grid._topo.get_coord(rank) for rank in range(num_ranks)]


def count_executed_lines(function: Callable[[], Any]) -> int:
    """Return the number of Python lines that a call executes: a measure of work that is the same on every machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_grid_construction_is_linear_in_ranks() -> None:
    """On the last rank, which DeepSpeed's own finds last.

    The differences leave out the constant number of lines of mock, which depends on the version of Python.
    """

    def count_lines(n: int) -> int:
        topology = pipe_topology.PipeDataParallelTopology(2, n // 2)
        return count_executed_lines(partial(_grid_of, deepspeed_api.Grid, topology, n - 1, n))

    count_lines(8)  # the first call also executes lines of imports
    few, middle, many = map(count_lines, (64, 128, 256))
    assert many - middle < 2.2 * (middle - few)  # twice if linear, four times if quadratic


def _grid_module(rank: int) -> tuple[str, bool]:
    module_name = type(make_engine(Toy("chain"), 1).grid).__module__
    return module_name, pipe_module.PipelineParallelGrid is pipe_topology.PipelineParallelGrid


def test_pipeline_module_uses_tds_grid_and_restores_deepspeed() -> None:
    assert run_ranks(1, _grid_module) == [("tds.deepspeed.api", True)]


def _check_engine_attributes(rank: int) -> dict[str, bool]:
    engine = make_engine(Toy("chain"), 1)
    module, grid = engine.module, engine.grid
    return {
        "_config.pipeline": isinstance(engine._config.pipeline, dict),
        "_config._param_dict": isinstance(engine._config._param_dict, dict),
        "monitor": hasattr(engine.monitor, "enabled") and callable(engine.monitor.write_events),
        "has_moe_layers": engine.has_moe_layers is False,
        "enable_backward_allreduce": engine.enable_backward_allreduce is False,
        "micro_steps": engine.micro_steps == 0 and engine.global_steps == 0,
        "device": torch.device(engine.device).type == "cpu",
        "get_lr": engine.get_lr() == [0.0],
        "zero_optimization_stage": engine.zero_optimization_stage() == 0,
        "timers": callable(engine.timers("x").reset) and callable(engine.timers.log),
        "reports": engine.steps_per_print() is None and engine.wall_clock_breakdown() is False,
        "deepspeed_io": callable(engine.deepspeed_io),
        "module": all(hasattr(module, n) for n in ("_grid", "_layer_specs", "parts", "stage_id", "num_stages",
                                                   "micro_offset", "dynamic_shape", "loss_fn", "forward_funcs",
                                                   "activation_checkpoint_interval", "activation_checkpoint_func")),
        "grid": all(hasattr(grid, n) for n in ("pipe_parallel_size", "data_parallel_size", "model_parallel_size",
                                               "pipe_groups")),
        "ds_pipe_replicated": all(p.ds_pipe_replicated is False for p in module.parameters()),
    }  # fmt: skip


def test_engine_has_expected_attributes() -> None:
    checks = run_ranks(1, _check_engine_attributes)[0]
    assert all(checks.values()), checks


def test_save_and_load_call_overridden_methods() -> None:
    save, load = _source(DeepSpeedEngine._save_checkpoint), _source(DeepSpeedEngine._load_checkpoint)
    for name in ("self._curr_ckpt_path = os.path.join(", "self.module_state_dict(", "self._common_checkpoint_state("):
        assert name in save, name
    for name in ("self._curr_ckpt_path = os.path.join(", "self.load_module_state_dict(", "checkpoint['mp_world_size']"):
        assert name in load, name
    assert callable(DeepSpeedEngine._get_all_ckpt_names) and callable(DeepSpeedEngine._get_zero_param_shapes)
    assert list(inspect.signature(DeepSpeedEngine._load_zero_checkpoint).parameters)[1:3] == ["load_dir", "tag"]
    assert "optimizer_state_dict=self.optimizer.state_dict()" in _source(DeepSpeedEngine._save_zero_checkpoint)
    assert "self._get_zero_param_shapes()" in _source(DeepSpeedEngine._common_checkpoint_state)
    assert "self._last_lr" in _source(lr_schedules.WarmupLR)


def test_checkpoints_are_loaded_through_checkpoint_engine() -> None:
    assert "self._configure_checkpointing()" in _source(DeepSpeedEngine.__init__)
    assert "self.checkpoint_engine = create_checkpoint_engine(" in _source(DeepSpeedEngine._configure_checkpointing)
    assert "checkpoint_engine=self.checkpoint_engine" in _source(DeepSpeedEngine._load_checkpoint)
    assert "self.checkpoint_engine.load(" in _source(DeepSpeedEngine._get_all_zero_checkpoint_state_dicts)
    assert "self.checkpoint_engine.save(state_dict=state, path=save_path)" in _source(DeepSpeedEngine._save_checkpoint)
    for engine in (TorchCheckpointEngine, FastCheckpointEngine, DecoupledCheckpointEngine):
        assert list(inspect.signature(engine.load).parameters) == ["self", "path", "map_location"]
        assert "torch.load(path, map_location=map_location" in _source(engine.load)


def test_layer_paths_depend_on_local_start() -> None:
    module = deepspeed.PipelineModule
    for path in (module.ckpt_layer_path, module.ckpt_layer_path_list):
        assert "local_layer_idx + self._local_start" in _source(path)
    for name in ("self.ckpt_layer_path(", "self.checkpoint_parallel_write_pipeline", "self._grid.data_parallel_id"):
        assert name in _source(module.save_state_dict), name
    assert callable(module._recursive_getattr) and "self._topo" in _source(module.__init__)
    assert "self.tied_weight_attrs[layer.key] = " in _source(module._build)


def test_pipeline_module_stores_layer_specs_and_bounds() -> None:
    source = _source(deepspeed.PipelineModule.__init__) + _source(deepspeed.PipelineModule._partition_layers)
    for name in ("self._layer_specs = list(layers)", "self.parts = ", "self.dynamic_shape = dynamic_shape"):
        assert name in source, name
    assert deepspeed.pipe.LayerSpec(torch.nn.Linear, 1, 1).typename is torch.nn.Linear


def test_zero_1_has_reduction_hooks_and_gradient_attributes() -> None:
    zero = DeepSpeedZeroOptimizer
    for method, parameter in (
        ("_add_full_reduction_to_compact_grad_partition", "reduced_tensor"),
        ("average_tensor", "tensor"),
    ):
        assert list(inspect.signature(getattr(zero, method)).parameters) == [
            "self",
            parameter,
            "communication_data_type",
        ]
    assert "self.average_tensor(" in _source(zero.reduce_ipg_grads)
    assert list(inspect.signature(zero.reduce_gradients).parameters) == ["self", "pipeline_parallel"]
    assert "param.grad_accum.add_(" in _source(zero._fill_param_grad_accum_attribute)
    assert "self._grad_acc_hooks.append" in _source(zero.create_gradient_handling_hooks)
    source = _source(zero.__init__)
    for name in ("bit16_groups", "use_grad_accum_attribute", "gradient_accumulation_dtype", "contiguous_gradients",
                 "reduce_bucket_size", "_grad_acc_hooks", "model_parallel_group"):  # fmt: skip
        assert f"self.{name} = " in source, name
    assert callable(zero._release_ipg_buffers) and callable(zero.set_gradient_accumulation_boundary)
    assert "overlap_comm = False" in _source(DeepSpeedEngine._configure_zero_optimizer)  # under a PipelineModule


def test_fp16_optimizers_reduce_norm_over_model_parallel_group() -> None:
    for optimizer in (FP16_Optimizer, FP16_UnfusedOptimizer):
        source = _source(optimizer)
        assert "CheckOverflow(self.fp16_groups, mpu=self.mpu" in source and "loss_scale = property(" in source
    assert "self.mpu.get_model_parallel_group()" in _source(CheckOverflow.has_overflow)
    assert "shared_grads.append(p.grad.to(p.dtype))" in _source(split_params_grads_into_shared_and_expert_params)
    assert "p.ds_pipe_replicated" in _source(get_weight_norm) and "p.model_parallel" in _source(
        is_model_parallel_parameter
    )
    assert "self.immediate_grad_update = " in _source(BF16_Optimizer.__init__)


def test_curriculum_learning_uses_forwarded_names() -> None:
    assert "self.training_dataloader.post_process_func = " in _source(DeepSpeedEngine.set_data_post_process_func)
    assert "training_dataloader.data_sampler" in _source(DeepSpeedEngine.set_custom_curriculum_learning_schedule)
    assert "dist.broadcast(batch, 0, group=self.data_parallel_group)" in _source(DeepSpeedDataSampler)
    tracker = checkpointing.get_cuda_rng_tracker()
    assert callable(tracker.get_states) and callable(tracker.set_states)
    assert callable(deepspeed.PipelineModule.get_additional_losses)


def test_store_can_be_cloned_for_watchdog(tmp_path: Path) -> None:
    assert callable(distributed_c10d._get_default_store)
    store: Any = dist.PrefixStore("a", dist.FileStore(str(tmp_path / "store"), 1))
    store.clone().set("x", "1")
    assert store.get("x") == b"1"
