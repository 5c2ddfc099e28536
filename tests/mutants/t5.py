"""Mistakes in T5: its model, its spans, and its stages."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLAIN = "tests/models/t5/test_model.py::test_the_model_equals_plain_torch"
PACKED = "tests/models/t5/test_model.py::test_a_packed_document_gets_exactly_what_it_gets_alone"
RANKS = "tests/models/t5/test_model.py::test_two_tensor_ranks_together_equal_one_process"
TEXTS = "tests/models/t5/test_corruption.py::test_inputs_and_targets_give_back_the_text_and_have_exact_lengths"
LATE = "tests/data/test_fields.py::test_t5_s_decoder_reads_late_and_starts_anew_in_each_document"


T5 = (
    Mutant(
        "the tied head is not scaled",
        "megatron/models/t5/model.py",
        "        x = x * sizes.hidden_size**-0.5\n",
        "        x = x * 1.0\n",
        (PLAIN,),
    ),
    Mutant(
        "scores beside a relative bias are scaled in attention to the encoder",
        "megatron/models/t5/layers.py",
        "self.scale = 1.0 if sizes.is_relative else self.head_size**-0.5",
        "self.scale = self.head_size**-0.5",
        (PLAIN,),
    ),
    Mutant(
        "distances count from key to query",
        "megatron/ops/positions.py",
        "    return buckets + size * (distances > 0) if is_bidirectional else buckets",
        "    return buckets + size * (distances < 0) if is_bidirectional else buckets",
        (PLAIN,),
    ),
    Mutant(
        "the decoder's bias looks both ways",
        "megatron/models/t5/model.py",
        'is_bidirectional = side == "encoder"',
        "is_bidirectional = True",
        (PLAIN,),
    ),
    Mutant(
        "each tensor rank takes the first heads of the bias table",
        "megatron/models/t5/layers.py",
        "place.group.rank * local, local)",
        "0 * local, local)",
        (RANKS,),
    ),
    Mutant(
        "the gradient of the bias misses one query",
        "megatron/ops/biased_attention.py",
        "        squares.copy_(matrices[first : first + at_once])\n",
        "        squares[:, 1:].copy_(matrices[first : first + at_once, 1:])\n",
        ("tests/ops/test_biased_attention.py::test_it_equals_the_formula_and_so_do_all_gradients",),
    ),
    Mutant(
        "a document of the decoder reads all of the encoder's output",
        "megatron/models/t5/layers.py",
        "segment_mask(dec_segments, enc_segments)",
        "None",
        (PACKED,),
    ),
    Mutant(
        "encoder and decoder share dropout masks",
        "megatron/models/t5/model.py",
        "T5DecoderLayer(sizes, place, sizes.enc_layers + i)",
        "T5DecoderLayer(sizes, place, i)",
        ("tests/models/t5/test_t5_dropout.py::test_every_mask_has_a_key_of_its_own",),
    ),
    Mutant(
        "the encoder's output goes on without its gradient",
        "megatron/models/t5/pipeline.py",
        "        return y, self.place.part(memory) if self.is_last_here else memory, *segments\n",
        "        kept = memory + 0 * memory.detach() if self.layer % 2 else memory.detach().requires_grad_()\n"
        "        return y, kept, *segments\n",
        ("tests/models/t5/test_pipeline.py::test_the_gradient_of_memory_is_the_sum_over_all_decoder_layers",),
    ),
    Mutant(
        "the decoder embeds with the encoder's segments",
        "megatron/models/t5/pipeline.py",
        'segments[self.side == "decoder"]',
        "segments[0]",
        ("tests/parity/test_t5_layouts.py::test_recompute_schedules_and_methods_of_cutting_equal_one_process",),
    ),
    Mutant(
        "the decoder reads the token that it is to give",
        "megatron/models/t5/data.py",
        "late = targets.roll(1, dims=1)",
        "late = targets.roll(0, dims=1)",
        (LATE,),
    ),
    Mutant(
        "a document's decoder starts from the last token of the one before",
        "megatron/models/t5/data.py",
        "    is_start = dec_segments != dec_segments.roll(1, dims=1)\n",
        "    is_start = dec_segments > dec_segments.max()\n",
        (LATE,),
    ),
    Mutant(
        "padding counts for the loss",
        "megatron/models/t5/data.py",
        '"loss_mask": (~is_padding).float(),',
        '"loss_mask": (is_padding | ~is_padding).float(),',
        ("tests/data/test_fields.py::test_t5_without_segments_still_masks_padding_and_rows_do_not_mix",),
    ),
    Mutant(
        "sentinels go on counting in the next document",
        "megatron/models/t5/data.py",
        "number - number[documents.searchsorted(documents)]",
        "number",
        ("tests/models/t5/test_t5_samples.py::test_a_sample_stays_the_same_for_ever", TEXTS),
    ),
    Mutant(
        "every epoch cuts the same spans",
        "megatron/models/t5/data.py",
        '"spans", *self._key, int(index))',
        '"spans", *self._key, int(index) % self.samples_per_epoch)',
        ("tests/models/t5/test_t5_samples.py::test_spans_are_new_in_each_epoch_and_with_each_seed",),
    ),
    Mutant(
        "what is kept and what is cut follow from the same random numbers",
        "megatron/models/t5/data.py",
        "words[noise:length])",
        "words[: length - noise])",
        ("tests/models/t5/test_corruption.py::test_what_is_kept_and_what_is_cut_out_are_independent",),
    ),
)
