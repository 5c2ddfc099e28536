"""Mistakes in what the decoders of 2026 have, in their files of Hugging Face's, and in those of Megatron-LM."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_THEIRS = "tests/models/llama/test_modern_against_huggingface.py"
_SAME = f"{_THEIRS}::test_the_same_weights_give_the_same_logits_loss_and_gradients"
_RANKS = f"{_THEIRS}::test_two_or_three_tensor_ranks_give_the_same_logits_loss_and_gradients"
_FORM = "tests/models/llama/test_modern_huggingface.py"
_IMPORTED = "tests/checkpoint/legacy/test_decoders.py"
_NORMS = "megatron/models/common/norms.py"
_CAPPED, _TURNED = "megatron/ops/softcapped_attention.py", "megatron/ops/positions.py"
_ARGS, _HF = "megatron/models/common/model_args.py", "megatron/models/llama/huggingface.py"
_SHARED, _LEGACY = "megatron/models/common/huggingface.py", "megatron/checkpoint/legacy/weights.py"

MODERN_DECODERS = (
    Mutant(
        "the gradient of a norm of each head is that of the rank's own heads",
        _NORMS,
        "            set_partial(parameter)\n",
        "            pass\n",
        (f"{_RANKS}[qwen3]",),
    ),
    Mutant(
        "a norm over all heads takes the mean of the rank's own",
        _NORMS,
        "copy_to_tensor_region(reduce_from_tensor_region(own, self.group), self.group) / self.size",
        "own / (x.shape[1] * x.shape[3])",
        (f"{_RANKS}[olmo2]",),
    ),
    Mutant(
        "the mean over all heads sends back the rank's own gradient",
        _NORMS,
        "copy_to_tensor_region(reduce_from_tensor_region(own, self.group), self.group) / self.size",
        "reduce_from_tensor_region(own, self.group) / self.size",
        (f"{_RANKS}[olmo2]",),
    ),
    Mutant(
        "their window counts the tokens before a token, as ours does",
        _HF,
        '"window_size": size - 1',
        '"window_size": size',
        (f"{_SAME}[mistral]",),
    ),
    Mutant(
        "a score of the future is as low as the cap allows",
        _CAPPED,
        "scores.masked_fill_(future, lowest(scores.dtype))",
        "scores.masked_fill_(future, -cap)",
        (f"{_SAME}[gemma2]",),
    ),
    Mutant(
        "a score beyond the window is as low as the cap allows",
        _CAPPED,
        "scores.masked_fill_(~own, lowest(scores.dtype))",
        "scores.masked_fill_(~own, -cap)",
        (f"{_SAME}[gemma2]",),
    ),
    Mutant(
        "yarn looks for its pairs by the usual base",
        _TURNED,
        "(2.0 * math.log(self.base))",
        "(2.0 * math.log(10000.0))",
        (f"{_SAME}[qwen2]",),
    ),
    Mutant(
        "heads turn as if they made up the hidden size",
        _ARGS,
        "head_size=self.kv_hidden_size,",
        "head_size=self.hidden_size // self.num_attention_heads,",
        (f"{_SAME}[qwen3]",),
    ),
    Mutant(
        "a format passes over what it does not name",
        _SHARED,
        "        if name not in free and value != only and _acts(model, name):\n",
        "        if name in fixed and name not in free and value != only and _acts(model, name):\n",
        (f"{_FORM}::test_what_no_type_can_hold_is_refused_naming_the_settings",),
        refuses=True,
    ),
    Mutant(
        "a model is of the first type of its family, whatever it has",
        "megatron/checkpoint/huggingface/config.py",
        "        if not problems:\n            return one\n",
        "        return one\n",
        (f"{_FORM}::test_the_type_follows_from_the_settings_in_whatever_program[changed3-qwen2-llama]",),
    ),
    Mutant(
        "the type of an imported folder is forgotten",
        "megatron/checkpoint/huggingface/convert.py",
        "    if model_type is None and saved_type is not None:\n",
        "    if False:\n",
        (f"{_FORM}::test_a_type_may_be_named_where_several_hold_the_model",),
    ),
    Mutant(
        "an mT5 is written as a T5",
        "megatron/models/t5/huggingface.py",
        '"model_type": "mt5"}',
        '"model_type": "t5"}',
        ("tests/tools/test_convert_hf.py::test_theirs_to_ours_and_back_is_bitwise_and_computes_the_same[mt5]",),
    ),
    Mutant(
        "gate and value of Megatron-LM's files stay in halves",
        _LEGACY,
        'if layout.is_gated and ".mlp.up." in name:',
        'if layout.is_gated and ".mlp.down." in name:',
        (f"{_IMPORTED}::test_the_first_half_of_a_ranks_rows_is_the_gate",),
    ),
    Mutant(
        "gate and value are halves of all ranks' rows",
        _LEGACY,
        "slices = [one.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for one in slices]",
        "slices = [torch.cat(list(slices)).unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)]",
        (f"{_IMPORTED}::test_the_first_half_of_a_ranks_rows_is_the_gate",),
    ),
    Mutant(
        "rows that turn neighbours are taken for rows that turn halves",
        _LEGACY,
        "torch.cat((rows[:, :, ::2], rows[:, :, 1::2]), dim=2)",
        "rows",
        (f"{_IMPORTED}::test_rows_that_turn_neighbours_give_the_scores_of_rows_that_turn_halves",),
    ),
    Mutant(
        "norms of heads keep the order of neighbours",
        _LEGACY,
        "return torch.cat((whole[:turned:2], whole[1:turned:2], whole[turned:]))",
        "return whole",
        (f"{_IMPORTED}::test_a_decoder_in_any_layout_is_the_same_model[Qwen 3 of Transformer Engine-1-neighbours]",),
    ),
)
