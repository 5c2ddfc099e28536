"""Mistakes in where settings come from: the file of --config."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FILE = "tests/arguments/test_config_file.py"
READER = "megatron/arguments/config_file.py"

CONFIG_FILE = (
    Mutant(
        "a duplicated key of a YAML passes",
        READER,
        "        if key in found:\n",
        "        if key in found and keys:\n",
        (f"{FILE}::test_a_duplicated_key_is_an_error_that_names_file_line_and_key",),
    ),
    Mutant(
        "a duplicated key under a heading of a YAML passes",
        READER,
        "        if key in found:\n",
        "        if key in found and not keys:\n",
        (f"{FILE}::test_a_duplicated_key_is_an_error_that_names_file_line_and_key",),
    ),
    Mutant(
        "two keys of one flag pass",
        READER,
        "        if option.name in self.places:\n",
        "        if option.name in self.places and False:\n",
        (f"{FILE}::test_two_keys_of_one_flag_are_an_error_that_names_both",),
    ),
    Mutant(
        "a file wins over the command line",
        READER,
        "    for name in values.keys() - found.values.keys():\n",
        "    for name in values.keys():\n",
        (f"{FILE}::test_the_order_is_command_line_file_json_recipe",),
    ),
    Mutant(
        "a recipe acts beside a run's config.json",
        READER,
        "        return {} if self.is_of_run else defaults\n",
        "        return defaults\n",
        (f"{FILE}::test_a_config_json_is_accepted_as_it_is_and_says_the_same",),
    ),
    Mutant(
        "a repeated run writes into the folder of the first",
        READER,
        '    if is_own("save"):\n',
        '    if is_own("save") and values.get("load"):\n',
        (f"{FILE}::test_a_repeated_run_begins_as_the_first_start_did_and_saves_elsewhere",),
    ),
    Mutant(
        "the decay of a repeated run stays that of the first",
        READER,
        "name not in derived or flat[name] != value}",
        "True}",
        (f"{FILE}::test_what_follows_from_other_sizes_follows_those_of_the_command_line",),
    ),
)
