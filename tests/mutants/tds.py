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
SUM = f"{GRADIENTS}::test_a_sum_comes_where_its_gradients_lie_to_the_bit[torch.float32-torch.float64]"
TIED = f"{GRADIENTS}::test_copies_of_a_tied_weight_are_added_up_in_the_type_that_is_asked_for"
NORM = "tests/tds/test_grads.py::test_replicated_cut_and_tied_parameters_count_once[dtype0-1e-14]"
SQUARES = "tests/tds/test_grads.py::test_squares_add_up_in_fp64_however_many_they_are"
REDUCTION = "tests/tds/test_reduction.py"
EARLY_SUMS = f"{REDUCTION}::test_sums_start_while_the_backward_still_runs[False]"
TWO_REPLICAS = f"{REDUCTION}::test_what_is_of_no_layer_or_of_two_chunks_is_added_up_once_all_have_added_to_it[1-1]"
OVERLAPPED = "tests/optim/test_overlapped_gradients.py"
LOSS = "tests/tds/test_loss.py"
NAMED_LOSSES = f"{LOSS}::test_named_losses_are_averaged_each_in_its_way_on_every_rank"
SHARED = "tests/tds/test_sharing.py::test_gradients_and_norm_equal_one_process[2]"
TWO_STAGES = "tests/tds/test_structures.py::test_layers_that_return_dicts_and_lists_train_as_in_one_process[2]"
USERS_ORDER = "tests/tds/test_parity.py::test_a_users_own_order_equals_one_process_and_must_be_able_to_run"
FAILED_STEP = "tests/tds/engine/test_engine.py::test_a_step_that_raises_counts_for_nothing_and_adds_to_no_later_batch"
OWN_OPTIMIZER = "tests/tds/engine/test_engine.py::test_an_optimizer_that_scales_and_clips_itself_is_left_to_it"
WRONG_USE = "tests/tds/engine/test_engine.py::test_mistakes_are_told_with_what_to_do"
DEEPSPEED_OPTIMIZERS = "tests/tds/deepspeed/test_optimizers.py"
EVALUATION = "tests/tds/engine/test_evaluation.py"
DATA = "tests/tds/engine/test_data_agreement.py"
RECOMPUTE = "tests/tds/deepspeed/test_recompute.py"
GRAPH_SPLIT = "tests/tds/engine/test_graph_split.py"
IN_A_V = "tests/tds/engine/test_v.py::test_the_order_of_a_file_equals_one_process"
ORDERS = "tests/tds/schedule/test_orders.py"
V_ORDERS = "tests/tds/schedule/test_v_schedules.py"
VALIDATE = "tests/tds/schedule/test_validate.py"
SCHEDULE_FILE = "tests/tds/schedule/test_schedule_file.py"
EXCHANGE = "tests/tds/p2p/test_exchange.py"
MESSAGES = f"{EXCHANGE}::test_every_structure_crosses_in_both_directions_with_any_number_of_chunks[1f1b]"
WIRE = "tests/tds/p2p/test_wire.py"
PACKING = f"{WIRE}::test_header_and_message_come_back_as_they_were"
CUTS = "tests/tds/schedule/test_stages.py"
WATCH = "tests/tds/watchdog/test_watch.py"


# Sums of gradients over replicas and over copies of tied weights.


@mutant("tds.gradients:reduce_gradients", f"{GRADIENTS}::test_sum_over_two_ranks_times_scale_in_any_bucket_size[40]")
def gradients_are_not_summed_over_replicas(original: Any) -> Any:
    return lambda gradients, group, scale=1.0, bucket_bytes=None: original(gradients, None, scale)


@mutant("tds.gradients:GradientBucket.wait", SUM)
def summed_gradients_are_not_copied_back(original: Any) -> Any:
    return lambda self, factor: self.work.wait()


@mutant("tds.gradients:one_run", f"{GRADIENTS}::test_what_lies_apart_is_no_run")
def gradients_with_a_gap_between_them_are_reduced_as_one_buffer(original: Any) -> Any:
    return lambda tensors: tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


