"""Mistakes in what a fresh start may change, in weights that come one by one, and in what a BERT folder brings."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FIT = "tests/checkpoint/test_compare.py::test_a_fresh_start_takes_weights_that_fit_with_what_no_shape_depends_on"
WARNED = "tests/training/test_resume_rules.py::test_each_warned_setting_is_told_with_both_values"
BERT = "tests/tools/test_convert_hf.py::test_the_vocabulary_of_a_bert_folder_is_imported_with_its_case"
ARRIVAL = "tests/optim/zero/test_arrival.py"
DEVICE = f"{ARRIVAL}::test_the_device_gets_the_parts_and_never_a_whole_weight[fp32]"
ONCE = f"{ARRIVAL}::test_weights_are_filled_once_before_they_are_cut"
OTHERS = f"{ARRIVAL}::test_other_stages_let_weights_lie_where_they_are"
ARRIVING = "tests/training/test_arriving.py"
WHOLE = f"{ARRIVING}::test_no_rank_ever_holds_more_than_its_parts_and_the_largest_unit"
SAME = f"{ARRIVING}::test_every_weight_is_that_of_the_other_stages[3]"
UNSET = f"{ARRIVING}::test_an_unset_weight_has_no_memory_until_it_is_filled"

LEFTOVERS = (
    Mutant(
        "a fresh start may not change the reach of T5's relative positions",
        "megatron/models/t5/config.py",
        '    REFITTED: ClassVar = ("relative_attention_max_distance",)\n',
        "    REFITTED: ClassVar = ()\n",
        (FIT,),
        refuses=True,
    ),
    Mutant(
        "a fresh start may change the rows of T5's relative positions",
        "megatron/models/t5/config.py",
        '    REFITTED: ClassVar = ("relative_attention_max_distance",)\n',
        '    REFITTED: ClassVar = ("relative_attention_num_buckets",)\n',
        (FIT,),
        refuses=True,
    ),
    Mutant(
        "vocab.txt stays behind",
        "megatron/checkpoint/huggingface/tokenizer.py",
        "_VOCABULARIES = (JSON, VOCAB_TEXT, ",
        "_VOCABULARIES = (JSON, ",
        (BERT,),
    ),
    Mutant(
        "the case of a BERT's vocabulary stays behind",
        "megatron/checkpoint/huggingface/origin.py",
        'TOKENIZER_TEXTS = (SETTINGS, "special_tokens_map.json"',
        'TOKENIZER_TEXTS = ("special_tokens_map.json"',
        (BERT,),
    ),
    Mutant(
        "vocab.txt is read as another kind",
        "megatron/checkpoint/huggingface/tokenizer.py",
        '        return {"tokenizer_type": "BertWordPiece", "tokenizer_path": str(place)}\n',
        '        return {"tokenizer_type": "CPM2", "tokenizer_path": str(place)}\n',
        (BERT,),
    ),
    Mutant(
        "whole weights are brought to the device",
        "megatron/optim/main_params.py",
        "self._param_init.come(parameter, is_cut=cut is not None)",
        "self._param_init.come(parameter, is_cut=False)",
        (DEVICE,),
    ),
    Mutant(
        "whole weights stay where they were filled",
        "megatron/optim/main_params.py",
        "                self._param_init.leave(parameter)\n",
        "                pass\n",
        (DEVICE, ONCE),
    ),
    Mutant(
        "masters are made before their weight is filled",
        "megatron/optim/zero/partition.py",
        "        self.fill(parameter)\n",
        "",
        (ONCE,),
    ),
    Mutant(
        "weights of ZeRO 1 are asked to come",
        "megatron/optim/main_params.py",
        "self._param_init = param_init if self._has_homes else None",
        "self._param_init = param_init",
        (OTHERS,),
        refuses=True,
    ),
    Mutant(
        "the host holds all weights at once",
        "megatron/mpu/shard.py",
        "            parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)\n",
        "            pass\n",
        (UNSET,),
    ),
    Mutant(
        "weights that are built later have no memory either",
        "megatron/mpu/shard.py",
        "        hook.remove()\n",
        "        pass\n",
        (UNSET,),
    ),
    Mutant(
        "each replica keeps what it has drawn itself",
        "megatron/training/setup.py",
        "        dist.broadcast(sent, group.ranks[0], group=group.handle)\n",
        "",
        (SAME,),
    ),
    Mutant(
        "the last values that are sent are lost",
        "megatron/training/setup.py",
        "    for chunk in flat.view(torch.uint8).split(CHUNK_BYTES):\n",
        "    for chunk in flat.view(torch.uint8).split(CHUNK_BYTES)[:-1]:\n",
        (SAME,),
    ),
    Mutant(
        "frozen weights stay unset",
        "megatron/training/setup.py",
        "    if param_init is not None:\n        put_in_place(config, module, world)",
        "    if False:\n        put_in_place(config, module, world)",
        (SAME,),
        refuses=True,
    ),
    Mutant(
        "the model is filled and moved whole ahead of ZeRO 3",
        "megatron/training/setup.py",
        "    if param_init is None:\n        put_in_place(config, module, world)\n",
        "    put_in_place(config, module, world)\n",
        (WHOLE,),
    ),
)
