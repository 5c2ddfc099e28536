"""Model-parallel unit (mpu): the rank grid and the layers sharded over it.

Names resolve on first use (PEP 562), so that importing ``mpu.topology``, which is pure arithmetic, does not import
torch.
"""

from __future__ import annotations

from typing import Any

from tds.lazy_imports import lazy_attribute

_NAMES = {
    "megatron.mpu.topology": (
        "Topology",
        "Coordinate",
    ),
    "megatron.mpu.groups": (
        "Group",
        "Grid",
        "SINGLE",
        "build_grid",
        "single_grid",
    ),
    "tds.param_info": (
        "Shard",
        "Matrices",
        "ParamInfo",
        "info_of",
        "set_info",
        "set_shard",
        "set_partial",
        "is_partial",
    ),
    "megatron.mpu.shard": (
        "shard_of",
        "global_norm",
    ),
    "megatron.mpu.matrices": (
        "set_matrices",
        "matrices_of",
    ),
    "megatron.mpu.mappings": (
        "copy_to_tensor_region",
        "reduce_from_tensor_region",
        "scatter_to_tensor_region",
        "gather_from_tensor_region",
        "gather_from_sequence_region",
        "reduce_scatter_to_sequence_region",
        "enter_tensor_region",
        "leave_tensor_region",
        "all_reduce",
    ),
    "megatron.mpu.context_parallel": (
        "split_along_context",
        "gather_from_context_region",
        "scatter_heads_gather_sequence",
        "scatter_sequence_gather_heads",
    ),
    "megatron.mpu.layers": (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "vocab_range",
        "divide",
    ),
    "megatron.mpu.cross_entropy": ("vocab_parallel_cross_entropy",),
    "megatron.mpu.philox_dropout": ("PhiloxDropout",),
    "megatron.mpu.random": (
        "DropoutStreams",
        "DropoutKey",
        "checkpoint",
    ),
    "tds.grad_norm": ("clip_coefficient", "is_counted_in_norm"),
    "megatron.mpu.initialize": (
        "initialize_model_parallel",
        "model_parallel_is_initialized",
        "destroy_model_parallel",
        "get_grid",
        "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "get_tensor_model_parallel_src_rank",
        "get_model_parallel_group",
        "get_model_parallel_rank",
        "get_model_parallel_world_size",
        "get_pipe_parallel_group",
        "get_pipe_parallel_rank",
        "get_pipe_parallel_world_size",
        "get_pipeline_model_parallel_group",
        "get_pipeline_model_parallel_rank",
        "get_pipeline_model_parallel_world_size",
        "get_data_parallel_group",
        "get_data_parallel_rank",
        "get_data_parallel_world_size",
        "get_context_parallel_group",
        "get_context_parallel_rank",
        "get_context_parallel_world_size",
        "get_context_parallel_global_ranks",
        "get_expert_model_parallel_group",
        "get_expert_model_parallel_rank",
        "get_expert_model_parallel_world_size",
        "get_batch_on_this_cp_rank",
        "is_pipeline_first_stage",
        "is_pipeline_last_stage",
        "broadcast_data",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return sorted(_MODULES)