@mutant(
    "tds.gradients:multiply",
    f"{GRADIENTS}::test_a_factor_is_not_rounded_to_the_16_bits_of_a_gradient[torch.bfloat16]",
)
def factor_is_rounded_to_the_dtype_of_the_gradient(original: Any) -> Any:
    return lambda gradients, factor: torch._foreach_mul_(list(gradients), factor)


@mutant("tds.gradients:sum_tied", TIED)
def tied_gradients_are_summed_twice(original: Any) -> Any:
    def sum_tied(weights: Any, *args: Any) -> None:
        pairs = list(weights)
        original(pairs, *args)
        original(pairs, *args)

    return sum_tied


@mutant("tds.gradients:sum_tied", TIED)
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
    f"{GRADIENTS}::test_clipping_brings_the_norm_to_the_bound_and_leaves_what_is_at_it",
)
def clipping_shrinks_gradients_within_the_bound(original: Any) -> Any:
    return lambda norm, clip_grad: original(norm, clip_grad / 2)


@mutant(
    "tds.deepspeed.optimizers:FP16Gradients.before_step",
    f"{DEEPSPEED_OPTIMIZERS}::test_an_overflow_on_one_stage_skips_the_same_step_on_all_with_one_scale",
)
def norm_of_fp16_optimizers_counts_tied_weights_twice(original: Any) -> Any:
    return lambda self: None


# Sums over replicas that start within the last backward.


@mutant("tds.bucket_reducer:BucketReducer.ready", EARLY_SUMS)
def buckets_are_reduced_before_their_gradients_are_final(original: Any) -> Any:
    def ready(self: Any, parameter: torch.Tensor) -> None:
        original(self, parameter)
        self._start(self.order.rest())

    return ready


@mutant("tds.bucket_reducer:BucketSchedule._arrange", EARLY_SUMS)
def replicas_reduce_buckets_in_different_orders(original: Any) -> Any:
    return lambda self, order: original(self, order[::-1] if dist.is_initialized() and dist.get_rank() == 1 else order)


@mutant(
    "tds.bucket_reducer:BucketReducer.finish_launch",
    f"{OVERLAPPED}::test_what_the_last_micro_batch_does_not_reach_is_summed_too_and_what_is_tied_once",
)
def buckets_with_an_unused_weight_are_not_reduced(original: Any) -> Any:
    return lambda self: self.order.rest()


@mutant("tds.bucket_reducer:ChunkOrder.__init__", TWO_REPLICAS)
def weights_outside_of_layers_are_not_reduced(original: Any) -> Any:
    def init(self: Any, every: Any, chunks: Any, *args: Any, **kwargs: Any) -> None:
        in_layers = {parameter for chunk in chunks for parameter in chunk}
        original(self, [parameter for parameter in every if parameter in in_layers], chunks, *args, **kwargs)

    return init


@mutant(
    "tds.bucket_reducer:ChunkOrder.__init__", "tests/tds/test_sharing.py::test_replicas_add_up_what_is_shared_once[2]"
)
def tied_weights_are_reduced_over_replicas_before_their_copies_are_summed(original: Any) -> Any:
    return lambda self, every, chunks, tied=(), *args, **kwargs: original(self, every, chunks, (), *args, **kwargs)


@mutant(
    "tds.bucket_reducer:ChunkOrder.reset",
    f"{REDUCTION}::test_weights_frozen_and_unfrozen_between_steps_stay_equal_on_all_replicas[False]",
)
def weights_unfrozen_after_the_first_step_are_not_reduced(original: Any) -> Any:
    from tds.bucket_reducer import BucketSchedule

    return lambda self: original(self) if self._trained is None else BucketSchedule.reset(self)


@mutant(
    "tds.bucket_reducer:BucketReducer._arrive",
    f"{REDUCTION}::test_a_weight_that_gets_its_gradient_in_parts_is_refused",
)
def gradients_added_after_their_bucket_was_reduced_are_accepted(original: Any) -> Any:
    return lambda self, parameter: self.ready(parameter)


