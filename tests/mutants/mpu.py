"""Mutants of tensor-, sequence-, context- and expert-parallel layers, of their groups, losses and dropout masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.mpu.context_parallel import to_rank_order
from megatron.mpu.mappings import leave_tensor_region
from tests.mutants.mutant import call_after_init, mutant

LINEAR = "tests/mpu/test_layers.py::test_column_then_row_matches_two_linears[2]"
SEQUENCE = "tests/mpu/test_products.py::test_sequence_shards_match_full_sequence"
MAPPINGS = "tests/mpu/test_mappings.py"
VOCABULARY = "tests/mpu/test_vocabulary.py"
EMBEDDING = f"{VOCABULARY}::test_embedding_matches_torch_and_padded_rows_get_no_gradient[vocabulary 101 by 1-2]"
ENTROPY = f"{VOCABULARY}::test_cross_entropy_matches_torch_and_ignores_padded_columns"
ENTROPY_1, ENTROPY_2 = (f"{ENTROPY}[vocabulary 101 by {case}]" for case in ("8-1", "1-2"))
HALF_PRECISION = "tests/mpu/test_embedding_lookup.py::test_repeated_rows_round_once_and_other_rows_are_zero[bf16]"
CHUNKS = "tests/mpu/test_linear_cross_entropy.py"
FUSED = "tests/mpu/test_fused_cross_entropy.py::test_loss_and_gradients_match_formula_with_and_without_kernels"
CHUNKED = f"{CHUNKS}::test_loss_and_gradients_match_torch_for_any_sharding"
Z_LOSS = "tests/mpu/test_z_loss.py::test_loss_and_gradients_match_formula_on_any_ranks[1]"
SHARD = "tests/mpu/test_shard.py"
TOPOLOGY = "tests/mpu/test_topology.py"
GRID = "tests/mpu/test_initialize.py::test_views_groups_and_broadcast_match_grid"
DROPOUT = "tests/mpu/test_random.py"
OTHER_MASK = f"{DROPOUT}::test_every_key_field_changes_mask"
PHILOX = "tests/mpu/test_random_counted.py"
OWN_MASK = f"{PHILOX}::test_every_rank_draws_its_slice_of_global_mask"
CONTEXT = "tests/mpu/test_context_parallel.py"
CHUNK_ORDER = f"{CONTEXT}::test_tokens_are_partitioned_and_causal_work_is_balanced"
EXCHANGE = "tests/mpu/test_expert_parallel.py::test_rows_reach_experts_in_sender_order_and_return[2]"
EXPERT_SHARDS = "tests/parity/test_experts.py::test_every_layout_equals_single_process[biases-4-1-1-cut-etp-2-1]"
EXPERT_AXIS = "tests/mpu/test_expert_parallel.py::test_expert_axis_is_within_data_and_context"

# Collectives of tensor and sequence parallelism


@mutant("megatron.mpu.mappings:_Reduce.forward", LINEAR)
def row_parallel_output_is_not_summed(original: Any) -> Any:
    return lambda ctx, x, *_: x.clone()


@mutant("megatron.mpu.mappings:_Reduce.backward", LINEAR)
def row_parallel_gradient_is_doubled(original: Any) -> Any:
    return lambda ctx, *grads: (2 * grads[0], None, None)


@mutant("megatron.mpu.mappings:_Copy.backward", f"{MAPPINGS}::test_copy_preserves_input_and_all_reduces_gradient[2]")
def gradient_of_a_copied_input_is_not_summed(original: Any) -> Any:
    return lambda ctx, *grads: (grads[0], None)


@mutant("megatron.mpu.mappings:_all_gather", f"{MAPPINGS}::test_gather_concatenates_inputs_and_slices_gradient[2]")
def gathered_columns_are_in_reverse_rank_order(original: Any) -> Any:
    return lambda x, group: torch.cat(original(x, group).chunk(group.size, dim=-1)[::-1], dim=-1)


@mutant("megatron.mpu.mappings:start_all_reduce", LINEAR)
def column_parallel_input_gradient_is_not_summed(original: Any) -> Any:
    return lambda x, group: replace(original(x.clone(), group), tensor=x)


@mutant("megatron.mpu.mappings:start_reduce_scatter", SEQUENCE)
def sequence_parallel_input_gradient_is_not_summed(original: Any) -> Any:
    return lambda x, group: replace(original(x, group), tensor=x.chunk(group.size)[group.rank])


@mutant("megatron.mpu.mappings:start_all_gather", SEQUENCE)
def weight_gradient_sees_the_local_sequence_shard_only(original: Any) -> Any:
    return lambda x, group: replace(original(x, group), tensor=torch.cat([x] * group.size))


@mutant("megatron.mpu.mappings:_ReduceScatterRows.forward", SEQUENCE)
def reduce_scatter_does_not_sum(original: Any) -> Any:
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.chunk(group.size)[group.rank].clone()

    return forward


# Parallel layers


@mutant("megatron.mpu.layers:RowParallelLinear.forward", LINEAR)
def row_parallel_bias_is_added_on_every_rank(original: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return leave_tensor_region(F.linear(x, self.weight, self.bias), self.group, self.sequence_parallel)

    return forward


@mutant(
    "megatron.mpu.layers:_start_input_grad_reduction",
    "tests/models/common/test_mlp.py::test_gated_mlp_is_activated_gate_times_value[2-gated-silu]",
)
def input_gradient_lacks_the_second_product(original: Any) -> Any:
    return lambda ctx, x, rows, weights: original(ctx, x, rows, [weights[0], *map(torch.zeros_like, weights[1:])])


@mutant("megatron.mpu.shard:set_partial", SEQUENCE)
def row_parallel_bias_gradient_is_not_marked_as_partial(original: Any) -> Any:
    return lambda parameter: parameter


@mutant("megatron.mpu.shard:Shard.narrow", f"{SHARD}::test_cut_slices_local_rows_or_columns")
def every_rank_holds_the_first_shard(original: Any) -> Any:
    return lambda self, full: original(replace(self, start=0), full)


@mutant("megatron.mpu.shard:Shard.unpadded", f"{SHARD}::test_unpadded_excludes_padding_rows")
def padding_rows_belong_to_the_shard(original: Any) -> Any:
    return lambda self, local: local


# Vocabulary-parallel embedding and cross-entropy


@mutant("megatron.mpu.layers:vocab_range", f"{VOCABULARY}::test_vocab_ranges_cover_each_token_once_with_equal_size")
def vocabulary_shards_overlap_by_one_token(original: Any) -> Any:
    def vocab_range(*args: Any) -> tuple[int, int, int]:
        rows, start, num_real = original(*args)
        return rows, max(start - 1, 0), num_real

    return vocab_range


@mutant("megatron.mpu.layers:VocabParallelEmbedding.forward", EMBEDDING)
def tokens_of_other_ranks_are_looked_up_too(original: Any) -> Any:
    def forward(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        rows = F.embedding((tokens - self.start).clamp(0, self.num_real - 1), self.weight)
        return leave_tensor_region(rows, self.group, self.sequence_parallel)

    return forward


@mutant("megatron.mpu.embedding_lookup:embedding_lookup", HALF_PRECISION)
def embedding_gradient_is_accumulated_in_16_bits(original: Any) -> Any:
    return lambda ids, table: F.embedding(ids, table)


@mutant("megatron.mpu.cross_entropy:vocab_parallel_cross_entropy", ENTROPY_1)
def padded_columns_take_part_in_the_softmax(original: Any) -> Any:
    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, group: Any, **kwargs: Any) -> Any:
        return original(logits, targets, group=group, **{**kwargs, "vocab_size": logits.shape[-1] * group.size})

    return cross_entropy


@mutant(
    "megatron.mpu.cross_entropy:vocab_parallel_cross_entropy",
    f"{VOCABULARY}::test_16_bit_logits_give_fp32_losses",
)
def losses_are_rounded_to_16_bits(original: Any) -> Any:
    return lambda logits, *args, **kwargs: original(logits, *args, **kwargs).to(logits.dtype)


@mutant("megatron.mpu.mappings:all_reduce", ENTROPY_2)
def largest_logit_is_each_ranks_own(original: Any) -> Any:
    return lambda x, group, op=dist.ReduceOp.SUM: x if op == dist.ReduceOp.MAX else original(x, group, op)


@mutant("megatron.mpu.cross_entropy:_CrossEntropy.backward", ENTROPY_1)
def upstream_gradient_of_the_loss_is_ignored(original: Any) -> Any:
    return lambda ctx, *grads: original(ctx, torch.ones_like(grads[0]), *grads[1:])


@mutant("megatron.mpu.cross_entropy:_VocabParallelCrossEntropy.backward", ENTROPY_2)
def target_probability_is_subtracted_on_every_rank(original: Any) -> Any:
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        softmax, local, is_remote, *slopes = ctx.saved_tensors
        saved = softmax, local, torch.zeros_like(is_remote), *slopes
        return original(SimpleNamespace(saved_tensors=saved), *grads)

    return backward


@mutant("megatron.mpu.cross_entropy:softmax_grad_scale", Z_LOSS)
def gradient_of_the_z_loss_is_halved(original: Any) -> Any:
    return lambda log_z, z_loss: original(log_z, z_loss / 2)


@mutant(
    "megatron.mpu.cross_entropy:validate_targets",
    f"{CHUNKS}::test_invalid_label_on_device_gives_nan_without_sync",
)
def labels_outside_the_vocabulary_are_accepted(original: Any) -> Any:
    return lambda weights, targets, vocab_size, **kwargs: weights


# Cross-entropy in chunks of tokens, with the product of the head


@mutant("megatron.mpu.linear_cross_entropy:_ChunkedLoss._chunks", f"{CHUNKED}[101-5-some-1]")
def last_incomplete_chunk_is_dropped(original: Any) -> Any:
    return lambda self: (rows for rows in original(self) if rows.stop - rows.start == self.args.chunk_tokens)


@mutant("megatron.mpu.linear_cross_entropy:_add_product", f"{CHUNKED}[101-5-some-1]")
def head_gradient_is_that_of_the_last_chunk(original: Any) -> Any:
    return lambda *args, is_first: original(*args, is_first=True)


@mutant("megatron.mpu.linear_cross_entropy:_add_product", f"{CHUNKS}::test_many_small_bf16_contributions_accumulate")
def head_gradient_is_accumulated_in_16_bits(original: Any) -> Any:
    def add(total: torch.Tensor, a: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        original(total, a, *args, **kwargs)
        total.copy_(total.to(a.dtype))

    return add


@mutant("megatron.mpu.linear_cross_entropy:_ChunkedLoss._start_gather", f"{CHUNKED}[101-5-some-2]")
def chunked_softmax_ignores_other_tensor_ranks(original: Any) -> Any:
    return lambda self, local: (local.unsqueeze(0), None)


@mutant("megatron.mpu.linear_cross_entropy:_ChunkedLoss._add_gradients", f"{CHUNKED}[64-4-weighed-1]")
def chunked_gradient_of_the_target_is_not_weighted(original: Any) -> Any:
    return lambda self, chunk, factor, exp_factor: original(self, chunk, torch.ones_like(factor), exp_factor)


@mutant("megatron.mpu.chunk_softmax:FusedSoftmax.gradient", f"{FUSED}[64-20-float32]")
def fused_gradient_of_the_target_is_not_weighted(original: Any) -> Any:
    return lambda self, factor, exp_factor, dtype: original(self, torch.ones_like(factor), exp_factor, dtype)


@mutant("megatron.mpu.cross_entropy:_FusedCrossEntropy.backward", f"{FUSED}[101-0-float32]")
def fused_gradient_is_that_of_the_sum_of_losses(original: Any) -> Any:
    return lambda ctx, *grads: original(ctx, torch.ones_like(grads[0]), *grads[1:])


# Groups and their order


@mutant(
    "megatron.mpu.topology:Topology.coordinate",
    f"{TOPOLOGY}::test_tensor_ranks_are_adjacent_and_pipe_varies_slowest",
)
def tensor_and_pipeline_axes_are_swapped(original: Any) -> Any:
    def coordinate(self: Any, rank: int) -> Any:
        swapped = replace(self, tensor=self.pipe, pipe=self.tensor)
        coords = original(swapped, rank)
        return replace(coords, tensor=coords.pipe, pipe=coords.tensor)

    return coordinate


@mutant("megatron.mpu.topology:Topology.coordinate", f"{TOPOLOGY}::test_context_axis_is_between_tensor_and_data")
def data_axis_runs_faster_than_context(original: Any) -> Any:
    def coordinate(self: Any, rank: int) -> Any:
        swapped = replace(self, data=self.context, context=self.data)
        coords = original(swapped, rank)
        return replace(coords, data=coords.context, context=coords.data)

    return coordinate


@mutant("megatron.mpu.topology:Topology.expert_groups", EXPERT_AXIS)
def expert_groups_and_their_replicas_are_swapped(original: Any) -> Any:
    return lambda self, *, same_experts=False: original(self, same_experts=not same_experts)


@mutant("megatron.mpu.topology:Topology.expert_groups", EXPERT_SHARDS)
def copies_of_experts_in_a_tensor_group_are_not_reduced(original: Any) -> Any:
    def expert_groups(self: Any, *, same_experts: bool = False) -> Any:
        return original(replace(self, expert_tensor=0) if same_experts else self, same_experts=same_experts)

    return expert_groups


@mutant("megatron.mpu.groups:AXES", GRID)
def model_group_spans_the_data_axis(original: Any) -> Any:
    return {**original, "model": ("pipe", "data")}


# Batches


@mutant(
    "megatron.mpu.data:Upload.get_on_device",
    "tests/mpu/test_uploads.py::test_upload_behaves_like_source_dict_and_tracks_changes",
)
def upload_ignores_what_the_script_has_changed(original: Any) -> Any:
    return lambda self, name: self._copies[name] if name in self._copies else original(self, name)


# Dropout masks


@mutant("megatron.mpu.random:DropoutStreams.__init__", f"{OTHER_MASK}[{{'data': 1}}-False]")
def replicas_draw_the_same_masks(original: Any) -> Any:
    return call_after_init(original, lambda self: setattr(self, "data_rank", 0))


@mutant("megatron.mpu.random:DropoutStreams.__init__", f"{DROPOUT}::test_tensor_ranks_differ_for_sharded_tensors")
def tensor_ranks_draw_the_same_masks_of_sharded_tensors(original: Any) -> Any:
    return call_after_init(original, lambda self: setattr(self, "tensor_rank", 0))


@mutant("megatron.mpu.random:DropoutStreams.key", f"{OTHER_MASK}[{{'micro_batch': 3}}-False]")
def micro_batches_draw_the_same_masks(original: Any) -> Any:
    def key(self: Any, layer: int, site: str, is_sharded: bool) -> int:
        with self.at(replace(self.position, micro_batch=0)):
            return int(original(self, layer, site, is_sharded))

    return key


@mutant(
    "megatron.mpu.random:DropoutStreams.at",
    f"{DROPOUT}::test_recompute_draws_same_masks_after_position_moved",
)
def recompute_draws_the_masks_of_the_current_micro_batch(original: Any) -> Any:
    return lambda self, position: nullcontext()


@mutant("megatron.mpu.philox:KEY_STEPS", f"{PHILOX}::test_philox_matches_known_vectors")
def every_philox_round_uses_the_same_key(original: Any) -> Any:
    return 0, 0


@mutant("megatron.mpu.philox_dropout:PhiloxDropout.__init__", OWN_MASK)
def layout_independent_masks_start_anew_on_each_tensor_rank(original: Any) -> Any:
    return call_after_init(original, lambda self: setattr(self, "tensor_rank", 0))


@mutant("megatron.mpu.philox_dropout:PhiloxDropout._first_sample", OWN_MASK)
def layout_independent_masks_start_anew_in_each_replica(original: Any) -> Any:
    return lambda self, samples, at=None: (at or self.position).micro_batch * samples


@mutant(
    "megatron.mpu.philox_dropout:_apply_mask",
    f"{PHILOX}::test_dropout_scales_survivors_and_zeroes_dropped_gradients",
)
def kept_elements_are_not_scaled_up(original: Any) -> Any:
    return lambda x, mask, probability: x.masked_fill(mask, 0.0)


# Context parallelism


@mutant("megatron.mpu.topology:chunk_indices", CHUNK_ORDER)
def context_ranks_hold_neighbouring_chunks(original: Any) -> Any:
    return lambda rank, size: (2 * rank, 2 * rank + 1)


@mutant("megatron.mpu.context_parallel:to_sequence_order", CHUNK_ORDER)
def gathered_sequence_stays_in_rank_order(original: Any) -> Any:
    return lambda x, size: x


@mutant("megatron.mpu.context_parallel:clip_ranges", f"{CONTEXT}::test_runs_within_match_local_positions")
def part_of_a_chunk_starts_where_the_chunk_does(original: Any) -> Any:
    def runs_within(runs: Iterable[Any], start: int, stop: int) -> Iterator[Any]:
        for run in runs:
            for sub_run in original((run,), start, stop):
                yield sub_run._replace(first_position=run.first_position)

    return runs_within


@mutant(
    "megatron.mpu.context_parallel:_Gather.backward",
    f"{CONTEXT}::test_exchanges_restore_sequence_and_reduce_gradients[2]",
)
def gradient_of_gathered_keys_is_not_summed(original: Any) -> Any:
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return to_rank_order(grads[0], ctx.group.size).chunk(ctx.group.size)[ctx.group.rank], None

    return backward


# Expert parallelism


@mutant("megatron.mpu.expert_parallel:Exchange.combine_without_grad", EXCHANGE)
def outputs_of_experts_come_back_in_the_order_of_experts(original: Any) -> Any:
    return lambda self, rows: original(replace(self, inverse_order=torch.arange(len(self.inverse_order))), rows)


@mutant("megatron.mpu.expert_parallel:_Combine.backward", EXCHANGE)
def gradient_of_expert_outputs_is_doubled(original: Any) -> Any:
    return lambda ctx, *grads: (2 * original(ctx, *grads)[0], None)


# Recompute


@mutant(
    "megatron.mpu.activation_storage:_StoredInput._local_shard",
    "tests/mpu/test_kept.py::test_partitioned_inputs_support_uneven_shards",
)
def every_tensor_rank_stores_the_first_part(original: Any) -> Any:
    def local_shard(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.options = replace(self.options, group=replace(self.options.group, rank=0))
        return original(self, x)

    return local_shard


@mutant(
    "megatron.mpu.activation_storage:_SlotBuffer.acquire_slot",
    "tests/mpu/test_kept.py::test_slots_share_one_reused_buffer",
)
def recompute_buffer_hands_out_a_slot_in_use(original: Any) -> Any:
    return lambda self: (self._free[-1], lambda: None)
