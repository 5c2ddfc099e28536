"""Mutants of the training loop: position, learning rate, evaluation, stability guard, resume and metrics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron.data.blend_resume import SAME_LENGTH
from megatron.training.trainer import STEP_HOOKS
from tests.mutants.mutant import mutant

LOOP = "tests/training/test_loop.py"
GUARD = "tests/training/test_guard.py"
DATA_ORDER = "tests/training/test_data_order.py"
LENGTHS = "tests/training/test_sample_lengths.py"
RAMP = "tests/config/test_rampup.py"

SKIPPED = f"{LOOP}::test_skipped_step_consumes_samples_but_not_learning_rate"
ORDER_OF_CALLS = f"{LOOP}::test_step_order_is_log_evaluate_save_stop"
MEAN_LOSS = f"{LOOP}::test_evaluation_restarts_at_first_sample_and_returns_mean"
CORPORA = f"{LOOP}::test_corpora_are_evaluated_separately_and_weighted"
RESUME = "tests/training/test_resume.py::test_killed_and_resumed_run_equals_uninterrupted_run_bitwise"
OTHER_LAYOUTS = "tests/training/test_reshard.py::test_gpt2_reshards_between_selected_layouts"


# Position and learning rate.


@mutant(
    "megatron.training.trainer:Trainer.open_batches",
    f"{LOOP}::test_run_resumes_at_saved_sample_and_learning_rate",
)
def resumed_run_trains_on_the_first_samples(original: Any) -> Any:
    def open_batches(self: Any) -> Any:
        with mock.patch.object(self.progress, "samples_consumed", 0):
            return original(self)

    return open_batches


@mutant("megatron.training.trainer:Trainer.train_step", SKIPPED)
def consumed_samples_omit_the_accumulation(original: Any) -> Any:
    def train_step(self: Any) -> Any:
        result = original(self)
        self.progress.samples_consumed -= (
            self.samples.num_samples - self.samples.micro_batch_size * self.samples.replicas
        )
        return result

    return train_step


@mutant("megatron.training.trainer:Trainer.train_step", SKIPPED)
def learning_rate_advances_in_skipped_steps(original: Any) -> Any:
    def train_step(self: Any) -> Any:
        result = original(self)
        self.progress.updates += result.is_skipped
        return result

    return train_step


@mutant("megatron.training.trainer:set_learning_rates", SKIPPED)
def learning_rate_is_one_step_late(original: Any) -> Any:
    return lambda optimizer, scheduler, position: original(optimizer, scheduler, max(position - 1, 1))


@mutant(
    "megatron.training.train_progress:TrainProgress.samples_updated",
    f"{LENGTHS}::test_skipped_steps_consume_samples_without_advancing_rate",
)
def learning_rate_by_samples_counts_skipped_samples(original: Any) -> Any:
    return property(lambda self: self.samples_consumed)


# Batch size ramp-up and the length of a run.


@mutant(
    "megatron.config.batch_rampup:BatchSizes.at",
    f"{RAMP}::test_batch_grows_by_increments",
)
def batch_grows_one_sample_early(original: Any) -> Any:
    return lambda self, samples_consumed: original(self, samples_consumed + 1)


@mutant(
    "megatron.config.batch_rampup:BatchSizes.consumed_after",
    f"{RAMP}::test_consumed_after_matches_step_by_step_sum",
)
def ramp_is_left_out_of_the_samples_of_a_run(original: Any) -> Any:
    return lambda self, steps, samples_consumed=0: samples_consumed + steps * self.full


@mutant(
    "megatron.config.batch_rampup:BatchSizes.steps_within",
    "tests/config/test_run_length.py::test_first_limit_ends_run",
)
def last_step_exceeds_the_limit_of_samples(original: Any) -> Any:
    return lambda self, samples, samples_consumed=0: self.steps_until(samples, samples_consumed)


@mutant("megatron.training.step_samples:StepSamples.share", f"{GUARD}::test_step_samples_name_samples_of_each_replica")
def replicas_are_named_with_the_samples_of_the_first(original: Any) -> Any:
    return lambda self, replica: original(self, 0)


# Evaluation.


@mutant("megatron.training.trainer:Trainer.due", ORDER_OF_CALLS)
def intervals_are_one_step_late(original: Any) -> Any:
    def due(self: Any, hook: str) -> list[Any]:
        if hook not in STEP_HOOKS:
            return original(self, hook)
        with mock.patch.object(self, "samples", replace(self.samples, step=self.samples.step - 1)):
            return original(self, hook)

    return due


@mutant("megatron.training.callbacks.evaluator:Evaluator._mean_loss", ORDER_OF_CALLS)
def evaluation_continues_at_the_samples_of_training(original: Any) -> Any:
    def mean_loss(self: Any, split: str, corpus: str | None) -> float | None:
        data = self.trainer.data
        batches = partial(data.batches, samples_consumed=self.trainer.progress.samples_consumed)
        with mock.patch.object(data, "batches", batches):
            return original(self, split, corpus)

    return mean_loss


@mutant("megatron.training.callbacks.evaluator:Evaluator._mean_loss", MEAN_LOSS)
def evaluated_loss_is_a_sum(original: Any) -> Any:
    return lambda self, split, corpus: original(self, split, corpus) * self.trainer.config.batch.eval_iters


@mutant("megatron.training.callbacks.evaluator:weighted_mean", CORPORA)
def corpora_count_alike_in_the_evaluated_loss(original: Any) -> Any:
    return lambda values, weights: original(values, {name: float(weight > 0) for name, weight in weights.items()})


@mutant(
    "megatron.training.data:RunData.batches", f"{DATA_ORDER}::test_evaluation_reads_full_batches_during_batch_size_ramp"
)
def evaluation_reads_the_small_batches_of_a_ramp(original: Any) -> Any:
    def batches(self: Any, split: str, config: Any, world: Any, *args: Any, **options: Any) -> Any:
        with mock.patch(
            "megatron.training.data.BatchSizes", lambda full: config.batch.batch_sizes(world.grid.data.size)
        ):
            return original(self, split, config, world, *args, **options)

    return batches


@mutant(
    "megatron.training.single_stage_engine:SingleStageEngine.evaluate_batch",
    f"{LOOP}::test_evaluation_applies_no_dropout[1]",
)
def evaluation_uses_dropout(original: Any) -> Any:
    def evaluate_batch(self: Any, data: Any) -> float:
        with mock.patch.object(self.engine, "eval", lambda: None):
            return original(self, data)

    return evaluate_batch


# Resume.


@mutant(
    "megatron.training.data:RunData.use_order",
    f"{DATA_ORDER}::test_blend_weight_change_repeats_no_samples",
)
def data_set_ignores_the_resumed_order(original: Any) -> Any:
    def use_order(self: Any, order: Any) -> None:
        self.order = order

    return use_order


@mutant(
    "megatron.training.data_resume:_length_ratio",
    f"{DATA_ORDER}::test_new_length_resumes_each_corpus_after_its_consumed_tokens[4-expected_cursors0-96]",
)
def cursors_ignore_a_changed_sequence_length(original: Any) -> Any:
    return lambda state, tokens_per_sample: SAME_LENGTH


@mutant(
    "megatron.training.restore_options:RestoreOptions.from_flags",
    "tests/training/test_resume_rules.py::test_flags_select_restored_state",
)
def weights_only_restores_the_optimizer(original: Any) -> Any:
    return lambda cls, flags: original(cls, replace(flags, load_weights_only=False))


@mutant("megatron.training.state_records:set_optimizer_steps", f"{RESUME}[1-1-1]")
def optimizer_steps_are_not_restored(original: Any) -> Any:
    return lambda optimizer, steps: None


@mutant("megatron.training.state_records:restore_rng", f"{RESUME}[1-1-1]")
def random_states_are_not_restored(original: Any) -> Any:
    return lambda checkpoint, world: None


@mutant("megatron.training.state_records:restore_rng", f"{RESUME}[1-1-2]")
def every_rank_restores_the_random_states_of_rank_0(original: Any) -> Any:
    return lambda checkpoint, world: original(checkpoint, SimpleNamespace(device_type=world.device_type, rank=0))


@mutant("megatron.training.capture:capture", f"{RESUME}[1-1-1]")
def weights_are_rounded_when_saved(original: Any) -> Any:
    def capture(*args: Any, **components: Any) -> Any:
        captured = original(*args, **components)
        for i, record in enumerate(captured.records):
            if record.name.startswith("weights/"):
                captured.records[i] = replace(record, tensor=record.tensor.bfloat16().to(record.tensor.dtype))
        return captured

    return capture


@mutant("megatron.training.resume:restore", OTHER_LAYOUTS)
def model_continues_with_its_initial_weights(original: Any) -> Any:
    def restore(checkpoint: Any, *, optimizer: Any, **options: Any) -> Any:
        with mock.patch.object(optimizer, "copy_main_params_to_parameters", lambda: None):
            return original(checkpoint, optimizer=optimizer, **options)

    return restore


# Stability guard.


@mutant(
    "megatron.training.callbacks.stability_guard:StabilityGuard._max_over_ranks",
    f"{GUARD}::test_anomaly_on_one_rank_is_anomaly_on_all_ranks",
)
def each_rank_judges_by_its_own_loss(original: Any) -> Any:
    return lambda self, value: value


@mutant(
    "megatron.training.callbacks.running_statistics:RunningStatistics.limit",
    f"{GUARD}::test_limit_is_mean_plus_sigma_deviations_of_window",
)
def limit_of_the_guard_ignores_the_deviations(original: Any) -> Any:
    return lambda self: self.mean() * (1 + self.sigma * 1e-3)


@mutant(
    "megatron.training.callbacks.running_statistics:RunningStatistics.add",
    f"{GUARD}::test_nonfinite_value_is_anomalous_and_excluded_from_statistics",
)
def nonfinite_losses_enter_the_statistics(original: Any) -> Any:
    return lambda self, value: self.values.append(value)


@mutant(
    "megatron.training.callbacks.stability_guard:StabilityGuard._roll_back",
    f"{GUARD}::test_anomalous_steps_roll_back_and_skip_their_samples[pipe]",
)
def rollback_repeats_the_anomalous_samples(original: Any) -> Any:
    def roll_back(self: Any, reason: str) -> None:
        original(self, reason)
        self.trainer.progress.samples_consumed -= self.trainer.progress.samples_skipped

    return roll_back


@mutant(
    "megatron.training.callbacks.stability_journal:EventLog.__init__",
    f"{GUARD}::test_journal_is_truncated_to_checkpoint_and_retries_failed_writes",
)
def journal_has_records_twice_after_a_resume(original: Any) -> Any:
    return lambda self, folder, num_known=0: original(self, folder, 10**9)


# Metrics and comparisons.


@mutant("megatron.training.trainer:perplexity", CORPORA)
def perplexity_is_a_power_of_two(original: Any) -> Any:
    return lambda loss: 2.0**loss


@mutant(
    "megatron.training.callbacks.metrics_writer:MetricsWriter.truncate_to_step",
    "tests/training/test_metrics_files.py::test_truncate_to_step_drops_later_records",
)
def rollback_leaves_metrics_of_abandoned_steps(original: Any) -> Any:
    return lambda self, step: None


@mutant(
    "megatron.training.callbacks.replica_check:checksum",
    "tests/training/test_drift.py::test_flipped_bit_changes_checksum",
)
def checksum_of_a_weight_covers_its_first_half(original: Any) -> Any:
    return lambda tensor: original(tensor.reshape(-1)[: -(-tensor.numel() // 2)])


@mutant(
    "megatron.training.callbacks.speed_monitor:Rates.flops_of_sample",
    "tests/training/test_plan.py::test_rates_count_chunks_as_samples_of_chunk_length",
)
def pieces_have_the_flops_of_a_whole_sample(original: Any) -> Any:
    return lambda self, length: self.flops_per_sample


# The proof of a run.


@mutant(
    "megatron.training.proof.check_process:bound_problems",
    "tests/training/proof/test_check_process.py::test_missing_all_reduce_of_gradients_fails",
)
def differences_of_a_layout_are_not_judged(original: Any) -> Any:
    return lambda *_: []


@mutant(
    "megatron.training.proof.shrink:_layer_parts",
    "tests/training/proof/test_shrink.py::test_types_of_layers_are_kept_with_their_patterns",
)
def layers_of_the_check_have_one_type(original: Any) -> Any:
    return lambda model: original(model)[:1] * model.num_layers


@mutant(
    "megatron.training.proof.record:sample_indices",
    "tests/training/proof/test_record.py::test_indices_cover_first_and_last_sample",
)
def only_first_samples_are_hashed(original: Any) -> Any:
    return lambda num_samples: list(range(min(num_samples, 8)))