@mutant(
    "tds.bucket_reducer:BucketReducer.reset",
    f"{OVERLAPPED}::test_a_backward_that_breaks_off_leaves_nothing_behind",
)
def sums_of_a_failed_backward_are_written_in_the_next_step(original: Any) -> Any:
    def reset(self: Any) -> None:
        started = list(self._started)
        original(self)
        self._started += started

    return reset


@mutant("tds.engine.stage_call:program_of", TWO_REPLICAS)
def gradients_count_as_final_after_the_first_backward(original: Any) -> Any:
    def program_of(actions: Any, *args: Any) -> Any:
        from tds.schedule import Backward, BackwardWeight

        first = {a.chunk: a for a in reversed(actions) if isinstance(a, (Backward, BackwardWeight))}
        return dataclasses.replace(original(actions, *args), last=frozenset(first.values()))

    return program_of


@mutant(
    "tds.engine.weight_grad_store:WeightGradStore.waiting",
    "tests/tds/test_sharing.py::test_what_one_stage_alone_holds_is_added_up_beside_its_backward",
)
def deferred_weight_gradients_are_reduced_before_they_are_computed(original: Any) -> Any:
    return lambda self, key: set()


# One step: micro-batches, backward, update.


@mutant("tds.engine.micro_batches:BatchSource.next", TWO_STAGES)
def first_micro_batch_is_read_for_all(original: Any) -> Any:
    def next_micro_batch(self: Any, micro_batch: int = 0) -> Any:
        first = self._first
        batch = original(self, micro_batch)
        self._first = first
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


@mutant("tds.device:upload", "tests/tds/engine/test_batches.py::test_inputs_of_any_structure_are_copied")
def inputs_share_memory_with_the_data_set(original: Any) -> Any:
    return lambda tensor, device: tensor.detach()


@mutant(
    "tds.engine.engine:ScheduleEngine._discarding_gradients_on_error",
    "tests/tds/engine/test_engine.py::test_an_error_in_the_middle_leaves_nothing_for_the_next_batch[1]",
)
def gradients_of_a_failed_batch_are_added_to_the_next(original: Any) -> Any:
    return lambda self: nullcontext()


@mutant("tds.engine.engine:ScheduleEngine._take_step", FAILED_STEP)
def gradients_of_a_failed_step_are_added_to_the_next_batch(original: Any) -> Any:
    def take_step(self: Any, gradients: Any) -> None:
        try:
            original(self, gradients)
        finally:
            self._has_untaken_gradients = False

    return take_step


@mutant("tds.deepspeed.optimizers:Gradients.loss_scale", OWN_OPTIMIZER)
def loss_is_not_scaled_before_the_backward(original: Any) -> Any:
    return lambda self: 1.0


@mutant(
    "tds.deepspeed.optimizers:BF16Gradients.before_backward",
    f"{DEEPSPEED_OPTIMIZERS}::test_every_optimizer_trains_as_with_deepspeeds_engine_to_the_bit",
)
def bf16_gradients_of_earlier_micro_batches_are_accumulated_again(original: Any) -> Any:
    return lambda self: None


@mutant("tds.deepspeed.engine:PipelineEngine.gradient_accumulation_steps", TWO_STAGES)
def last_micro_batch_is_dropped(original: Any) -> Any:
    return lambda self: max(original(self) - 1, 1)


# Data.


@mutant(
    "tds.engine.data_consistency:DataConsistency.begin", f"{DATA}::test_all_ranks_learn_of_data_that_end_and_can_go_on"
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
    f"{DATA}::test_a_global_batch_that_is_not_whole_changes_no_weight",
)
def incomplete_global_batch_is_trained_on(original: Any) -> Any:
    return lambda self, ended_at, *args: original(self, None, *args)


@mutant(
    "tds.engine.data_consistency:DataConsistency._compare",
    f"{DATA}::test_checksums_on_request_find_stages_that_read_different_samples",
)
def stages_may_read_different_samples(original: Any) -> Any:
    return lambda self, rows: None


