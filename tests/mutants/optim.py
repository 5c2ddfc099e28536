"""Mutants of the optimizer, ZeRO, the learning rate and the training step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.groups import SINGLE
from megatron.optim.matrix_owners import OwnerGrid
from megatron.optim.newton_schulz import newton_schulz
from tds.gradients import is_reduced_by_optimizer
from tests.mutants.mutant import mutant

MIXED = "tests/optim/test_mixed_precision.py"
TINY_GRADIENTS = f"{MIXED}::test_tiny_gradients_accumulate_in_fp32[dtype0]"
TWO_STAGES = f"{MIXED}::test_norm_and_clipped_steps_match_single_process"
OVERFLOW = f"{MIXED}::test_fp16_overflow_skips_step_and_halves_scale"
ASKED_AHEAD = f"{MIXED}::test_precomputed_norm_is_used_and_discarded_with_gradients"
CLIPS = f"{MIXED}::test_clipping_matches_torch[clipping acts]"
DOES_NOT_CLIP = f"{MIXED}::test_clipping_matches_torch[clipping has nothing to do]"
SCALER = "tests/optim/test_scaler.py"
RESUMED_SCALER = f"{SCALER}::test_resumed_state_equals_uninterrupted"
SGD = "tests/optim/test_sgd.py"
SGD_RESUMED = f"{SGD}::test_momentum_survives_state_dict"
SCHEDULES = "tests/optim/test_schedules.py"
LAST_UPDATE = f"{SCHEDULES}::test_last_update_and_later_have_min_lr"
RATES = "tests/optim/test_param_rates.py"
PATTERNS = f"{RATES}::test_parameter_uses_rate_of_last_matching_pattern[adamw]"
MUP = "tests/models/common/test_mup.py"
MUP_RATES = f"{MUP}::test_mup_scales_only_init_and_rate_of_hidden_matrices[gpt2]"
ADAM = "tests/optim/test_adam.py"
BF16_STATES = f"{ADAM}::test_bf16_steps_match_formula_bitwise[4194304-('exp_avg', 'exp_avg_sq')]"
MUON = "tests/optim/test_muon.py"
TORCHS_MUON = f"{MUON}::test_steps_match_torch_muon_bitwise[torch.float32-]"
MUON_EXPERTS = "tests/optim/test_muon_experts.py::test_expert_updates_equal_those_of_one_process[1-4]"
ADAPTIVE_MUON = "tests/optim/test_adaptive_muon.py"
NORMUON_MOVES = "tests/optim/test_muon_layouts.py::test_state_loads_into_other_layouts[saved0-loaded0]"
MUON_LAYOUT = "tests/optim/test_muon_layouts.py::test_every_layout_matches_single_process_weights[2-1-2-1-1]"
BUFFER = "tests/optim/test_grad_buffer.py"
BUFFER_PARTS = f"{BUFFER}::test_replica_gets_contiguous_shard_of_summed_micro_batches"
SCATTERED = f"{BUFFER}::test_reduce_scatter_trains_like_all_reduce[3-2]"
OVERLAPPED = "tests/optim/test_overlapped_gradients.py"
OVERLAPPED_BITS = f"{OVERLAPPED}::test_overlapped_all_reduce_is_bitwise_equal"
CUTS = "tests/optim/zero/test_cuts.py"
ZERO_2_3 = "tests/optim/zero/test_zero_parts.py"
PARITY_ZERO_2_3 = "tests/parity/test_zero_parts.py"
ZERO_LAYOUTS = "tests/parity/test_zero_layouts.py::test_layout_equals_single_process"
TIED_STAGES = f"{ZERO_LAYOUTS}[1-2-2-clip-grad-0.5-pipeline-schedule-zb-h1-pipeline-chunks-2-zero-stage-3]"
SHARDED_EXPERTS = f"{ZERO_LAYOUTS}[1-1-4-balanced-expert-model-parallel-size-2-zero-stage-3]"
ZERO_3 = f"{ZERO_2_3}::test_micro_batches_accumulate_up_to_rounding"
TWO_REDUCTIONS = f"{ZERO_2_3}::test_reduce_scatter_equals_shards_of_all_reduce"
ZERO_3_READS = f"{ZERO_2_3}::test_weight_read_outside_call_is_nan"
LATER_GATHERS = "tests/optim/zero/test_param_gather.py"
GATHERS = f"{LATER_GATHERS}::test_deferred_gather_is_bitwise_equal[2]"
READERS = f"{LATER_GATHERS}::test_reads_outside_forward_wait_for_gather"
LAYOUTS = "tests/parity/test_layouts.py"
TWO_REPLICAS = f"{LAYOUTS}::test_two_replicas_are_bitwise_sum_in_rank_order"
LOSS_AVERAGE = "tests/parity/test_loss_average.py"
RAMP = "tests/parity/test_rampup.py::test_growing_batch_equals_single_process[2-1]"
REFUSED = "tests/training/test_guard.py::test_nan_loss_on_one_tensor_rank_is_skipped_on_all_ranks"
SEQUENCE_PARALLEL = (
    "tests/parity/test_sequence_parallel.py::test_gradient_shards_are_reduced_over_replicas_and_tensor_ranks"
)
EXPERTS = (
    "tests/parity/test_experts.py::test_every_layout_equals_single_process[balanced-2-1-2-ep-2-cut-zero-stage-1-1]"
)
MEANS = f"{LOSS_AVERAGE}::test_only_trained_loss_becomes_mean"


# Main params and their gradients.


@mutant("megatron.optim.gradients.local:LocalGradReducer._accumulate", TINY_GRADIENTS)
def sixteen_bit_gradients_accumulate_in_16_bits(original: Any) -> Any:
    def add(self: Any, parameter: Any) -> None:
        original(self, parameter)
        total = self._fp32_grads[parameter]
        total.copy_(total.to(parameter.dtype))

    return add


@mutant("megatron.optim.gradients.local:LocalGradReducer._accumulate", TINY_GRADIENTS)
def a_16_bit_gradient_replaces_those_of_earlier_micro_batches(original: Any) -> Any:
    def add(self: Any, parameter: Any) -> None:
        self._fp32_grads.pop(parameter, None)
        original(self, parameter)

    return add


@mutant(
    "megatron.optim.param_store:ParamStore.register",
    f"{MIXED}::test_main_params_keep_unrounded_weights",
)
def main_params_start_from_rounded_weights(original: Any) -> Any:
    def register(self: Any, parameter: Any, dtype: torch.dtype) -> Any:
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        return original(self, parameter, dtype)

    return register


@mutant(
    "megatron.optim.param_store:ParamStore.copy_to_parameters",
    f"{MIXED}::test_tiny_updates_move_bf16_weight",
)
def updated_main_params_are_not_copied_to_the_weights(original: Any) -> Any:
    return lambda self, *, deferred=False: None


@mutant("megatron.optim.gradients.local:LocalGradReducer.clear", f"{MIXED}::test_gradients_are_cleared_after_step")
def gradients_are_kept_after_the_step(original: Any) -> Any:
    return lambda self: None


# Norm, clipping, loss scale and skipped steps.


@mutant("megatron.optim.optimizer:MixedPrecisionOptimizer._set_grads", OVERFLOW)
def update_includes_the_loss_scale(original: Any) -> Any:
    return lambda self, factor: original(self, factor * self.loss_scale)


@mutant("tds.grad_norm:clip_coefficient", CLIPS)
def gradients_are_not_clipped(original: Any) -> Any:
    return lambda norm, clip_grad: 1.0


@mutant("tds.grad_norm:clip_coefficient", DOES_NOT_CLIP)
def small_gradients_are_scaled_up_to_the_clipping_norm(original: Any) -> Any:
    return lambda norm, clip_grad: clip_grad / (norm + 1.0e-6)


@mutant("megatron.optim.gradients.reducer:GradReducer.norm", TWO_STAGES)
def norm_is_that_of_one_stage(original: Any) -> Any:
    def norm(self: Any) -> Any:
        self.model_group = self.tensor_group
        return original(self)

    return norm


@mutant("tds.grad_norm:is_counted_in_norm", TWO_STAGES)
def norm_counts_replicated_weights_on_each_tensor_rank(original: Any) -> Any:
    return lambda parameter, tensor_rank: original(parameter, 0)


@mutant("tds.grad_norm:is_counted_in_norm", TWO_STAGES)
def norm_counts_tied_weights_on_each_stage(original: Any) -> Any:
    return lambda parameter, tensor_rank: tensor_rank == 0 or parameter.dim() == 2


@mutant(
    "megatron.optim.optimizer:MixedPrecisionOptimizer.norm_of_sums",
    f"{MIXED}::test_overflow_on_one_rank_skips_step_on_all_ranks",
)
def overflow_of_another_rank_is_ignored(original: Any) -> Any:
    def norm_of_sums(self: Any) -> Any:
        norm = original(self)
        is_finite = all(self.reducer.grad(p).isfinite().all() for p in self.store.main_params)
        return torch.ones_like(norm) if is_finite and not norm.isfinite() else norm

    return norm_of_sums


@mutant("megatron.optim.optimizer:MixedPrecisionOptimizer.step", ASKED_AHEAD)
def gradient_factor_is_ignored(original: Any) -> Any:
    def step(self: Any, closure: None = None) -> None:
        self.gradient_factor = 1.0
        original(self)

    return step


@mutant(
    "megatron.optim.grad_scaler:GradScaler._adapt",
    f"{SCALER}::test_overflow_halves_scale_and_restarts_window",
)
def overflow_does_not_restart_the_loss_scale_window(original: Any) -> Any:
    def adapt(self: Any, has_overflow: bool) -> None:
        before = self.good_steps
        original(self, has_overflow)
        self.good_steps = before if has_overflow else self.good_steps

    return adapt


@mutant("megatron.optim.grad_scaler:GradScaler._adapt", f"{SCALER}::test_hysteresis_tolerates_overflows")
def halving_the_loss_scale_restores_the_hysteresis(original: Any) -> Any:
    def adapt(self: Any, has_overflow: bool) -> None:
        before = self.scale
        original(self, has_overflow)
        self.overflows_left = self.hysteresis if self.scale < before else self.overflows_left

    return adapt


@mutant("megatron.optim.grad_scaler:GradScaler._adapt", f"{SCALER}::test_scale_does_not_fall_below_floor")
def loss_scale_falls_below_its_minimum(original: Any) -> Any:
    def adapt(self: Any, has_overflow: bool) -> None:
        self.floor = 0.0
        original(self, has_overflow)

    return adapt


@mutant("megatron.optim.grad_scaler:GradScaler.load", RESUMED_SCALER)
def good_steps_of_the_loss_scale_are_not_resumed(original: Any) -> Any:
    return lambda self, state: original(self, {**state, "good_steps": 0})


# State of the inner optimizer.


@mutant("megatron.optim.state:load_state", SGD_RESUMED)
def momentum_is_not_loaded(original: Any) -> Any:
    def load_state(optimizer: Any, state: Any) -> None:
        original(optimizer, state)
        optimizer.inner.state.clear()

    return load_state


@mutant("megatron.optim.state:load_state", SGD_RESUMED)
def main_params_are_not_loaded(original: Any) -> Any:
    def load_state(optimizer: Any, state: Any) -> None:
        main_params = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
        original(optimizer, {**state, "masters": main_params})

    return load_state


@mutant("megatron.optim.state:_copied", f"{ADAM}::test_torch_state_loads_into_either_format")
def bf16_moments_are_loaded_in_fp32(original: Any) -> Any:
    return lambda value, device, dtype: original(value, device, torch.float32 if dtype else None)


@mutant("megatron.optim.adam:_update", BF16_STATES)
def adam_rounds_the_gradient_to_the_dtype_of_its_states(original: Any) -> Any:
    return lambda w, g, *rest: original(w, g.bfloat16().to(g.dtype), *rest)


@mutant(
    "megatron.training.state_records:store_quantized",
    "tests/optim/test_quantized_state.py::test_resumed_run_is_bitwise_identical[1--True]",
    needs="torchao",
)
def loaded_moments_are_not_stored_in_8_bits(original: Any) -> Any:
    return lambda module, optimizer, records: None


@mutant(
    "megatron.optim.param_groups:_with_eps",
    "tests/optim/test_adafactor.py::test_matrix_update_matches_paper_for_any_gradient_scale[gradients of 1e-8]",
)
def adafactor_matrices_have_the_epsilon_of_vectors(original: Any) -> Any:
    return lambda group: {**group, "eps": (1e-8, 1e-3)}


# Parameter groups: weight decay, named rates, muP.


@mutant(
    "megatron.optim.param_groups:decay_groups",
    "tests/optim/test_param_groups.py::test_step_without_gradients_decays_only_weights[adamw]",
)
def biases_and_norms_are_decayed(original: Any) -> Any:
    def decay_groups(parameters: Any, weight_decay: float) -> Any:
        return [{**group, "weight_decay": weight_decay} for group in original(parameters, weight_decay)]

    return decay_groups


@mutant("megatron.optim.param_rates:RateTable.rate_of", PATTERNS)
def first_matching_pattern_sets_the_rate(original: Any) -> Any:
    def rate_of(self: Any, name: str, parameter: Any) -> Any:
        return original(replace(self, named=dict(reversed(self.named.items()))), name, parameter)

    return rate_of


@mutant(
    "megatron.optim.param_rates:_floor",
    f"{RATES}::test_all_rates_share_one_schedule_and_floor_ratio[39-linear]",
)
def named_rates_decay_to_min_lr(original: Any) -> Any:
    return lambda settings, lr: settings.min_lr


@mutant("megatron.optim.lr_scheduler:set_learning_rates", PATTERNS)
def all_groups_have_the_rate_of_lr(original: Any) -> Any:
    def set_learning_rates(optimizer: Any, scheduler: Any, num_updates: float) -> float:
        lr: float = original(optimizer, scheduler, num_updates)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr

    return set_learning_rates


@mutant("megatron.optim.param_rates:_mup_rate", MUP_RATES)
def mup_leaves_the_rate_of_matrices(original: Any) -> Any:
    def mup_rate(config: Any) -> Any:
        settings = config.optimizer
        return replace(original(config), lr=settings.lr, min_lr=settings.min_lr) if original(config) else None

    return mup_rate


# The learning rate.


@mutant("megatron.optim.lr_scheduler:LRScheduler.at", f"{SCHEDULES}::test_warmup_rises_linearly_to_lr[linear]")
def rate_is_that_of_the_update_before(original: Any) -> Any:
    return lambda self, update: original(self, update - 1)


@mutant("megatron.optim.lr_scheduler:LRScheduler.after", f"{LAST_UPDATE}[linear]")
def decay_does_not_include_the_warmup(original: Any) -> Any:
    def after(self: Any, num_updates: float) -> float:
        longer = replace(
            self, decay_updates=self.decay_updates + self.warmup_updates, warmup_length=self.warmup_updates
        )
        rate: float = original(longer, num_updates)
        return rate

    return after


@mutant(
    "megatron.training.optimizer_setup:make_lr_scheduler",
    f"{SCHEDULES}::test_sample_lengths_match_megatron_rates[]",
)
def warmup_samples_are_rounded_to_whole_steps(original: Any) -> Any:
    def make_learning_rate(config: Any) -> Any:
        schedule, size = original(config), config.batch.batch_sizes(2).full
        return replace(schedule, warmup_length=size * round(schedule.warmup_updates / size))

    return make_learning_rate


@mutant(
    "megatron.optim.lr_scheduler:LRScheduler.position",
    f"{SCHEDULES}::test_offset_of_minus_one_counts_samples_before_step",
)
def step_offset_is_one_sample(original: Any) -> Any:
    return lambda self, completed, step_length: completed + step_length + self.step_offset


# Muon.


@mutant("megatron.optim.muon:Muon._orthogonalize", MUON_LAYOUT)
def each_rank_orthogonalizes_its_own_shard(original: Any) -> Any:
    def orthogonalize(self: Any, batch: Any, shards: Any, moments: Any) -> Any:
        return [newton_schulz(shard, self._coefficients) if shard.numel() else shard for shard in shards]

    return orthogonalize


@mutant("megatron.optim.muon:MuonArgs.matrices", TORCHS_MUON)
def query_key_and_value_are_orthogonalized_as_one_matrix(original: Any) -> Any:
    return lambda self, packed: original(replace(self, split_qkv=False), packed)


@mutant(
    "megatron.optim.muon:Muon._apply_update",
    "tests/optim/test_param_groups.py::test_step_without_gradients_decays_only_weights[muon]",
)
def muon_does_not_decay_matrices(original: Any) -> Any:
    return lambda self, weight, master, group, update: original(
        self, weight, master, {**group, "weight_decay": 0.0}, update
    )


@mutant("megatron.optim.muon:Muon._make_batches", MUON_EXPERTS)
def expert_momentum_has_two_owners(original: Any) -> Any:
    def make_batches(self: Any, grid: OwnerGrid, *, is_expert: bool) -> Any:
        return original(self, OwnerGrid(grid.tensor, SINGLE) if is_expert else grid, is_expert=is_expert)

    return make_batches


@mutant("megatron.optim.muon:Muon._orthogonalize_matrices", f"{ADAPTIVE_MUON}::test_steps_follow_formula[True-normuon]")
def all_newton_schulz_steps_have_the_first_coefficients(original: Any) -> Any:
    def orthogonalize(self: Any, *args: Any) -> Any:
        self._coefficients = self._coefficients[:1] * len(self._coefficients)
        return original(self, *args)

    return orthogonalize


@mutant("megatron.optim.muon:normalize_neurons", f"{ADAPTIVE_MUON}::test_steps_follow_formula[False-normuon]")
def normuon_does_not_restore_the_norm(original: Any) -> Any:
    def normalize(update: Any, moment2: Any, args: Any) -> Any:
        normalized = original(update, moment2, args)
        return normalized * (update / moment2.sqrt().mean()).norm() / normalized.norm()

    return normalize


@mutant("megatron.optim.optimizer:MixedPrecisionOptimizer.owns_replicated_state", NORMUON_MOVES, raises=True)
def no_rank_saves_the_second_moments_of_normuon(original: Any) -> Any:
    return lambda self, parameter: False


# The gradient buffer: accumulation and reduce-scatter in buckets.


@mutant("megatron.optim.gradients.buffer:_BucketMemory.main_grad", BUFFER_PARTS)
def gradient_shard_is_that_of_the_previous_replica(original: Any) -> Any:
    def main_grad(self: Any, parameter: Any) -> Any:
        shard, first = original(self, parameter), self._offsets[parameter]
        if self._partitions[parameter] is None:
            return shard
        return self.slots[self._rank - 1, first : first + shard.numel()].view(shard.shape)

    return main_grad


@mutant("megatron.optim.gradients.buffer:_BucketMemory.add", BUFFER_PARTS)
def buffered_gradient_replaces_those_of_earlier_micro_batches(original: Any) -> Any:
    def add(self: Any, parameter: Any, gradient: Any) -> None:
        self._filled.discard(parameter)
        original(self, parameter, gradient)

    return add


@mutant(
    "megatron.optim.gradients.buffer:_BucketMemory.add_product",
    f"{BUFFER}::test_add_product_equals_adding_gradient",
)
def buffered_product_replaces_those_of_earlier_micro_batches(original: Any) -> Any:
    def add_product(self: Any, parameter: Any, rows: Any, inputs: Any) -> None:
        self._filled.discard(parameter)
        original(self, parameter, rows, inputs)

    return add_product


@mutant(
    "megatron.optim.gradients.buffer:_BucketMemory._fill",
    f"{BUFFER}::test_gradients_are_contiguous_and_missing_ones_are_zero",
)
def missing_gradients_are_not_zeroed(original: Any) -> Any:
    """Ones stand for memory that is not cleared, which could be zero by chance."""

    def fill(self: Any, parameter: Any) -> None:
        if parameter not in self._filled:
            self._filled.add(parameter)
            for _, slot in self._pairs(parameter, parameter.detach()):
                slot.fill_(1.0)

    return fill


@mutant("megatron.optim.gradients.buffer:_BucketMemory.start", SCATTERED)
def unsharded_gradients_of_a_bucket_are_not_reduced(original: Any) -> Any:
    def start(self: Any, group: Any) -> Any:
        numel, self._unsharded_numel = self._unsharded_numel, 0
        try:
            return original(self, group)
        finally:
            self._unsharded_numel = numel

    return start


@mutant(
    "megatron.optim.gradients.buffer:_BucketMemory._raise_if_summed",
    f"{BUFFER}::test_gradient_after_reduce_scatter_is_rejected",
)
def gradients_are_accumulated_after_their_reduce_scatter(original: Any) -> Any:
    return lambda self, parameter: None


# Reduction during the last backward.


@mutant("megatron.optim.gradients.overlapped:OverlappedGradReducer.begin_last_backward", OVERLAPPED_BITS)
def overlapped_gradients_are_not_reduced(original: Any) -> Any:
    return lambda self: None


@mutant(
    "megatron.optim.gradients.overlapped:OverlappedGradReducer.end_micro_batch",
    f"{OVERLAPPED}::test_unreached_and_tied_weights_are_reduced_once",
)
def gradients_that_the_last_micro_batch_misses_are_not_reduced(original: Any) -> Any:
    def end_micro_batch(self: Any) -> None:
        self._reducer.start_remaining = lambda: None
        original(self)

    return end_micro_batch


@mutant(
    "megatron.optim.gradients.overlapped:OverlappedGradReducer.clear",
    f"{OVERLAPPED}::test_interrupted_backward_leaves_no_state",
)
def sums_of_an_interrupted_backward_are_kept(original: Any) -> Any:
    return lambda self: self.buffer.clear()


# ZeRO: shards of main params, gradients and weights.


@mutant("megatron.optim.zero.partition:VECTOR", f"{CUTS}::test_fused_adamw_on_shards_is_bitwise_full_update")
def shards_start_within_a_vector(original: Any) -> Any:
    return 1


@mutant(
    "megatron.optim.zero.partition:ParamPartition.shard",
    f"{CUTS}::test_shard_ranges_tile_real_values",
)
def padding_is_part_of_the_shard(original: Any) -> Any:
    def shard(self: Any, numel: Any, replica: int) -> Any:
        return replace(original(self, numel, replica), length=self.bounds[replica + 1] - self.bounds[replica])

    return shard


@mutant(
    "megatron.optim.zero.partition:ParamPartition.shard",
    f"{CUTS}::test_tensor_sharded_weight_is_partitioned_along_same_dimension",
)
def shards_of_each_tensor_rank_start_at_zero(original: Any) -> Any:
    def shard(self: Any, numel: Any, replica: int) -> Any:
        tensor_shard = original(self, numel, replica)
        return (
            replace(tensor_shard, start=tensor_shard.start - numel.start)
            if numel.partition_dim == self.dim
            else tensor_shard
        )

    return shard


@mutant(
    "megatron.optim.zero.partition:ParamPartition.pairs",
    "tests/optim/zero/test_gather.py::test_shards_are_gathered_with_few_copies",
)
def gathered_shards_are_those_of_the_next_replica(original: Any) -> Any:
    return lambda self, full, slots: original(self, full, slots.roll(-1, 0))


@mutant("megatron.optim.zero.gather:Gather.start", GATHERS)
def replicas_gather_the_weights_of_before_the_update(original: Any) -> Any:
    def start(cls: Any, bucket: Any, group: Any, note: Any = ()) -> Any:
        old = [replace(w, shard=w.partition.slice(w.parameter, group.rank).clone()) for w in bucket]
        gather = original(cls, old, group, note)
        return replace(gather, bucket=bucket)

    return start


@mutant("megatron.optim.param_store:ParamStore.contiguous_main_params", MUON_LAYOUT)
def updates_of_column_shards_are_lost(original: Any) -> Any:
    @contextmanager
    def contiguous(self: Any) -> Any:
        views = [(param, param.data) for param in self.main_params.values() if not param.is_contiguous()]
        for param, view in views:
            param.data = view.contiguous()
        yield
        for param, view in views:
            param.data = view

    return contiguous


@mutant(
    "megatron.optim.optimizer:MixedPrecisionOptimizer.owns",
    "tests/optim/zero/test_zero.py::test_replica_0_owns_unpartitioned_weights",
)
def only_the_first_replica_saves_its_shards(original: Any) -> Any:
    return lambda self, parameter: original(self, parameter) and self.store.group_of(parameter).rank == 0


@mutant("megatron.optim.zero.param_gather:ParamGather.wait", GATHERS)
def layers_do_not_wait_for_their_weights(original: Any) -> Any:
    return lambda self, weights=None: original(self) if weights is None else None


@mutant("megatron.optim.param_store:ParamStore.finish_gathers", READERS)
def weights_are_read_before_they_are_gathered(original: Any) -> Any:
    return lambda self: None


@mutant("megatron.optim.gradients.reduction:_in_slots", TWO_REDUCTIONS)
def reduce_scatter_sends_the_shards_in_reverse_order(original: Any) -> Any:
    return lambda grads, num_replicas: original(grads, num_replicas).flip(0)


@mutant("megatron.optim.gradients.reduction:_flattened", TWO_REDUCTIONS)
def sharded_gradients_are_reduced_in_bf16(original: Any) -> Any:
    def flattened(grads: Any) -> Any:
        flat = original(grads)
        return flat.bfloat16().to(flat.dtype)

    return flattened


@mutant("megatron.optim.gradients.reduce_scatter:ReduceScatterGradReducer._wait", ZERO_3)
def gradient_shard_replaces_those_of_earlier_micro_batches(original: Any) -> Any:
    def wait(self: Any) -> None:
        for message in self._pending._messages if self._pending else ():
            for grad in message.grads:
                self._shards.pop(grad.parameter, None)
        original(self)

    return wait


@mutant("megatron.optim.gradients.reduce_scatter:ReduceScatterGradReducer.finish", TIED_STAGES)
def stage_3_shard_of_a_tied_weight_is_summed_over_stages_before_the_replicas(original: Any) -> Any:
    def finish(self: Any, factor: float = 1.0) -> None:
        pending, self._pending = self._pending, None
        original(self, factor)
        self._pending = pending

    return finish


@mutant("megatron.optim.gradients.reduce_scatter:ReduceScatterGradReducer._add_grad", TIED_STAGES)
def waiting_gradient_is_replaced_by_that_of_the_next_micro_batch(original: Any) -> Any:
    def add_grad(self: Any, parameter: Any) -> None:
        self._arrived.pop(parameter, None)
        original(self, parameter)

    return add_grad


@mutant("megatron.optim.gradients.reducer:SumGroup.sum", SHARDED_EXPERTS)
def sum_over_experts_is_repeated_for_shards(original: Any) -> Any:
    """Shards of experts are summed again at the end of the step, as full gradients of ZeRO 1 are."""

    def sum_shards(self: Any, grad_of: Any) -> None:
        reducer = grad_of.__self__
        if not self._parameters and reducer.reduces_in_backward:
            for parameter in filter(is_reduced_by_optimizer, reducer._store.main_params):
                dist.all_reduce(grad_of(parameter), group=reducer._store.expert_group.handle)
        original(self, grad_of)

    return sum_shards


@mutant("megatron.optim.gradients.reducer:GradReducer._is_counted", ZERO_3)
def norm_counts_unsharded_gradients_once_per_replica(original: Any) -> Any:
    return lambda self, parameter: True


@mutant("megatron.optim.param_store:ParamStore.copy_to_parameters", ZERO_3_READS)
def weight_shards_are_not_updated(original: Any) -> Any:
    def copy_to_parameters(self: Any, *, deferred: bool = False) -> None:
        before = {parameter: shard.clone() for parameter, shard in self.weight_shards.items()}
        original(self, deferred=deferred)
        for parameter, shard in self.weight_shards.items():
            shard.copy_(before[parameter])

    return copy_to_parameters


@mutant("megatron.optim.zero.stage3:ParamUnits.free", ZERO_3_READS)
def gathered_weights_survive_the_update(original: Any) -> Any:
    return lambda self: self._order.drop()


@mutant(
    "megatron.optim.zero.gather_order:GatherOrder.drop",
    "tests/optim/zero/test_prefetch.py::test_prefetched_weights_are_not_used_after_update",
)
def prefetched_weights_survive_the_update(original: Any) -> Any:
    return lambda self: None


@mutant(
    "megatron.optim.offload:OffloadConfig.copy",
    f"{PARITY_ZERO_2_3}::test_zero_3_offload_is_bitwise_stage_0",
)
def offloaded_main_params_are_rounded(original: Any) -> Any:
    return lambda self, tensor: original(self, tensor.bfloat16().to(tensor.dtype))


@mutant(
    "megatron.optim.offload:OffloadConfig.copies",
    "tests/optim/zero/test_host.py::test_copies_are_synchronized_once_after_last",
)
def offloaded_gradients_are_read_before_they_are_copied(original: Any) -> Any:
    return lambda self, tensors: [self._empty_like(t).copy_(t, non_blocking=True) for t in tensors]


# Losses and the training step.


@mutant("megatron.optim.optimizer:MixedPrecisionOptimizer.finish_gradient_sums", TWO_REPLICAS)
def gradients_are_divided_by_the_number_of_replicas(original: Any) -> Any:
    return lambda self, factor=1.0: original(self, factor / self.store.data_group.size)


@mutant(
    "megatron.optim.gradients.all_reduce:reduce_gradients",
    "tests/parity/test_overlapped_sums.py::test_single_stage_accumulation_in_fp32_is_bitwise_equal",
)
def gradients_are_not_summed_over_the_replicas(original: Any) -> Any:
    return lambda gradients, group, *how: None


@mutant(
    "megatron.training.loss_forms:as_weighted",
    f"{LOSS_AVERAGE}::test_single_process_trains_on_mean_of_micro_batch_means",
)
def weighted_losses_are_averaged_by_micro_batch(original: Any) -> Any:
    def as_weighted(loss: Any) -> Any:
        weighted = original(loss)
        return (
            weighted.total / weighted.count if hasattr(weighted, "count") and hasattr(weighted, "total") else weighted
        )

    return as_weighted


@mutant("megatron.training.loss_forms:mean_of_micro_batch", MEANS)
def mean_of_an_empty_micro_batch_is_nan(original: Any) -> Any:
    def mean(loss: Any, *context: Any) -> Any:
        return loss.total / loss.count if hasattr(loss, "total") else original(loss, *context)

    return mean


@mutant(
    "megatron.training.loss_forms:token_weight",
    f"{LOSS_AVERAGE}::test_router_divisor_is_all_tokens_of_mean_micro_batch_count",
)
def router_losses_are_divided_by_the_tokens_of_all_replicas(original: Any) -> Any:
    return lambda tokens, grid, *, is_mean: tokens if is_mean else original(tokens, grid, is_mean=False)


@mutant("megatron.training.single_stage_engine:all_reduce_loss", TWO_REPLICAS)
def loss_is_that_of_one_replica(original: Any) -> Any:
    return lambda meter, device, **groups: original(meter, device, **groups | {"data_size": 1})


@mutant("megatron.training.step_engine:set_micro_batches", RAMP)
def a_growing_batch_keeps_its_number_of_micro_batches(original: Any) -> Any:
    return lambda engine, number: None


@mutant("megatron.optim.step_policy:StepPolicy.rejects", f"{REFUSED}[fp32]")
def a_refused_step_is_taken(original: Any) -> Any:
    return lambda self, norm: original(self, norm) and False


@mutant("megatron.optim.step_policy:StepPolicy.rejects", f"{REFUSED}[fp16]")
def a_refused_step_counts_towards_the_loss_scale_window(original: Any) -> Any:
    def rejects(self: Any, norm: float) -> bool:
        is_rejected: bool = original(self, norm)
        if is_rejected:
            self.scaler.update(has_overflow=False)
        return is_rejected

    return rejects


@mutant(
    "megatron.training.step_result:make_step_result",
    "tests/training/test_loss_scale.py::test_overflowed_and_rejected_steps_are_reported_as_skipped",
)
def overflowed_steps_count_as_taken(original: Any) -> Any:
    return lambda *step: replace(original(*step), is_skipped=original(*step).is_rejected)


# Gradients of sequence-parallel weights and of experts.


@mutant("megatron.optim.gradients.sum_group:SumGroup.sum", SEQUENCE_PARALLEL)
def sequence_parallel_gradients_are_not_summed(original: Any) -> Any:
    return lambda self, grad_of: None


@mutant("megatron.optim.gradients.reducer:GradReducer.norm_group", EXPERTS)
def norm_counts_the_experts_of_one_rank(original: Any) -> Any:
    return property(lambda self: self.shard_group)


@mutant("megatron.optim.gradients.reducer:GradReducer.sum_over_groups", EXPERTS)
def expert_gradients_are_reduced_over_all_replicas(original: Any) -> Any:
    def sum_over_groups(self: Any) -> None:
        if not self._are_groups_summed:
            for parameter in filter(is_reduced_by_optimizer, self._store.main_params):
                dist.all_reduce(self.grad(parameter))
        original(self)

    return sum_over_groups
