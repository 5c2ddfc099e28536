"""Mutants of the pipeline engine: schedules, messages between stages, gradients, losses, partitions, the watchdog."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants.mutant import mutant

GRADIENTS = "tests/tds/test_gradients.py"
SUM = f"{GRADIENTS}::test_all_reduce_writes_result_into_gradients[torch.float32-torch.float64]"
TIED = f"{GRADIENTS}::test_tied_gradients_are_summed_in_requested_dtype"
NORM = "tests/tds/test_grads.py::test_replicated_sharded_and_tied_parameters_count_once[dtype0-1e-14]"
SQUARES = "tests/tds/test_grads.py::test_square_of_norm_accumulates_in_fp64"
REDUCTION = "tests/tds/test_reduction.py"
EARLY_SUMS = f"{REDUCTION}::test_all_reduces_start_during_backward[False]"
TWO_REPLICAS = f"{REDUCTION}::test_shared_and_module_parameters_are_reduced_once[1-1]"
OVERLAPPED = "tests/optim/test_overlapped_gradients.py"
LOSS = "tests/tds/test_loss.py"
NAMED_LOSSES = f"{LOSS}::test_named_losses_are_averaged_on_all_ranks"
SHARED = "tests/tds/test_sharing.py::test_gradients_and_norm_equal_one_process[2]"
TWO_STAGES = "tests/tds/test_structures.py::test_dict_and_list_outputs_equal_one_process[2]"
SPLIT = "tests/tds/engine/test_split.py"
USERS_ORDER = "tests/tds/test_parity.py::test_user_schedule_equals_one_process_and_rejects_invalid_order"
FAILED_STEP = "tests/tds/engine/test_engine.py::test_failed_step_is_not_counted_and_leaves_no_gradients"
OWN_OPTIMIZER = "tests/tds/engine/test_engine.py::test_self_scaling_optimizer_is_not_clipped_by_engine"
WRONG_USE = "tests/tds/engine/test_engine.py::test_user_errors_suggest_fixes"
DEEPSPEED_OPTIMIZERS = "tests/tds/deepspeed/test_optimizers.py"
EVALUATION = "tests/tds/engine/test_evaluation.py"
DATA = "tests/tds/engine/test_data_agreement.py"
RECOMPUTE = "tests/tds/deepspeed/test_recompute.py"
GRAPH_SPLIT = "tests/tds/engine/test_graph_split.py"
IN_A_V = "tests/tds/engine/test_v.py::test_schedule_file_equals_one_process"
ORDERS = "tests/tds/schedule/test_orders.py"
V_ORDERS = "tests/tds/schedule/test_v_schedules.py"
VALIDATE = "tests/tds/schedule/test_validate.py"
SCHEDULE_FILE = "tests/tds/schedule/test_schedule_file.py"
EXCHANGE = "tests/tds/p2p/test_exchange.py"
MESSAGES = f"{EXCHANGE}::test_structures_cross_in_both_directions_with_chunks[1f1b]"
WIRE = "tests/tds/p2p/test_wire.py"
PACKING = f"{WIRE}::test_header_and_message_roundtrip"
CUTS = "tests/tds/schedule/test_stages.py"
WATCH = "tests/tds/watchdog/test_watch.py"


# Sums of gradients over replicas and over copies of tied weights.


@mutant("tds.gradients:reduce_gradients", f"{GRADIENTS}::test_reduce_gradients_sums_and_scales_in_any_bucket_size[40]")
def gradients_are_not_summed_over_replicas(original: Any) -> Any:
    return lambda gradients, group, scale=1.0, bucket_bytes=None: original(gradients, None, scale)


@mutant("tds.gradients:GradientBucket.wait", SUM)
def summed_gradients_are_not_copied_back(original: Any) -> Any:
    return lambda self, factor: self.work.wait()


@mutant("tds.gradients:contiguous_view", f"{GRADIENTS}::test_one_run_requires_adjacent_tensors")
def gradients_with_a_gap_between_them_are_reduced_as_one_buffer(original: Any) -> Any:
    return lambda tensors: tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


@mutant(
    "tds.gradients:multiply",
    f"{GRADIENTS}::test_factor_is_not_rounded_to_gradient_dtype[torch.bfloat16]",
)
def factor_is_rounded_to_the_dtype_of_the_gradient(original: Any) -> Any:
    return lambda gradients, factor: torch._foreach_mul_(list(gradients), factor)


@mutant("tds.gradients:reduce_tied_gradients", TIED)
def tied_gradients_are_summed_twice(original: Any) -> Any:
    def reduce_tied(weights: Any, *args: Any) -> None:
        pairs = list(weights)
        original(pairs, *args)
        original(pairs, *args)

    return reduce_tied


@mutant("tds.gradients:reduce_tied_gradients", TIED)
def tied_gradients_ignore_the_communication_data_type(original: Any) -> Any:
    return lambda weights, gradient_of, dtype=None: original(weights, gradient_of)


@mutant("tds.engine.engine:ScheduleEngine._reduce_tied", SHARED)
def engine_does_not_sum_tied_gradients(original: Any) -> Any:
    return lambda self, gradients: None


@mutant("tds.engine.engine:ScheduleEngine._reduce_over_replicas", TWO_REPLICAS)
def gradients_are_divided_by_the_number_of_micro_batches_again(original: Any) -> Any:
    return lambda self, gradients, reducer, factor: original(self, gradients, reducer, factor / self.micro_batches)


# The gradient norm and clipping.


@mutant("tds.grad_norm:is_counted_in_norm", NORM)
def norm_counts_tied_weights_on_each_stage(original: Any) -> Any:
    return lambda parameter, tensor_rank: (
        getattr(parameter, "ds_pipe_replicated", False) or original(parameter, tensor_rank)
    )


@mutant("tds.grad_norm:is_counted_in_norm", NORM)
def norm_counts_replicated_parameters_on_each_tensor_rank(original: Any) -> Any:
    return lambda parameter, tensor_rank: original(parameter, 0)


@mutant("tds.grad_norm:global_norm", NORM)
def norm_is_not_summed_over_ranks(original: Any) -> Any:
    return lambda gradients, groups, device=None: original(gradients, [], device)


@mutant("tds.grad_norm:square_of_norm", f"{SQUARES}[(4000003,)-float32]")
def norm_of_a_large_gradient_is_one_sum_in_fp32(original: Any) -> Any:
    return lambda x: torch.linalg.vector_norm(x, dtype=torch.float32).double().square()


@mutant(
    "tds.grad_norm:clip_coefficient",
    f"{GRADIENTS}::test_clip_scales_norm_to_bound_and_skips_smaller_norms",
)
def clipping_shrinks_gradients_within_the_bound(original: Any) -> Any:
    return lambda norm, clip_grad: original(norm, clip_grad / 2)


@mutant(
    "tds.deepspeed.optimizers:FP16Gradients.before_step",
    f"{DEEPSPEED_OPTIMIZERS}::test_overflow_on_one_stage_skips_step_on_all_ranks",
)
def norm_of_fp16_optimizers_counts_tied_weights_twice(original: Any) -> Any:
    return lambda self: None


# Sums over replicas that start within the last backward.


@mutant("tds.bucket_reducer:BucketReducer.mark_ready", EARLY_SUMS)
def buckets_are_reduced_before_their_gradients_are_final(original: Any) -> Any:
    def ready(self: Any, parameter: torch.Tensor) -> None:
        original(self, parameter)
        self._start(self.order.pop_remaining())

    return ready


@mutant("tds.bucket_reducer:BucketSchedule._set_buckets", EARLY_SUMS)
def replicas_reduce_buckets_in_different_orders(original: Any) -> Any:
    return lambda self, order: original(self, order[::-1] if dist.is_initialized() and dist.get_rank() == 1 else order)


@mutant(
    "tds.bucket_reducer:BucketReducer.start_remaining",
    f"{OVERLAPPED}::test_unreached_and_tied_weights_are_reduced_once",
)
def buckets_with_an_unused_weight_are_not_reduced(original: Any) -> Any:
    return lambda self: self.order.pop_remaining()


@mutant("tds.bucket_reducer:ChunkOrder.__init__", TWO_REPLICAS)
def weights_outside_of_layers_are_not_reduced(original: Any) -> Any:
    def init(self: Any, parameters: Any, chunks: Any, *args: Any, **kwargs: Any) -> None:
        in_layers = {parameter for chunk in chunks for parameter in chunk}
        original(self, [parameter for parameter in parameters if parameter in in_layers], chunks, *args, **kwargs)

    return init


@mutant(
    "tds.bucket_reducer:ChunkOrder.__init__", "tests/tds/test_sharing.py::test_replicas_reduce_shared_weights_once[2]"
)
def tied_weights_are_reduced_over_replicas_before_their_copies_are_summed(original: Any) -> Any:
    return lambda self, every, chunks, tied=(), *args, **kwargs: original(self, every, chunks, (), *args, **kwargs)


@mutant(
    "tds.bucket_reducer:ChunkOrder.reset",
    f"{REDUCTION}::test_freezing_between_steps_keeps_replicas_equal[False]",
)
def weights_unfrozen_after_the_first_step_are_not_reduced(original: Any) -> Any:
    from tds.bucket_reducer import BucketSchedule

    return lambda self: original(self) if self._trainable_ids is None else BucketSchedule.reset(self)


@mutant(
    "tds.bucket_reducer:BucketReducer._on_grad_accumulated",
    f"{REDUCTION}::test_repeated_gradient_accumulation_in_backward_is_rejected",
)
def gradients_added_after_their_bucket_was_reduced_are_accepted(original: Any) -> Any:
    return lambda self, parameter: self.mark_ready(parameter)


@mutant(
    "tds.bucket_reducer:BucketReducer.reset",
    f"{OVERLAPPED}::test_interrupted_backward_leaves_no_state",
)
def sums_of_a_failed_backward_are_written_in_the_next_step(original: Any) -> Any:
    def reset(self: Any) -> None:
        started = list(self._pending)
        original(self)
        self._pending += started

    return reset


@mutant("tds.engine.stage_call:program_of", TWO_REPLICAS)
def gradients_count_as_final_after_the_first_backward(original: Any) -> Any:
    def program_of(actions: Any, *args: Any) -> Any:
        from tds.schedule import Backward, BackwardWeight

        first = {a.chunk: a for a in reversed(actions) if isinstance(a, (Backward, BackwardWeight))}
        return dataclasses.replace(original(actions, *args), last=frozenset(first.values()))

    return program_of


@mutant(
    "tds.engine.weight_grad_store:WeightGradStore.deferred_leaves",
    "tests/tds/test_sharing.py::test_weights_of_single_stage_are_reduced_during_backward",
)
def deferred_weight_gradients_are_reduced_before_they_are_computed(original: Any) -> Any:
    return lambda self, key: set()


# One step: micro-batches, backward, update.


@mutant("tds.engine.micro_batches:BatchSource.next", TWO_STAGES)
def first_micro_batch_is_read_for_all(original: Any) -> Any:
    def next_micro_batch(self: Any, micro_batch: int = 0) -> Any:
        first = self._first_batch
        batch = original(self, micro_batch)
        self._first_batch = first
        return batch

    return next_micro_batch


@mutant("tds.engine.micro_batches:BothEndsSource.next", IN_A_V)
def labels_in_a_v_are_those_of_the_newest_micro_batch(original: Any) -> Any:
    def next_micro_batch(self: Any, micro_batch: int = 0) -> Any:
        newest = self._labels.get(max(self._labels, default=0))
        inputs, labels = original(self, micro_batch)
        return inputs, newest if inputs is None else labels

    return next_micro_batch


class _NewestFirst(dict[Any, Any]):
    def pop(self, key: Any) -> Any:  # type: ignore[override]
        return super().pop(max(self))


@mutant("tds.engine.stage:Stage.__init__", TWO_STAGES)
def backward_runs_on_the_newest_micro_batch(original: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._in_flight = _NewestFirst()

    return init


@mutant("tds.device:upload", "tests/tds/engine/test_batches.py::test_stage_inputs_copies_nested_structures")
def inputs_share_memory_with_the_data_set(original: Any) -> Any:
    return lambda tensor, device: tensor.detach()


@mutant(
    "tds.engine.engine:ScheduleEngine._discarding_gradients_on_error",
    "tests/tds/engine/test_engine.py::test_error_within_step_leaves_no_gradients_for_next_batch[1]",
)
def gradients_of_a_failed_batch_are_added_to_the_next(original: Any) -> Any:
    return lambda self: nullcontext()


@mutant("tds.engine.engine:ScheduleEngine._step_optimizer", FAILED_STEP)
def gradients_of_a_failed_step_are_added_to_the_next_batch(original: Any) -> Any:
    def take_step(self: Any, gradients: Any) -> None:
        try:
            original(self, gradients)
        finally:
            self._has_pending_gradients = False

    return take_step


@mutant("tds.deepspeed.optimizers:Gradients.loss_scale", OWN_OPTIMIZER)
def loss_is_not_scaled_before_the_backward(original: Any) -> Any:
    return lambda self: 1.0


@mutant(
    "tds.deepspeed.optimizers:BF16Gradients.before_backward",
    f"{DEEPSPEED_OPTIMIZERS}::test_all_optimizers_match_deepspeed_engine_bitwise",
)
def bf16_gradients_of_earlier_micro_batches_are_accumulated_again(original: Any) -> Any:
    return lambda self: None


@mutant("tds.deepspeed.engine:PipelineEngine.gradient_accumulation_steps", TWO_STAGES)
def last_micro_batch_is_dropped(original: Any) -> Any:
    return lambda self: max(original(self) - 1, 1)


# Data.


@mutant(
    "tds.engine.data_consistency:DataConsistency.begin", f"{DATA}::test_all_ranks_raise_at_data_end_and_can_continue"
)
def data_that_end_on_some_ranks_count_as_ended_on_all(original: Any) -> Any:
    def begin(self: Any, state: int) -> None:
        from tds.engine.data_consistency import DataEnded

        try:
            original(self, state)
        except DataEnded:
            raise StopIteration from None

    return begin


@mutant(
    "tds.engine.data_consistency:DataConsistency.end",
    f"{DATA}::test_incomplete_global_batch_changes_no_weights",
)
def incomplete_global_batch_is_trained_on(original: Any) -> Any:
    return lambda self, ended_at, *args: original(self, None, *args)


@mutant(
    "tds.engine.data_consistency:DataConsistency._compare",
    f"{DATA}::test_check_data_detects_stages_with_different_samples",
)
def stages_may_read_different_samples(original: Any) -> Any:
    return lambda self, rows: None


@mutant(
    "tds.deepspeed.training_loader:training_loader",
    f"{DATA}::test_middle_stages_read_no_samples_and_replicas_share_them",
)
def replicas_read_the_same_samples(original: Any) -> Any:
    def training_loader(data: Any, grid: Any, *args: Any, **kwargs: Any) -> Any:
        one_replica = SimpleNamespace(
            data_parallel_size=1, pipe_parallel_size=grid.pipe_parallel_size, get_data_parallel_rank=lambda: 0
        )
        return original(data, one_replica, *args, **kwargs)

    return training_loader


# Backwards that are split into halves.


@mutant("tds.engine.weight_grad_store:_ViewCalls.run", f"{SPLIT}::test_hooks_run_when_weight_gradient_is_computed")
def each_view_of_a_weight_runs_its_hooks(original: Any) -> Any:
    def run(self: Any) -> None:
        for call in self.calls:
            call.run()

    return run


@mutant("tds.engine.weight_grad_store:WeightGradStore.run", USERS_ORDER)
def first_deferred_weight_gradient_is_lost(original: Any) -> Any:
    def run(self: Any, key: Any, *args: Any) -> None:
        self._deferred[key] = self._deferred[key][1:]
        original(self, key, *args)

    return run


@mutant(
    "tds.engine.weight_grad_store:_ModuleCalls.run",
    f"{GRAPH_SPLIT}::test_backward_dw_modules_equal_torch_gradients[2-zb-h1-True-delayed]",
)
def backward_dw_is_called_once_for_two_forwards(original: Any) -> Any:
    return lambda self: original(dataclasses.replace(self, num_calls=1))


@mutant(
    "tds.engine.graph_split:Branch.run",
    f"{GRAPH_SPLIT}::test_addmm_weights_are_deferred_under_splitting_schedule[2-2-1-zb-h1]",
)
def weight_gradients_deferred_by_the_graph_are_lost(original: Any) -> Any:
    return lambda self: None


# Recompute and evaluation.


@mutant(
    "tds.device:use_rng_states",
    f"{RECOMPUTE}::test_recompute_restores_rng_and_in_place_modified_inputs[CPU_CHECKPOINT]",
)
def recompute_draws_new_dropout_masks(original: Any) -> Any:
    return lambda states: nullcontext()


@mutant("tds.deepspeed.recompute:Recompute._save_input", f"{RECOMPUTE}::test_modified_tensor_is_saved_for_every_run")
def recompute_starts_from_the_first_value_of_an_input_changed_in_place(original: Any) -> Any:
    def keep(self: Any, x: torch.Tensor) -> Any:
        _, first_copy = self._saved_inputs.get(x, (None, None))
        return original(self, x) if first_copy is None else first_copy

    return keep


@mutant(
    "tds.deepspeed.module:preserve_forward_counts",
    f"{EVALUATION}::test_evaluation_between_steps_does_not_affect_training[2-4]",
)
def evaluation_advances_the_seeds_of_layers(original: Any) -> Any:
    return lambda module: nullcontext()


@mutant(
    "tds.device:preserve_rng_states",
    f"{EVALUATION}::test_evaluation_preserves_rng_state",
)
def evaluation_advances_the_random_generator(original: Any) -> Any:
    return lambda device: nullcontext()


@mutant("tds.deepspeed.module:PipelineModule.eval", "tests/training/test_loop.py::test_evaluation_applies_no_dropout")
def evaluation_applies_dropout(original: Any) -> Any:
    return lambda self: self.train()


# Losses.


@mutant("tds.loss:named_losses", f"{LOSS}::test_weighted_losses_average_over_total_count")
def loss_is_a_mean_of_the_means_of_micro_batches(original: Any) -> Any:
    def named_losses(loss: Any, micro_batch: int) -> dict[str, Any]:
        named = original(loss, micro_batch)
        return {
            name: x.total / x.count if hasattr(x, "count") and hasattr(x, "total") else x for name, x in named.items()
        }

    return named_losses


@mutant("tds.loss:_to_wide_dtype", f"{LOSS}::test_16_bit_losses_accumulate_in_fp32_and_fp64_losses_in_fp64")
def losses_of_micro_batches_are_summed_in_16_bits(original: Any) -> Any:
    return lambda value: value


@mutant("tds.loss:LossMeter.add", FAILED_STEP)
def backward_does_not_divide_by_the_number_of_micro_batches(original: Any) -> Any:
    return lambda self, loss, micro_batch: original(self, loss, micro_batch) * self.num_micro_batches


@mutant("tds.loss_reduction:all_reduce_loss", NAMED_LOSSES)
def loss_is_not_averaged_over_replicas(original: Any) -> Any:
    return lambda *args, **kwargs: original(*args, **{**kwargs, "data_size": 1})


@mutant("tds.loss_reduction:LossReduction.factor", NAMED_LOSSES)
def gradients_are_not_divided_by_the_number_of_tokens(original: Any) -> Any:
    return property(lambda self: 1.0)


@mutant(
    "tds.loss_reduction:_encode_names",
    f"{LOSS}::test_different_loss_names_across_replicas_raise_on_all_ranks",
)
def losses_of_different_names_are_averaged(original: Any) -> Any:
    def written(*args: Any) -> Any:
        known, names = original(*args)
        return torch.cat([known[:2], torch.zeros_like(known[2:])]), names

    return written


@mutant(
    "tds.loss:LossMeter.__init__",
    "tests/training/test_unequal_shares.py::"
    "test_mean_losses_are_weighted_correctly_on_unequal_replicas[--pipe-parallel-size 2]",
)
def replicas_with_more_micro_batches_weigh_each_of_them_less(original: Any) -> Any:
    def init(self: Any, *args: Any, mean_num_micro_batches: float | None = None, **kwargs: Any) -> None:
        original(self, *args[:4], **kwargs)

    return init


# Messages between stages.


@mutant("tds.p2p.packed_layout:PackedLayout.pack", MESSAGES)
def activations_cross_in_bf16(original: Any) -> Any:
    return lambda self, tensors: original(
        self, [t.bfloat16().to(t.dtype) if t.is_floating_point() else t for t in tensors]
    )


@mutant("tds.p2p.packed_layout:PackedLayout.new_buffer", MESSAGES)
def receive_buffer_is_reused_while_its_activations_are_in_flight(original: Any) -> Any:
    return lambda self, device: self.__dict__.setdefault("buffer", original(self, device))


@mutant("tds.p2p.packed_layout:PackedLayout.unpack", PACKING)
def first_and_last_tensor_of_a_message_are_swapped(original: Any) -> Any:
    def unpack(self: Any, message: torch.Tensor) -> list[torch.Tensor]:
        tensors = original(self, message)
        if len(tensors) > 1 and (tensors[0].dtype, tensors[0].shape) == (tensors[-1].dtype, tensors[-1].shape):
            tensors[0], tensors[-1] = tensors[-1], tensors[0]
        return tensors

    return unpack


@mutant(
    "tds.p2p.packed_layout:PackedLayout._gather",
    "tests/tds/p2p/test_tensor_group.py::test_all_dtypes_and_shapes_are_sharded_and_gathered",
)
def partitioned_tensor_is_gathered_in_reverse_rank_order(original: Any) -> Any:
    def gather(self: Any, shard: torch.Tensor, num_bytes: int) -> torch.Tensor:
        gathered = original(self, shard, shard.numel() * self.tensor_group.size)
        return gathered.view(self.tensor_group.size, -1).flip(0).reshape(-1)[:num_bytes]

    return gather


@mutant("tds.p2p.structure:Structure.rebuild", f"{EXCHANGE}::test_received_structure_equals_sent_structure")
def tensors_of_a_dict_arrive_under_sorted_keys(original: Any) -> Any:
    return lambda self, tensors: original(dataclasses.replace(self, keys=tuple(sorted(self.keys))), tensors)


@mutant(
    "tds.p2p.tensor_meta:check_received",
    "tests/tds/p2p/test_boundary.py::test_header_not_matching_receiver_declaration_is_rejected",
)
def header_is_not_checked_against_the_receivers_declaration(original: Any) -> Any:
    return lambda specs, records, side, is_training: None


@mutant("tds.p2p.message_header:decode_header", f"{WIRE}::test_invalid_header_bytes_are_rejected")
def any_bytes_are_read_as_a_header(original: Any) -> Any:
    from tds.p2p.message_header import MAGIC

    return lambda header: original(torch.cat([torch.tensor([MAGIC]), header[1:]]))


@mutant("tds.p2p.tensor_meta:check_same", f"{EXCHANGE}::test_changed_dtype_shape_or_structure_is_not_sent")
def change_of_shape_within_a_call_is_not_checked(original: Any) -> Any:
    return lambda *args, **kwargs: None


@mutant("tds.p2p.communicator:P2PCommunicator.send_backward", TWO_STAGES)
def gradients_of_all_but_the_first_tensor_are_lost_between_stages(original: Any) -> Any:
    def send_backward(self: Any, message: Any, gradients: Any) -> None:
        original(self, message, [g if index == 0 else torch.zeros_like(g) for index, g in enumerate(gradients)])

    return send_backward


@mutant("tds.p2p.communicator:P2PCommunicator.recv_backward", IN_A_V)
def gradient_that_stays_on_its_stage_is_doubled(original: Any) -> Any:
    def recv_backward(self: Any, message: Any) -> list[torch.Tensor]:
        gradients = original(self, message)
        return [2 * g for g in gradients] if message.peer == self.links.stage else gradients

    return recv_backward


@mutant("tds.p2p.input_leaves:with_leaves", f"{EXCHANGE}::test_in_place_change_of_local_message_is_detected")
def next_chunk_may_change_saved_activations_in_place(original: Any) -> Any:
    return lambda tensors, is_local=False: original(tensors)


@mutant("tds.p2p.transport:Transport.wait_for", MESSAGES)
def activations_are_used_before_they_have_arrived(original: Any) -> Any:
    def wait_for(self: Any, transfer: Any) -> torch.Tensor:
        early = transfer.buffer.clone()
        arrived = original(self, transfer)
        return arrived if transfer.message_type.name == "HEADER" else early

    return wait_for


@mutant(
    "tds.p2p.host_copies:CopiedWork.wait",
    "tests/tds/p2p/test_host_copies.py::test_operations_equal_gloo[all_reduces]",
)
def results_through_the_host_are_not_copied_back(original: Any) -> Any:
    def wait(self: Any, timeout: Any = None) -> bool:
        self._outputs = ()
        return original(self, timeout)

    return wait


# Orders of actions.


@mutant("tds.schedule.schedules:ONE_CHUNK", f"{ORDERS}::test_schedules_run_with_documented_peak_memory[1f1b]")
def one_f_one_b_keeps_all_micro_batches_in_flight(original: Any) -> Any:
    return {**original, "1f1b": original["gpipe"]}


@mutant("tds.schedule.schedules:_defer_weight_halves", f"{ORDERS}::test_zb_h1_defers_weights_by_stage_index")
def zb_h1_defers_weight_gradients_by_one_micro_batch_on_each_stage(original: Any) -> Any:
    return lambda unsplit, trail, num_unsplit: original(unsplit, 1, num_unsplit)


@mutant("tds.schedule.schedules:_all_stages", f"{ORDERS}::test_larger_micro_batch_group_raises_peak_memory")
def interleaved_ignores_the_group_size(original: Any) -> Any:
    return lambda stages, micro_batches, chunks, group_size: original(stages, micro_batches, chunks, stages)


@mutant("tds.schedule.actions:Placement._mirrored", f"{V_ORDERS}::test_v_placement_reverses_at_last_stage")
def pieces_of_a_v_lie_in_a_loop(original: Any) -> Any:
    return lambda self, position, chunk: position


@mutant("tds.schedule.validate:_check_complete", f"{VALIDATE}::test_invalid_order_of_one_stage_is_rejected")
def order_without_a_backward_is_accepted(original: Any) -> Any:
    return lambda stage, reached, num_chunks, is_training: None


@mutant("tds.schedule.validate:_check_order", f"{VALIDATE}::test_incompatible_stage_orders_are_rejected")
def order_that_sums_gradients_in_another_sequence_is_accepted(original: Any) -> Any:
    return lambda stage, actions, num_chunks: None


@mutant(
    "tds.schedule.limits:send_window",
    "tests/tds/schedule/test_window.py::test_deadlocking_schedule_gets_larger_send_window",
)
def limit_of_pending_sends_deadlocks_some_schedules(original: Any) -> Any:
    return lambda order, num_stages, *args: num_stages + 1


@mutant(
    "tds.schedule.limits:_completes",
    "tests/tds/p2p/test_receives.py::test_receives_are_posted_one_action_ahead_except_in_rings",
)
def receives_are_posted_that_depend_on_the_running_action(original: Any) -> Any:
    return lambda travels, places, counts: True


@mutant("tds.schedule.validate:validate", f"{SCHEDULE_FILE}::test_invalid_schedule_file_is_rejected")
def order_in_a_file_is_not_validated(original: Any) -> Any:
    return lambda stages, *args, **kwargs: [1] * len(stages)


# Layers on stages, and modules that they share.


@mutant(
    "tds.deepspeed.module:PipelineModule.forward",
    "tests/tds/engine/test_v.py::test_larger_micro_batch_group_equals_one_process",
)
def chunks_of_a_stage_run_in_reverse(original: Any) -> Any:
    return lambda self, forward_input, chunk=0: original(self, forward_input, self.chunks - 1 - chunk)


@mutant("tds.partition:partition_balanced", f"{CUTS}::test_balanced_partition_matches_exhaustive_search")
def stages_have_equal_layers_whatever_they_cost(original: Any) -> Any:
    return lambda costs, parts: original([1.0] * len(costs), parts)


@mutant("tds.deepspeed.module:check_bounds", WRONG_USE)
def bounds_may_leave_layers_out(original: Any) -> Any:
    return lambda bounds, num_layers, num_pieces: list(bounds)


@mutant("tds.deepspeed.shared_layers:index_shared_modules", SHARED)
def gradients_of_shared_modules_are_not_summed_over_stages(original: Any) -> Any:
    return lambda module: original(module) and {}


@mutant("tds.deepspeed.shared_layers:index_shared_modules", SHARED)
def norm_counts_shared_modules_on_each_stage(original: Any) -> Any:
    def index_shared_modules(module: Any) -> Any:
        modules = original(module)
        for parameter in (p for entry in modules.values() for p in entry["module"].parameters()):
            parameter.ds_pipe_replicated = False
        return modules

    return index_shared_modules


@mutant(
    "tds.deepspeed.shared_layers:_set_shared_module",
    "tests/tds/test_sharing.py::test_chunks_list_their_shared_parameters",
)
def each_layer_has_a_copy_of_a_shared_module(original: Any) -> Any:
    return lambda layer, name, module: original(layer, name, copy.deepcopy(module))


@mutant(
    "tds.deepspeed.module:PipelineModule.synchronize_tied_weights",
    "tests/tds/test_sharing.py::test_shared_weights_start_equal_on_all_holders",
)
def copies_of_a_tied_weight_start_with_different_values(original: Any) -> Any:
    return lambda self: None


# The watchdog.


@mutant("tds.watchdog.watchdog:Watchdog._is_late", f"{WATCH}::test_rank_is_late_after_limit_without_change")
def stuck_rank_is_never_late(original: Any) -> Any:
    return lambda self: False


@mutant("tds.watchdog.watchdog:Watchdog._update", f"{WATCH}::test_progressing_rank_is_never_late[progress]")
def progress_does_not_count(original: Any) -> Any:
    def update(self: Any, now: float) -> Any:
        self.progress = 0
        return original(self, now)

    return update


@mutant("tds.watchdog.diagnosis:verdict", "tests/tds/watchdog/test_watchdog.py::test_verdict_follows_chain_of_waits")
def verdict_names_the_rank_that_raised_the_alarm(original: Any) -> Any:
    def verdict(reports: Any, names: Any, asking_rank: int, *args: Any) -> str:
        isolated_reports = {rank: dataclasses.replace(report, waits_for=None) for rank, report in reports.items()}
        return original(isolated_reports, names, asking_rank, *args)

    return verdict