@mutant(
    "tds.deepspeed.training_loader:training_loader",
    f"{DATA}::test_middle_stages_open_no_sample_and_replicas_share_them",
)
def replicas_read_the_same_samples(original: Any) -> Any:
    def training_loader(data: Any, grid: Any, *args: Any, **kwargs: Any) -> Any:
        one_replica = SimpleNamespace(
            data_parallel_size=1, pipe_parallel_size=grid.pipe_parallel_size, get_data_parallel_rank=lambda: 0
        )
        return original(data, one_replica, *args, **kwargs)

    return training_loader


# Backwards that are split into halves.


@mutant("tds.engine.weight_grad_store:WeightGradStore.run", USERS_ORDER)
def first_deferred_weight_gradient_is_lost(original: Any) -> Any:
    def run(self: Any, key: Any, *args: Any) -> None:
        self._put_off[key] = self._put_off[key][1:]
        original(self, key, *args)

    return run


@mutant(
    "tds.engine.weight_grad_store:_ModuleCalls.run",
    f"{GRAPH_SPLIT}::test_modules_with_backward_dw_have_the_gradients_of_torchs[2-zb-h1-True-delayed]",
)
def backward_dw_is_called_once_for_two_forwards(original: Any) -> Any:
    return lambda self: original(dataclasses.replace(self, times=1))


@mutant(
    "tds.engine.graph_split:Branch.run",
    f"{GRAPH_SPLIT}::test_products_without_linear_are_put_off_under_a_schedule_that_splits[2-2-1-zb-h1]",
)
def weight_gradients_deferred_by_the_graph_are_lost(original: Any) -> Any:
    return lambda self: None


# Recompute and evaluation.


@mutant("tds.device:drawing_from", f"{RECOMPUTE}::test_masks_and_inputs_that_a_layer_changes_come_back[CPU_CHECKPOINT]")
def recompute_draws_new_dropout_masks(original: Any) -> Any:
    return lambda states: nullcontext()


@mutant("tds.deepspeed.recompute:Recompute._keep", f"{RECOMPUTE}::test_a_tensor_that_a_run_changes_is_kept_for_each")
def recompute_starts_from_the_first_value_of_an_input_changed_in_place(original: Any) -> Any:
    def keep(self: Any, x: torch.Tensor) -> Any:
        _, kept = self._kept.get(x, (None, None))
        return original(self, x) if kept is None else kept

    return keep


@mutant(
    "tds.deepspeed.module:forwards_uncounted",
    f"{EVALUATION}::test_evaluation_between_steps_changes_nothing_in_training[2-4]",
)
def evaluation_advances_the_seeds_of_layers(original: Any) -> Any:
    return lambda module: nullcontext()


@mutant(
    "tds.device:random_numbers_kept",
    f"{EVALUATION}::test_evaluation_with_a_layer_and_data_that_draw_leaves_the_generator_as_it_was",
)
def evaluation_advances_the_random_generator(original: Any) -> Any:
    return lambda device: nullcontext()


@mutant("tds.deepspeed.module:PipelineModule.eval", "tests/training/test_loop.py::test_evaluation_drops_nothing")
def evaluation_applies_dropout(original: Any) -> Any:
    return lambda self: self.train()


# Losses.


@mutant(
    "tds.loss:named_losses", f"{LOSS}::test_weighted_losses_are_a_mean_over_what_was_counted_and_zero_where_nothing_was"
)
def loss_is_a_mean_of_the_means_of_micro_batches(original: Any) -> Any:
    def named_losses(loss: Any, micro_batch: int) -> dict[str, Any]:
        named = original(loss, micro_batch)
        return {
            name: x.total / x.count if hasattr(x, "count") and hasattr(x, "total") else x for name, x in named.items()
        }

    return named_losses


@mutant("tds.loss:_wide", f"{LOSS}::test_losses_of_16_bits_are_added_up_in_32_and_those_of_64_in_64")
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
    "tds.loss_reduction:_written",
    f"{LOSS}::test_replicas_with_other_names_raise_on_every_rank_and_leave_nothing_in_flight",
)
def losses_of_different_names_are_averaged(original: Any) -> Any:
    def written(*args: Any) -> Any:
        known, names = original(*args)
        return torch.cat([known[:2], torch.zeros_like(known[2:])]), names

    return written


