"""Mutants of the data pipeline: order of samples, blends, packing, masks and preprocessing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from megatron.data.preprocess.shards import Shard
from megatron.data.split import split_documents
from tests.mutants.mutant import mutant

PERMUTATION = "tests/data/test_permutation.py"
SAMPLES = "tests/data/test_gpt2_samples.py"
FIELDS = "tests/data/test_fields.py"
PACKING = "tests/data/test_packing.py"
MIXTURE = "tests/data/test_mixture.py"
MIXED = "tests/data/test_mixed_samples.py"
BATCHES = "tests/data/test_batches.py"
SFT = "tests/data/test_sft.py"
WRITER = "tests/data/test_token_writer.py"
PREPROCESS = "tests/data/preprocess/test_preprocess.py"
MEGATRON_WINDOWS = "tests/data/megatron_order/test_windows.py"
MEGATRON_BLENDS = "tests/data/megatron_order/test_blends.py"
MEGATRON_RUNS = "tests/training/test_megatron_order.py"
CORRUPTION = "tests/models/t5/test_corruption.py"
DOCUMENT_LOSSES = "tests/training/test_document_losses.py"
T5_SAMPLES = "tests/models/t5/test_t5_samples.py"

SEGMENTS = f"{FIELDS}::test_segment_ids_separate_documents_regardless_of_tokens"
DOCUMENTS = f"{FIELDS}::test_documents_are_separated_at_eod_tokens"
DECODER_INPUT = f"{FIELDS}::test_t5_decoder_inputs_are_shifted_and_restart_per_document"
EVERY_LAYOUT = f"{BATCHES}::test_global_batches_are_identical_in_every_layout[2-2-2]"


# Shuffling and the sample index.


@mutant("megatron.data.permutation:Permutation.__call__", f"{SAMPLES}::test_order_and_fingerprint_are_stable")
def samples_are_not_shuffled(original: Any) -> Any:
    return lambda self, index: index


@mutant(
    "megatron.data.permutation:Permutation.__init__",
    f"{SAMPLES}::test_epoch_contains_each_token_once_and_epochs_differ",
)
def order_does_not_depend_on_seed_and_epoch(original: Any) -> Any:
    return lambda self, size, *key: original(self, size, key[0])


@mutant(
    "megatron.data.shuffle_window:WindowIndex._wait_for_tokens",
    "tests/data/test_text_corpus.py::test_text_that_grows_has_the_samples_of_finished_files[100,0,0-range-0]",
)
def window_is_read_before_it_is_encoded(original: Any) -> Any:
    return lambda self, num_tokens: original(self, 1)


@mutant(
    "megatron.data.shuffle_window:WindowIndex._permutation",
    "tests/data/test_text_corpus.py::test_a_window_is_a_permutation_of_its_samples",
)
def windows_have_the_same_order_in_every_epoch(original: Any) -> Any:
    return lambda self, epoch, window_idx, size: original(self, 0, window_idx, size)


@mutant(
    "megatron.tokenizer.probe:difference",
    "tests/tokenizer/test_probe.py::test_token_files_of_another_library_version_are_rejected",
)
def probes_are_not_compared(original: Any) -> Any:
    return lambda saved, current: None


@mutant(
    "megatron.data.permutation:Permutation.fill",
    f"{PERMUTATION}::test_fill_at_any_offset_equals_scalar_calls",
)
def every_segment_of_an_order_is_the_first(original: Any) -> Any:
    return lambda self, places, start: original(self, places, 0)


@mutant(
    "megatron.data.sample_index:SampleIndex._epoch", f"{SAMPLES}::test_epoch_contains_each_token_once_and_epochs_differ"
)
def every_epoch_has_the_same_order(original: Any) -> Any:
    return lambda self, number: original(self, 0)


@mutant("megatron.data.sample_index:DocumentIndex.slices", f"{SAMPLES}::test_samples_equal_reference")
def windows_start_one_token_late(original: Any) -> Any:
    return lambda self, start, stop: original(self, start + 1, stop + 1)


@mutant("megatron.data.documents:indices_at", f"{SAMPLES}::test_samples_equal_reference")
def documents_before_the_split_are_read(original: Any) -> Any:
    return lambda documents, places: original(documents, places) if isinstance(documents, np.ndarray) else places


@mutant(
    "megatron.data.cache:_has_valid_checksum",
    "tests/data/test_cache.py::test_flipped_bit_is_detected_and_file_rebuilt[61]",
)
def damaged_order_in_the_cache_is_used(original: Any) -> Any:
    return lambda data: True


# Splits.


@mutant(
    "megatron.data.split:split_documents", "tests/data/test_split.py::test_splits_cover_all_documents_without_overlap"
)
def neighbouring_splits_share_a_document(original: Any) -> Any:
    return lambda num_documents, split: [(max(start - 1, 0), stop) for start, stop in original(num_documents, split)]


@mutant(
    "megatron.data.split:document_hashes",
    "tests/data/test_document_hash.py::test_equal_documents_share_split_and_additions_move_none",
)
def hash_depends_on_the_position_of_a_document(original: Any) -> Any:
    def hashes(token_file: Any, first: int, stop: int) -> np.ndarray:
        return original(token_file, first, stop) ^ (np.arange(first, stop, dtype=np.uint32) << np.uint32(24))

    return hashes


# Blends.


@mutant(
    "megatron.data.blend_index:_Branch.num_left_samples",
    "tests/data/test_interleave.py::test_interleaving_equals_loop_over_times",
)
def shares_of_a_blend_are_rounded_down(original: Any) -> Any:
    return lambda self, num_samples: num_samples * self.weight // self.total


@mutant(
    "megatron.data.blend_schedule:BlendSchedule.locate",
    f"{MIXTURE}::test_phase_starts_at_scheduled_sample_with_current_cursors",
)
def new_weights_restart_each_corpus(original: Any) -> Any:
    def locate(self: Any, index: int) -> tuple[int, int]:
        corpus, position = original(self, index)
        return corpus, position - self._phase(index).cursors[corpus]

    return locate


@mutant(
    "megatron.data.blend_schedule:BlendSchedule.__init__",
    f"{MIXTURE}::test_changed_fingerprint_raises_and_names_changes",
)
def cursors_of_the_checkpoint_are_dropped(original: Any) -> Any:
    return lambda self, corpora, schedule, **options: original(self, corpora, schedule, **{**options, "cursors": None})


@mutant(
    "megatron.data.blend_resume:resumed_order",
    f"{MIXTURE}::test_missing_corpus_raises_and_zero_weight_retains_it",
)
def changed_data_are_resumed_silently(original: Any) -> Any:
    return lambda *args, **options: original(*args, **{**options, "allow_change": True})


@mutant(
    "megatron.data.blend_resume:make_fingerprint",
    f"{MIXED}::test_fingerprint_changes_with_every_sample_option",
)
def fingerprint_of_a_corpus_ignores_its_tokenizer(original: Any) -> Any:
    return lambda tokens, tokenizer, samples: original(tokens, None, samples)


@mutant(
    "megatron.data.blended_dataset:BlendedDataset.__getitem__",
    f"{MIXED}::test_each_sample_is_next_one_of_its_corpus",
)
def blend_reads_a_corpus_at_the_index_of_the_run(original: Any) -> Any:
    return lambda self, index: self._named_datasets[self.order.locate(index)[0]][1][index]


@mutant(
    "megatron.data.blend_paths:BlendPaths.schedule",
    "tests/data/test_corpora.py::test_schedule_starts_with_path_weights_and_counts_full_samples",
)
def weights_change_one_sample_early(original: Any) -> Any:
    def schedule(self: Any, tokens_per_sample: int) -> list[tuple[int, tuple[float, ...]]]:
        return [(max(start - 1, 0), weights) for start, weights in original(self, tokens_per_sample)]

    return schedule


# Packing and fill-in-the-middle.


@mutant(
    "megatron.data.packing:_SliceIndexBuilder._num_full_slices",
    f"{PACKING}::test_chunks_are_independent_of_sort_block_size",
)
def pieces_of_a_long_document_share_no_token(original: Any) -> Any:
    return lambda self, sizes: np.maximum(sizes - 1, 0) // (self.capacity - 1)


@mutant(
    "megatron.data.packing:SliceIndex.full_slice",
    f"{PACKING}::test_each_token_except_first_of_document_is_label_once_per_epoch",
)
def full_pieces_skip_a_token(original: Any) -> Any:
    def full(self: Any, slice_idx: int) -> tuple[int, int]:
        document, offset = original(self, slice_idx)
        return document, offset + offset // self.step

    return full


@mutant(
    "megatron.data.packing:PackedSampleIndex._packed_slices",
    f"{PACKING}::test_epochs_group_documents_differently_and_processes_agree",
)
def every_epoch_packs_the_same_documents_together(original: Any) -> Any:
    return lambda self, shares, in_group, epoch: original(self, shares, in_group, 0)


@mutant(
    "megatron.data.fim:Fim._documents",
    "tests/data/test_fim.py::test_undoing_fim_restores_document_except_last_three_tokens",
)
def fim_moves_the_end_of_document_token(original: Any) -> Any:
    def documents(self: Any, text: np.ndarray, slice_lengths: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        starts, lengths, num_eod_tokens = original(self, text, slice_lengths)
        return starts, lengths + num_eod_tokens, 0 * num_eod_tokens

    return documents


# Labels, loss masks and positions of a decoder's batch.


@mutant("megatron.data.gpt_fields:gpt2_fields", DOCUMENTS)
def labels_are_the_inputs(original: Any) -> Any:
    return lambda tokens, **options: {**original(tokens, **options), "labels": tokens[:, :-1]}


@mutant("megatron.data.gpt_fields:gpt2_fields", DOCUMENTS)
def end_of_document_predicts_the_next_document(original: Any) -> Any:
    return lambda tokens, **options: original(tokens, **{**options, "eod_mask_loss": False})


@mutant("megatron.data.gpt_fields:gpt2_fields", SEGMENTS)
def packed_document_predicts_the_next_document(original: Any) -> Any:
    def fields(tokens: torch.Tensor, *, segments: torch.Tensor, **options: Any) -> dict[str, Any]:
        return {**original(tokens, segments=segments, **options), "loss_mask": (segments[:, 1:] >= 0).float()}

    return fields


@mutant("megatron.data.gpt_fields:gpt2_fields", SEGMENTS)
def padding_of_a_packed_sample_has_a_loss(original: Any) -> Any:
    def fields(tokens: torch.Tensor, *, segments: torch.Tensor, **options: Any) -> dict[str, Any]:
        loss_mask = (segments[:, :-1] == segments[:, 1:]).float()
        return {**original(tokens, segments=segments, **options), "loss_mask": loss_mask}

    return fields


@mutant("megatron.ops.attention:positions_in_segments", SEGMENTS)
def positions_continue_across_packed_documents(original: Any) -> Any:
    return lambda segments: torch.arange(segments.shape[1], device=segments.device).expand_as(segments)


@mutant("megatron.data.gpt_fields:_document_starts", DOCUMENTS)
def positions_restart_one_token_late(original: Any) -> Any:
    def starts(is_eod: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        positions_of_starts = torch.zeros_like(positions)
        positions_of_starts[:, 2:] = torch.where(is_eod[:, :-2], positions[:, 2:], 0)
        return positions_of_starts.cummax(dim=1).values

    return starts


@mutant("megatron.data.gpt_fields:_exclusive_cumsum", DOCUMENTS)
def end_of_document_token_belongs_to_the_next_document(original: Any) -> Any:
    return lambda is_eod: is_eod.cumsum(dim=1, dtype=torch.int32)


# Conversations.


@mutant(
    "megatron.data.sft_dataset:ConversationFile._encode_record",
    f"{SFT}::test_each_conversation_is_document_with_loss_mask",
)
def prompts_have_a_loss_and_answers_have_none(original: Any) -> Any:
    def row(self: Any, record: bytes, line_number: int) -> tuple[np.ndarray, Any]:
        signed_ids, conversation = original(self, record, line_number)
        return ~signed_ids, conversation

    return row


@mutant(
    "megatron.data.sft_dataset:ConversationFile._encode_record",
    f"{SFT}::test_long_conversations_are_truncated_and_counted",
)
def long_conversations_lose_their_beginning(original: Any) -> Any:
    def row(self: Any, record: bytes, line_number: int) -> tuple[np.ndarray, Any]:
        signed_ids, conversation = original(self, record, line_number)
        return signed_ids[-self.capacity :], conversation

    return row


@mutant("megatron.data.sft_dataset:SFTDataset.__getitem__", f"{SFT}::test_packed_sample_fields_match_conversations")
def loss_mask_of_a_conversation_is_one_token_late(original: Any) -> Any:
    def getitem(self: Any, index: int) -> dict[str, np.ndarray]:
        sample = original(self, index)
        return {**sample, "loss_mask": np.roll(sample["loss_mask"], 1)}

    return getitem


# Spans and batches of T5.


@mutant(
    "megatron.models.t5.data:corrupt_spans",
    f"{CORRUPTION}::test_inputs_and_targets_restore_text_with_exact_lengths",
)
def sentinels_continue_in_the_next_document(original: Any) -> Any:
    def corrupt_spans(text: np.ndarray, spans: Any, sentinels: np.ndarray) -> Any:
        pair = original(text, spans, sentinels)
        as_one_document = original(text, spans._replace(documents=0 * spans.documents), sentinels)
        return pair._replace(inputs=as_one_document.inputs, targets=as_one_document.targets)

    return corrupt_spans


@mutant("megatron.data.permutation:random_words", f"{T5_SAMPLES}::test_spans_change_with_epoch_and_seed")
def every_sample_has_the_same_spans(original: Any) -> Any:
    return lambda count, *key: original(count, *key[:-1], 0)


@mutant("megatron.models.t5.data:T5Dataset.__init__", f"{MIXED}::test_t5_corpora_use_different_random_spans")
def corpora_of_a_blend_have_the_same_spans(original: Any) -> Any:
    return lambda self, token_file, **options: original(self, token_file, **{**options, "draws": ""})


@mutant("megatron.models.t5.data:t5_fields", DECODER_INPUT)
def decoder_reads_the_label(original: Any) -> Any:
    return lambda inputs, targets, *segments, **options: {
        **original(inputs, targets, *segments, **options),
        "dec_tokens": targets,
    }


@mutant("megatron.models.t5.data:t5_fields", DECODER_INPUT)
def padding_of_t5_targets_has_a_loss(original: Any) -> Any:
    def fields(*args: torch.Tensor, **options: Any) -> dict[str, Any]:
        return {**original(*args, **options), "loss_mask": torch.ones_like(args[1], dtype=torch.float32)}

    return fields


# Micro-batches of a replica.


@mutant("megatron.data.data_loader:share_of", EVERY_LAYOUT)
def replicas_read_the_same_samples(original: Any) -> Any:
    return lambda num_micro_batches, data_size, data_rank: original(num_micro_batches, data_size, 0)


@mutant("megatron.data.data_loader:DataLoader.micro_batches", EVERY_LAYOUT)
def samples_of_a_micro_batch_are_reversed(original: Any) -> Any:
    return lambda self: (batch._replace(indices=batch.indices[::-1]) for batch in original(self))


@mutant(
    "megatron.data.data_loader:DataLoader.__init__",
    f"{BATCHES}::test_resume_continues_with_next_sample_in_any_layout[2-2-2]",
)
def resumed_run_reads_from_the_first_sample(original: Any) -> Any:
    return lambda self, dataset, **options: original(self, dataset, **{**options, "samples_consumed": 0})


@mutant(
    "megatron.data.documents:windows_of",
    "tests/data/test_document_lookup.py::test_samples_of_document_equal_search[concat-all]",
)
def only_the_first_window_of_a_document_is_found(original: Any) -> Any:
    return lambda start, stop, length, overlap: original(start, start + 1, length, overlap)


@mutant(
    "megatron.data.gpt_fields:gpt2_fields",
    "tests/data/test_exclusion.py::test_excluded_document_has_no_loss_and_its_own_segment",
)
def other_documents_attend_to_excluded_ones(original: Any) -> Any:
    def fields(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if kwargs.get("excluded") is not None and kwargs.get("segments") is None:
            result["segment_ids"] = torch.zeros_like(result["segment_ids"])
        return result

    return fields


@mutant(
    "megatron.data.gpt_fields:gpt2_fields", "tests/data/test_exclusion.py::test_excluded_packed_document_has_no_loss"
)
def excluded_documents_keep_their_loss(original: Any) -> Any:
    def fields(*args: Any, excluded: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return fields


@mutant(
    "megatron.data.dataset_builder:exclude_documents",
    "tests/training/test_exclusion_runs.py::test_excluded_conversations_have_no_loss_and_no_influence",
)
def excluded_conversations_are_read(original: Any) -> Any:
    def exclude(datasets: Any, prefixes: Any, excluded: Any) -> Any:
        nothing = excluded and {prefix: documents[:0] for prefix, documents in excluded.items()}
        return original(datasets, prefixes, nothing)

    return exclude


@mutant(
    "megatron.training.document_losses:sum_by_document",
    f"{DOCUMENT_LOSSES}::test_loss_belongs_to_document_of_predicted_token[]",
)
def loss_belongs_to_document_of_input_token(original: Any) -> Any:
    return lambda ordered, samples, losses, weights, positions: original(
        ordered, samples, losses, weights, positions - 1
    )


@mutant(
    "megatron.training.callbacks.document_losses:local_positions",
    f"{DOCUMENT_LOSSES}::test_layouts_equal_one_process[context 2-concat]",
)
def context_ranks_sum_the_first_tokens(original: Any) -> Any:
    return lambda length, group: torch.arange(length)


@mutant(
    "megatron.mpu.groups:Group.gather_objects_on_first",
    f"{DOCUMENT_LOSSES}::test_layouts_equal_one_process[data 2-concat]",
)
def losses_of_other_replicas_are_not_recorded(original: Any) -> Any:
    def gather(self: Any, value: Any) -> Any:
        values = original(self, value)
        return None if values is None else [value]

    return gather


@mutant("megatron.training.document_losses:drop_later_steps", f"{DOCUMENT_LOSSES}::test_resumed_run_repeats_no_step[]")
def losses_of_repeated_steps_are_retained(original: Any) -> Any:
    return lambda folder, step: None


@mutant(
    "megatron.training.sample_history:reader_of",
    "tests/training/test_sample_history.py::test_reader_equals_data_loader[dp2-True]",
)
def audit_ignores_interleaved_replicas(original: Any) -> Any:
    return lambda stretch, step, sample: original(dataclasses.replace(stretch, is_interleaved=False), step, sample)


@mutant(
    "megatron.data.data_loader:DataLoader.length_at",
    "tests/data/test_growing_length.py::test_every_token_is_label_once_for_any_schedule",
)
def sequence_length_of_the_first_step_stays(original: Any) -> Any:
    return lambda self, samples_consumed: original(self, 0)


@mutant(
    "megatron.data.step_predictions:StepPredictions.counts_of_step",
    "tests/models/bert/test_bert_samples.py::test_ramped_batches_carry_counts_of_their_step",
)
def tokens_to_predict_are_counted_per_sample(original: Any) -> Any:
    return lambda self, index: np.array([self._num_predicted(index), 1])


# Token files and preprocessing.


@mutant(
    "megatron.data.preprocess.progress:JobProgress.shards",
    f"{PREPROCESS}::test_output_is_independent_of_workers_units_and_chunks",
)
def shards_are_joined_in_reverse(original: Any) -> Any:
    return lambda self: original(self)[::-1]


@mutant(
    "megatron.data.preprocess.shards:ShardFolder.verify_unit",
    "tests/data/preprocess/test_preprocess_resume.py::test_resume_reencodes_only_damaged_units",
)
def damaged_shard_is_resumed(original: Any) -> Any:
    def verify_unit(self: Any, unit: int) -> Any:
        path = self.path(unit, "json")
        return Shard.from_json(path.read_bytes()) if path.exists() else "missing"

    return verify_unit


@mutant("megatron.files:crc32_combine", f"{WRITER}::test_appended_files_equal_single_write[True]")
def checksum_of_joined_shards_is_the_last_one(original: Any) -> Any:
    return lambda first, second, num_bytes: second


@mutant(
    "megatron.data.index_format:_document_lengths",
    "tests/data/test_token_file.py::test_megatron_files_open_and_sequences_of_document_are_joined",
)
def sequences_of_a_document_are_separate_documents(original: Any) -> Any:
    return lambda starts, ends, lengths, path: lengths


@mutant(
    "megatron.data.preprocess.encode:Encoder._encode_texts", f"{PREPROCESS}::test_documents_round_trip_with_end_token"
)
def end_of_document_token_comes_first(original: Any) -> Any:
    def encode_texts(self: Any, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths = original(self, texts)
        return np.roll(tokens, 1) if self.append_eod else tokens, lengths

    return encode_texts


@mutant(
    "megatron.data.preprocess.verification:_scan_tokens",
    "tests/data/preprocess/test_preprocess_verify.py::test_flipped_bit_is_detected[100]",
)
def verification_trusts_the_checksum_of_the_tokens(original: Any) -> Any:
    return lambda file: (file.sidecar.bin_crc32, *original(file)[1:])


@mutant(
    "megatron.data.indexed_dataset:IndexedDataset.find_invalid_id",
    "tests/data/test_build.py::test_files_without_sidecar_are_scanned",
)
def token_ids_outside_the_vocabulary_are_accepted(original: Any) -> Any:
    return lambda self, vocab_size: None


# Megatron's order.


@mutant(
    "megatron.data.megatron_order.sample_windows:plan_epochs",
    f"{MEGATRON_WINDOWS}::test_order_equals_recorded_order_of_megatron_core[8]",
)
def last_epoch_of_megatrons_order_is_never_separate(original: Any) -> Any:
    def plan(*args: Any) -> Any:
        epochs = original(*args)
        return epochs._replace(num_samples_before_last=epochs.num_samples)

    return plan


@mutant(
    "megatron.data.megatron_order.sample_windows:permuted_samples",
    f"{MEGATRON_WINDOWS}::test_order_equals_recorded_order_of_megatron_core[12]",
)
def samples_of_megatrons_order_have_their_own_generator(original: Any) -> Any:
    return lambda plan, generator: original(plan, np.random.RandomState(1234))


@mutant(
    "megatron.data.megatron_order.split_bounds:split_bounds",
    f"{MEGATRON_WINDOWS}::test_split_has_megatrons_rounding[15-70,20,10-bounds1]",
)
def split_of_megatrons_order_rounds_halves_up(original: Any) -> Any:
    return split_documents


@mutant(
    "megatron.data.megatron_order.blend_choices:_start_counts",
    f"{MEGATRON_BLENDS}::test_choices_equal_recorded_choices_of_megatron_core",
)
def megatrons_blend_starts_with_one_sample_too_many(original: Any) -> Any:
    def start_counts(weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
        counts = original(weights, starts)
        counts[0, 0] += 1
        return counts

    return start_counts


@mutant(
    "megatron.data.data_loader:share_of",
    f"{MEGATRON_RUNS}::test_each_replica_reads_the_samples_of_megatrons_sampler[2-2]",
)
def replicas_read_contiguous_samples_in_megatrons_order(original: Any) -> Any:
    return lambda count, replicas, replica, is_interleaved=False: original(count, replicas, replica)


@mutant(
    "megatron.training.data:num_validations_of_run",
    f"{MEGATRON_RUNS}::test_validation_continues_after_the_previous_validation",
)
def each_validation_in_megatrons_order_reads_the_same_samples(original: Any) -> Any:
    return lambda config: 1


@mutant(
    "megatron.training.data_resume:check_megatron_resume",
    f"{MEGATRON_RUNS}::test_resume_in_another_order_is_an_error_with_a_fix",
)
def change_of_megatrons_order_is_not_noticed(original: Any) -> Any:
    return lambda *args, **options: []
