"""Mutants of the model families: attention, masks, norms, losses, experts, initial values, Hugging Face weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron.models.common.cache_slots import KVCacheSlots
from megatron.models.common.experts import Coefficient
from megatron.mpu.groups import SINGLE
from megatron.mpu.mappings import reduce_from_tensor_region
from megatron.mpu.shard import Shard, set_shard
from tests.mutants.mutant import call_after_init, mutant

FEATURE = "tests/models/common/test_features.py::test_feature_matches_formula"
TENSOR_RANKS = "tests/models/common/test_tensor_ranks.py::test_tensor_ranks_match_one_process"
CONTEXT = "tests/models/common/test_context_parallel.py::test_every_family_matches_one_process_with_same_masks"
CONTEXT_A2A = "tests/models/common/test_context_parallel.py::test_all_to_all_matches_one_process"
PARTIAL = "tests/models/common/test_sequence_parallel.py::test_replicated_parameters_have_partial_gradients"
SEQUENCE_SHARDS = (
    "tests/models/common/test_sequence_parallel.py::test_every_family_matches_one_process_with_same_masks[2]"
)
CACHE = "tests/models/common/test_cache.py::test_decoder_cache_matches_full_forward[gpt2]"
SINK_LAYOUT = "tests/parity/test_extras.py::test_every_layout_equals_single_process"
SLOPES = "tests/models/common/test_mpt_model.py::test_tensor_ranks_use_slopes_of_their_heads"
ONE_MASK = "tests/models/common/test_masks.py::test_stage_builds_document_mask_once_per_micro_batch[gpt2]"
NORM = "tests/models/common/test_norm.py"
RMS_NORM = f"{NORM}::test_rms_norm_and_gradients_match_formula"
GATED = "tests/models/common/test_mlp.py::test_gated_mlp_is_activated_gate_times_value[1-gated-silu]"
DROPOUT = "tests/models/common/test_dropout.py"
LOSS_MASK = "tests/models/common/test_model.py::test_tokens_outside_loss_mask_do_not_count"
SHARED_TABLE = "tests/models/common/test_shared_table.py::test_shared_table_gradient_matches_single_table[both]"
INITIAL = "tests/models/common/test_init.py"
MUP = "tests/models/common/test_mup.py"
EXPERTS = "tests/models/common/test_experts.py"
BY_TOKEN = f"{EXPERTS}::test_layer_matches_loop_over_tokens"
BALANCING = "tests/parity/test_load_balancing.py::test_every_layout_equals_single_process"
HIERARCHICAL = (
    "tests/models/common/test_context_parallel.py::test_hierarchical_form_and_types_by_layer_match_one_process"
)
EXPERT_LAYOUT = "tests/parity/test_experts.py::test_every_layout_equals_single_process[balanced-1-1-2-ep-2-1]"
T5 = "tests/models/t5/test_model.py"
PLAIN_T5 = f"{T5}::test_model_matches_plain_torch[T5-False]"
T5_FIELDS = "tests/data/test_fields.py::test_t5_decoder_inputs_are_shifted_and_restart_per_document"
SPANS = "tests/models/t5/test_corruption.py::test_inputs_and_targets_restore_text_with_exact_lengths"
BERT_SAMPLES = "tests/models/bert/test_bert_samples.py"
HUGGING_FACE_BERT = (
    "tests/models/bert/test_against_huggingface.py"
    "::test_logits_loss_and_gradients_match_hugging_face[2-fp64 both gelu sdpa]"
)
GPT2_WEIGHTS = "tests/models/gpt2/test_huggingface.py::test_plain_forward_with_our_weights_matches_hugging_face[True]"
READ_PART = "tests/models/common/test_recipes.py::test_reading_any_shard_equals_slice_of_full_weight[grouped queries]"
HUB_CONFIGS = "tests/models/llama/test_modern_huggingface.py"
EXPERT_WEIGHTS = (
    "tests/models/llama/test_experts_against_huggingface.py"
    "::test_logits_loss_and_gradients_match_hugging_face[qwen3_moe]"
)
MODERN_WEIGHTS = (
    "tests/models/llama/test_modern_against_huggingface.py::test_logits_loss_and_gradients_match_hugging_face[gemma2]"
)
HALF_BIAS = f"{T5}::test_16_bit_bias_table_gradient_accumulates_in_fp32"

# Attention, its positions and its cache


@mutant("megatron.models.common.attention:SelfAttention.split_groups", f"{FEATURE}[groups]")
def keys_and_values_are_swapped(original: Any) -> Any:
    def split(self: Any, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = original(self, packed)
        return query, value, key

    return split


@mutant(
    "megatron.models.common.attention:Attention.__init__",
    f"{DROPOUT}::test_tensor_ranks_share_hidden_masks_but_not_attention_masks",
)
def tensor_ranks_drop_the_same_attention(original: Any) -> Any:
    return call_after_init(original, lambda self: setattr(self, "has_sharded_heads", False))


@mutant("megatron.ops.positions:Rotary._llama3_weights", f"{FEATURE}[rope, llama3]")
def llama3_scaling_slows_down_high_frequencies(original: Any) -> Any:
    return lambda self, plain: [1.0 - share for share in original(self, plain)]


@mutant("megatron.models.common.attention:SelfAttention._set_attention_functions", f"{FEATURE}[large value heads]")
def padded_heads_change_the_scale_of_the_scores(original: Any) -> Any:
    def set_functions(self: Any, args: Any, *others: Any) -> None:
        original(self, replace(args, softmax_scale=args.padded_head_size**-0.5), *others)

    return set_functions


@mutant("megatron.models.common.model_args:ModelArgs.local_rotary", f"{FEATURE}[rope, local base]")
def layers_with_a_window_use_the_global_rotary_base(original: Any) -> Any:
    return property(lambda self: self.rotary)


@mutant("megatron.models.common.attention:local_alibi_slopes", SLOPES)
def every_tensor_rank_has_the_alibi_slopes_of_the_first(original: Any) -> Any:
    return lambda args, parallel: original(args, replace(parallel, group=replace(parallel.group, rank=0)))


@mutant("megatron.models.common.cache_slots:KVCacheSlots.advance", CACHE)
def cached_queries_do_not_see_their_own_key(original: Any) -> Any:
    def advance(self: KVCacheSlots, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        original(self, positions, lengths)
        if self.mask is not None:
            slots = torch.arange(self.stop, device=positions.device)
            self.mask = (slots < positions.unsqueeze(2)).unsqueeze(1)

    return advance


@mutant("megatron.models.common.kv_cache:LayerKVCache.keep", CACHE)
def cache_keeps_the_first_rows_of_the_batch(original: Any) -> Any:
    return lambda self, rows: original(self, torch.arange(len(rows)))


# Masks


@mutant("megatron.models.common.masks:Masks.__init__", f"{FEATURE}[window]")
def window_is_one_key_too_short(original: Any) -> Any:
    return call_after_init(original, lambda self: setattr(self, "window", max(self.window - 1, 0)))


@mutant("megatron.models.common.transformer:TransformerLayer.forward", f"{FEATURE}[window by list]")
def layers_with_a_window_use_the_full_mask(original: Any) -> Any:
    return lambda self, x, mask=None, cache=None, positions=None, window_mask=None, starts=None: original(
        self, x, mask, cache, positions, mask, starts
    )


@mutant("megatron.models.common.masks:LastValueCache.get", ONE_MASK)
def mask_of_the_previous_micro_batch_is_reused(original: Any) -> Any:
    return lambda self, key, make: original(self, key, make) if self._value is None else self._value


# Context parallelism in the families


@mutant("megatron.models.common.language_model:Embedding._default_positions", CONTEXT)
def learned_positions_restart_on_each_context_rank(original: Any) -> Any:
    return lambda self, tokens: torch.arange(tokens.shape[1]).expand(tokens.shape)


@mutant("megatron.models.common.parallel_context:ParallelContext.query_positions", CONTEXT)
def queries_of_a_context_rank_are_masked_as_the_first_of_the_sequence(original: Any) -> Any:
    return lambda self, length, device: torch.arange(len(original(self, length, device)))


@mutant("megatron.models.common.parallel_context:ParallelContext.query_and_key_segments", CONTEXT)
def documents_that_began_on_another_context_rank_are_cut(original: Any) -> Any:
    return lambda self, segment_ids: original(self, segment_ids - segment_ids[:, :1])


@mutant("megatron.models.bert.model:bert_loss", CONTEXT)
def next_sentence_loss_counts_on_every_context_rank(original: Any) -> Any:
    def loss(*args: Any, parallel: Any, **kwargs: Any) -> Any:
        return original(*args, parallel=replace(parallel, context=replace(parallel.context, rank=0)), **kwargs)

    return loss


# Sinks


@mutant("tds.grad_norm:is_counted_in_norm", f"{SINK_LAYOUT}[gpt_oss-2-1-1-1---sequence-parallel]")
def sinks_of_other_tensor_ranks_are_missing_from_the_gradient_norm(original: Any) -> Any:
    """Sharded vectors, such as sinks, count on the first tensor rank only."""
    return lambda parameter, tensor_rank: original(parameter, tensor_rank) and (parameter.dim() > 1 or not tensor_rank)


@mutant(
    "megatron.models.common.attention_extras:Sinks.__init__",
    f"{SINK_LAYOUT}[gpt_oss-2-1-1-1---sequence-parallel]",
    raises=True,
)
def sinks_are_not_marked_as_shards(original: Any) -> Any:
    return call_after_init(original, lambda self: set_shard(self.weight, Shard(tuple(self.weight.shape))))


@mutant("megatron.models.common.attention_extras:Sinks.forward", CONTEXT)
def each_context_rank_adds_the_sink_to_the_denominator(original: Any) -> Any:
    return lambda self, query: original(self, query) + math.log(self._parallel.context.size)


@mutant("megatron.models.common.attention_extras:Sinks.forward", CONTEXT_A2A)
def all_to_all_uses_the_sinks_of_the_first_heads(original: Any) -> Any:
    return lambda self, query: self.weight[: len(original(self, query))]


@mutant("megatron.models.common.parallel_context:ParallelContext.query_positions", HIERARCHICAL)
def hierarchical_form_masks_the_queries_of_one_rank(original: Any) -> Any:
    return lambda self, length, device: self.positions(length // self.query_group.size, device)


@mutant("megatron.ops.document_attention:_TileScores.__init__", f"{FEATURE}[sinks]")
def sinks_are_scaled_like_scores(original: Any) -> Any:
    def scale_sinks(self: Any) -> None:
        self.sinks = None if self.sinks is None else self.sinks * self.scale

    return call_after_init(original, scale_sinks)


@mutant("megatron.ops.grouped:_AddGroupedBias.forward", f"{EXPERTS}::test_layer_matches_loop_over_tokens[biases]")
def biases_of_experts_are_those_of_the_next(original: Any) -> Any:
    return lambda ctx, x, counts, row_counts, *biases: original(ctx, x, counts, row_counts, *biases[1:], biases[0])


@mutant("megatron.config.layer_features:no_rope_layers", f"{FEATURE}[rope, not in the first layer]")
def layers_with_and_without_rotary_positions_are_swapped(original: Any) -> Any:
    return lambda text, num_layers: tuple(not entry for entry in original(text, num_layers))


# Norms


@mutant("megatron.models.common.norms:_RMSNorm.backward", RMS_NORM)
def rms_norm_gradient_takes_the_norm_for_a_constant(original: Any) -> Any:
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _, weight, factor = ctx.saved_tensors
        return grads[0] * weight * factor, *original(ctx, *grads)[1:]

    return backward


@mutant(
    "megatron.models.common.norms:layer_norm",
    f"{NORM}::test_layer_norm_accumulates_16_bit_gradients_in_fp32[True-bf16]",
)
def layer_norm_gradients_are_accumulated_in_16_bits(original: Any) -> Any:
    return lambda x, weight, bias, epsilon: F.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)


@mutant("megatron.models.common.norms:upcast_with_offset", f"{FEATURE}[1 + weight]")
def offset_norm_does_not_add_one_to_its_weight(original: Any) -> Any:
    def widened(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide, scale = original(x, weight)
        return wide, scale - 1.0

    return widened


@mutant("megatron.models.common.norms:AllHeadsNorm._mean", f"{TENSOR_RANKS}[2-q/k norm, all, rms]")
def query_norm_is_over_the_heads_of_one_tensor_rank(original: Any) -> Any:
    return lambda self, x: x.sum(dim=(1, 3), keepdim=True) * self.group.size / self.size


@mutant("megatron.models.common.norms:AllHeadsNorm._mean", f"{TENSOR_RANKS}[2-q/k norm, all, rms]")
def gradient_of_the_mean_over_all_heads_is_not_summed(original: Any) -> Any:
    return lambda self, x: reduce_from_tensor_region(x.sum(dim=(1, 3), keepdim=True), self.group) / self.size


@mutant("megatron.models.common.parallel_context:ParallelContext.mark_sequence_parallel", PARTIAL)
def gradients_of_sequence_parallel_norms_are_not_marked_as_partial(original: Any) -> Any:
    return lambda self, module: module


# Layers and recompute


@mutant("megatron.models.common.transformer:GatedLinear.forward", GATED)
def gate_and_value_are_swapped(original: Any) -> Any:
    return lambda self, *args: original(self, *args)[::-1]


@mutant(
    "megatron.models.common.transformer:run_layers",
    f"{DROPOUT}::test_recompute_is_bitwise_equal[no dropout-2-False]",
)
def recompute_skips_the_last_incomplete_group_of_layers(original: Any) -> Any:
    def run_layers(layers: Sequence[Any], x: torch.Tensor, *args: Any, recompute: Any) -> Any:
        group_size = recompute.interval or 1
        return original(layers[: len(layers) // group_size * group_size], x, *args, recompute=recompute)

    return run_layers


# Head, loss and the table shared with the embedding


@mutant("megatron.models.common.language_model:head_output", f"{FEATURE}[scaled logits]")
def logits_are_not_scaled(original: Any) -> Any:
    return lambda x, weight, args, parallel, bias=None: original(
        x / args.logit_multiplier, weight, args, parallel, bias
    )


@mutant("megatron.mpu.mappings:enter_tensor_region", f"{TENSOR_RANKS}[2-GPT-2]")
def gradient_of_the_heads_input_is_not_summed(original: Any) -> Any:
    return lambda x, group, sequence_parallel=False: original(x, group, sequence_parallel) if sequence_parallel else x


@mutant("megatron.models.common.language_model:model_loss", LOSS_MASK)
def masked_tokens_have_a_loss(original: Any) -> Any:
    return lambda logits, labels, loss_mask, *args: original(logits, labels, torch.ones_like(loss_mask), *args)


@mutant("megatron.models.common.language_model:model_loss", LOSS_MASK)
def masked_tokens_are_counted(original: Any) -> Any:
    def loss(logits: Any, labels: torch.Tensor, loss_mask: torch.Tensor, *args: Any) -> Any:
        total, count = original(logits, labels, loss_mask, *args)
        return total, torch.full_like(count, loss_mask.numel())

    return loss


@mutant("megatron.models.common.language_model:_SharedTable.backward", SHARED_TABLE)
def shared_table_gets_the_gradient_of_the_head_only(original: Any) -> Any:
    return lambda ctx, rows, rest: rest


# Initial values


@mutant(
    "megatron.models.common.parameters:_fill_normal",
    f"{INITIAL}::test_model_init_is_independent_of_tensor_ranks[2]",
)
def every_tensor_rank_draws_its_own_initial_values(original: Any) -> Any:
    return lambda parameter, shard, name, seed, *args: original(parameter, shard, name, seed + shard.start, *args)


@mutant(
    "megatron.models.common.parameters:_random_block",
    f"{INITIAL}::test_table_of_several_blocks_matches_on_four_ranks",
)
def every_block_of_rows_repeats_the_first(original: Any) -> Any:
    return lambda name, seed, first, rows, rest: original(name, seed, 0, rows, rest)


@mutant(
    "megatron.models.common.parameters:gpt2_rule",
    f"{INITIAL}::test_weights_are_normal_with_scaled_residual_projections",
)
def residual_outputs_are_scaled_by_layers_instead_of_sublayers(original: Any) -> Any:
    return lambda std, num_layers, *args: original(std, num_layers / 2, *args)


@mutant(
    "megatron.models.common.parameters:gpt2_rule",
    f"{MUP}::test_mup_scales_only_init_and_rate_of_hidden_matrices[gpt2]",
)
def mup_divides_initial_values_by_the_width_instead_of_its_root(original: Any) -> Any:
    return lambda std, num_layers, width_multiplier=1.0: original(std, num_layers, width_multiplier**2)


# Experts


@mutant("megatron.models.common.router:Router._previous_expert_shares", f"{BY_TOKEN}[softmax]")
def load_balancing_loss_lacks_the_number_of_experts(original: Any) -> Any:
    return lambda self, like: original(self, like) / self.model_args.num_experts


@mutant("megatron.models.common.router:_AttachLoss.backward", f"{BY_TOKEN}[softmax]")
def losses_of_the_router_ignore_the_gradient_scale(original: Any) -> Any:
    return lambda ctx, *grads: (grads[0], ctx.like.new_ones(()), None)


@mutant(
    "megatron.models.common.router:Router.update_balance",
    f"{EXPERTS}::test_expert_bias_moves_by_sign_of_load_error",
)
def expert_bias_moves_towards_busy_experts(original: Any) -> Any:
    def take(self: Any, counts: torch.Tensor) -> None:
        before = self.expert_bias.detach().clone()
        original(self, counts)
        self.expert_bias.data = 2 * before - self.expert_bias.data

    return take


@mutant("tds.backward_state:is_running", f"{EXPERTS}::test_recompute_and_evaluation_do_not_count_tokens")
def recompute_counts_the_choices_of_experts_again(original: Any) -> Any:
    return lambda: False


@mutant("megatron.models.common.router:Router._expert_shares", f"{BALANCING}[sequence]")
def choices_of_a_sequence_are_not_summed_over_context_ranks(original: Any) -> Any:
    def expert_shares(self: Any, balancing_type: str, probabilities: torch.Tensor) -> torch.Tensor:
        parallel, self.parallel = self.parallel, replace(self.parallel, context=SINGLE)
        try:
            return original(self, balancing_type, probabilities)
        finally:
            self.parallel = parallel

    return expert_shares


@mutant(
    "megatron.config.experts:ExpertFeatures.aux_loss_coeffs",
    f"{EXPERTS}::test_several_load_balancing_losses_are_added_with_their_weights",
)
def all_load_balancing_losses_have_the_first_weight(original: Any) -> Any:
    return property(lambda self: original.fget(self)[:1] * len(self.balancing_types))


@mutant("megatron.models.common.router:Router.clear", f"{EXPERTS}::test_global_loss_ignores_tokens_of_earlier_steps")
def choices_of_the_previous_step_stay_in_global_aux_loss(original: Any) -> Any:
    def clear(self: Any) -> None:
        step_counts = self.step_counts.clone()
        original(self)
        self.step_counts = step_counts

    return clear


@mutant("megatron.models.common.router:capacity_mask", f"{BY_TOKEN}[capacity by weight]")
def capacity_of_experts_is_rounded_down(original: Any) -> Any:
    def capacity_mask(
        experts: torch.Tensor, weights: torch.Tensor, args: Any, parallel: Any, **options: Any
    ) -> torch.Tensor:
        even_share = len(experts) * args.moe_router_topk / args.num_experts
        factor = math.floor(args.moe_expert_capacity_factor * even_share) / even_share
        return original(experts, weights, replace(args, moe_expert_capacity_factor=factor), parallel, **options)

    return capacity_mask


@mutant("megatron.models.common.experts:Coefficient.forward", f"{BY_TOKEN}[residual]")
def coefficients_of_routed_and_shared_experts_are_swapped(original: Any) -> Any:
    return lambda self, x: original(self, x).flip(-1)


@mutant("megatron.models.common.parallel_context:ParallelContext.mark_sequence_parallel", SEQUENCE_SHARDS)
def gradients_of_coefficients_are_not_summed_over_sequence_shards(original: Any) -> Any:
    return lambda self, module: module if isinstance(module, Coefficient) else original(self, module)


@mutant("megatron.models.common.router:Routers._reduce_counters", EXPERT_LAYOUT)
def choices_of_experts_are_not_summed_over_replicas(original: Any) -> Any:
    return lambda self, counts: counts


@mutant("megatron.mpu.expert_parallel:set_expert", EXPERT_LAYOUT)
def gradients_of_different_experts_are_summed(original: Any) -> Any:
    return lambda parameter: parameter


# T5


@mutant("megatron.models.t5.model:tied_logits", PLAIN_T5)
def tied_t5_head_is_not_scaled(original: Any) -> Any:
    return lambda x, weight, args, parallel: original(x * args.hidden_size**0.5, weight, args, parallel)


@mutant("megatron.models.t5.layers:RelativeBias.__init__", PLAIN_T5)
def relative_bias_of_the_decoder_is_bidirectional(original: Any) -> Any:
    return lambda self, args, parallel, is_bidirectional: original(self, args, parallel, True)


@mutant("megatron.models.t5.layers:RelativeBias.__init__", f"{T5}::test_relative_bias_table_is_sharded_by_heads")
def every_tensor_rank_has_the_relative_bias_of_the_first_heads(original: Any) -> Any:
    return lambda self, args, parallel, is_bidirectional: original(
        self, args, replace(parallel, group=replace(parallel.group, rank=0)), is_bidirectional
    )


@mutant("tds.grad_norm:accurate_dtype", HALF_BIAS)
def gradient_of_the_relative_bias_is_accumulated_in_16_bits(original: Any) -> Any:
    return lambda dtype: dtype


@mutant("megatron.ops.attention:segment_mask", f"{T5}::test_packed_document_matches_standalone_forward[T5]")
def decoder_reads_the_encoder_output_of_other_documents(original: Any) -> Any:
    return lambda queries, keys: original(queries, keys) | torch.tensor(queries is not keys)


@mutant("megatron.models.t5.model:embed", "tests/models/t5/test_t5_dropout.py::test_every_mask_has_distinct_key")
def encoder_and_decoder_share_the_dropout_mask_of_the_embedding(original: Any) -> Any:
    return lambda *args, side, **kwargs: original(*args, side="encoder", **kwargs)


@mutant("megatron.models.t5.data:t5_fields", T5_FIELDS)
def t5_decoder_reads_the_token_it_must_predict(original: Any) -> Any:
    def fields(*args: Any, **kwargs: Any) -> dict[str, Any]:
        t5_inputs = original(*args, **kwargs)
        return {**t5_inputs, "dec_tokens": t5_inputs["labels"]}

    return fields


@mutant("megatron.models.t5.data:t5_fields", T5_FIELDS)
def padding_of_t5_targets_has_a_loss(original: Any) -> Any:
    def fields(*args: Any, **kwargs: Any) -> dict[str, Any]:
        t5_inputs = original(*args, **kwargs)
        return {**t5_inputs, "loss_mask": torch.ones_like(t5_inputs["loss_mask"])}

    return fields


@mutant("megatron.models.t5.data:corrupt_spans", SPANS)
def sentinels_continue_in_the_next_document(original: Any) -> Any:
    def corrupt_spans(text: np.ndarray, spans: Any, sentinels: np.ndarray) -> Any:
        pair = original(text, spans, sentinels)
        one_document = original(text, spans._replace(documents=np.zeros_like(spans.documents)), sentinels)
        return pair._replace(inputs=one_document.inputs, targets=one_document.targets)

    return corrupt_spans


# BERT


@mutant("megatron.models.bert.model:padding_mask", HUGGING_FACE_BERT)
def tokens_see_padding(original: Any) -> Any:
    return lambda segments, x, args, parallel: None


@mutant(
    "megatron.models.bert.data:build_sample",
    f"{BERT_SAMPLES}::test_second_segment_continues_or_starts_mid_document",
)
def labels_of_the_next_sentence_are_inverted(original: Any) -> Any:
    return lambda masked, seam, is_random, *args: original(masked, seam, not is_random, *args)


@mutant(
    "megatron.models.bert.data:_MASKED",
    f"{BERT_SAMPLES}::test_mask_prob_and_80_10_10_split_match_settings",
)
def every_predicted_token_is_masked(original: Any) -> Any:
    return np.uint64(2**64 - 1)


# Hugging Face weights and settings


@mutant("megatron.models.gpt2.huggingface:weight_mapping", GPT2_WEIGHTS)
def query_key_and_value_are_not_interleaved_by_head(original: Any) -> Any:
    def weight_mapping(name: str, num_heads: int) -> Any:
        return original(name, 1 if name.endswith("query_key_value.weight") else num_heads)

    return weight_mapping


@mutant("megatron.models.common.huggingface:read_into", READ_PART)
def every_rank_reads_the_first_part_of_a_weight(original: Any) -> Any:
    return lambda target, mapping, hf_weights, shapes, shard: original(
        target, mapping, hf_weights, shapes, replace(shard, start=0)
    )


@mutant(
    "megatron.models.llama.huggingface_rotary:_convert_parameters",
    "tests/models/llama/test_huggingface.py::test_reads_hub_configs",
)
def rotary_base_of_a_config_is_ignored(original: Any) -> Any:
    def convert_rope(rope: Any, hf_config: Any) -> Any:
        return original(
            *({key: value for key, value in config.items() if key != "rope_theta"} for config in (rope, hf_config))
        )

    return convert_rope


@mutant(
    "megatron.models.llama.huggingface:_window_values",
    f"{HUB_CONFIGS}::test_hub_configs_round_trip[mistral]",
)
def window_counts_the_token_itself(original: Any) -> Any:
    def values(*args: Any) -> Any:
        model_values, unmapped = original(*args)
        return (
            {**model_values, "window_size": model_values["window_size"] + 1} if model_values else model_values
        ), unmapped

    return values


@mutant("megatron.models.llama.huggingface:_NORMS", MODERN_WEIGHTS)
def norms_before_and_after_the_mlp_are_swapped(original: Any) -> Any:
    both = dict(original["both"])
    both["post_attention_norm"], both["mlp_output_norm"] = both["mlp_output_norm"], both["post_attention_norm"]
    return {**original, "both": both}


@mutant("megatron.models.llama.huggingface_experts:expert_values", EXPERT_WEIGHTS)
def normalisation_of_expert_weights_is_inverted(original: Any) -> Any:
    def values(*args: Any) -> Any:
        model_values, unmapped = original(*args)
        return {**model_values, "moe_router_pre_softmax": not model_values["moe_router_pre_softmax"]}, unmapped

    return values
