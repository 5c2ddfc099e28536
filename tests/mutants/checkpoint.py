"""Mutants of checkpoints: integrity, shards, commit, retention, background saves, conversions and averages."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron.checkpoint.folders import list_checkpoints, step_of
from megatron.checkpoint.retention import RetentionPolicy, remove_old
from megatron.models.common.huggingface import WeightMapping
from tests.mutants.mutant import mutant

FOLDERS = "tests/checkpoint/test_folders.py"
DAMAGE = "tests/checkpoint/test_damage.py"
LAYOUTS = "tests/checkpoint/test_layouts.py"
REMOTE = "tests/checkpoint/test_remote.py"
BACKGROUND = "tests/checkpoint/test_background.py"
DIRECT = "tests/checkpoint/huggingface/test_direct.py"
HF_FOLDER = "tests/checkpoint/huggingface/test_folder.py"
LOSS_SCALE = "tests/training/test_loss_scale.py"
TORCH_DIST = "tests/checkpoint/torch_dist/test_checkpoint.py"
MEGATRON_LOSSES = f"{TORCH_DIST}::test_losses_after_load_are_those_of_megatron_core[--batch-size 2]"

ANY_SLICE = f"{LAYOUTS}::test_any_slice_along_any_dimension_is_loaded"
ANY_LAYOUT = "tests/checkpoint/test_reshard.py::test_tensors_survive_any_chain_of_layouts"
OTHER_ROWS = (
    f"{DIRECT}::test_resized_vocab_keeps_shared_rows_and_fills_new_rows_with_mean[29-40-gpt2 without biases and untied]"
)
AVERAGE = "tests/tools/test_average.py::test_average_equals_manual_average[--last 3 --ema 0.75-coefficients3]"
UNCHANGED_BY_TRAINING = f"{BACKGROUND}::test_background_save_matches_synchronous_save_bytes[1]"


# Integrity.


@mutant("megatron.checkpoint.verify:verify", f"{DAMAGE}::test_ranks_share_verification_and_agree_on_fallback")
def checksums_of_shards_are_not_compared(original: Any) -> Any:
    return lambda path, content, world: None


@mutant(
    "megatron.checkpoint.manifest:has_valid_checksum",
    f"{DAMAGE}::test_altered_sequence_number_is_reported_and_checkpoint_skipped[steps0]",
)
def checksum_of_the_manifest_is_not_compared(original: Any) -> Any:
    return lambda content: content.startswith(b'{"crc32": "')


@mutant("megatron.files:segment_crc", "tests/checkpoint/test_verify.py::test_segment_crc_reads_only_segment")
def checksum_of_a_segment_includes_what_follows(original: Any) -> Any:
    return lambda path, start, stop, *chunk: original(path, start, stop + 1, *chunk)


@mutant(
    "megatron.checkpoint.tensor_record:tiling_problem",
    f"{LAYOUTS}::test_tensor_not_written_exactly_once_is_rejected",
)
def overlapping_shards_are_saved(original: Any) -> Any:
    return lambda global_shape, shards: None


@mutant(
    "megatron.checkpoint.model_match:compare_model_config",
    "tests/checkpoint/test_compare.py::test_all_differing_keys_are_listed_with_both_values",
)
def weights_of_another_model_are_loaded(original: Any) -> Any:
    return lambda saved, now: None


# Shards.


@mutant("megatron.checkpoint.dcp_load:RecordLoadPlanner._items", ANY_SLICE)
def ranks_load_each_others_shards(original: Any) -> Any:
    def items(self: Any, idx: int) -> Any:
        record = self._records[idx]
        shard = record.shard
        if shard.partition_dim is None:
            return original(self, idx)
        mirrored = replace(shard, start=shard.global_shape[shard.partition_dim] - shard.start - shard.length)
        with mock.patch.dict(self.__dict__, _records=[replace(record, shard=mirrored)] * (idx + 1)):
            return original(self, idx)

    return items


@mutant("megatron.checkpoint.dcp_load:ShardReader._read", ANY_SLICE)
def columns_are_read_from_the_first(original: Any) -> Any:
    def read(self: Any, segment: Any, slices: tuple[slice, ...]) -> torch.Tensor:
        return original(
            self, segment, (*slices[:1], *(slice(0, dim_slice.stop - dim_slice.start) for dim_slice in slices[1:]))
        )

    return read


@mutant("megatron.training.state_records:optimizer_records", ANY_LAYOUT)
def second_moment_is_saved_as_the_first(original: Any) -> Any:
    def records(module: Any, optimizer: Any) -> Any:
        for record in original(module, optimizer):
            if record.name.startswith("optimizer/exp_avg/"):
                first = record.tensor
            yield record if "exp_avg_sq" not in record.name else replace(record, tensor=first)

    return records


@mutant(
    "megatron.training.state_records:_shard_of_state",
    "tests/optim/zero/test_zero_checkpoints.py::test_checkpoint_passes_stages_and_layouts_bitwise[dtype0]",
)
def moments_are_saved_at_the_rows_of_another_rank(original: Any) -> Any:
    def shard_of_state(key: str, value: torch.Tensor, main_param: torch.Tensor) -> Any:
        shard = original(key, value, main_param)
        if shard.partition_dim is None:
            return shard
        return replace(shard, start=shard.global_shape[shard.partition_dim] - shard.start - shard.length)

    return shard_of_state


# Commit, retention and the choice of the newest.


@mutant(
    "megatron.checkpoint.dcp_save:ShardWriter.finish",
    "tests/checkpoint/test_crash.py::test_kill_during_background_save_leaves_old_or_new_checkpoint[1-0]",
    raises=True,
)
def old_checkpoint_is_deleted_before_the_commit(original: Any) -> Any:
    def finish(self: Any, metadata: Any, results: Any) -> None:
        remove_old(list_checkpoints(self._root), RetentionPolicy(last=0))
        original(self, metadata, results)

    return finish


@mutant("megatron.checkpoint.retention:RetentionPolicy.protects", f"{FOLDERS}::test_loaded_checkpoint_is_never_deleted")
def loaded_checkpoint_is_deleted(original: Any) -> Any:
    return lambda self, path: original(replace(self, loaded=None), path)


@mutant("megatron.checkpoint.retention:_has_files", f"{FOLDERS}::test_broken_checkpoint_does_not_count_as_retained")
def damaged_checkpoint_counts_as_retained(original: Any) -> Any:
    return lambda path, content: True


@mutant(
    "megatron.checkpoint.retention:RetentionPolicy.counts",
    f"{FOLDERS}::test_checkpoints_of_earlier_run_are_not_counted_or_deleted",
)
def checkpoints_of_an_earlier_run_are_deleted(original: Any) -> Any:
    return lambda self, content: original(replace(self, earlier_sequence=0), content)


@mutant(
    "megatron.checkpoint.folders:newest_first",
    f"{FOLDERS}::test_rolled_back_run_continues_from_last_save",
)
def newest_checkpoint_is_that_of_the_highest_step(original: Any) -> Any:
    return lambda paths: sorted(original(paths), key=step_of, reverse=True)


@mutant(
    "megatron.training.checkpoint_lineage:CheckpointLineage.contains",
    "tests/training/test_branch.py::test_resume_from_older_step_excludes_later_checkpoints",
)
def abandoned_checkpoints_are_rolled_back_to(original: Any) -> Any:
    return lambda self, sequence: sequence > self.earlier


# Background saves and object stores.


@mutant("megatron.checkpoint.staging_buffer:StagingBuffer.copy", UNCHANGED_BY_TRAINING)
def background_save_writes_the_weights_of_later_steps(original: Any) -> Any:
    return lambda self, records: (records, original(self, records)[1])


@mutant("megatron.checkpoint.async_saving:copy", UNCHANGED_BY_TRAINING)
def background_save_writes_the_state_of_later_steps(original: Any) -> Any:
    return SimpleNamespace(deepcopy=lambda state: state)


@mutant(
    "megatron.checkpoint.downloading:_download",
    f"{REMOTE}::test_damaged_download_falls_back_unless_strict",
)
def damaged_download_is_loaded(original: Any) -> Any:
    def download(checkpoint: Any, name: str, folder: Any) -> str:
        original(checkpoint, name, folder)
        return ""

    return download


@mutant("megatron.checkpoint.remote:remove", f"{REMOTE}::test_old_checkpoints_are_deleted_manifest_first")
def manifest_is_deleted_last(original: Any) -> Any:
    from megatron import object_store

    def remove(path: str, last: str = "") -> None:
        for name in sorted(("/".join(name_parts) for name_parts in object_store.sizes_below(path)), reverse=True):
            object_store.remove(object_store.join(path, name))

    return remove


# Loss scale, optimizer steps and positions of earlier versions.


@mutant(
    "megatron.training.loss_scale_resume:restore_scaler",
    f"{LOSS_SCALE}::test_resumed_dynamic_scale_uses_current_flags[--min-scale 4096-expected0]",
)
def loss_scale_is_not_restored(original: Any) -> Any:
    return lambda scaler, state, config: None


@mutant(
    "megatron.checkpoint.former:_tokens_per_sample",
    "tests/checkpoint/test_former.py::test_sample_position_converts_to_tokens_of_saved_length[t5-314]",
)
def decoder_tokens_of_earlier_t5_checkpoints_are_not_counted(original: Any) -> Any:
    def tokens_per_sample(saved: Any) -> int:
        family_config = saved.get(saved.get("family"), {})
        return int(family_config["enc_seq_length"]) if "enc_seq_length" in family_config else original(saved)

    return tokens_per_sample


@mutant(
    "megatron.training.train_progress:TrainProgress.from_metadata",
    "tests/training/test_sample_lengths.py::test_progress_survives_checkpoint_and_seq_length_change",
)
def resumed_position_repeats_the_last_sample(original: Any) -> Any:
    def resumed(cls: Any, state: Any, tokens_per_sample: int) -> Any:
        progress = original(cls, state, tokens_per_sample)
        return replace(progress, samples_consumed=max(progress.samples_consumed - 1, 0))

    return resumed


# Other formats and vocabularies.


@mutant("megatron.checkpoint.resized_vocab:_mean_row", OTHER_ROWS)
def new_rows_of_a_vocabulary_are_zero(original: Any) -> Any:
    return lambda saved, read: torch.zeros_like(original(saved, read))


@mutant("megatron.models.common.huggingface:read_into", f"{DIRECT}::test_every_rank_loads_its_shard_of_every_weight")
def keys_and_queries_are_exchanged_on_import(original: Any) -> Any:
    def read_into(target: torch.Tensor, mapping: Any, *args: Any) -> None:
        hf_names = (*mapping.hf_names[1::-1], *mapping.hf_names[2:])
        original(target, replace(mapping, hf_names=hf_names), *args)

    return read_into


@mutant(
    "megatron.checkpoint.huggingface.weights:_same_values",
    f"{HF_FOLDER}::test_tied_head_with_other_values_is_rejected",
)
def head_that_differs_from_a_tied_table_is_dropped(original: Any) -> Any:
    return lambda one, other: True


@mutant(
    "megatron.checkpoint.huggingface.weights:without_zero_biases",
    f"{HF_FOLDER}::test_nonzero_biases_are_imported",
)
def trained_biases_are_dropped(original: Any) -> Any:
    return lambda tensors, config: config


@mutant(
    "megatron.checkpoint.legacy.weights:row_order",
    "tests/checkpoint/legacy/test_legacy.py::test_megatron_gpt2_imports_from_any_layout_and_version[2-1-1.0]",
)
def query_key_value_rows_of_megatron_are_read_in_the_newest_order(original: Any) -> Any:
    return lambda version: original(2.0)


@mutant("megatron.checkpoint.torch_dist.checkpoint:TorchDistCheckpoint._mapping", MEGATRON_LOSSES)
def gates_and_values_of_megatron_core_are_read_as_if_they_alternated(original: Any) -> Any:
    return lambda self, name, slices: WeightMapping(tuple(slices))


@mutant("megatron.checkpoint.torch_dist.folder:_adam_steps", MEGATRON_LOSSES)
def bias_correction_of_megatron_core_restarts(original: Any) -> Any:
    return lambda optimizer, archive: 0


@mutant(
    "megatron.checkpoint.torch_dist.export:scheduler_state",
    f"{TORCH_DIST}::test_export_of_checkpoint_has_same_tensors_and_objects",
)
def exported_schedule_counts_steps_instead_of_samples(original: Any) -> Any:
    return lambda run: {**original(run), "num_steps": run.progress["updates"]}


@mutant(
    "megatron.training.deepspeed_checkpoint:check_layout",
    "tests/training/test_deepspeed_format_files.py::test_new_layout_loads_weights_or_raises_with_both_layouts",
)
def deepspeed_shards_of_another_layout_are_loaded(original: Any) -> Any:
    return lambda checkpoint, config, now, *, loads_optimizer: None


# Averages.


@mutant("megatron.checkpoint.average:_average_tensor", AVERAGE)
def moving_average_weights_the_newest_by_its_decay(original: Any) -> Any:
    return lambda checkpoints, name, ema: original(checkpoints, name, None if ema is None else 1 - ema)


@mutant("megatron.checkpoint.average:open_newest", AVERAGE)
def moving_average_starts_with_the_newest(original: Any) -> Any:
    return lambda run, count: original(run, count)[::-1]


@mutant("megatron.checkpoint.average:_average_tensor", "tests/tools/test_average.py::test_mean_is_rounded_once")
def mean_of_checkpoints_is_summed_in_fp32(original: Any) -> Any:
    def averaged(checkpoints: Any, name: str, ema: float | None) -> torch.Tensor:
        from megatron.checkpoint.one_process import read_full

        return sum(read_full(checkpoint, name) for checkpoint in checkpoints) / len(checkpoints)

    return averaged


@mutant(
    "megatron.checkpoint.average:open_steps",
    "tests/checkpoint/test_average.py::test_average_uses_newest_checkpoint_of_repeated_step",
)
def older_of_two_checkpoints_of_a_step_is_averaged(original: Any) -> Any:
    def open_steps(run: Any, steps: Any) -> Any:
        with mock.patch("megatron.checkpoint.average.newest_first", lambda paths: sorted(paths)):
            return original(run, steps)

    return open_steps
