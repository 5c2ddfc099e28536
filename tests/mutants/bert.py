"""Mistakes in BERT: its masks and pairs, its layers and heads, and how its two means are added up."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DATA = "tests/models/bert/test_bert_samples.py"
BACK = f"{DATA}::test_text_comes_back_from_inputs_and_labels"
SHARES = f"{DATA}::test_as_many_tokens_are_masked_as_asked_and_become_mask_random_or_stay"
PAIRS = f"{DATA}::test_the_second_segment_goes_on_or_begins_within_a_document_elsewhere"
WHOLE = f"{DATA}::test_whole_words_stay_whole"
STEPS = f"{DATA}::test_batches_are_the_same_in_every_layout_and_told_of_their_step"
GROWING = f"{DATA}::test_a_growing_batch_is_told_of_its_own_step"
THEIRS = "tests/models/bert/test_against_huggingface.py::test_the_same_weights_give_the_same_logits_loss_and_gradients"
BOTH = f"{THEIRS}[1-fp64 both gelu sdpa]"
CUT = "tests/parity/test_bert.py::test_every_layout_equals_one_process[pairs-2-1-1]"
OTHERS = "tests/parity/test_bert.py::test_micro_batches_of_another_size_give_the_same_sum_of_two_means"
WORDS = "tests/tokenizer/test_word_starts.py"

BERT = (
    Mutant(
        "masked tokens are never left as they are",
        "megatron/models/bert/data.py",
        "np.where(kind < _MASKED_OR_RANDOM, random, text[places]))",
        "random)",
        (SHARES,),
    ),
    Mutant(
        "separators of documents are masked",
        "megatron/models/bert/data.py",
        "    may = tokens.is_word[text]\n",
        "    may = tokens.is_word[text] | True\n",
        (SHARES,),
    ),
    Mutant(
        "control tokens are put in place of words",
        "megatron/models/bert/data.py",
        "        return np.flatnonzero(self.is_word)\n",
        "        return np.zeros(1, np.int64)\n",
        (SHARES,),
    ),
    Mutant(
        "a word is masked up to its last token",
        "megatron/models/bert/data.py",
        "    sizes = np.diff(firsts, append=len(may))\n",
        "    sizes = np.maximum(np.diff(firsts, append=len(may)) - 1, 1)\n",
        (WHOLE,),
    ),
    Mutant(
        "a word goes on in the second segment",
        "megatron/models/bert/data.py",
        "            is_start[seam : seam + 1] = True",
        "            is_start[seam:seam] = True",
        (f"{DATA}::test_no_word_reaches_over_the_seam",),
    ),
    Mutant(
        "words are masked beyond what is asked",
        "megatron/models/bert/data.py",
        "_fitting(sizes[order], count)]",
        "_fitting(sizes[order], count + 1)]",
        (WHOLE,),
    ),
    Mutant(
        "the second segment is from a document beside the first",
        "megatron/models/bert/data.py",
        "if found[0].offset and found[0].document not in beside:",
        "if found[0].offset:",
        (PAIRS,),
    ),
    Mutant(
        "the start does not tell of text that is nearly all one document",
        "megatron/models/bert/data.py",
        "samples.share_of_random < FEW",
        "samples.share_of_random > FEW",
        ("tests/models/bert/test_bert_samples.py::test_the_start_tells_of_a_split_that_is_nearly_all_one_document",),
    ),
    Mutant(
        "labels of pairs are swapped",
        "megatron/models/bert/data.py",
        '"is_random": np.array(int(is_random), np.int64)',
        '"is_random": np.array(int(not is_random), np.int64)',
        (PAIRS,),
    ),
    Mutant(
        "the seam is put after the separator",
        "megatron/models/bert/data.py",
        "    parts[: first + seam + 1], parts[first + seam + 1 : second + 1] = 0, 1\n",
        "    parts[: first + seam], parts[first + seam : second + 1] = 0, 1\n",
        (BACK,),
    ),
    Mutant(
        "all steps are told of the first",
        "megatron/data/data_loader.py",
        "sum(map(self._num_predicted, range(start, stop))), stop - start",
        "sum(map(self._num_predicted, range(self._consumed, self._consumed + stop - start))), stop - start",
        (STEPS,),
    ),
    Mutant(
        "steps are all of the full size",
        "megatron/data/data_loader.py",
        "stop + self._sizes.at(stop)",
        "stop + self._sizes.full",
        (GROWING,),
    ),
    Mutant(
        "the second mean weighs by the micro-batch's own tokens",
        "megatron/models/bert/model.py",
        "    elif step_predictions is None:\n",
        "    elif step_predictions is not None:\n",
        (OTHERS,),
    ),
    Mutant(
        "queries see no later key",
        "megatron/models/bert/model.py",
        "mask=mask, is_causal=False)",
        "mask=None, is_causal=True)",
        (BOTH,),
    ),
    Mutant(
        "layers norm before they add",
        "megatron/models/bert/model.py",
        '        return self.post_mlp_norm(x + self._dropout(self.mlp(x), "mlp output"))\n',
        '        return x + self.post_mlp_norm(self._dropout(self.mlp(x), "mlp output"))\n',
        (BOTH,),
    ),
    Mutant(
        "token types are left out",
        "megatron/models/bert/model.py",
        "self.token_type(types)",
        "self.token_type(torch.zeros_like(types))",
        (BOTH,),
    ),
    Mutant(
        "the second head looks at the last token",
        "megatron/models/bert/model.py",
        "            return x[0]\n",
        "            return x[-1]\n",
        (BOTH,),
    ),
    Mutant(
        "logits have no bias",
        "megatron/models/bert/model.py",
        "self.sizes, self.place, self.bias)",
        "self.sizes, self.place, 0 * self.bias)",
        (BOTH,),
    ),
    Mutant(
        "the gradient of what enters the head is not summed over tensor ranks",
        "megatron/models/common/language_model.py",
        "    x = enter_tensor_region(x, **place.cut)  # [s, b, h]\n",
        "",
        (CUT,),
    ),
    Mutant(
        "bytes within a character begin a word",
        "megatron/tokenizer/tokenizer.py",
        '    return raw[:1] == b"" or raw[0] in _CHINESE_BYTES',
        '    return raw[:1] == b"" or raw[0] >= 0x80',
        (f"{WORDS}::test_byte_level_words_begin_with_a_blank_a_sign_or_a_chinese_character",),
    ),
    Mutant(
        "a head too many is not left out",
        "megatron/models/bert/huggingface.py",
        "    return None if is_second and not config.own.binary_head else name\n",
        "    return name\n",
        ("tests/models/bert/test_huggingface.py::test_files_of_google_with_old_names_and_a_head_too_many_are_read",),
        refuses=True,
    ),
)
