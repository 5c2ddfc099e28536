"""Mistakes in the loss in chunks: what a chunk adds, what ranks tell each other, what waits for backward."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOSS = "megatron/mpu/linear_cross_entropy.py"
HEAD = "megatron/models/common/language_model.py"
_TESTS = "tests/mpu/test_linear_cross_entropy.py"
_SUM = f"{_TESTS}::test_sum_and_gradients_equal_those_of_torch_however_the_tokens_and_words_are_cut"
ONE, TWO, FOUR = f"{_SUM}[101-5-some-1]", f"{_SUM}[101-5-some-2]", f"{_SUM}[5-1-some-4]"
PADDED = f"{_SUM}[101-14-some-2]"
SIXTEEN = f"{_TESTS}::test_many_small_parts_of_a_gradient_add_up_in_16_bits"
HALF = f"{_TESTS}::test_in_fp16_neither_small_probabilities_nor_a_large_loss_scale_are_lost"
PEAK = f"{_TESTS}::test_the_peak_is_a_chunk_and_the_gradients_instead_of_logits_and_their_gradient[float32]"
POISONED = f"{_TESTS}::test_no_gradient_holds_what_its_memory_held"
ALIGNED = f"{_TESTS}::test_columns_that_align_the_products_change_no_sum_and_no_gradient"
OFF_CPU = f"{_TESTS}::test_off_the_cpu_every_product_of_the_head_is_aligned_whatever_the_vocabulary"
FAMILIES = "tests/models/common/test_head.py::test_chunks_give_the_loss_and_every_gradient_of_whole_logits"

CHUNKED_LOSS = (
    Mutant(
        "the first chunk is added to what memory held",
        LOSS,
        "beta=0 if is_first else 1",
        "beta=1",
        (POISONED,),
    ),
    Mutant(
        "padded rows have as gradient what memory held",
        LOSS,
        "            self.of_table[untouched:].zero_()\n",
        "            self.of_table[given.num_real + 1 :].zero_()\n",
        (POISONED,),
    ),
    Mutant(
        "the table's gradient is that of the last chunk",
        LOSS,
        "beta=0 if is_first else 1",
        "beta=0",
        (ONE,),
    ),
    Mutant(
        "the table's gradient is added up in 16 bits",
        LOSS,
        "table.new_empty((rows, table.shape[1]), dtype=self.wide)",
        "table.new_empty((rows, table.shape[1]))",
        (SIXTEEN,),
    ),
    Mutant(
        "tokens that do not count have a gradient",
        LOSS,
        "            factor = weights * _scale(self.x.dtype)\n",
        "            factor = torch.ones_like(weights) * _scale(self.x.dtype)\n",
        (ONE,),
    ),
    Mutant(
        "the number that comes to the loss is left out of a gradient",
        LOSS,
        "gradient.to(factor.dtype).mul_(factor)",
        "gradient.to(factor.dtype)",
        (ONE,),
    ),
    Mutant(
        "each rank divides by its own sum of exponentials",
        LOSS,
        "of_softmax * (begun.own[0] - top).exp() / denominator)",
        "of_softmax / begun.own[1])",
        (TWO,),
    ),
    Mutant(
        "exponentials stay relative to the rank's own largest",
        LOSS,
        "of_softmax * (begun.own[0] - top).exp() / denominator)",
        "of_softmax / denominator)",
        (TWO,),
    ),
    Mutant(
        "ranks add up sums that are relative to different logits",
        LOSS,
        "(sums * (largest - top).exp())",
        "(sums + 0 * largest)",
        (TWO,),
    ),
    Mutant(
        "the first token of a rank is one too high",
        LOSS,
        "targets.reshape(-1) - start,",
        "targets.reshape(-1) - start - min(group.rank, 1),",
        (TWO,),
    ),
    Mutant(
        "padded rows take part in the softmax",
        LOSS,
        "    _, start, num_real = vocab_range(vocab_size, group, divisible_by)\n",
        "    num_real, start, _ = vocab_range(vocab_size, group, divisible_by)\n",
        (PADDED,),
    ),
    Mutant(
        "a chunk's memory is taken while its numbers still travel",
        LOSS,
        "room[number % most]",
        "room[0]",
        (TWO,),
    ),
    Mutant(
        "the last tokens are left out",
        LOSS,
        "        while waiting:\n            self._end(waiting.popleft())\n",
        "",
        (TWO,),
    ),
    Mutant(
        "the bias gets the gradient of the last chunk",
        LOSS,
        "self.of_bias[: self.given.num_real] += wide",
        "self.of_bias[: self.given.num_real] = wide",
        (FOUR,),
    ),
    Mutant(
        "small probabilities of fp16 lose their bits",
        LOSS,
        "FP16_SCALE = 8.0",
        "FP16_SCALE = 1.0",
        (HALF,),
    ),
    Mutant(
        "the gradients are multiplied once more by a second backward",
        LOSS,
        "        ctx.is_used_up = True\n",
        "",
        (f"{_TESTS}::test_a_second_backward_raises",),
    ),
    Mutant(
        "all tokens are one chunk",
        LOSS,
        "        tokens = min(self.given.at_once, len(self.x))\n",
        "        object.__setattr__(self.given, 'at_once', max(len(self.x), 1))\n        tokens = len(self.x)\n",
        (PEAK,),
    ),
    Mutant(
        "the bias of a head is left out of its chunks",
        "megatron/models/common/language_model.py",
        '{"bias": logits.bias,',
        '{"bias": None if logits.bias is None else 0 * logits.bias,',
        (f"{FAMILIES}[bert-False-1]",),
    ),
    Mutant(
        "what enters the head in chunks gets this rank's part of its gradient",
        HEAD,
        "    x = enter_tensor_region(x, **place.cut)  # [s, b, h]\n",
        "    x = enter_tensor_region(x, **place.cut) if sizes.loss_chunk_tokens == 0 else x\n",
        (f"{FAMILIES}[gpt2-False-2]",),
    ),
    Mutant(
        "a user asks for logits and gets what they are made of",
        "tds/engine/stage.py",
        "return output if output is None or make is None else make(output)",
        "return output",
        ("tests/models/common/test_made_outputs.py::test_outputs_are_logits_to_the_bit[1]",),
    ),
    Mutant(
        "logits of twice the size are made together",
        "megatron/config/model.py",
        "num_tokens * vocab_size > SMALL",
        "num_tokens * vocab_size > 2 * SMALL",
        ("tests/models/common/test_loss.py::test_chunks_are_of_one_size_and_none_where_logits_are_few",),
    ),
    Mutant(
        "a gradient of the table is held where whole logits are less",
        "megatron/config/model.py",
        " and num_tokens > chunk + hidden_size",
        " and num_tokens > chunk",
        ("tests/models/common/test_loss.py::test_the_automatic_choice_holds_no_more_than_whole_logits",),
    ),
    Mutant(
        "whole logits of 16 bits count without their copy in 32",
        "megatron/models/common/memory.py",
        "(wide if width < wide else 0) + kept * forwards",
        "kept * forwards",
        ("tests/models/common/test_loss.py::test_the_estimate_is_what_lies_there_at_the_worst_moment",),
    ),
    Mutant(
        "a chunk of one label overflows in fp16",
        LOSS,
        ".log2().ceil().clamp(min=0)",
        ".log2().ceil().clamp(min=0, max=0)",
        (f"{_TESTS}::test_in_fp16_a_chunk_of_one_label_and_large_hidden_states_does_not_overflow",),
    ),
    Mutant(
        "what a chunk was divided by is not multiplied back",
        LOSS,
        ".to(b.dtype)), power)",
        ".to(b.dtype)), power.clamp(max=1))",
        (f"{_TESTS}::test_in_fp16_a_chunk_of_one_label_and_large_hidden_states_does_not_overflow",),
    ),
    Mutant(
        "the first label behind the vocabulary is taken for one of it",
        "megatron/mpu/cross_entropy.py",
        "(targets >= vocab_size)",
        "(targets > vocab_size)",
        (f"{_TESTS}::test_a_label_outside_the_vocabulary_raises_where_its_token_counts[1]",),
    ),
    Mutant(
        "a label outside the vocabulary is refused where its token does not count",
        "megatron/mpu/cross_entropy.py",
        " & (weights != 0)",
        "",
        (f"{_TESTS}::test_off_the_cpu_such_a_label_makes_no_number_and_waits_for_nothing",),
    ),
    Mutant(
        "columns that align the logits have a gradient",
        LOSS,
        "        made[:, self.given.num_real :].zero_()\n",
        "",
        (f"{ALIGNED}[1]",),
    ),
    Mutant(
        "columns that align the logits are in the softmax",
        LOSS,
        "room.copy_(made))[:, : self.given.num_real]",
        "room.copy_(made))",
        (f"{ALIGNED}[1]",),
        refuses=True,
    ),
    Mutant(
        "logits in chunks begin anywhere",
        LOSS,
        "        self.width = aligned(given.num_real, x.device)\n",
        "        self.width = given.num_real\n",
        (f"{OFF_CPU}[48-50257]",),
    ),
    Mutant(
        "logits made together begin anywhere",
        "megatron/mpu/layers.py",
        "    width = aligned(rows, x.device) if",
        "    width = rows if",
        (f"{OFF_CPU}[0-50257]",),
    ),
    Mutant(
        "logits in fp32 have the bits of 16",
        LOSS,
        "out_dtype=room.dtype, out=room)",
        "out_dtype=room.dtype, out=room).copy_(room.to(x.dtype))",
        (f"{_TESTS}::test_where_torch_can_16_bit_products_are_written_in_32_and_logits_keep_all_bits",),
    ),
    Mutant(
        "sizes of a model of one's own cut its logits",
        "megatron/models/common/model_args.py",
        "loss_chunk_tokens: int | None = 0 ",
        "loss_chunk_tokens: int | None = None ",
        (
            ""
            "tests/models/common/test_head.py::test_sizes_of_a_model_of_ones_own_mean_whole_logits_and_a_configuration_decides",
        ),
    ),
    Mutant(
        "inputs of products that are put off count as cut",
        "megatron/models/common/cost.py",
        "is_compiled or any(map(splits, names))",
        "is_compiled",
        (
            ""
            "tests/models/common/test_decoder_cost.py::test_products_that_are_put_off_or_compiled_keep_their_inputs_joined",
        ),
    ),
)
