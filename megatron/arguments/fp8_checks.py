"""Checks of --fp8-format: number format, model family, layers, and sizes of sharded weights."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.config import Config
from megatron.config.layer_types import EXPERTS, MLP, layer_types
from megatron.config.optimizer import BLOCKWISE

ALIGNMENT = 16
"""Row sizes of FP8 operands must be multiples of 16 bytes for matrix products on CUDA."""
BLOCK_SIZE = 128


def fp8_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each setting that --fp8-format does not support."""
    precision, model = config.precision, config.model
    if precision.fp8_format is None:
        return
    got = f"got --fp8-format {precision.fp8_format}"
    if precision.dtype not in (None, "bf16", "fp64"):  # fp64: comparisons of layouts
        yield f"--fp8-format needs --bf16 for all tensors that are not in FP8, got --{precision.dtype}"
    if precision.dtype is None and "bf16" in precision.excluded:
        yield f"--fp8-format needs bf16, but the JSON has bf16.enabled false, {got}. Enable it, or remove --fp8-format"
    if config.family_config.KIND != "decoder":
        yield f"--fp8-format is supported in decoders only, {got} and --model {config.family}. Remove it"
        return
    if config.parallel.compile:
        yield f"--compile does not support products in FP8, {got}. Remove one of them"
    counted = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    num_bf16 = sum(getattr(precision, name) for name in counted)
    if precision.first_last_layers_bf16 and num_bf16 >= model.num_layers:
        yield (
            f"--num-layers-at-start-in-bf16 ({precision.num_layers_at_start_in_bf16}) and "
            f"--num-layers-at-end-in-bf16 ({precision.num_layers_at_end_in_bf16}) must leave a layer in FP8, got "
            f"--num-layers {model.num_layers}. Lower them, or remove --fp8-format"
        )
    yield from _size_problems(config)


def fp8_notes(config: Config) -> Iterator[str]:
    """Yield a note if Megatron-LM would use another recipe for the same flags."""
    if config.precision.fp8_format and "fp8_recipe" not in config.explicit_fields:
        yield "--fp8-recipe rowwise: a scale per row; the default of Megatron-LM is delayed, a scale per tensor"


def _size_problems(config: Config) -> Iterator[str]:
    """Yield one error message that lists all sizes that FP8 products do not support; fp64 runs accept any size."""
    is_blockwise = config.precision.fp8_recipe == BLOCKWISE
    if config.precision.dtype == "fp64" and not is_blockwise:
        return
    unfit = [
        f"{name} = {size}{f' / {shards}' if shards > 1 else ''}"
        for name, size, shards in _sizes(config)
        if size % (shards * (BLOCK_SIZE if is_blockwise and shards > 1 else ALIGNMENT))
    ]
    if unfit:
        rule = f"{ALIGNMENT} per rank" + (
            f", and of {BLOCK_SIZE} where tensor ranks shard them" if is_blockwise else ""
        )
        yield (
            f"with --fp8-format, the sizes of weights must be multiples of {rule}, got {'; '.join(unfit)}. Change "
            "these sizes or --model-parallel-size, or remove --fp8-format"
        )


def _sizes(config: Config) -> Iterator[tuple[str, int, int]]:
    """Yield (name, size, number of shards) for the dimensions of the weights with products in FP8."""
    model, tensor = config.model, config.parallel.model_parallel_size
    try:
        types = layer_types(model)
    except ValueError:  # reported by ``recurrent_problems``
        return
    yield "--hidden-size", model.hidden_size, 1
    if any(layer_type.has_attention for layer_type in types):
        heads = model.num_attention_heads
        if model.multi_latent_attention:
            query_size = model.qk_head_dim + model.qk_pos_emb_head_dim
            yield "query heads x (--qk-head-dim + --qk-pos-emb-head-dim)", heads * query_size, tensor
            yield "--kv-lora-rank + --qk-pos-emb-head-dim", model.kv_lora_rank + model.qk_pos_emb_head_dim, 1
            if model.q_lora_rank:
                yield "--q-lora-rank", model.q_lora_rank, 1
        else:
            rows = heads * model.kv_hidden_size + model.attention_output_gate * heads * model.value_size
            for groups in sorted({model.num_query_groups, model.window_num_query_groups} - {0}):
                key_rows = groups * (model.kv_hidden_size + model.value_size)
                yield "rows of query, key and value", rows + key_rows, tensor
        yield "heads x the size of a value head", heads * model.value_size, tensor
    if any(layer_type.feed_forward == MLP for layer_type in types):
        yield "--ff-hidden-size", model.ff_hidden_size, tensor
    if any(layer_type.feed_forward == EXPERTS for layer_type in types):
        expert_shards = config.parallel.expert_shards
        yield "--moe-ffn-hidden-size", model.moe_ffn_hidden_size, expert_shards
        if model.moe_shared_expert_intermediate_size:
            yield "--moe-shared-expert-intermediate-size", model.moe_shared_expert_intermediate_size, tensor
