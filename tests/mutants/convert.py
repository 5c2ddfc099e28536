"""Mistakes in the conversion to Hugging Face's folders, and in what is said of checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TOOL = "tests/tools/test_convert_hf.py"
_FOLDER = "tests/checkpoint/huggingface/test_folder.py"
_INSPECT = "tests/tools/test_inspect_checkpoint.py"
_TWO_RANKS = f"{_TOOL}::test_a_model_of_two_ranks_goes_there_and_back_to_the_bit_without_its_padding"

CONVERT = (
    Mutant(
        "the zero biases of a GPT-2 without them are given to its norms as well",
        "megatron/models/gpt2/huggingface.py",
        "for name in ours if _LAYER_WEIGHT.fullmatch(name)}",
        'for name in ours if name.startswith("layers.")}',
        (f"{_TWO_RANKS}[gpt2-values0]",),
    ),
    Mutant(
        "biases that were trained elsewhere are dropped",
        "megatron/checkpoint/huggingface/weights.py",
        "hidden_bias=has_biases",
        "hidden_bias=False",
        (f"{_FOLDER}::test_biases_that_were_trained_elsewhere_are_kept",),
    ),
    Mutant(
        "a head that equals the table is lost",
        "megatron/models/gpt2/huggingface.py",
        "        ours.setdefault(_HEAD, theirs[_THEIR_HEAD].clone())\n",
        "        pass\n",
        (f"{_FOLDER}::test_a_missing_head_of_an_untied_model_is_named",),
        refuses=True,
    ),
    Mutant(
        "tensors that no model has are passed over",
        "megatron/checkpoint/huggingface/weights.py",
        "for name in found if name not in expected]",
        "for name in () if name not in expected]",
        (f"{_TOOL}::test_every_tensor_that_does_not_fit_is_in_one_error",),
    ),
    Mutant(
        "a T5 with a head of its own is said to scale it",
        "megatron/models/t5/huggingface.py",
        '"scale_decoder_outputs": not model.untie_embeddings',
        '"scale_decoder_outputs": True',
        (f"{_TOOL}::test_theirs_to_ours_and_back_is_bitwise_and_computes_the_same[t5-v1.1]",),
        refuses=True,
    ),
    Mutant(
        "the size of the feed-forward layer is left to Hugging Face",
        "megatron/models/gpt2/huggingface.py",
        '"n_inner": model.ff_hidden_size',
        '"n_inner": None',
        (f"{_TWO_RANKS}[gpt2-values1]",),
        refuses=True,
    ),
    Mutant(
        "the epsilon of norms is Hugging Face's own",
        "megatron/models/t5/huggingface.py",
        '        "layer_norm_epsilon": model.layernorm_epsilon,\n        "dropout_rate"',
        '        "dropout_rate"',
        (f"{_FOLDER}::test_settings_are_the_same_after_there_and_back",),
    ),
    Mutant(
        "sentinels get the ids of a run the other way round",
        "megatron/checkpoint/huggingface/tokenizer.py",
        "for number, token in enumerate(t5.sentinels)}",
        "for number, token in enumerate(t5.sentinels[::-1])}",
        (f"{_TOOL}::test_sentinels_have_the_ids_there_that_the_run_gave_them[TokenizersJSON]",),
    ),
    Mutant(
        "a tokenizer is written in other bytes",
        "megatron/checkpoint/huggingface/tokenizer.py",
        'if not added and suffixes == [".json"]:',
        "if False:",
        (f"{_TOOL}::test_a_tokenizer_travels_both_ways",),
    ),
    Mutant(
        "what a failure leaves is not removed",
        "megatron/checkpoint/huggingface/folder.py",
        "            files.remove_tree(temporary)\n",
        "            pass\n",
        (f"{_FOLDER}::test_a_failure_at_any_moment_leaves_no_folder_of_that_name[export]",),
    ),
    Mutant(
        "a file does not count what lies in it already",
        "megatron/checkpoint/huggingface/folder.py",
        "        size += _bytes(tensor)\n",
        "        size = _bytes(tensor)\n",
        (f"{_FOLDER}::test_tensors_come_back_from_any_number_of_files[35-3]",),
    ),
    Mutant(
        "verification is content with any difference",
        "megatron/checkpoint/huggingface/convert.py",
        "if not difference <= allowed:",
        "if difference < 0:",
        (f"{_TOOL}::test_logits_that_differ_are_told",),
    ),
    Mutant(
        "a zero and a negative zero are the same bits",
        "megatron/checkpoint/inspect.py",
        "torch.equal(_bits(one), _bits(other))",
        "torch.equal(one, other)",
        (f"{_INSPECT}::test_each_kind_of_difference_is_told",),
    ),
    Mutant(
        "tensors of the second checkpoint alone are passed over",
        "megatron/checkpoint/inspect.py",
        "names = dict.fromkeys([*first.names(), *second.names()])",
        "names = first.names()",
        (f"{_INSPECT}::test_each_kind_of_difference_is_told",),
    ),
    Mutant(
        "one number that is not finite spoils the norm",
        "megatron/checkpoint/inspect.py",
        "squares += float(finite.square().sum())",
        "squares += float(values.square().sum())",
        (f"{_INSPECT}::test_the_table_names_each_tensor_and_what_is_not_finite",),
    ),
)