@mutant(
    "tds.loss:LossMeter.__init__",
    "tests/training/test_unequal_shares.py::"
    "test_plain_means_of_micro_batches_weigh_the_same_on_unequal_replicas[--pipe-parallel-size 2]",
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
    "tests/tds/p2p/test_tensor_group.py::test_any_dtype_and_size_is_cut_and_gathered",
)
def partitioned_tensor_is_gathered_in_reverse_rank_order(original: Any) -> Any:
    def gather(self: Any, piece: torch.Tensor, num_bytes: int) -> torch.Tensor:
        whole = original(self, piece, piece.numel() * self.cut.size)
        return whole.view(self.cut.size, -1).flip(0).reshape(-1)[:num_bytes]

    return gather


@mutant("tds.p2p.structure:Structure.rebuild", f"{EXCHANGE}::test_a_layer_gets_the_very_structure_that_was_returned")
def tensors_of_a_dict_arrive_under_sorted_keys(original: Any) -> Any:
    return lambda self, tensors: original(dataclasses.replace(self, keys=tuple(sorted(self.keys))), tensors)


@mutant(
    "tds.p2p.tensor_meta:check_received",
    "tests/tds/p2p/test_boundary.py::test_a_header_that_disagrees_with_the_receivers_declaration_is_refused",
)
def header_is_not_checked_against_the_receivers_declaration(original: Any) -> Any:
    return lambda specs, records, place, is_training: None


@mutant("tds.p2p.message_header:decode_header", f"{WIRE}::test_bytes_that_are_no_header_are_rejected")
def any_bytes_are_read_as_a_header(original: Any) -> Any:
    from tds.p2p.message_header import MAGIC

    return lambda header: original(torch.cat([torch.tensor([MAGIC]), header[1:]]))


@mutant("tds.p2p.tensor_meta:check_same", f"{EXCHANGE}::test_a_change_of_dtype_shape_or_form_sends_nothing_more")
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


@mutant("tds.p2p.input_leaves:with_leaves", f"{EXCHANGE}::test_what_a_stage_hands_to_itself_is_not_changed_unnoticed")
def next_chunk_may_change_saved_activations_in_place(original: Any) -> Any:
    return lambda tensors, is_own=False: original(tensors)


@mutant("tds.p2p.transport:Transport.wait_for", MESSAGES)
def activations_are_used_before_they_have_arrived(original: Any) -> Any:
    def wait_for(self: Any, transfer: Any) -> torch.Tensor:
        early = transfer.buffer.clone()
        arrived = original(self, transfer)
        return arrived if transfer.kind.name == "HEADER" else early

    return wait_for


@mutant(
    "tds.p2p.host_copies:Copied.wait",
    "tests/tds/p2p/test_host_copies.py::test_every_operation_gives_what_gloo_gives[all_reduces]",
)
def results_through_the_host_are_not_copied_back(original: Any) -> Any:
    def wait(self: Any, timeout: Any = None) -> bool:
        self._back = ()
        return original(self, timeout)

    return wait


# Orders of actions.


@mutant("tds.schedule.schedules:ONE_CHUNK", f"{ORDERS}::test_a_schedule_runs_and_holds_what_its_table_says[1f1b]")
def one_f_one_b_keeps_all_micro_batches_in_flight(original: Any) -> Any:
    return {**original, "1f1b": original["gpipe"]}


@mutant("tds.schedule.schedules:_put_off", f"{ORDERS}::test_zb_h1_puts_off_weights_by_the_number_of_the_stage")
def zb_h1_defers_weight_gradients_by_one_micro_batch_on_each_stage(original: Any) -> Any:
    return lambda whole, trail, stay_whole: original(whole, 1, stay_whole)


@mutant("tds.schedule.schedules:_all_stages", f"{ORDERS}::test_a_larger_group_of_micro_batches_runs_and_holds_more")
def interleaved_ignores_the_group_size(original: Any) -> Any:
    return lambda stages, micro_batches, chunks, group_size: original(stages, micro_batches, chunks, stages)


