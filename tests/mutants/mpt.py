"""Mistakes in MPT: slopes, who adds which bias to what, what is kept of it, and how weights are converted."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ALIBI = "tests/ops/test_alibi.py"
MODEL = "tests/models/common/test_mpt_model.py"
THEIRS = "tests/models/mpt/test_against_huggingface.py::test_the_same_weights_give_the_same_logits_loss_and_gradients"
TWELVE_HEADS = f"{THEIRS}[1-fp64 untied, 12 heads, steeper, clipped]"
KEPT = f"{MODEL}::test_all_layers_add_one_bias_and_another_batch_or_length_gets_its_own"
DOCUMENTS = "tests/models/common/test_documents.py::test_each_document_is_read_as_if_it_stood_alone[ALiBi]"
CACHED = "tests/generate/test_mpt.py::test_a_cache_and_rows_of_any_length_equal_each_row_alone_without_one"
CONVERTED = "tests/models/mpt/test_huggingface.py"
COSTS = "tests/models/mpt/test_cost.py"

MPT = (
    Mutant(
        "heads that are no power of two take the first slopes of the next one",
        "megatron/ops/positions.py",
        "[*slopes[1::2], *slopes[::2]][:num_heads]",
        "slopes[:num_heads]",
        (f"{ALIBI}::test_eight_heads_have_a_half_to_a_256th",),
    ),
    Mutant(
        "the other slopes come first",
        "megatron/ops/positions.py",
        "[*slopes[1::2], *slopes[::2]][:num_heads]",
        "[*slopes[::2], *slopes[1::2]][:num_heads]",
        (TWELVE_HEADS,),
    ),
    Mutant(
        "scores rise with the distance",
        "megatron/ops/positions.py",
        ".view(-1, 1, 1) * ahead.to(wide)",
        ".view(-1, 1, 1) * -ahead.to(wide)",
        (f"{ALIBI}::test_a_bias_is_minus_slope_times_distance_and_hides_what_comes_later",),
    ),
    Mutant(
        "the next token may be seen",
        "megatron/ops/positions.py",
        ".masked_fill_(ahead > 0,",
        ".masked_fill_(ahead > 1,",
        (f"{ALIBI}::test_a_bias_is_minus_slope_times_distance_and_hides_what_comes_later",),
    ),
    Mutant(
        "biases of an fp64 model are made in fp32",
        "megatron/ops/positions.py",
        "    wide = dtype if dtype == torch.float64 else torch.float32\n",
        "    wide = torch.float32\n",
        (TWELVE_HEADS,),
    ),
    Mutant(
        "biases in 16 bits are made in 16 bits",
        "megatron/ops/positions.py",
        "    wide = dtype if dtype == torch.float64 else torch.float32\n",
        "    wide = dtype\n",
        (f"{ALIBI}::test_16_bits_hold_what_matters_of_a_bias",),
    ),
    Mutant(
        "documents see each other",
        "megatron/ops/positions.py",
        "~document_mask(segment_ids)",
        "~document_mask(segment_ids * 0)",
        (f"{ALIBI}::test_documents_are_as_if_each_stood_alone",),
    ),
    Mutant(
        "every tensor rank takes the slopes of the first",
        "megatron/models/common/attention.py",
        "    first = place.group.rank * heads\n",
        "    first = 0\n",
        (f"{MODEL}::test_heads_of_a_tensor_rank_have_the_slopes_of_their_place",),
    ),
    Mutant(
        "the documents of the first micro-batch are those of all",
        "megatron/models/common/masks.py",
        "self._key[0]() is key and",
        "self._key[0]() is not None and",
        (KEPT,),
    ),
    Mutant(
        "documents that are overwritten in place go unseen",
        "megatron/models/common/masks.py",
        " and self._key[1] == key._version\n",
        "\n",
        (KEPT,),
    ),
    Mutant(
        "a bias outlives its number format",
        "megatron/models/common/masks.py",
        "(kept.shape[-1], kept.dtype, kept.device) != (length, dtype, x.device)",
        "kept.shape[-1] != length",
        (KEPT,),
    ),
    Mutant(
        "a bias within documents outlives the one that it was made of",
        "megatron/models/common/masks.py",
        "            self._within[has_window].forget()\n",
        "",
        (KEPT,),
    ),
    Mutant(
        "each layer makes a bias of its own",
        "megatron/models/common/masks.py",
        "        if self._made is None or not is_known:\n",
        "        if True:\n",
        (KEPT,),
    ),
    Mutant(
        "queries of all rows stand where those of the first do",
        "megatron/models/common/masks.py",
        "slots.positions if slots.mask is not None else slots.positions[:1]",
        "slots.positions[:1]",
        (CACHED,),
    ),
    Mutant(
        "norms shift",
        "megatron/models/common/norms.py",
        '{**found, "bias": sizes.norm_bias}',
        '{**found, "bias": True}',
        (f"{MODEL}::test_there_is_no_bias_and_no_table_of_positions",),
    ),
    Mutant(
        "queries, keys and values are clipped on one side",
        "megatron/models/common/attention.py",
        ".clamp(-self.clip, self.clip)",
        ".clamp(max=self.clip)",
        (TWELVE_HEADS,),
    ),
    Mutant(
        "a single stage does not keep documents apart",
        "megatron/models/common/decoder.py",
        "mask = self.masks.of(x, segment_ids)\n",
        "mask = self.masks.of(x)\n",
        (DOCUMENTS,),
    ),
    Mutant(
        "a pipeline does not keep documents apart",
        "megatron/models/common/pipeline.py",
        "segment_ids = beside[0] if len(beside) > self.has_positions else None",
        "segment_ids = None",
        ("tests/parity/test_mpt.py::test_fp64_equals_one_process[2-2-1-documents]",),
    ),
    Mutant(
        "their queries, keys and values are taken as ours",
        "megatron/models/mpt/huggingface.py",
        "blocks=config.model.num_attention_heads, parts_in_one=3",
        "blocks=1, parts_in_one=3",
        (TWELVE_HEADS,),
    ),
    Mutant(
        "their gelu is taken for the approximation",
        "megatron/models/mpt/huggingface.py",
        '        "activation": "gelu",\n',
        '        "activation": "gelu-tanh",\n',
        (TWELVE_HEADS,),
    ),
    Mutant(
        "their model keeps the slopes that it has without the setting",
        "megatron/models/mpt/huggingface.py",
        '"alibi_bias_max": config.model.alibi_bias_max})',
        "})",
        (TWELVE_HEADS,),
    ),
    Mutant(
        "a model of the hub without alibi is taken",
        "megatron/models/mpt/huggingface.py",
        '    "alibi": True,\n',
        "",
        (f"{CONVERTED}::test_what_our_mpt_has_not_is_refused_by_name",),
    ),
    Mutant(
        "the verification does not prepare their model",
        "megatron/checkpoint/huggingface/convert.py",
        "    hf_format.prepare(model, config)\n",
        "",
        (f"{CONVERTED}::test_theirs_to_ours_and_back_is_bitwise_and_computes_the_same",),
    ),
    Mutant(
        "the plan counts a table of positions",
        "megatron/models/common/decoder_cost.py",
        "sizes.max_position_embeddings * sizes.hidden_size if sizes.has_learned_positions else 0",
        "sizes.max_position_embeddings * sizes.hidden_size",
        (f"{COSTS}::test_mpt_7b_has_its_published_number_of_parameters",),
    ),
    Mutant(
        "the plan counts the biases of all heads on each tensor rank",
        "megatron/models/common/decoder_cost.py",
        "width * self.sizes.num_attention_heads // tensor * square",
        "width * self.sizes.num_attention_heads * square",
        (f"{COSTS}::test_a_stage_keeps_one_bias_and_one_for_the_documents_of_each_micro_batch",),
    ),
)
