"""The configuration of the layout check: the run's, shrunk to sizes that a CPU computes in a second. No torch.

Kept: the axes of the layout; schedule, chunks and their placement, recomputation, ZeRO stage, fused accumulation and
overlap; the parts of the model, the optimizer, clipping and the average of losses; the ends of documents in positions,
attention and loss.

Lowered: the number of replicas, to 2 if possible. If the layout still has more than ``MAX_RANKS`` ranks, the sizes of
other axes are lowered to 2; a note states each such axis.

Replaced: layers (one per stage, chunk and type of layer), hidden size, heads, experts, vocabulary and sequence length;
the number format (fp64); dropout (0, unless it is independent of the layout); data (random tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.arguments.validate import find_problems
from megatron.config import Config
from megatron.config.batch import BatchConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.debug import DebugConfig
from megatron.config.decoder import ROPE, window_pattern
from megatron.config.layer_features import no_rope_layers
from megatron.config.layer_types import ATTENTION, EXPERTS, LayerType, is_hybrid, layer_types, type_of_letter
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import BLOCKWISE, OptimizerConfig, PrecisionConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import parse_layout
from megatron.config.run import RunConfig
from megatron.config.stability import StabilityConfig
from tds.schedule.simulate import AUTO

MAX_RANKS = 16
"""Largest number of processes of the layout check."""
NUM_STEPS = 2
"""Steps of the check: the loss of the second step depends on the first update."""
MIN_SEQ_LENGTH = 16
WINDOW = 5
MAX_FACTOR_OF_DOCUMENTS = 4  # positions with the same attention temperature
MAX_LOGIT = 0.3  # threshold of QK-clip, which most heads of the small model exceed
DECODER_VOCABULARY, VOCABULARY = 61, 211  # primes, which every tensor size has to pad; the larger one holds sentinels


class ShrinkError(Exception):
    """A configuration that cannot be shrunk; the message is the reason."""


@dataclass(frozen=True)
class LayerParts:
    """The parts of a decoder layer that depend on its index."""

    has_window: bool
    layer_type: LayerType
    has_rotary: bool


@dataclass(frozen=True)
class Shrunk:
    """Configurations for the layout check.

    Args:
        config: configuration for the layout's ranks.
        reference: configuration for the single process, which computes the same global batches without the features
            that must not change results: recomputation, fused accumulation, chunks of the loss, ZeRO.
        world_size: rank count in ``config``.
        notes: differences from the run's layout or schedule.
    """

    config: Config
    reference: Config
    world_size: int
    notes: tuple[str, ...] = field(default=())


def shrink(config: Config, world_size: int, device_type: str, *, keeps_data: bool = False) -> Shrunk:
    """Shrink a run's configuration for the layout check.

    Args:
        world_size: the run's rank count.
        device_type: the run's device, which determines some flags' defaults.
        keeps_data: keep the run's data and vocabulary, because its script has its own data sets.

    Raises:
        ShrinkError: the small configuration is invalid, or needs more than ``MAX_RANKS`` ranks.
    """
    notes: list[str] = []
    parallel, small_world_size = _shrink_parallel(config, world_size, device_type, notes)
    num_replicas = parallel.data_parallel_size(small_world_size)
    seq_length = _seq_length(parallel)
    model, layout = _shrink_model(config, parallel, seq_length)
    if keeps_data:
        model = replace(model, vocab_size=config.model.vocab_size)
    if layout is not None:
        parallel = replace(parallel, pipeline_layout=layout, pipeline_chunks=1)
    if not isinstance(parallel.cp_comm_by_layer, str):
        types = list(dict.fromkeys(parallel.cp_comm_by_layer))
        types = [types[layer % len(types)] for layer in range(model.num_layers)]
        parallel = replace(parallel, cp_comm_type=" ".join(types))
    optimizer = config.optimizer
    small = Config(
        family=config.family,
        model=model,
        family_config=_shrink_family(config, parallel, seq_length),
        parallel=parallel,
        batch=BatchConfig(
            batch_size=min(config.batch.batch_size, 2),
            gas=1,
            seq_length=seq_length,
            train_iters=NUM_STEPS,
            eval_iters=0,
        ),
        optimizer=OptimizerConfig(
            optimizer=optimizer.optimizer,
            lr=1e-3,
            lr_decay_style="constant",
            weight_decay=0.1,
            apply_wd_to_qk_layernorm=optimizer.apply_wd_to_qk_layernorm,
            sgd_momentum=optimizer.sgd_momentum,
            muon_momentum=optimizer.muon_momentum,
            muon_nesterov=optimizer.muon_nesterov,
            muon_num_ns_steps=optimizer.muon_num_ns_steps,
            muon_coefficient_type=optimizer.muon_coefficient_type,
            muon_fp32_matmul_prec=optimizer.muon_fp32_matmul_prec,
            muon_scale_mode=optimizer.muon_scale_mode,
            muon_extra_scale_factor=optimizer.muon_extra_scale_factor,
            muon_split_qkv=optimizer.muon_split_qkv,
            muon_split_qkv_heads=optimizer.muon_split_qkv_heads,
            adaptive_muon_moment2_method=optimizer.adaptive_muon_moment2_method,
            adaptive_muon_beta2=optimizer.adaptive_muon_beta2,
            adaptive_muon_eps=optimizer.adaptive_muon_eps,
            clip_grad=min(optimizer.clip_grad, 0.5),
            zero_stage=optimizer.zero_stage,
        ),
        precision=_shrink_precision(config, model.num_layers),
        data=replace(config.data, num_workers=0) if keeps_data else _shrink_data(config),
        checkpoint=CheckpointConfig(),
        stability=StabilityConfig(),
        debug=DebugConfig(),
        logging=LoggingConfig(),
        run=RunConfig(seed=config.run.seed),
        extra=config.extra,
    )
    small = _with_micro_batches(small, config.batch.gas, small_world_size)
    gas = small.batch.gas * num_replicas
    reference = replace(
        small,
        model=replace(model, loss_chunk_tokens=0),
        parallel=ParallelConfig(device="cpu"),
        batch=replace(small.batch, gas=gas),
        optimizer=replace(small.optimizer, zero_stage=0),
    )
    if problems := find_problems(reference, 1):
        raise ShrinkError(problems[0])
    return Shrunk(small, reference, small_world_size, tuple(notes))


def _shrink_parallel(config: Config, world_size: int, device_type: str, notes: list[str]) -> tuple[ParallelConfig, int]:
    """Return the small layout and its rank count; append differences to ``notes``."""
    parallel = config.parallel
    sizes = {
        "data": parallel.data_parallel_size(world_size),
        "expert": parallel.expert_model_parallel_size if config.model.num_experts else 1,
        "tensor": parallel.model_parallel_size,
        "context": parallel.context_parallel_size,
        "pipe": parallel.num_stages,
    }
    original_sizes = dict(sizes)

    def num_ranks() -> int:
        return sizes["data"] * sizes["tensor"] * sizes["context"] * sizes["pipe"]

    def expert_shards() -> int:
        """Return the number of tensor ranks that shard an expert: fewer than all if that is so in the run."""
        if not parallel.has_fewer_expert_shards:
            return sizes["tensor"]
        return parallel.expert_shards if sizes["tensor"] == original_sizes["tensor"] else 1

    def lower_data() -> None:
        """Set the smallest number of replicas (2 if possible) over which ``expert`` expert ranks can be distributed."""
        for count in range(min(original_sizes["data"], 2), original_sizes["data"] + 1):
            if count * sizes["context"] * (sizes["tensor"] // expert_shards()) % sizes["expert"] == 0:
                sizes["data"] = count
                return

    lower_data()
    for axis in ("expert", "tensor", "context", "pipe"):
        is_fixed = axis == "pipe" and (parallel.pipeline_layout or parallel.pipeline_schedule_file)
        smallest = 4 if axis == "context" and parallel.context_inner > 1 else 2
        if num_ranks() > MAX_RANKS and sizes[axis] > smallest and not is_fixed:
            sizes[axis] = smallest
            lower_data()
    if num_ranks() > MAX_RANKS:
        raise ShrinkError(f"the smallest layout with these axes needs {num_ranks()} processes, more than {MAX_RANKS}")
    for axis in ("tensor", "context", "pipe", "expert"):
        if sizes[axis] != original_sizes[axis]:
            notes.append(f"{axis} {original_sizes[axis]} checked as {sizes[axis]}")
    if parallel.has_fewer_expert_shards and expert_shards() != parallel.expert_shards:
        notes.append(f"experts' tensor {parallel.expert_shards} checked as {expert_shards()}")
    schedule = parallel.pipeline_schedule
    if schedule == AUTO:
        notes.append("--pipeline-schedule auto checked with the default schedule")
        schedule = None
    has_file = parallel.pipeline_schedule_file is not None
    small = replace(
        parallel,
        model_parallel_size=sizes["tensor"],
        pipe_parallel_size=sizes["pipe"] if parallel.has_pipeline else 0,
        context_parallel_size=sizes["context"],
        hierarchical_context_parallel_sizes=(
            parallel.hierarchical_context_parallel_sizes if sizes["context"] == original_sizes["context"] else "2 2"
        ),
        expert_model_parallel_size=sizes["expert"],
        expert_tensor_parallel_size=expert_shards() if parallel.expert_tensor_parallel_size else 0,
        pipeline_schedule=schedule,
        pipeline_auto_schedules=None,
        pipeline_chunks=1 if parallel.pipeline_layout or has_file else parallel.chunks,
        micro_batch_group_size=min(parallel.micro_batch_group_size, sizes["pipe"]),
        layers_per_chunk=0,
        pipeline_trace=None,
        gradient_accumulation_fusion=config.fuses_accumulation(device_type),
        reduce_bucket_size=1000,  # several buckets, in spite of the few weights
        allgather_bucket_size=1000,
        checkpoint_num_layers=min(parallel.checkpoint_num_layers, 2),
        compile=False,
        partition_method="balanced",
        device="cpu",
        fused_kernels="auto",
        distributed_backend=None,
        step_timeout=0,
    )
    return small, num_ranks()


def _seq_length(parallel: ParallelConfig) -> int:
    """Return the smallest sequence length >= ``MIN_SEQ_LENGTH`` that the tensor and context ranks can split."""
    unit = 2 * parallel.context_parallel_size * parallel.model_parallel_size
    return -(-MIN_SEQ_LENGTH // unit) * unit


def _shrink_model(config: Config, parallel: ParallelConfig, seq_length: int) -> tuple[ModelConfig, str | None]:
    """Return the small model, and its pipeline chunks in ``pipeline_layout`` notation."""
    model, tensor = config.model, parallel.model_parallel_size
    is_decoder = config.family_config.KIND == "decoder"

    # Two heads per rank, with or without sharing of key-value heads, of at least 8 elements that can be rotated.
    unit = tensor * max(map(parallel.head_ranks_of, parallel.cp_comm_type.split()))
    groups = model.num_query_groups
    small_groups = 2 * unit if groups >= 2 * unit and groups % (2 * unit) == 0 else min(groups, unit)
    heads = small_groups * min(model.num_attention_heads // max(groups, 1), 2)
    has_factor_lists = bool(model.rotary_short_factors or model.rotary_long_factors)
    sizes_of_heads = (8, 16, 20) if not has_factor_lists else ()
    head_size = next((size for size in sizes_of_heads if (size * model.rotary_percent) % 2 == 0), model.kv_hidden_size)
    hidden = heads * head_size
    if model.hidden_size != model.num_attention_heads * model.kv_hidden_size and not model.multi_latent_attention:
        hidden += 8 * tensor
    latents: dict[str, Any] = {}
    if model.multi_latent_attention:
        hidden = 16 * tensor
        latents = {
            "q_lora_rank": min(model.q_lora_rank, 12),
            "kv_lora_rank": 8,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8 if model.v_head_dim == model.qk_head_dim else 6,
        }

    types = _layer_parts(model) if is_decoder else []
    num_layers, layout, patterns = _shrink_layers(config, parallel, types)
    small = replace(
        model,
        num_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=small_groups if is_decoder else heads,
        kv_hidden_size=head_size,
        ff_hidden_size=2 * hidden,
        max_position_embeddings=0 if not config.family_config.has_max_positions(model) else 2 * seq_length,
        vocab_size=DECODER_VOCABULARY if is_decoder else VOCABULARY,
        make_vocab_size_divisible_by=min(model.make_vocab_size_divisible_by, 4) if model.vocab_size else 1,
        init_method_std=0.1,  # the gradients of a small model with small weights would be close to 0
        attention_dropout=model.attention_dropout if model.layout_independent_dropout else 0.0,
        hidden_dropout=model.hidden_dropout if model.layout_independent_dropout else 0.0,
        loss_chunk_tokens=8 if model.loss_chunk_tokens else model.loss_chunk_tokens,
        window_size=min(model.window_size, WINDOW),
        mup_base_hidden_size=_base_size(model.mup_base_hidden_size, model.hidden_size, hidden),
        dim_model_base=_base_size(model.dim_model_base, model.hidden_size, hidden),
        mtp_num_layers=min(model.mtp_num_layers, 2),
        qk_clip_threshold=min(model.qk_clip_threshold, MAX_LOGIT),
        attention_temperature_floor=min(model.attention_temperature_floor, MAX_FACTOR_OF_DOCUMENTS),
        **latents,
        **_shrink_recurrent(model, unit),
        **patterns,
        **(_shrink_experts(model, parallel, hidden) if model.num_experts else {}),
    )
    return small, layout


def _base_size(base: int, size: int, small_size: int) -> int:
    """Return the base size for muP or MiniCPM at ``small_size``; 0 stays 0."""
    if not base:
        return 0
    return small_size if base == size else small_size // 2 if base < size else small_size * 2


def _shrink_recurrent(model: ModelConfig, tensor: int) -> dict[str, Any]:
    """Return the sizes of small recurrent mixers, with two key heads or groups per tensor rank if the model has them.

    Sizes of mixers that the model does not have are reset to their defaults by ``ModelConfig``.
    """
    key_heads = 2 * tensor if model.linear_num_key_heads >= 2 * tensor else tensor
    value_heads = key_heads * min(model.linear_num_value_heads // model.linear_num_key_heads, 2)
    is_square = model.linear_key_head_dim == model.linear_value_head_dim
    groups = model.mamba_num_groups if model.mamba_num_groups < tensor else tensor
    has_one_norm = model.mamba_norm_groups != model.mamba_num_groups
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8 if is_square else 6,
        "mamba_state_dim": 6,
        "mamba_head_dim": 8,
        "mamba_num_groups": groups,
        "mamba_num_heads": 2 * tensor,
        "mamba_norm_groups": 1 if has_one_norm else groups,
    }


def _shrink_experts(model: ModelConfig, parallel: ParallelConfig, hidden: int) -> dict[str, Any]:
    """Return fields for a few experts per layer, routed by the same rules."""
    expert_ranks = parallel.expert_model_parallel_size
    topk = min(model.moe_router_topk, 2)
    groups = group_topk = 0
    if model.moe_router_num_groups:
        groups = min(model.moe_router_num_groups, 2)
        group_topk = 1 if model.moe_router_group_topk < model.moe_router_num_groups else groups
        topk = max(topk, group_topk)
    unit = expert_ranks * max(groups, 1)
    experts = next(
        count for count in range(unit, unit * 64, unit)
        if count > topk and (not groups or count // groups >= max(topk // group_topk, 2))
    )  # fmt: skip
    experts = min(experts, model.num_experts) if model.num_experts % expert_ranks == 0 else experts
    return {
        "num_experts": experts,
        "moe_router_topk": min(topk, experts),
        "moe_router_num_groups": groups,
        "moe_router_group_topk": group_topk,
        "moe_router_group_score_topk": min(model.moe_router_group_score_topk, experts // max(groups, 1)),
        "moe_ffn_hidden_size": hidden,
        "moe_shared_expert_intermediate_size": hidden if model.moe_shared_expert_intermediate_size else 0,
    }


def _layer_parts(model: ModelConfig) -> list[LayerParts]:
    """Return the parts of each layer of a decoder; windows and rotary positions are parts of attention."""
    count = model.num_layers
    has_window = window_pattern(model.window_attn_skip_freq, count) if model.window_size else (False,) * count
    is_rope = model.position_embedding_type == ROPE
    has_no_rope = no_rope_layers(model.no_rope_freq, count) if is_rope else (True,) * count
    return [
        LayerParts(
            window and layer_type.has_attention, layer_type, layer_type.has_attention and is_rope and not no_rope
        )
        for window, layer_type, no_rope in zip(has_window, layer_types(model), has_no_rope, strict=True)
    ]


def _shrink_layers(
    config: Config, parallel: ParallelConfig, types: Sequence[LayerParts]
) -> tuple[int, str | None, dict[str, Any]]:
    """Return the layer count, the layers by pipeline chunk, and the fields with layer patterns.

    Args:
        types: parts of each layer of a decoder; empty for another family.
    """
    model = config.model
    num_chunks = parallel.num_stages * parallel.chunks
    if not types:  # balanced by cost; the encoder-decoder has the numbers of its sides in the family's section
        return min(model.num_layers, max(num_chunks, 2)), None, {}

    # Distinct types in order of their first layer, with that of the last layer, which MTP repeats, at the end.
    distinct = [*(layer_type for layer_type in dict.fromkeys(types) if layer_type != types[-1]), types[-1]]
    chunk_sizes: list[int] = []
    if parallel.has_pipeline:
        chunk_sizes = [1] * num_chunks
        if config.parallel.pipeline_layout is not None:
            chunk_sizes = [min(chunk.count("t"), 1) for chunk in parse_layout(config.parallel.pipeline_layout)]
        while sum(chunk_sizes) < len(distinct):
            chunk_sizes[chunk_sizes.index(1)] += len(distinct) - sum(chunk_sizes)
        num_layers = sum(chunk_sizes)
    else:
        num_layers = max(len(distinct), min(len(types), 2))
    small_types = [distinct[(idx - num_layers) % len(distinct)] for idx in range(num_layers)]
    patterns: dict[str, Any] = {
        name: str([int(value) for value in values])
        for name, is_set, values in (
            ("window_attn_skip_freq", bool(model.window_attn_skip_freq), [t.has_window for t in small_types]),
            (
                "moe_layer_freq",
                model.moe_layer_freq != "1" and not model.hybrid_layer_pattern,
                [t.layer_type.feed_forward == EXPERTS for t in small_types],
            ),
            ("no_rope_freq", bool(model.no_rope_freq), [not t.has_rotary for t in small_types]),
            (
                "linear_attention_freq",
                is_hybrid(model) and not model.hybrid_layer_pattern,
                [t.layer_type.mixer != ATTENTION for t in small_types],
            ),
        )
        if is_set
    }
    if model.hybrid_layer_pattern:
        letters = {type_of_letter(letter, model): letter for letter in model.hybrid_layer_pattern}
        patterns["hybrid_layer_pattern"] = "".join(letters[t.layer_type] for t in small_types)
    if not parallel.has_pipeline:
        return num_layers, None, patterns
    chunks = ["t" * size for size in chunk_sizes]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * min(model.mtp_num_layers, 2) + "L"
    return num_layers, "|".join(chunks), patterns


def _shrink_family(config: Config, parallel: ParallelConfig, seq_length: int) -> Any:
    """Copy the family's section with short sequences and, for an encoder-decoder, few layers on both sides."""
    section = config.family_config
    if not section.is_encoder_decoder:
        return section
    num_chunks = parallel.num_stages * parallel.chunks
    enc_chunks = section.pipeline_split_rank * parallel.chunks if section.pipeline_split_rank else -(-num_chunks // 2)
    dec_layers = min(section.dec_layers, max(num_chunks - enc_chunks, 1))
    enc_layers = min(section.enc_layers, max(enc_chunks, num_chunks - dec_layers, 1))
    return replace(
        section,
        enc_seq_length=2 * seq_length,
        dec_seq_length=0,
        enc_layers=enc_layers,
        dec_layers=max(dec_layers, num_chunks - enc_layers),
    )


def has_sharded_blocks(config: Config) -> bool:
    """Return True if tensor ranks shard weights with FP8 scales per block, which small weights cannot have."""
    return config.precision.fp8_recipe == BLOCKWISE and config.parallel.model_parallel_size > 1


def _shrink_precision(config: Config, num_layers: int) -> PrecisionConfig:
    """Return fp64, with the run's products in FP8 if their scales do not need shards of full blocks."""
    precision = config.precision
    if precision.fp8_format is None or has_sharded_blocks(config):
        return PrecisionConfig(dtype="fp64")
    num_at_start, num_at_end = (
        min(number, (num_layers - 1) // 2)
        for number in (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16)
    )
    return PrecisionConfig(
        dtype="fp64",
        fp8_format=precision.fp8_format,
        fp8_recipe=precision.fp8_recipe,
        first_last_layers_bf16=precision.first_last_layers_bf16,
        num_layers_at_start_in_bf16=num_at_start,
        num_layers_at_end_in_bf16=num_at_end,
    )


def _shrink_data(config: Config) -> DataConfig:
    """Configure random tokens with the run's rules for document ends."""
    data = config.data
    is_packed = data.sft is not None or data.packing != DataConfig().packing
    can_reset = config.family_config.KIND == "decoder"
    separates_documents = data.reset_attention_mask or (is_packed and can_reset) or data.exclude is not None
    return DataConfig(
        data_path="none",
        reset_position_ids=data.reset_position_ids or (is_packed and config.model.has_position_ids),
        reset_attention_mask=separates_documents,
        eod_mask_loss=data.eod_mask_loss or (data.sft is not None and can_reset),
    )


def _with_micro_batches(config: Config, gas: int, world_size: int) -> Config:
    """Copy ``config`` with the smallest valid micro-batch count, at least two per stage if the run has them.

    Args:
        gas: the run's micro-batches per replica.

    Raises:
        ShrinkError: the configuration is invalid with every micro-batch count.
    """
    first_problem = ""
    for count in _counts(config, gas):
        candidate = replace(config, batch=replace(config.batch, gas=count))
        problems = find_problems(candidate, world_size)
        if not problems:
            return candidate
        first_problem = first_problem or problems[0]
    raise ShrinkError(first_problem)


def _counts(config: Config, gas: int) -> Iterator[int]:
    """Yield micro-batch counts to try: two per stage first, the run's own last."""
    if config.parallel.pipeline_schedule_file is None:
        start = min(gas, 2 * config.parallel.num_stages)
        yield from range(start, min(gas, start + 2 * config.parallel.num_stages))
    yield gas