@mutant("tds.schedule.actions:Placement._mirrored", f"{V_ORDERS}::test_pieces_go_down_and_up_again")
def pieces_of_a_v_lie_in_a_loop(original: Any) -> Any:
    return lambda self, place, chunk: place


@mutant("tds.schedule.validate:_check_complete", f"{VALIDATE}::test_what_is_no_order_for_one_stage_is_refused")
def order_without_a_backward_is_accepted(original: Any) -> Any:
    return lambda stage, reached, num_chunks, is_training: None


@mutant("tds.schedule.validate:_check_rising", f"{VALIDATE}::test_stages_that_do_not_go_together_are_refused")
def order_that_sums_gradients_in_another_sequence_is_accepted(original: Any) -> Any:
    return lambda stage, actions, num_chunks: None


@mutant(
    "tds.schedule.limits:send_window",
    "tests/tds/schedule/test_window.py::test_a_schedule_that_would_stand_still_gets_a_larger_limit",
)
def limit_of_pending_sends_deadlocks_some_schedules(original: Any) -> Any:
    return lambda order, num_stages, *args: num_stages + 1


@mutant(
    "tds.schedule.limits:_completes",
    "tests/tds/p2p/test_receives.py::test_a_receive_is_posted_for_the_next_action_and_further_ahead_only_in_a_ring",
)
def receives_are_posted_that_depend_on_the_running_action(original: Any) -> Any:
    return lambda travels, places, counts: True


@mutant("tds.schedule.validate:validate", f"{SCHEDULE_FILE}::test_what_is_no_order_is_refused")
def order_in_a_file_is_not_validated(original: Any) -> Any:
    return lambda stages, *args, **kwargs: [1] * len(stages)


# Layers on stages, and modules that they share.


@mutant(
    "tds.deepspeed.module:PipelineModule.forward",
    "tests/tds/engine/test_v.py::test_a_larger_group_of_micro_batches_equals_one_process",
)
def chunks_of_a_stage_run_in_reverse(original: Any) -> Any:
    return lambda self, forward_input, chunk=0: original(self, forward_input, self.chunks - 1 - chunk)


@mutant("tds.partition:partition_balanced", f"{CUTS}::test_balanced_bounds_are_as_good_as_the_best_of_all_partitions")
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
        found = original(module)
        for parameter in (p for each in found.values() for p in each["module"].parameters()):
            parameter.ds_pipe_replicated = False
        return found

    return index_shared_modules


@mutant("tds.deepspeed.shared_layers:_lend", "tests/tds/test_sharing.py::test_each_chunk_knows_what_it_shares")
def each_layer_has_a_copy_of_a_shared_module(original: Any) -> Any:
    return lambda layer, name, module: original(layer, name, copy.deepcopy(module))


@mutant(
    "tds.deepspeed.module:PipelineModule.synchronize_tied_weights",
    "tests/tds/test_sharing.py::test_all_holders_start_with_one_copy_of_the_same_weights",
)
def copies_of_a_tied_weight_start_with_different_values(original: Any) -> Any:
    return lambda self: None


# The watchdog.


@mutant(
    "tds.watchdog.watchdog:Watchdog._is_late", f"{WATCH}::test_a_rank_is_late_once_nothing_has_changed_for_the_limit"
)
def stuck_rank_is_never_late(original: Any) -> Any:
    return lambda self: False


@mutant("tds.watchdog.watchdog:Watchdog._update", f"{WATCH}::test_a_rank_that_gets_on_is_never_late[progress]")
def progress_does_not_count(original: Any) -> Any:
    def update(self: Any, now: float) -> Any:
        self.progress = 0
        return original(self, now)

    return update


@mutant(
    "tds.watchdog.diagnosis:verdict", "tests/tds/watchdog/test_watchdog.py::test_the_verdict_follows_the_chain_of_waits"
)
def verdict_names_the_rank_that_raised_the_alarm(original: Any) -> Any:
    def verdict(reports: Any, names: Any, asking: int, *args: Any) -> str:
        alone = {rank: dataclasses.replace(report, waits_for=None) for rank, report in reports.items()}
        return original(alone, names, asking, *args)

    return verdict
