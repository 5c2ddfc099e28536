"""Mistakes in reading a Hugging Face folder in parts, and in tables that have grown."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RECIPES = "tests/models/common/test_recipes.py"
DIRECT = "tests/checkpoint/huggingface/test_direct.py"
PART = f"{RECIPES}::test_any_part_that_is_read_is_that_part_of_the_whole"
MADE = "megatron/models/common/huggingface.py"
GROWN = f"{DIRECT}::test_a_vocabulary_of_another_size_keeps_what_both_have_and_fills_the_rest_with_the_mean"
SETTINGS = "tests/checkpoint/huggingface/test_settings.py"
FURTHER = "tests/training/test_pretrained.py::test_a_fresh_start_may_reach_further_than_an_earlier_training"
FIT = "tests/checkpoint/test_compare.py::test_a_fresh_start_takes_weights_that_fit_with_what_no_shape_depends_on"

PRETRAINED = (
    Mutant(
        "a part begins at the block it lies in",
        MADE,
        "    first, low = divmod(start, sum(each))  # block, and row in it\n",
        "    first, low = start // sum(each), 0\n",
        (f"{PART}[three tensors by head]",),
        refuses=True,
    ),
    Mutant(
        "the parts of one tensor are read from its first rows",
        MADE,
        "(part * recipe.blocks + first) * height",
        "first * height",
        (f"{PART}[one tensor by head]",),
    ),
    Mutant(
        "columns of a transposed weight are cut as they lie in the file",
        MADE,
        "else tensor[columns, rows]).t()",
        "else tensor[rows, columns]).t()",
        (f"{PART}[transposed]",),
        refuses=True,
    ),
    Mutant(
        "all parts have blocks of one height",
        MADE,
        "        lowest, highest = max(low, begin), min(high, begin + height)\n",
        "        height = sum(each) // len(each)\n"
        "        lowest, highest = max(low, begin), min(high, begin + height)\n",
        (f"{PART}[grouped queries]",),
    ),
    Mutant(
        "a rank reads whole tensors and cuts them",
        MADE,
        "    return tensor[rows] if columns is None else",
        "    return tensor[:][rows] if columns is None else",
        (f"{RECIPES}::test_a_rank_of_two_reads_half[plain]",),
    ),
    Mutant(
        "all of a merged weight is held once more",
        "megatron/checkpoint/huggingface/weights.py",
        "        read_into(target, recipe, self.slices, shapes, shard)\n",
        "        held = {part: self.slices[part][:].clone() for part in recipe.names}\n"
        "        read_into(target, recipe, {part: tensor.clone() for part, tensor in held.items()}, shapes, shard)\n",
        (f"{DIRECT}::test_a_rank_holds_its_share_and_one_tensor_at_most[llama-1]",),
    ),
    Mutant(
        "new rows of a table are those of its end",
        "megatron/checkpoint/loading.py",
        "        target[known:].copy_(_mean(saved, read))\n",
        "        target[known:].copy_(read(Shard(saved, 0, saved[0] - 1, 1)))\n",
        (f"{GROWN}[29-40-bert]",),
    ),
    Mutant(
        "the mean is that of a block of rows",
        "megatron/checkpoint/loading.py",
        "        total += read(",
        "        total = read(",
        (f"{DIRECT}::test_tables_of_many_rows_are_filled_a_block_after_another",),
    ),
    Mutant(
        "rows of a grown table are read from the front on every rank",
        "megatron/checkpoint/loading.py",
        "    start = shard.start if shard.is_partitioned else 0\n",
        "    start = 0\n",
        (f"{GROWN}[29-40-bert]",),
    ),
    Mutant(
        "masters of a started model are not copied into its weights",
        "megatron/training/resume.py",
        "    trainer.engine.optimizer.copy_masters_to_parameters()\n",
        "",
        ("tests/training/test_pretrained.py::test_weights_of_16_bits_are_those_of_the_folder",),
    ),
    Mutant(
        "a tied table that differs from its copy is taken",
        "megatron/checkpoint/huggingface/weights.py",
        "        return torch.equal(one, other)\n",
        "        return one.shape == other.shape\n",
        ("tests/checkpoint/huggingface/test_folder.py::test_a_tied_head_with_other_values_is_refused",),
    ),
    Mutant(
        "a folder's weights are taken with other settings without a word",
        "megatron/training/resume.py",
        '        advice = f". The folder\'s own: {folder.flags}"\n        warn_of_weights(',
        '        advice = f". The folder\'s own: {folder.flags}"\n        (lambda *given: None)(',
        (f"{FURTHER}[a folder]",),
    ),
    Mutant(
        "a fresh start takes a checkpoint's weights with other settings without a word",
        "megatron/training/callbacks/checkpointer.py",
        "                warn_of_weights(",
        "                (lambda *given: None)(",
        (f"{FURTHER}[a checkpoint]",),
    ),
    Mutant(
        "any start takes weights with what no shape depends on",
        "megatron/checkpoint/loading.py",
        "    free += config.refitted if flags.finetune else ()\n",
        "    free += config.refitted\n",
        (FIT,),
    ),
    Mutant(
        "a fresh start may not leave the settings of an earlier training",
        "megatron/checkpoint/loading.py",
        "    free += config.refitted if flags.finetune else ()\n",
        "",
        (FIT,),
        refuses=True,
    ),
    Mutant(
        "values of a config.json are taken as they are",
        "megatron/checkpoint/huggingface/config.py",
        "        found = list(_out_of_range(values))\n",
        "        found: list[str] = []\n",
        (f"{SETTINGS}::test_what_no_flag_would_take_is_refused_all_at_once",),
        refuses=True,
    ),
    Mutant(
        "sizes of a config.json need not go together",
        "megatron/checkpoint/huggingface/config.py",
        "list(model_problems(replace(config, given=tuple(values))))",
        "[]",
        (f"{SETTINGS}::test_what_no_flag_would_take_is_refused_all_at_once",),
        refuses=True,
    ),
    Mutant(
        "a folder of an unknown model is no folder",
        "megatron/checkpoint/huggingface/weights.py",
        '.get("model_type") is not None',
        '.get("model_type") in ("gpt2", "t5")',
        (f"{SETTINGS}::test_a_folder_of_a_model_that_we_do_not_have_is_told_with_those_that_we_have",),
        refuses=True,
    ),
    Mutant(
        "a sliding window of a config.json is passed over",
        "megatron/models/mpt/huggingface.py",
        " | _NOT_IN_ATTENTION)",
        ")",
        ("tests/models/mpt/test_huggingface.py::test_what_our_mpt_has_not_is_refused_by_name",),
        refuses=True,
    ),
    Mutant(
        "tokens of other ids are taken for the folder's",
        "megatron/checkpoint/huggingface/tokenizer.py",
        "if None not in pair and pair[0] != pair[1]]",
        "if None in pair and pair[0] != pair[1]]",
        ("tests/training/test_pretrained.py::test_the_tokenizer_is_compared_with_that_of_the_folder",),
    ),
    Mutant(
        "nobody is told of another tokenizer than the folder's",
        "megatron/training/resume.py",
        "    if found:\n        log.warning(",
        "    if found:\n        (lambda told: None)(",
        ("tests/training/test_pretrained.py::test_the_tokenizer_is_compared_with_that_of_the_folder",),
    ),
)
