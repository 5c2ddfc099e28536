"""Mistakes in what is checked ahead of a run, and in rows of docs/reliability.md that small tests of their own hold."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONFIGURATION = "tests/reliability/test_configuration.py"
CASES = f"{CONFIGURATION}::test_what_cannot_be_is_told_with_what_was_got_and_what_to_do"
CHECKPOINTS = "tests/reliability/test_checkpoints.py"
VALIDATE = "megatron/arguments/validate.py"

ROWS = (
    Mutant(
        "an assert tells of a single problem",
        VALIDATE,
        "    if len(unique) == 1:\n        raise ConfigError(unique[0])\n    if unique:\n",
        "    assert len(unique) != 1, unique\n    if len(unique) > 1:\n",
        (f"{CONFIGURATION}::test_python_that_drops_asserts_says_the_same",),
    ),
    Mutant(
        "each rank tells of a wrong configuration",
        "megatron/arguments/parser.py",
        "    with marked(is_of_this_rank=bool(own)):\n",
        "    with marked(is_of_this_rank=True):\n",
        (f"{CONFIGURATION}::test_of_four_ranks_one_reports_and_all_leave_with_2",),
    ),
    Mutant(
        "the first problem hides the others",
        "megatron/arguments/parser.py",
        "    problems = own + found.problems + _plugin_problems(env) + find_problems(config, world_size)\n",
        "    problems = own + found.problems or _plugin_problems(env) + find_problems(config, world_size)\n",
        ("tests/arguments/test_parse.py::test_all_problems_are_told_at_once_and_numbered",),
    ),
    Mutant(
        "a stage without a layer is taken",
        VALIDATE,
        "    if p > layers:\n",
        "    if p > 2 * layers:\n",
        (CASES,),
    ),
    Mutant(
        "ranks beyond a multiple are left idle",
        VALIDATE,
        "    elif world_size % each:\n",
        "    elif world_size // each == 0:\n",
        (CASES,),
    ),
    Mutant(
        "a key twice in the JSON is taken as its last",
        "megatron/arguments/deepspeed_json.py",
        '            if keys in places and "" not in keys:\n',
        '            if keys in places and "" in keys:\n',
        (CASES,),
    ),
    Mutant(
        "a flag and the JSON may differ",
        "megatron/arguments/deepspeed_json.py",
        "        elif given != value:\n",
        "        elif given is None:\n",
        (CASES,),
    ),
    Mutant(
        "fields of a later version are passed over",
        "megatron/checkpoint/metadata.py",
        "sorted(fields.keys() - _FIELDS)",
        "sorted(fields.keys() & set())",
        (f"{CHECKPOINTS}::test_a_field_of_a_later_version_is_named_and_nothing_older_is_taken",),
    ),
    Mutant(
        "moments of another optimizer are taken",
        "megatron/training/train_state.py",
        "    if taken.optimizer and saved != now:\n",
        "    if taken.optimizer and not saved:\n",
        (f"{CHECKPOINTS}::test_moments_of_another_optimizer_are_refused_and_weights_alone_are_taken",),
    ),
    Mutant(
        "ids below 0 pass",
        "megatron/data/indexed_dataset.py",
        "            if int(block.max()) < vocab_size and int(block.min()) >= 0:\n",
        "            if int(block.max()) < vocab_size:\n",
        ("tests/reliability/test_data.py::test_an_id_below_0_is_named_with_its_place",),
    ),
)
